"""Where a run's numbers go besides its own folder: the protocol of a sink, and what keeps sinks from harming a run.

A sink that cannot be opened is refused before the run begins. One that fails later is named in a notice and
switched off; the run goes on. Each sink is told every step and every evaluation at most once, in order, over all lives
of the run: `sinks.json` says what it was told, and what came while it was off it is told when the run goes on. What it
was being told when it failed, or when the process was killed, is left out; the ledger has it.
The packages themselves are in `keel/run/monitor/sink_backends.py`.
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
from keel.config import MetricsSettings, RunSettings
from keel.errors import ConfigError, KeelError
from keel.run.evaluate import EvaluationResult
from keel.run.folder import RunFolder
from keel.run.ledger import Ledger
from keel.run.monitor.callbacks import NullCallback

FORMAT = 1
"""Of sinks.json."""


class Sink(Protocol):
    """Called from the thread of the loop, which waits: a sink that sends over a network does so in a thread of its own.

    Numbers are finite, and their names are those of the ledger.
    """

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is trained. Steps come in order, each once."""

    def evaluated(self, step: int, environment: str, metrics: Mapping[str, float]) -> None:
        """An environment was evaluated after that step; 0: before the first. After the numbers of the step, if any."""

    def close(self) -> None:
        """The last call: everything has to be where it belongs when it returns."""


@dataclass(frozen=True)
class RunInfo:
    """What a sink is told about the run that it is opened for."""

    folder: Path
    run_id: str
    """Of this run and no other, in all of its lives."""
    settings: RunSettings

    @property
    def unique_name(self) -> str:
        """What people call the run; other runs of that name have another key."""
        return f"{self.folder.name}-{self.run_id}"


SinkFactory = Callable[[RunInfo], Sink]


def resolve_sinks(settings: MetricsSettings) -> dict[str, SinkFactory]:
    """What opens each sink that the settings name; a package or module that is not there is refused here."""
    # here, not above: who wants no sink pays for none
    from keel.run.monitor import sink_backends as packages

    found: dict[str, SinkFactory] = {}
    if settings.tensorboard:
        _check_package("tensorboard", "true", "tensorboardX")
        found["tensorboard"] = packages.TensorBoard
    if settings.wandb != "off":
        _check_package("wandb", f'"{settings.wandb}"', "wandb")
        found["wandb"] = packages.Wandb
    if settings.trackio:
        _check_package("trackio", "true", "trackio")
        found["trackio"] = packages.Trackio
    if settings.custom_sink is not None:
        found["custom_sink"] = _import_custom_sink(settings.custom_sink)
    return found


def _check_package(setting: str, value: str, package: str) -> None:
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(
            f'metrics.{setting} = {value} needs the package {package}: pip install "keel-rl[metrics]" ({error})'
        ) from error


def _import_custom_sink(path: str) -> SinkFactory:
    module_name, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f'metrics.custom_sink = "{path}" cannot be imported: {error}; it is module:attribute, and the module has to be'
            " next to the recipe, in the current folder or on PYTHONPATH"
        ) from error
    if not callable(found):
        raise ConfigError(
            f'metrics.custom_sink = "{path}" is a {type(found).__name__}; it must make a sink when called'
        )

    def opened(about: RunInfo) -> Sink:
        sink: Sink = found(about.folder, about.settings)
        for method in ("step", "evaluated", "close"):
            if not callable(getattr(sink, method, None)):
                raise ConfigError(f"what it made has no method {method}; see keel.run.monitor.sinks.Sink")
        return sink

    return opened


class PendingMetrics(NamedTuple):
    """What a sink has not been told."""

    step: int
    environment: str
    """Of an evaluation; empty for a step, which therefore comes before its evaluations in the order of tuples."""
    metrics: Mapping[str, float]


class DeliveryLog:
    """`sinks.json`: the run's key, and for each sink what it was told."""

    def __init__(self, path: Path) -> None:
        self._path = path
        content: dict[str, Any] = {"format": FORMAT, "key": secrets.token_hex(4), "told": {}}
        if path.exists():
            content = read_json(path)
        try:
            if content["format"] != FORMAT:
                raise KeelError(f"{path} has format {content['format']}, and this version of keel reads {FORMAT}")
            self.run_id = str(content["key"])
            self._steps = {name: int(told["step"]) for name, told in content["told"].items()}
            self._evaluations = {
                name: {(int(step), str(environment)) for step, environment in told["evaluations"]}
                for name, told in content["told"].items()
            }
        except KeelError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise KeelError(f"{path} is damaged ({error!r}); without it every sink is told everything again") from None

    def is_pending(self, name: str, entry: PendingMetrics) -> bool:
        """Whether the sink has not been told."""
        if entry.environment:
            return (entry.step, entry.environment) not in self._evaluations.get(name, ())
        return entry.step > self._steps.get(name, 0)

    def mark_delivered(self, name: str, entries: list[PendingMetrics]) -> None:
        """Written before the sink is told: nothing is told twice, whenever the process ends."""
        steps = [one.step for one in entries if not one.environment]
        self._steps[name] = max([self._steps.get(name, 0), *steps])
        asked = self._evaluations.setdefault(name, set())
        asked.update((one.step, one.environment) for one in entries if one.environment)
        self.write()

    def write(self) -> None:
        told = {
            name: {"step": step, "evaluations": sorted(self._evaluations[name])} for name, step in self._steps.items()
        }
        with atomic_file(self._path) as temporary:
            temporary.write_text(json.dumps({"format": FORMAT, "key": self.run_id, "told": told}) + "\n")


class Sinks(NullCallback):
    """All sinks of a run, as one observer that never fails.

    What sinks are told is what the ledger holds, which is written before observers are called.
    """

    def __init__(
        self, sinks: Mapping[str, Sink], delivery_log: DeliveryLog, ledger: Ledger, notice: Callable[[str], None]
    ) -> None:
        self._sinks = dict(sinks)
        self._delivery_log, self._ledger, self._notice = delivery_log, ledger, notice

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._deliver_all([PendingMetrics(step, "", metrics)])

    def evaluated(self, step: int, evaluation: EvaluationResult) -> None:
        # the ledger calls an environment by its table in the settings, an evaluation by its own name
        del step, evaluation
        if self._sinks:
            self._deliver_all([PendingMetrics(*row) for row in self._ledger.evaluations()])

    def catch_up(self) -> None:
        """Tell each sink all that the ledger has and the sink was not told."""
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
            late = sorted((one for one in entries if self._delivery_log.is_pending(name, one)), key=lambda one: one[:2])
            if late:
                self._call_or_disable(name, partial(self._deliver, name, sink, late))

    def _deliver(self, name: str, sink: Sink, entries: list[PendingMetrics]) -> None:
        self._delivery_log.mark_delivered(name, entries)
        for one in entries:
            if one.environment:
                sink.evaluated(one.step, one.environment, finite_metrics(one.metrics))
            else:
                sink.step(one.step, finite_metrics(one.metrics))

    def _call_or_disable(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - whatever a sink does, the run goes on
            del self._sinks[name]
            self._notice(f"metrics.{name} failed and is switched off: {type(error).__name__}: {error}")


def open_sinks(folder: RunFolder, notice: Callable[[str], None]) -> Sinks:
    """The sinks of a run's settings, told what they have missed. Opening fails as a whole, and then nothing is open."""
    metrics = folder.settings.metrics
    wanted = resolve_sinks(metrics)
    marks = DeliveryLog(folder.path / "sinks.json")
    if wanted:
        marks.write()
    about = RunInfo(folder.path, marks.run_id, folder.settings)
    sinks: dict[str, Sink] = {}
    for name, opened in wanted.items():
        try:
            sinks[name] = opened(about)
        except Exception as error:
            Sinks(sinks, marks, folder.ledger, notice).ended("")
            value = json.dumps(getattr(metrics, name))
            raise ConfigError(f"metrics.{name} = {value} cannot be opened: {type(error).__name__}: {error}") from error
    told = Sinks(sinks, marks, folder.ledger, notice)
    told.catch_up()
    return told


def finite_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Without what is not finite: a step that trained nothing has no mean of anything."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
