"""TRL's GRPOTrainer with an objective of Keel as its loss.

Generation, rewards, advantages, the reference model and the optimizer remain TRL's. The loss is that of the whole
optimizer step: denominators are counted over all micro-batches of gradient accumulation and over all processes, and an
objective that needs log-probs of the whole step gets them from a first pass. A token whose sampler log-prob is missing
is dropped and counted.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from keel.errors import BatchError
from keel.integrations.conversion import from_padded
from keel.integrations.metric_log import MetricLog
from keel.integrations.recording import TokenRecorder
from keel.integrations.step_loss import HostedObjective, count_padded, gather_parts, to_step_counts
from keel.integrations.trl.options import GRPO_HOST, prepare_grpo_args, truncating_options
from keel.integrations.trl.step_callback import SkipEmptySteps
from keel.objectives import Composition
from keel.signal import Objective, StepCounts, StepTotals, TokenBatch

logger = logging.getLogger(__name__)

MODEL_INPUTS = (
    *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles"),
    *("image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
)
"""Inputs of multimodal models that TRL passes on to the forward pass."""
ALIASES = {"entropy": "entropy", "is_clipped": "clip_ratio/region_mean"}
"""TRL's names of metrics that it defines as Keel does."""

ObjectiveSpec = str | Mapping[str, Any] | Composition | Objective
Inputs = dict[str, Any]


class KeelGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """`GRPOTrainer` that trains with an objective of Keel."""

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        *positional: Any,
        objective: ObjectiveSpec,
        record_tokens: str | Path | None = None,
        **keywords: Any,
    ) -> None:
        """Create the trainer. Arguments other than these two are those of `GRPOTrainer`.

        `objective` is the name of a preset, a table such as `{"name": "icepop", "ratio_high": 8.0}`, or a composition.
        `record_tokens` is a folder for the tokens of every step, in the format of `keel compare`.
        """
        self.hosted = HostedObjective(objective, GRPO_HOST)
        if args is None:
            args = GRPOConfig(f"{_model_name(model)}-GRPO")
        self._records_logprobs = bool(args.use_vllm or keywords.get("rollout_func"))
        args = prepare_grpo_args(args, self.hosted.composition, recorded=self._records_logprobs)
        super().__init__(model, reward_funcs, args, *positional, **keywords)
        composition = self.hosted.composition
        # the mean of b - f over the step is known in advance only where b is recorded
        self._needs_step_logprobs = self.hosted.needs_step_logprobs or bool(
            composition.kl_penalty_coef and not self._records_logprobs
        )
        self._metric_log = MetricLog(ALIASES)
        self._recorder: TokenRecorder | None = None
        if record_tokens is not None:
            self._recorder = TokenRecorder(record_tokens, self._tokenizer.decode, self.temperature)
            self.add_callback(_WriteTokens(self))
        self._num_sampled_sequences = 0
        self._step_totals: tuple[int, StepTotals | StepCounts] | None = None
        self._skip_empty_steps = SkipEmptySteps(self)
        self.add_callback(self._skip_empty_steps)
        _warn_about_sampler(args, recorded=self._records_logprobs)

    def _generate_and_score_completions(self, inputs: Any) -> Inputs:
        """Add the ids that TRL does not keep: the sequence, its group and the version that sampled it."""
        output: Inputs = super()._generate_and_score_completions(inputs)
        rows, device = len(output["completion_ids"]), output["completion_ids"].device
        processes, rank = self.accelerator.num_processes, self.accelerator.process_index
        generations = self.num_generations if self.model.training else self.num_generations_eval
        # the sampler repeats every prompt `num_generations` times in the order of the global batch
        global_row = torch.arange(rows, device=device) + (self._num_sampled_sequences + rank * rows)
        self._num_sampled_sequences += rows * processes
        output["keel_sequence"] = global_row
        output["keel_group"] = torch.div(global_row, generations, rounding_mode="floor")
        output["keel_version"] = torch.full_like(global_row, self.state.global_step)
        return output

    def _compute_loss(self, model: Any, inputs: Inputs) -> Tensor:
        mode = "train" if self.model.training else "eval"
        logprobs, entropy, aux_loss = self._score(model, inputs)
        batch = self._token_batch(inputs, logprobs, entropy)
        step = self._totals_of_step(model, inputs, batch)
        # gradients are summed over micro-batches and averaged over processes
        loss, result = self.hosted(batch, step, scale=self.accelerator.num_processes)
        if self.aux_loss_enabled:
            micro_batches = self.args.gradient_accumulation_steps if mode == "train" else 1
            loss = loss + self.router_aux_loss_coef * aux_loss / micro_batches
            self._metrics[mode]["aux_loss"].append(self.accelerator.gather_for_metrics(aux_loss).mean().item())
        self._metric_log.add(mode, result.metrics)
        if mode == "train":
            self._skip_empty_steps.add(result.kept_tokens)
            if self._recorder is not None:
                ids, attention = _full_rows(inputs)
                self._recorder.add(batch, result, ids, attention, _loss_mask(inputs))
        return loss

    def _score(self, model: Any, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return log-probs and entropies of the completion tokens, and the router's auxiliary loss of an MoE model."""
        input_ids, attention_mask = _full_rows(inputs)
        multimodal = {name: inputs[name] for name in MODEL_INPUTS if inputs.get(name) is not None}
        logprobs, entropy, aux_loss = self._get_per_token_logps_and_entropies(
            model,
            input_ids,
            attention_mask,
            inputs["completion_ids"].size(1),
            compute_entropy=True,
            compute_aux_loss=self.aux_loss_enabled,
            **multimodal,
        )
        return logprobs, entropy.detach(), aux_loss

    def _token_batch(self, inputs: Inputs, logprobs: Tensor, entropy: Tensor) -> TokenBatch:
        # TRL omits the old log-probs where they would be those of this very step
        proximal = inputs.get("old_per_token_logps")
        proximal = logprobs.detach() if proximal is None else proximal
        sampler = self._recorded_logprobs(inputs)
        return from_padded(
            logprobs,
            _loss_mask(inputs),
            sequence=inputs.get("keel_sequence"),
            trainer_version=self.state.global_step,
            sampler_logprobs=proximal if sampler is None else sampler,
            proximal_logprobs=proximal,
            reference_logprobs=inputs.get("ref_per_token_logps"),
            advantages=inputs["advantages"],
            group=inputs.get("keel_group"),
            version=inputs.get("keel_version"),
            token_ids=inputs["completion_ids"],
            entropy=entropy,
        )

    def _recorded_logprobs(self, inputs: Inputs) -> Tensor | None:
        """Return the sampler's log-probs; None if `generate` sampled with the policy of the trainer itself."""
        recorded: Tensor | None = inputs.get("sampling_per_token_logps")
        if recorded is None and self._records_logprobs:
            raise BatchError("the sampler returned no log-probs, and they are never assumed to be those of the policy")
        return recorded

    def _totals_of_step(self, model: Any, inputs: Inputs, batch: TokenBatch) -> StepTotals | StepCounts:
        """Return the counts or totals of the optimizer step, computed when its first micro-batch arrives."""
        distributed = self.accelerator.num_processes > 1
        if not self.model.training:
            return self._compute_totals(model, [inputs], batch, distributed)
        accumulated = self.args.gradient_accumulation_steps
        number = self._step // accumulated
        if self._step_totals is None or self._step_totals[0] != number or accumulated == 1:
            self._step_totals = number, self._compute_totals(model, self._micro_batches(inputs), batch, distributed)
        return self._step_totals[1]

    def _micro_batches(self, inputs: Inputs) -> list[Inputs]:
        """Return all micro-batches of the current optimizer step on this process."""
        accumulated, per_generation = self.args.gradient_accumulation_steps, self.args.steps_per_generation
        if accumulated == 1:
            return [inputs]
        first = self._step - self._step % accumulated
        buffered = self._buffered_inputs or []
        if len(buffered) != per_generation or buffered[self._step % per_generation] is not inputs:
            raise BatchError(
                "the micro-batch is not one of the buffered completions, so the rest of its step is not known"
            )
        return [buffered[(first + index) % per_generation] for index in range(accumulated)]

    def _compute_totals(
        self, model: Any, micro_batches: list[Inputs], batch: TokenBatch, distributed: bool
    ) -> StepTotals | StepCounts:
        if not self._needs_step_logprobs:
            counts = [
                count_padded(_loss_mask(part), self._recorded_logprobs(part), part.get("ref_per_token_logps"))
                for part in micro_batches
            ]
            summed = torch.stack(counts).sum(0)
            if distributed:
                summed = self.accelerator.reduce(summed, reduction="sum")
            return to_step_counts(summed, self.state.global_step)
        if len(micro_batches) == 1:
            return self.hosted.totals([batch], distributed=distributed)
        with torch.no_grad():
            batches = [self._token_batch(part, *self._score(model, part)[:2]) for part in micro_batches]
        return self.hosted.totals(batches, distributed=distributed)

    def write_tokens(self) -> None:
        """Write the recorded tokens of the step that just ended."""
        if self._recorder is not None:
            rows = self._recorder.take_rows()
            if self.accelerator.num_processes > 1:
                rows = [row for part in gather_parts(rows) for row in part]
            if self.accelerator.is_main_process:
                self._recorder.write(self.state.global_step, self.state.global_step - 1, rows)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        mode = "train" if self.model.training else "eval"
        gather = gather_parts if self.accelerator.num_processes > 1 else None
        for name, value in self._metric_log.flush(mode, gather).items():
            self._metrics[mode][name].append(value)
        super().log(logs, start_time)


class _WriteTokens(TrainerCallback):
    """Writes the recorded tokens of a step when it ends."""

    def __init__(self, trainer: KeelGRPOTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args, state, control
        self._trainer.write_tokens()


def _full_rows(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return token ids and attention mask of prompts and completions."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    return ids, torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)


def _loss_mask(inputs: Inputs) -> Tensor:
    """Return which completion tokens the policy sampled and trains on: no padding and no tool output."""
    mask: Tensor = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


def _model_name(model: Any) -> str:
    name = model if isinstance(model, str) else getattr(model.config, "_name_or_path", "") or "model"
    return str(name).split("/")[-1]


def _warn_about_sampler(args: Any, *, recorded: bool) -> None:
    if not recorded:
        logger.warning(
            "model.generate records no log-probs: the sampler's are recomputed by the trainer when a batch is sampled."
            " Gates see the staleness of a completion, but no mismatch between sampler and trainer"
        )
    for option in truncating_options(args) if recorded else ():
        logger.warning(
            "GRPOConfig.%s: the sampler's log-probs are those of a truncated distribution and the trainer's are not",
            option,
        )
