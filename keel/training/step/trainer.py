"""One training step: from samples and an objective to new weights, with an account of every token.

Guarantees that the gradient does not depend on how the step was cut into micro-batches, that a gradient which is not
finite is never stepped on and names the samples it came from, that nothing moves when nothing trained, and that the
report says of each token whether it trained and why. On several ranks this is what rank 0 is asked; the others take
part in each call through `follow`. It does not decide what to train on.
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
from keel.errors import ConfigError, StepRefused
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
    """A model, its optimizer, and how to take a step."""

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
        """`world`: the ranks to train on; each gets its shard of the model and of the teacher by their settings."""
        self.settings, self.seed, self.world = settings or TrainerSettings(), seed, world
        _check_ranks(self.settings, world)
        retain_freed_memory(self.settings.retain_freed_memory)
        if isinstance(model, str):
            model = ModelSettings(name=model)
        with self._on_all_ranks("begin", lambda: _begin_command(model, self.settings, teacher, seed)):
            self.model = model if isinstance(model, Model) else self._load_model(model)
            self.references = references
            self.teacher = teacher if isinstance(teacher, Model | None) else self._load_model(teacher)
            """Scores samples that bring no teacher log-probs, for objectives with `teacher_tau`."""
            self.forward = self._make_forward(self.model)
        self.optimizer = adamw.build_optimizer(self.settings.optimizer, self.model.parameters().values())
        self.steps = 0
        """Optimizer steps taken."""
        self._forwards: dict[int, Forward] = {id(self.model): self.forward}

    def step(self, samples: Sequence[Sample], objective: Objective | str, *, version: int | None = None) -> StepReport:
        """Train on these samples once. `version` is the version being trained, from which staleness counts."""
        objective = make_objective(objective) if isinstance(objective, str) else objective
        with self._on_all_ranks("step", lambda: encode_command(samples, objective, version=version, steps=self.steps)):
            return self._step(samples, objective, version)

    def _step(self, samples: Sequence[Sample], objective: Objective, version: int | None) -> StepReport:
        began = time.perf_counter()
        tokens = TrainableTokens(samples)
        dtype = torch.promote_types(self.model.dtype, torch.float32)
        ledger = StepColumns.empty(tokens, dtype, self.model.device, entropy=self.settings.compute_entropy)
        parts = _split_samples(samples, self.settings.optimizer_steps)
        references = self._reference_logprobs(ledger, objective)
        taught = objective.composition.reads("teacher") and tokens.gather_field("teacher_logprobs") is None
        if taught and self.teacher is not None:
            ledger.teacher_logprobs = self._frozen_logprobs(self.teacher, tokens)
        if len(parts) > 1 and objective.composition.reads("proximal"):
            ledger.proximal_logprobs = self.forward.score(tokens).logprobs
        done = []
        for part in parts:
            update = OptimizerStep(self.forward, self.optimizer, self.settings, objective, ledger, part, version)
            try:
                done.append(update.run(self.steps))
            except StepRefused as error:
                if not done:
                    raise
                taken = (
                    f"{sum(one.stepped for one in done)} of trainer.optimizer_steps = {len(parts)} were taken before"
                )
                raise StepRefused(f"{error}; {taken}", error.samples) from error
            self.steps += done[-1].stepped
        return StepReport(
            steps=self.steps,
            stepped=any(one.stepped for one in done),
            skip_reason="; ".join(dict.fromkeys(one.skip_reason for one in done if one.skip_reason)),
            loss=sum(one.loss for one in done) / len(done),
            terms={name: sum(one.terms[name] for one in done) / len(done) for name in done[0].terms},
            grad_norm=max(one.grad_norm for one in done),
            lr=done[-1].lr,
            metrics=sum((one.metrics for one in done), Metrics()),
            tokens=ledger.to_token_report(),
            reasons=tuple(objective.reasons),
            samples=len(tokens.samples),
            computed_tokens=sum(one.computed_tokens for one in done),
            unshared_tokens=sum(len(sample.inputs) for sample in tokens.samples),
            micro_batches=sum(one.micro_batches for one in done),
            seconds=time.perf_counter() - began,
            reference_kl={name: _mean_metric(ledger.logprobs - values) for name, values in references.items()},
        )

    def logprobs(self, samples: Sequence[Sample]) -> list[Float[Tensor, "tokens"]]:
        """The policy's log-prob of each trainable token, at the sample's temperature; NaN at all other tokens."""
        tokens = TrainableTokens(samples)
        with self._on_all_ranks("score", lambda: encode_command(samples)):
            found = self.forward.score(tokens).logprobs.cpu()
        answers = []
        for number, sample in enumerate(tokens.samples):
            answer = torch.full((len(sample),), torch.nan, dtype=found.dtype)
            answer[torch.from_numpy(np.asarray(sample.trainable))] = found[tokens.slice_of(number)]
            answers.append(answer)
        return answers

    def set_references(self, references: Mapping[str, ReferenceSettings], checkpoints: Checkpoints) -> None:
        """Find, check and load frozen policies, for objectives that compare with a reference."""

        def told() -> bytes:
            settings = {name: one.model_dump(mode="json") for name, one in references.items()}
            return encode_command(named=settings, checkpoints=str(checkpoints.folder.resolve()))

        with self._on_all_ranks("refer", told):
            self.references = load_references(references, self.model, checkpoints, self.seed)

    def save(self, checkpoints: Checkpoints, step: int, state: Mapping[str, Any] | None = None) -> None:
        """Write weights, optimizer, random states and the caller's own state as checkpoint `step`."""
        checkpoints.save(step, self.model, self.optimizer, {"steps": self.steps, "state": dict(state or {})})

    def load(self, checkpoints: Checkpoints, step: int) -> dict[str, Any]:
        """Go back to a checkpoint, and return the caller's own state."""
        found = checkpoints.load(step, self.model, self.optimizer)
        self.steps = int(found["steps"])
        return dict(found["state"])

    def _on_all_ranks(self, command: str, payload: Callable[[], bytes]) -> AbstractContextManager[None]:
        return nullcontext() if self.world is None else self.world.run_on_all_ranks(command, payload)

    def _load_model(self, settings: ModelSettings) -> Model:
        return load_model(settings, self.seed, world=self.world, trainer=self.settings)

    def _make_forward(self, model: Model) -> Forward:
        return Forward(
            model, max_tokens=self.settings.max_tokens_per_micro_batch, share_prefixes=self.settings.share_prefixes
        )

    def _frozen_logprobs(self, model: Model, tokens: TrainableTokens) -> Tensor:
        """Log-probs under a model that does not train, or the policy while an adapter of it is switched."""
        if id(model) not in self._forwards:
            self._forwards[id(model)] = self._make_forward(model)
        return self._forwards[id(model)].score(tokens).logprobs.to(self.model.device)

    def _reference_logprobs(self, columns: StepColumns, objective: Objective) -> dict[str, Tensor]:
        """Log-probs of each reference; the ledger gets their weighted mean, whose drift is the mean of the drifts."""
        if not objective.composition.reads("reference"):
            return {}
        if not self.references:
            raise ConfigError(
                f"objective {objective.name or ''} compares with a reference and the trainer has none; give"
                " references, for example the base model"
            )
        found, mean = {}, torch.zeros_like(columns.logprobs)
        for name, weight, active in self.references.each():
            with active as model:
                found[name] = self._frozen_logprobs(model, columns.tokens)
            mean += weight * found[name]
        columns.reference_logprobs = mean
        return found


def _check_ranks(settings: TrainerSettings, world: World | None) -> None:
    if world is not None:
        return
    if settings.ranks > 1:
        raise ConfigError(
            f"trainer.ranks = {settings.ranks} cannot act here, where one process trains; `keel train` starts as many"
        )
    for name in ("rank_timeout", "master_weights", "reduce_dtype"):
        value = getattr(settings, name)
        if value != type(settings).model_fields[name].default:
            said = json.dumps(value)
            raise ConfigError(f"trainer.{name} = {said} cannot act on one rank; set trainer.ranks, or leave it out")


def _begin_command(
    model: Model | ModelSettings, settings: TrainerSettings, teacher: Model | ModelSettings | None, seed: int
) -> bytes:
    """What the other ranks must know to make the same trainer."""
    if isinstance(model, Model) or isinstance(teacher, Model):
        raise ConfigError("on several ranks the trainer loads its models itself: give their settings")
    return encode_command(
        model=model.model_dump(mode="json"),
        trainer=settings.model_dump(mode="json"),
        teacher=None if teacher is None else teacher.model_dump(mode="json"),
        seed=seed,
    )


def _split_samples(samples: Sequence[Sample], optimizer_steps: int) -> list[list[int]]:
    """The numbers of the samples of each update: whole groups, in order, of about equally many trainable tokens."""
    groups: dict[int | tuple[int], list[int]] = {}
    for number, sample in enumerate(samples):
        groups.setdefault((number,) if sample.group is None else sample.group, []).append(number)
    optimizer_steps = min(optimizer_steps, max(len(groups), 1))  # a step that lost most of its groups is still a step
    sizes = [sum(int(np.sum(samples[number].trainable)) for number in members) for members in groups.values()]
    middles = np.cumsum(sizes) - np.array(sizes) / 2
    share = np.minimum(middles / max(sum(sizes), 1) * optimizer_steps, optimizer_steps - 1).astype(int)
    parts: list[list[int]] = [[] for _ in range(optimizer_steps)]
    for members, place in zip(groups.values(), share, strict=True):
        parts[place] += members
    return [part for part in parts if part] or [[]]


def _mean_metric(values: Tensor) -> Metric:
    return Metric(float(values.sum(dtype=torch.float64)), len(values))
