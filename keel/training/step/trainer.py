"""Train a model on samples with an objective, and report on every token.

Guarantees that the gradient does not depend on how the step is split into micro-batches; that a non-finite gradient is
never applied and raises an error that names the samples it came from; that weights and moments stay unchanged if no
token trained; and that the report says for each token whether it trained and why. On several ranks, rank 0 calls these
methods and the other ranks take part through `rank_worker`. Choosing the samples is up to the caller.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from keel.common.sample import Sample
from keel.config import ModelSettings, ReferenceSettings, TrainerSettings
from keel.errors import ConfigError, StepSkippedError
from keel.objectives import Composition
from keel.signal import Metric, Metrics, Objective
from keel.signal import objective as make_objective
from keel.training.distributed.rank_command import encode_command
from keel.training.distributed.world import World
from keel.training.model.checkpoint import Checkpoints
from keel.training.model.model import Model, load_model
from keel.training.model.references import References, load_references
from keel.training.step import optimizer as adamw
from keel.training.step.forward import Forward
from keel.training.step.malloc import retain_freed_memory
from keel.training.step.optimizer_step import OptimizerStep
from keel.training.step.step_report import StepColumns, StepReport
from keel.training.step.trainable_tokens import TrainableTokens


class Trainer:
    """A model and its optimizer."""

    def __init__(
        self,
        model: Model | ModelSettings | str,
        settings: TrainerSettings | None = None,
        *,
        references: References | None = None,
        teacher: Model | ModelSettings | None = None,
        seed: int = 0,
        world: World | None = None,
    ) -> None:
        """With `world`, each rank loads its shard of the model and the teacher, which must be given as settings."""
        self.settings, self.seed, self.world = settings or TrainerSettings(), seed, world
        _check_ranks(self.settings, world)
        adamw.check_schedule(self.settings.optimizer)
        retain_freed_memory(self.settings.retain_freed_memory)
        if isinstance(model, str):
            model = ModelSettings(name=model)
        with self._on_all_ranks("create", lambda: _create_command(model, self.settings, teacher, seed)):
            self.model = model if isinstance(model, Model) else self._load_model(model)
            self.references = references
            self.teacher = teacher if isinstance(teacher, Model | None) else self._load_model(teacher)
            """Computes teacher log-probs for samples without them, for objectives with `teacher_tau`."""
            self.forward = self._make_forward(self.model)
        self.optimizer = adamw.build_optimizer(self.settings.optimizer, self.model.parameters().values())
        self.steps = 0
        """Number of optimizer steps taken."""
        self._forwards: dict[int, Forward] = {id(self.model): self.forward}

    def step(
        self,
        samples: Sequence[Sample],
        objective: Objective | Composition | Mapping[str, Any] | str,
        *,
        version: int | None = None,
    ) -> StepReport:
        """Train on these samples once. `version` is the trainer's version, from which staleness is counted.

        The objective is an `Objective`, a composition, an `[objective]` table or the name of a preset.
        """
        objective = _as_objective(objective)
        with self._on_all_ranks("step", lambda: encode_command(samples, objective, version=version, steps=self.steps)):
            return self._step(samples, objective, version)

    def _step(self, samples: Sequence[Sample], objective: Objective, version: int | None) -> StepReport:
        start = time.perf_counter()
        tokens = TrainableTokens(samples)
        dtype = torch.promote_types(self.model.dtype, torch.float32)
        columns = StepColumns.empty(tokens, dtype, self.model.device, entropy=self.settings.compute_entropy)
        parts = _split_samples(samples, self.settings.optimizer_steps)
        references = self._reference_logprobs(columns, objective)
        needs_teacher = objective.composition.reads("teacher") and tokens.gather_field("teacher_logprobs") is None
        if needs_teacher and self.teacher is not None:
            columns.teacher_logprobs = self._frozen_logprobs(self.teacher, tokens)
        if len(parts) > 1 and objective.composition.reads("proximal"):
            columns.proximal_logprobs = self.forward.score(tokens).logprobs
        results = []
        for part in parts:
            step = OptimizerStep(self.forward, self.optimizer, self.settings, objective, columns, part, version)
            try:
                results.append(step.run(self.steps))
            except StepSkippedError as error:
                if not results:
                    raise
                taken = sum(result.stepped for result in results)
                message = f"{error}; {taken} of trainer.optimizer_steps = {len(parts)} were taken before"
                raise StepSkippedError(message, error.samples) from error
            self.steps += results[-1].stepped
        return StepReport(
            steps=self.steps,
            stepped=any(result.stepped for result in results),
            skip_reason="; ".join(dict.fromkeys(result.skip_reason for result in results if result.skip_reason)),
            loss=sum(result.loss for result in results) / len(results),
            terms={name: sum(result.terms[name] for result in results) / len(results) for name in results[0].terms},
            grad_norm=max(result.grad_norm for result in results),
            lr=results[-1].lr,
            metrics=sum((result.metrics for result in results), Metrics()),
            tokens=columns.to_token_report(),
            reasons=tuple(objective.reasons),
            samples=len(tokens.samples),
            computed_tokens=sum(result.computed_tokens for result in results),
            unshared_tokens=sum(len(sample.inputs) for sample in tokens.samples),
            micro_batches=sum(result.micro_batches for result in results),
            seconds=time.perf_counter() - start,
            reference_kl={name: _mean_metric(columns.logprobs - values) for name, values in references.items()},
        )

    def logprobs(self, samples: Sequence[Sample]) -> list[Float[Tensor, "tokens"]]:
        """Return the policy's log-probs of trainable tokens at each sample's temperature; NaN at other tokens."""
        tokens = TrainableTokens(samples)
        with self._on_all_ranks("score", lambda: encode_command(samples)):
            logprobs = self.forward.score(tokens).logprobs.cpu()
        per_sample = []
        for index, sample in enumerate(tokens.samples):
            values = torch.full((len(sample),), torch.nan, dtype=logprobs.dtype)
            values[torch.from_numpy(np.asarray(sample.trainable))] = logprobs[tokens.slice_of(index)]
            per_sample.append(values)
        return per_sample

    def set_references(self, references: Mapping[str, ReferenceSettings], checkpoints: Checkpoints) -> None:
        """Resolve, check and load references, for objectives that compare with a reference."""

        def command() -> bytes:
            settings = {name: reference.model_dump(mode="json") for name, reference in references.items()}
            return encode_command(references=settings, checkpoints=str(checkpoints.folder.resolve()))

        with self._on_all_ranks("set_references", command):
            self.references = load_references(references, self.model, checkpoints, self.seed)

    def save(self, checkpoints: Checkpoints, step: int, state: Mapping[str, Any] | None = None) -> None:
        """Write weights, optimizer, random states and the caller's state as checkpoint `step`."""
        checkpoints.save(step, self.model, self.optimizer, {"steps": self.steps, "state": dict(state or {})})

    def load(self, checkpoints: Checkpoints, step: int) -> dict[str, Any]:
        """Restore a checkpoint and return the caller's state."""
        content = checkpoints.load(step, self.model, self.optimizer)
        self.steps = int(content["steps"])
        return dict(content["state"])

    def _on_all_ranks(self, command: str, payload: Callable[[], bytes]) -> AbstractContextManager[None]:
        return nullcontext() if self.world is None else self.world.run_on_all_ranks(command, payload)

    def _load_model(self, settings: ModelSettings) -> Model:
        return load_model(settings, self.seed, world=self.world, trainer=self.settings)

    def _make_forward(self, model: Model) -> Forward:
        return Forward(
            model, max_tokens=self.settings.max_tokens_per_micro_batch, share_prefixes=self.settings.share_prefixes
        )

    def _frozen_logprobs(self, model: Model, tokens: TrainableTokens) -> Tensor:
        """Return log-probs of a frozen model, or of the policy while another adapter is active."""
        if id(model) not in self._forwards:
            self._forwards[id(model)] = self._make_forward(model)
        return self._forwards[id(model)].score(tokens).logprobs.to(self.model.device)

    def _reference_logprobs(self, columns: StepColumns, objective: Objective) -> dict[str, Tensor]:
        """Return log-probs of each reference and store their weighted mean in the columns.

        The log-ratio to the weighted mean equals the weighted mean of the log-ratios.
        """
        if not objective.composition.reads("reference"):
            return {}
        if not self.references:
            raise ConfigError(
                f"objective {objective.name or ''} compares with a reference and the trainer has none; set"
                " references, for example to the base model"
            )
        logprobs, mean = {}, torch.zeros_like(columns.logprobs)
        for name, weight, active in self.references.each():
            with active as model:
                logprobs[name] = self._frozen_logprobs(model, columns.tokens)
            mean += weight * logprobs[name]
        columns.reference_logprobs = mean
        return logprobs


def _as_objective(objective: Objective | Composition | Mapping[str, Any] | str) -> Objective:
    if isinstance(objective, Objective):
        return objective
    if not isinstance(objective, Composition | Mapping | str):
        raise ConfigError(
            f"objective is a {type(objective).__name__}, and Trainer.step needs the gradient of every token in closed"
            " form: pass a keel.Objective, a keel.Composition, an [objective] table or the name of a preset. keel audit"
            " checks a loss function"
        )
    return make_objective(objective)


def _check_ranks(settings: TrainerSettings, world: World | None) -> None:
    if world is not None:
        return
    if settings.ranks > 1:
        raise ConfigError(
            f"trainer.ranks = {settings.ranks} has no effect in a single process; `keel train` starts that many ranks"
        )
    for name in ("rank_timeout", "master_weights", "reduce_dtype"):
        value = getattr(settings, name)
        if value != type(settings).model_fields[name].default:
            raise ConfigError(
                f"trainer.{name} = {json.dumps(value)} has no effect on one rank; set trainer.ranks, or leave it out"
            )


def _create_command(
    model: Model | ModelSettings, settings: TrainerSettings, teacher: Model | ModelSettings | None, seed: int
) -> bytes:
    """Return the command from which the other ranks create the same trainer."""
    if isinstance(model, Model) or isinstance(teacher, Model):
        raise ConfigError("on several ranks each rank loads its models: pass ModelSettings instead of a loaded Model")
    return encode_command(
        model=model.model_dump(mode="json"),
        trainer=settings.model_dump(mode="json"),
        teacher=None if teacher is None else teacher.model_dump(mode="json"),
        seed=seed,
    )


def _split_samples(samples: Sequence[Sample], optimizer_steps: int) -> list[list[int]]:
    """Return sample indices for each optimizer step: complete groups in order, with similar trainable token counts."""
    groups: dict[int | tuple[int], list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault((index,) if sample.group is None else sample.group, []).append(index)
    optimizer_steps = min(optimizer_steps, max(len(groups), 1))  # there may be fewer groups than optimizer steps
    sizes = [sum(int(np.sum(samples[index].trainable)) for index in members) for members in groups.values()]
    midpoints = np.cumsum(sizes) - np.array(sizes) / 2
    assigned = np.minimum(midpoints / max(sum(sizes), 1) * optimizer_steps, optimizer_steps - 1).astype(int)
    parts: list[list[int]] = [[] for _ in range(optimizer_steps)]
    for members, part_index in zip(groups.values(), assigned, strict=True):
        parts[part_index] += members
    return [part for part in parts if part] or [[]]


def _mean_metric(values: Tensor) -> Metric:
    return Metric(float(values.sum(dtype=torch.float64)), len(values))
