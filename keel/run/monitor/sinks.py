"""Metric sinks: where the metrics of a run go besides its own folder, and how a failing sink cannot harm the run.

A sink that cannot be opened is an error before the run starts. A sink that fails later is named in a notice and
disabled; the run continues. Each sink gets every step and every evaluation at most once and in order, across resumes:
`sinks.json` records what was delivered, and entries from a time when the sink was off are delivered when the run
resumes. An entry that was being delivered when the sink failed or the process was killed is skipped; the ledger has it.
The backends are in `keel/run/monitor/sink_backends.py`.
"""

import importlib
import json
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from keel.common.atomic_files import atomic_file, read_json
from keel.common.extras import import_object
from keel.config import MetricsSettings, RunSettings
from keel.errors import ConfigError, KeelError
from keel.run.evaluation.evaluate import EvaluationResult
from keel.run.folder import RunFolder
from keel.run.ledger import Ledger
from keel.run.monitor.callbacks import NullCallback

FORMAT = 2
"""Format of sinks.json."""


class Sink(Protocol):
    """Called from the thread of the loop, which waits: a sink that uses a network must do so in its own thread.

    Metrics are finite, and their names are those of the ledger.
    """

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Receive the metrics of a step. Steps come in order, each once."""

    def evaluated(self, step: int, environment: str, metrics: Mapping[str, float]) -> None:
        """Receive an evaluation after that step (0: before the first), after the metrics of the step."""

    def close(self) -> None:
        """Flush everything. This is the last call."""


@dataclass(frozen=True)
class RunInfo:
    """The run a sink is opened for."""

    folder: Path
    run_id: str
    """Unique id of the run, kept across resumes."""
    settings: RunSettings

    @property
    def unique_name(self) -> str:
        """Name of the run made unique by its id."""
        return f"{self.folder.name}-{self.run_id}"


SinkFactory = Callable[[RunInfo], Sink]


def resolve_sinks(settings: MetricsSettings) -> dict[str, SinkFactory]:
    """Return the factory of each sink in the settings; raise if a package or module is missing."""
    # imported here so that a run without sinks does not pay for them
    from keel.run.monitor import sink_backends

    factories: dict[str, SinkFactory] = {}
    if settings.tensorboard:
        _check_package("tensorboard", "true", "tensorboardX")
        factories["tensorboard"] = sink_backends.TensorBoard
    if settings.wandb != "off":
        _check_package("wandb", f'"{settings.wandb}"', "wandb")
        factories["wandb"] = sink_backends.Wandb
    if settings.trackio:
        _check_package("trackio", "true", "trackio")
        factories["trackio"] = sink_backends.Trackio
    if settings.custom_sink is not None:
        factories["custom_sink"] = _import_custom_sink(settings.custom_sink)
    return factories


def _check_package(setting: str, value: str, package: str) -> None:
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(
            f'metrics.{setting} = {value} needs the package {package}: pip install "keel-rl[metrics]" ({error})'
        ) from error


def _import_custom_sink(path: str) -> SinkFactory:
    factory = import_object(path, f'metrics.custom_sink = "{path}"', "callable and return a sink")

    def open_sink(run_info: RunInfo) -> Sink:
        sink: Sink = factory(run_info.folder, run_info.settings)
        for method in ("step", "evaluated", "close"):
            if not callable(getattr(sink, method, None)):
                raise ConfigError(f"the sink it returned has no method {method}; see keel.run.monitor.sinks.Sink")
        return sink

    return open_sink


class PendingMetrics(NamedTuple):
    """A step or an evaluation that a sink has not received."""

    step: int
    environment: str
    """Environment of an evaluation; empty for a step, so a step sorts before its evaluations."""
    metrics: Mapping[str, float]


class DeliveryLog:
    """`sinks.json`: the id of the run, and for each sink what was delivered."""

    def __init__(self, path: Path) -> None:
        self._path = path
        content: dict[str, Any] = {"format": FORMAT, "run_id": secrets.token_hex(4), "delivered": {}}
        if path.exists():
            content = read_json(path)
        try:
            if content["format"] != FORMAT:
                raise KeelError(f"{path} has format {content['format']}, and this version of keel reads {FORMAT}")
            self.run_id = str(content["run_id"])
            self._steps = {name: int(entry["step"]) for name, entry in content["delivered"].items()}
            self._evaluations = {
                name: {(int(step), str(environment)) for step, environment in entry["evaluations"]}
                for name, entry in content["delivered"].items()
            }
        except KeelError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise KeelError(
                f"{path} is damaged ({error!r}); if you delete it, every sink receives all metrics again"
            ) from None

    def is_pending(self, name: str, entry: PendingMetrics) -> bool:
        """Return whether the sink has not received the entry."""
        if entry.environment:
            return (entry.step, entry.environment) not in self._evaluations.get(name, ())
        return entry.step > self._steps.get(name, 0)

    def mark_delivered(self, name: str, entries: list[PendingMetrics]) -> None:
        """Record the entries before they are delivered, so nothing is delivered twice whenever the process ends."""
        steps = [entry.step for entry in entries if not entry.environment]
        self._steps[name] = max([self._steps.get(name, 0), *steps])
        evaluations = self._evaluations.setdefault(name, set())
        evaluations.update((entry.step, entry.environment) for entry in entries if entry.environment)
        self.write()

    def write(self) -> None:
        delivered = {
            name: {"step": step, "evaluations": sorted(self._evaluations[name])} for name, step in self._steps.items()
        }
        with atomic_file(self._path) as temporary:
            temporary.write_text(json.dumps({"format": FORMAT, "run_id": self.run_id, "delivered": delivered}) + "\n")


class Sinks(NullCallback):
    """All sinks of a run, as one callback that never fails.

    Sinks receive what the ledger holds, which is written before callbacks run.
    """

    def __init__(
        self, sinks: Mapping[str, Sink], delivery_log: DeliveryLog, ledger: Ledger, notice: Callable[[str], None]
    ) -> None:
        self._sinks = dict(sinks)
        self._delivery_log, self._ledger, self._notice = delivery_log, ledger, notice

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._deliver_all([PendingMetrics(step, "", metrics)])

    def evaluated(self, step: int, evaluation: EvaluationResult) -> None:
        # read from the ledger, which names an environment by its settings table, not by its own name
        del step, evaluation
        self._deliver_evaluations()

    def loss_evaluated(self, step: int, name: str, metrics: Mapping[str, float]) -> None:
        del step, name, metrics
        self._deliver_evaluations()

    def _deliver_evaluations(self) -> None:
        if self._sinks:
            self._deliver_all([PendingMetrics(*row) for row in self._ledger.evaluations()])

    def catch_up(self) -> None:
        """Deliver to each sink everything in the ledger that it has not received."""
        if self._sinks:
            evaluations = [PendingMetrics(*row) for row in self._ledger.evaluations()]
            self._deliver_all(
                [*(PendingMetrics(row.step, "", row.metrics) for row in self._ledger.steps()), *evaluations]
            )

    def ended(self, summary: str) -> None:
        del summary
        for name, sink in list(self._sinks.items()):
            self._call_or_disable(name, sink.close)
        self._sinks = {}

    def _deliver_all(self, entries: list[PendingMetrics]) -> None:
        for name, sink in list(self._sinks.items()):
            pending = [entry for entry in entries if self._delivery_log.is_pending(name, entry)]
            if pending:
                pending.sort(key=lambda entry: entry[:2])
                self._call_or_disable(name, partial(self._deliver, name, sink, pending))

    def _deliver(self, name: str, sink: Sink, entries: list[PendingMetrics]) -> None:
        self._delivery_log.mark_delivered(name, entries)
        for entry in entries:
            if entry.environment:
                sink.evaluated(entry.step, entry.environment, finite_metrics(entry.metrics))
            else:
                sink.step(entry.step, finite_metrics(entry.metrics))

    def _call_or_disable(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - a failing sink must not end the run
            del self._sinks[name]
            self._notice(f"metrics.{name} failed and is disabled: {type(error).__name__}: {error}")


def open_sinks(folder: RunFolder, notice: Callable[[str], None]) -> Sinks:
    """Open the sinks of a run and deliver what they missed. If one fails to open, close all and raise."""
    metrics = folder.settings.metrics
    factories = resolve_sinks(metrics)
    delivery_log = DeliveryLog(folder.path / "sinks.json")
    if factories:
        delivery_log.write()
    run_info = RunInfo(folder.path, delivery_log.run_id, folder.settings)
    sinks: dict[str, Sink] = {}
    for name, open_sink in factories.items():
        try:
            sinks[name] = open_sink(run_info)
        except Exception as error:
            Sinks(sinks, delivery_log, folder.ledger, notice).ended("")
            value = json.dumps(getattr(metrics, name))
            raise ConfigError(f"metrics.{name} = {value} cannot be opened: {type(error).__name__}: {error}") from error
    result = Sinks(sinks, delivery_log, folder.ledger, notice)
    result.catch_up()
    return result


def finite_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the finite metrics; a step that trained nothing has NaN means."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
