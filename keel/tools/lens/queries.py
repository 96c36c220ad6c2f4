"""The queries of the page, by name. The server answers them over HTTP; a report has their results embedded.

A query is a name and parameters. Each parameter is validated by the QUERIES table, and none is inserted as text into a
path or into SQL. Results are plain JSON data.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from keel.errors import KeelError
from keel.objectives.describe import describe
from keel.tools.lens import evaluations, rollouts
from keel.tools.lens.aggregates import (
    ADVANTAGE_FILTERS,
    OUTCOME_FILTERS,
    TOKEN_ORDERS,
    Aggregate,
    DroppedTexts,
    ExtremeTokens,
    TrustRegionHistograms,
)
from keel.tools.lens.database import Database
from keel.tools.lens.query_params import ChoiceParam, IntParam, Param, ParamValues, TextParam, parse_params
from keel.tools.lens.run_reader import RunCatalog, RunReader, UnknownRun
from keel.tools.lens.trust_region_bands import statistics_of

MAX_AGGREGATES = 24
"""Aggregates kept in memory to be continued; the least recently used one is removed first."""
READ_SECONDS = 0.6
"""Reading time of one request about many steps."""

_RANGE_PARAMS: Mapping[str, Param] = {"run": TextParam(), "first": IntParam(0), "last": IntParam(0)}
_STEP_PARAMS: Mapping[str, Param] = {"run": TextParam(), "step": IntParam()}
QUERIES: Mapping[str, Mapping[str, Param]] = {
    "runs": {},
    "run": {"run": TextParam()},
    "series": {"run": TextParam(), "names": TextParam("", max_length=8000)},
    "outcomes": {"run": TextParam()},
    "tasks": {"run": TextParam()},
    "region": _RANGE_PARAMS,
    "texts": _RANGE_PARAMS,
    "extremes": {
        **_RANGE_PARAMS,
        "order": ChoiceParam(TOKEN_ORDERS, "distance"),
        "outcome": ChoiceParam(OUTCOME_FILTERS, "any"),
        "advantage": ChoiceParam(ADVANTAGE_FILTERS, "any"),
        "text": TextParam(""),
    },
    "groups": {**_STEP_PARAMS, "order": ChoiceParam(rollouts.GROUP_ORDERS, "name"), "offset": IntParam(0)},
    "members": {**_STEP_PARAMS, "group": TextParam(""), "offset": IntParam(0)},
    "sample": {
        **_STEP_PARAMS,
        "group": TextParam(""),
        "member": IntParam(),
        "attempt": IntParam(),
        "sample": IntParam(-1, minimum=-1),
        "offset": IntParam(0),
        "limit": IntParam(rollouts.PAGE_TOKENS),
    },
    "evaluations": {
        "run": TextParam(),
        "environment": TextParam(""),
        "order": ChoiceParam(evaluations.GRID_ORDERS, "flips"),
        "offset": IntParam(0),
    },
    "evaluated": {**_STEP_PARAMS, "environment": TextParam(""), "task": TextParam("")},
}
"""Every query with its parameters; the OpenAPI document is generated from it as well."""


class Lens:
    """Answers queries about the runs below a folder."""

    def __init__(self, root: Path, read_seconds: float = READ_SECONDS) -> None:
        self.runs = RunCatalog(root)
        self.database = Database(self.runs.root)
        self.read_seconds = read_seconds
        self._aggregates: OrderedDict[tuple[object, ...], Aggregate] = OrderedDict()
        self._lock = threading.Lock()
        self._handlers: dict[str, Callable[[ParamValues], dict[str, Any]]] = {
            "runs": self._query_runs,
            "run": self._query_run,
            "series": self._query_series,
            "outcomes": lambda params: self._get_run(params).outcomes(),
            "tasks": lambda params: self._get_run(params).task_rates(),
            "region": self._query_region,
            "texts": lambda params: self._query_aggregate(params, DroppedTexts),
            "extremes": self._query_extremes,
            "groups": self._query_groups,
            "members": self._query_members,
            "sample": self._query_sample,
            "evaluations": self._query_evaluations,
            "evaluated": self._query_evaluated,
        }

    def close(self) -> None:
        self.database.close()

    def query(self, name: str, params: Mapping[str, str]) -> dict[str, Any]:
        """Run one query. Invalid parameters raise a `KeelError` that names them."""
        if name not in QUERIES:
            raise UnknownRun(f"{name[:40]!r} is not a query; known queries: {', '.join(QUERIES)}")
        return self._handlers[name](parse_params(QUERIES[name], params))

    # -- runs ---------------------------------------------------------------------------------------------------------

    def _get_run(self, params: ParamValues) -> RunReader:
        return self.runs.get(params["run"])

    def _query_runs(self, _params: ParamValues) -> dict[str, Any]:
        summaries = []
        for run in self.runs.list_runs():
            try:
                summaries.append(run.summary())
            except KeelError as error:
                summaries.append({"run": run.name, "status": "unreadable", "why": str(error), "step": 0, "time": None})
        return {"root": self.runs.root.name, "runs": summaries}

    def _query_run(self, params: ParamValues) -> dict[str, Any]:
        """Return the facts about a run that every view shows."""
        run = self._get_run(params)
        settings, problem = run.settings()
        composition = settings.objective.composition if settings else None
        description = describe(composition) if composition else None
        recorded = run.recorded_steps()
        return {
            "names": run.metric_names(),
            "evaluations": run.evaluations(),
            "recorded": len(recorded),
            "first": recorded[0] if recorded else None,
            "last": recorded[-1] if recorded else None,
            "formula": description.formula if description else "",
            "dropped": list(description.dropped) if description else [],
            "notes": ([problem] if problem else []) + statistics_of(composition)[1],
        }

    def _query_series(self, params: ParamValues) -> dict[str, Any]:
        names = [name for name in params["names"].split(",") if name]
        if len(names) > 100:
            raise KeelError(f"names lists {len(names)} metrics; request at most 100 at a time")
        return self._get_run(params).series(names)

    # -- many steps ---------------------------------------------------------------------------------------------------

    def _query_aggregate(self, params: ParamValues, kind: type[Aggregate], **options: Any) -> dict[str, Any]:
        run, first, last = self._get_run(params), params["first"], params["last"] or None
        key = (kind, run, first, last, *(value for value in options.values() if isinstance(value, str)))
        with self._lock:
            aggregate = self._aggregates.get(key) or kind(self.database, run, first, last, **options)
            self._aggregates[key] = aggregate
            self._aggregates.move_to_end(key)
            while len(self._aggregates) > MAX_AGGREGATES:
                self._aggregates.popitem(last=False)
        return aggregate.advance(self.read_seconds)

    def _query_region(self, params: ParamValues) -> dict[str, Any]:
        settings, _ = self._get_run(params).settings()
        statistics, _ = statistics_of(settings.objective.composition if settings else None)
        return self._query_aggregate(params, TrustRegionHistograms, statistics=statistics)

    def _query_extremes(self, params: ParamValues) -> dict[str, Any]:
        filters = {name: params[name] for name in ("order", "outcome", "advantage")}
        return self._query_aggregate(params, ExtremeTokens, **filters, text=params["text"][:80])

    # -- one step -----------------------------------------------------------------------------------------------------

    def _query_groups(self, params: ParamValues) -> dict[str, Any]:
        file = self._get_run(params).rollout_file(params["step"])
        return rollouts.list_groups(self.database, file, params["order"], params["offset"])

    def _query_members(self, params: ParamValues) -> dict[str, Any]:
        file = self._get_run(params).rollout_file(params["step"])
        return rollouts.list_members(self.database, file, params["group"], params["offset"])

    def _query_sample(self, params: ParamValues) -> dict[str, Any]:
        file = self._get_run(params).rollout_file(params["step"])
        sample_id = (params["group"], params["member"], params["attempt"], params["sample"])
        return rollouts.read_sample(self.database, file, sample_id, params["offset"], params["limit"])

    # -- evaluations --------------------------------------------------------------------------------------------------

    def _query_evaluations(self, params: ParamValues) -> dict[str, Any]:
        run = self._get_run(params)
        files = [run.evaluation_file(step) for step in run.evaluated_steps()]
        options = (params["environment"], params["order"], params["offset"])
        return evaluations.evaluation_grid(self.database, files, *options)

    def _query_evaluated(self, params: ParamValues) -> dict[str, Any]:
        file = self._get_run(params).evaluation_file(params["step"])
        return evaluations.evaluated_episodes(self.database, file, params["environment"], params["task"])
