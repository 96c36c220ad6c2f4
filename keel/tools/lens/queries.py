"""Everything that the page may ask, by name: the server answers it over HTTP, and a report has the answers written in.

A question is a name and words; each word is checked by the table of questions, and none reaches a path or a query as
text. Answers are plain data that JSON can say.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from keel.errors import KeelError
from keel.objectives.describe import describe
from keel.tools.lens import rollouts
from keel.tools.lens.aggregates import ADVANTAGES, ORDERS, OUTCOMES, Extremes, Region, Survey, Texts
from keel.tools.lens.database import Database
from keel.tools.lens.query_params import Choice, Read, Text, Whole, Word, read
from keel.tools.lens.run_reader import Run, Runs, UnknownRun
from keel.tools.lens.trust_region_bands import statistics_of

SURVEYS = 24
"""Aggregates that are kept to be read on; the one that was not asked for longest goes first."""
PATIENCE = 0.6
"""Seconds of reading for one answer about many steps."""

_RANGE: Mapping[str, Word] = {"run": Text(), "first": Whole(0), "last": Whole(0)}
_STEP: Mapping[str, Word] = {"run": Text(), "step": Whole()}
QUESTIONS: Mapping[str, Mapping[str, Word]] = {
    "runs": {},
    "run": {"run": Text()},
    "series": {"run": Text(), "names": Text("", longest=8000)},
    "fates": {"run": Text()},
    "region": _RANGE,
    "texts": _RANGE,
    "extremes": {
        **_RANGE,
        "order": Choice(ORDERS, "distance"),
        "outcome": Choice(OUTCOMES, "any"),
        "side": Choice(ADVANTAGES, "any"),
        "text": Text(""),
    },
    "groups": {**_STEP, "order": Choice(rollouts.GROUP_ORDERS, "order"), "offset": Whole(0)},
    "members": {**_STEP, "group": Text(""), "offset": Whole(0)},
    "sample": {
        **_STEP,
        "group": Text(""),
        "member": Whole(),
        "attempt": Whole(),
        "sample": Whole(-1, least=-1),
        "offset": Whole(0),
        "limit": Whole(rollouts.TOKENS),
    },
}
"""Every question with its words; the server's description is made from it too."""


class Lens:
    """Answers about the runs below a folder."""

    def __init__(self, root: Path, patience: float = PATIENCE) -> None:
        self.runs = Runs(root)
        self.database = Database(self.runs.root)
        self.patience = patience
        self._surveys: OrderedDict[tuple[object, ...], Survey] = OrderedDict()
        self._lock = threading.Lock()
        self._questions: dict[str, Callable[[Read], dict[str, Any]]] = {
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

    def answer(self, name: str, words: Mapping[str, str]) -> dict[str, Any]:
        """One question."""
        if name not in QUESTIONS:
            raise UnknownRun(f"{name[:40]!r} is no question; known are {', '.join(QUESTIONS)}")
        return self._questions[name](read(QUESTIONS[name], words))

    # -- runs ---------------------------------------------------------------------------------------------------------

    def _of(self, words: Read) -> Run:
        return self.runs.get(words["run"])

    def _runs(self, _words: Read) -> dict[str, Any]:
        found = []
        for run in self.runs.all():
            try:
                found.append(run.facts())
            except KeelError as error:
                found.append({"run": run.name, "status": "unreadable", "why": str(error), "step": 0, "time": None})
        return {"root": self.runs.root.name, "runs": found}

    def _run(self, words: Read) -> dict[str, Any]:
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

    def _series(self, words: Read) -> dict[str, Any]:
        names = [name for name in words["names"].split(",") if name]
        if len(names) > 100:
            raise KeelError(f"names lists {len(names)} numbers; ask for at most 100 at a time")
        return self._of(words).series(names)

    # -- many steps ---------------------------------------------------------------------------------------------------

    def _survey(self, words: Read, kind: type[Survey], **rest: Any) -> dict[str, Any]:
        run, first, last = self._of(words), words["first"], words["last"] or None
        key = (kind, run, first, last, *(value for value in rest.values() if isinstance(value, str)))
        with self._lock:
            survey = self._surveys.get(key) or kind(self.database, run, first, last, **rest)
            self._surveys[key] = survey
            self._surveys.move_to_end(key)
            while len(self._surveys) > SURVEYS:
                self._surveys.popitem(last=False)
        return survey.look(self.patience)

    def _region(self, words: Read) -> dict[str, Any]:
        settings, _ = self._of(words).settings()
        statistics, _ = statistics_of(settings.objective.composition if settings else None)
        return self._survey(words, Region, statistics=statistics)

    def _extremes(self, words: Read) -> dict[str, Any]:
        chosen = {name: words[name] for name in ("order", "outcome", "side")}
        return self._survey(words, Extremes, **chosen, text=words["text"][:80])

    # -- one step -----------------------------------------------------------------------------------------------------

    def _groups(self, words: Read) -> dict[str, Any]:
        file = self._of(words).file(words["step"])
        return rollouts.groups(self.database, file, words["order"], words["offset"])

    def _members(self, words: Read) -> dict[str, Any]:
        file = self._of(words).file(words["step"])
        return rollouts.members(self.database, file, words["group"], words["offset"])

    def _sample(self, words: Read) -> dict[str, Any]:
        file = self._of(words).file(words["step"])
        name = (words["group"], words["member"], words["attempt"], words["sample"])
        return rollouts.sample(self.database, file, name, words["offset"], words["limit"])
