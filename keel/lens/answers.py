"""Everything that the page may ask, by name: the server answers it over HTTP, and a report has the answers written in.

A question is a name and words; each word is checked here and none reaches a path or a query as text. Answers are plain
data that JSON can say.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from keel.config.words import describe
from keel.errors import KeelError
from keel.lens import rollouts
from keel.lens.bands import statistics_of
from keel.lens.database import Database
from keel.lens.folder import Run, Runs, UnknownRun
from keel.lens.survey import Extremes, Region, Survey, Texts

SURVEYS = 24
"""Aggregates that are kept to be read on; the one that was not asked for longest goes first."""
PATIENCE = 0.6
"""Seconds of reading for one answer about many steps."""
LARGEST = 2**31 - 1

Words = Mapping[str, str]


class Lens:
    """Answers about the runs below a folder."""

    def __init__(self, root: Path, patience: float = PATIENCE) -> None:
        self.runs = Runs(root)
        self.database = Database(self.runs.root)
        self.patience = patience
        self._surveys: OrderedDict[tuple[object, ...], Survey] = OrderedDict()
        self._lock = threading.Lock()
        self.questions: dict[str, Callable[[Words], dict[str, Any]]] = {
            "runs": self._runs,
            "run": self._run,
            "series": self._series,
            "fates": lambda words: self._of(words).fates(),
            "region": self._region,
            "texts": lambda words: self._survey(words, Texts),
            "extremes": self._extremes,
            "groups": self._groups,
            "members": self._members,
            "sample": self._sample,
        }

    def close(self) -> None:
        self.database.close()

    def answer(self, name: str, words: Words) -> dict[str, Any]:
        """One question."""
        if name not in self.questions:
            raise UnknownRun(f"{name[:40]!r} is no question; known are {', '.join(self.questions)}")
        return self.questions[name](words)

    # -- runs ---------------------------------------------------------------------------------------------------------

    def _of(self, words: Words) -> Run:
        return self.runs.get(words.get("run", ""))

    def _runs(self, _words: Words) -> dict[str, Any]:
        found = []
        for run in self.runs.all():
            try:
                found.append(run.facts())
            except KeelError as error:
                found.append({"run": run.name, "status": "unreadable", "why": str(error), "step": 0, "time": None})
        return {"root": self.runs.root.name, "runs": found}

    def _run(self, words: Words) -> dict[str, Any]:
        """What a run is made of, for the head of each view."""
        run = self._of(words)
        settings, problem = run.settings()
        composition = settings.objective.composition if settings else None
        said = describe(composition) if composition else None
        recorded = run.steps()
        return {
            "names": run.names(),
            "evaluations": run.evaluations(),
            "recorded": len(recorded),
            "first": recorded[0] if recorded else None,
            "last": recorded[-1] if recorded else None,
            "formula": said.formula if said else "",
            "dropped": list(said.dropped) if said else [],
            "notes": ([problem] if problem else []) + statistics_of(composition)[1],
        }

    def _series(self, words: Words) -> dict[str, Any]:
        names = [name for name in words.get("names", "").split(",") if name]
        if len(names) > 100:
            raise KeelError(f"names lists {len(names)} numbers; ask for at most 100 at a time")
        return self._of(words).series(names)

    # -- many steps ---------------------------------------------------------------------------------------------------

    def _survey(self, words: Words, kind: type[Survey], **rest: Any) -> dict[str, Any]:
        run, first = self._of(words), whole(words, "first", 0)
        last = whole(words, "last", 0) or None
        key = (kind, run, first, last, *(value for value in rest.values() if isinstance(value, str)))
        with self._lock:
            survey = self._surveys.get(key) or kind(self.database, run, first, last, **rest)
            self._surveys[key] = survey
            self._surveys.move_to_end(key)
            while len(self._surveys) > SURVEYS:
                self._surveys.popitem(last=False)
        return survey.look(self.patience)

    def _region(self, words: Words) -> dict[str, Any]:
        settings, _ = self._of(words).settings()
        statistics, _ = statistics_of(settings.objective.composition if settings else None)
        return self._survey(words, Region, statistics=statistics)

    def _extremes(self, words: Words) -> dict[str, Any]:
        chosen = {name: words.get(name, default) for name, default in (("order", "distance"), ("outcome", "any"))}
        return self._survey(words, Extremes, **chosen, side=words.get("side", "any"), text=words.get("text", "")[:80])

    # -- one step -----------------------------------------------------------------------------------------------------

    def _groups(self, words: Words) -> dict[str, Any]:
        file = self._of(words).file(whole(words, "step"))
        return rollouts.groups(self.database, file, words.get("order", "order"), whole(words, "offset", 0))

    def _members(self, words: Words) -> dict[str, Any]:
        file = self._of(words).file(whole(words, "step"))
        return rollouts.members(self.database, file, words.get("group", ""), whole(words, "offset", 0))

    def _sample(self, words: Words) -> dict[str, Any]:
        file = self._of(words).file(whole(words, "step"))
        name = (words.get("group", ""), whole(words, "member"), whole(words, "attempt"), whole(words, "sample", -1))
        offset, limit = whole(words, "offset", 0), whole(words, "limit", rollouts.TOKENS)
        return rollouts.sample(self.database, file, name, offset, limit)


def whole(words: Words, name: str, default: int | None = None) -> int:
    """A whole number among the words of a question; -1 is the sample of a rollout that has none."""
    text = words.get(name)
    if text is None or text == "":
        if default is None:
            raise KeelError(f"{name} is missing")
        return default
    if not text.removeprefix("-").isdecimal() or not text.isascii() or not -1 <= int(text[:12]) <= LARGEST:
        raise KeelError(f"{name} = {text[:40]!r} must be a whole number")
    return int(text)
