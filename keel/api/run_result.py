"""The result of a training run, as `keel.train` returns it: metrics, evaluations, plots and the trained model."""

import html
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import peft
import transformers

from keel.common.lora_config_check import check_adapter
from keel.config import RunSettings
from keel.errors import KeelError
from keel.run.folder import RunFolder
from keel.training import load_model
from keel.training.model.export import find_checkpoint


class Evaluation(NamedTuple):
    """The first and the last evaluation of an environment: `reward`, its interval `low` to `high`, `tasks` and more."""

    before: dict[str, Any] | None
    """Before the first step; None if the run did not evaluate then."""
    after: dict[str, Any] | None
    """After the last step; None if the run did not evaluate then."""


class TrainedModel(NamedTuple):
    """A trained model with its tokenizer, as Hugging Face objects."""

    model: transformers.PreTrainedModel
    tokenizer: transformers.PreTrainedTokenizerBase


@dataclass(frozen=True)
class RunResult:
    """A run that has ended."""

    path: Path
    """Folder of the run; `keel lens`, `keel compare`, `keel eval` and `keel train --resume` take it."""
    status: str
    """finished, or stopped if it was interrupted: then `keel.train(run=..., resume=True)` continues it."""
    metrics: list[dict[str, float]]
    """Metrics of each step, with `step`; the names are those of docs/metrics.md. `pandas.DataFrame(result.metrics)`
    is a table."""
    evaluation: dict[str, Evaluation]
    """First and last evaluation by environment; the environment of `dataset=` is named "dataset"."""
    summary: str
    """What `keel train` prints at the end."""
    _settings: RunSettings = field(repr=False)
    _evaluations: list[tuple[int, str, dict[str, Any]]] = field(repr=False)

    @classmethod
    def from_folder(cls, folder: RunFolder, summary: str) -> Self:
        """Read the result of a run that is open."""
        steps = folder.ledger.steps()
        evaluations = folder.ledger.evaluations()
        return cls(
            path=folder.path,
            status=folder.ledger.get_meta("status") or "unknown",
            metrics=[{"step": row.step, **row.metrics} for row in steps],
            evaluation=_first_and_last(evaluations, steps[-1].step if steps else 0),
            summary=summary,
            _settings=folder.settings,
            _evaluations=evaluations,
        )

    def __repr__(self) -> str:
        return f"RunResult({str(self.path)!r}, {self.status} after {len(self.metrics)} steps)"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.summary)}</pre>"

    def model(self) -> TrainedModel:
        """Load the newest checkpoint as a Hugging Face model in evaluation mode, with its tokenizer.

        With `model.lora`, the adapter is merged into its base model. The model is on the device of the run's settings.
        """
        checkpoint = find_checkpoint(self.path)
        changes: dict[str, Any] = {"lora": None, "gradient_checkpointing": False}
        if self._settings.model.lora is None:
            changes |= {"name": str(checkpoint), "sft_warmup_steps": 0}
        loaded = load_model(self._settings.model.model_copy(update=changes), self._settings.seed)
        network = loaded.network
        if self._settings.model.lora is not None:
            check_adapter(checkpoint)
            network = peft.PeftModel.from_pretrained(network, str(checkpoint), local_files_only=True).merge_and_unload()
        network.train(False)
        return TrainedModel(network, loaded.tokenizer)

    def plot(self, *names: str) -> Any:
        """Return a matplotlib figure of metrics by step; by default the reward, with evaluations, and the loss."""
        try:
            pyplot = importlib.import_module("matplotlib.pyplot")
        except ImportError as error:
            raise KeelError("plot needs matplotlib: pip install matplotlib; or plot result.metrics yourself") from error
        chosen = names or ("reward", "loss")
        unknown = [name for name in chosen if not any(name in row for row in self.metrics)]
        if unknown:
            known = sorted({name for row in self.metrics for name in row} - {"step"})
            raise KeelError(f"no step has the metric {unknown[0]}; there are {', '.join(known) or 'none'}")
        figure, axes = pyplot.subplots(1, len(chosen), figsize=(5 * len(chosen), 3), squeeze=False, layout="tight")
        for axis, name in zip(axes[0], chosen, strict=True):
            points = [(row["step"], row[name]) for row in self.metrics if name in row]
            axis.plot(*zip(*points, strict=True), marker=".", label="training")
            self._plot_evaluations(axis, name)
            axis.set(xlabel="step", title=name)
        pyplot.close(figure)  # a notebook would show it twice: as the open figure and as the value of the cell
        return figure

    def _plot_evaluations(self, axis: Any, name: str) -> None:
        if name != "reward" or not self._evaluations:
            return
        for environment in dict.fromkeys(label for _, label, _ in self._evaluations):
            own = [(step, values[name]) for step, label, values in self._evaluations if label == environment]
            axis.plot(*zip(*own, strict=True), marker="o", linestyle="--", label=f"evaluation {environment}")
        axis.legend()


def _first_and_last(evaluations: list[tuple[int, str, dict[str, Any]]], last_step: int) -> dict[str, Evaluation]:
    by_environment: dict[str, dict[int, Mapping[str, Any]]] = {}
    for step, name, metrics in evaluations:
        by_environment.setdefault(name, {})[step] = metrics
    return {
        name: Evaluation(*(dict(steps[step]) if step in steps else None for step in (0, last_step)))
        for name, steps in by_environment.items()
    }
