"""What `keel train` and `keel sft` do differently: loading settings, the loop, the summary and the columns.

Torch is imported only when a run is made, so that errors in settings are reported quickly.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keel.run.monitor.progress import COLUMNS, StepColumn

if TYPE_CHECKING:
    from keel.config import LoadedSettings
    from keel.run.checkpointed_run import CheckpointedRun
    from keel.run.folder import RunFolder
    from keel.training.distributed.world import RankInfo


@dataclass(frozen=True)
class RunKind:
    """The parts of a session that depend on the command."""

    command: str
    load: "Callable[[str | None, Sequence[str]], LoadedSettings]"
    """Loads and checks settings from a recipe and overrides. Errors here leave no folder behind."""
    make_run: "Callable[..., CheckpointedRun]"
    summarize: "Callable[[RunFolder], str]"
    columns: tuple[StepColumn, ...]


def train_kind(rank_info: "RankInfo | None" = None) -> RunKind:
    """Return the kind of `keel train`."""
    from keel.config import load_settings
    from keel.rollout.episode_runner import build_environments
    from keel.run.summary import summarize_run

    def make_run(*args: Any, **options: Any) -> "CheckpointedRun":
        from keel.run.loop import TrainingRun

        return TrainingRun(*args, **options)

    def load(recipe: str | None, overrides: Sequence[str]) -> "LoadedSettings":
        loaded = load_settings(recipe, overrides)
        build_environments(loaded.settings)
        check_start(loaded, rank_info)
        return loaded

    return RunKind("train", load, make_run, summarize_run, COLUMNS)


def check_start(loaded: "LoadedSettings", rank_info: "RankInfo | None") -> None:
    """Raise an error for sinks and ranks that cannot be used."""
    from keel.run.monitor.sinks import resolve_sinks
    from keel.training.distributed.rank_processes import RankProcesses

    resolve_sinks(loaded.settings.metrics)
    RankProcesses(loaded.settings.trainer, rank_info)
