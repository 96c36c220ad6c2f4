"""TRL's AsyncGRPOTrainer with an objective of Keel as its loss.

TRL runs the forward pass, its own metrics and its accounting; only the loss is replaced. Denominators are those of the
whole optimizer step, counted over the micro-batches that the trainer fetches together and over all processes. TRL's
own loss averages the token means of micro-batches instead.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from keel.integrations.conversion import from_packed
from keel.integrations.metric_log import MetricLog
from keel.integrations.step_loss import HostedObjective, gather_parts
from keel.integrations.trl.grpo_trainer import ObjectiveSpec
from keel.integrations.trl.options import async_host, check_replaced
from keel.integrations.trl.step_callback import SkipEmptySteps
from keel.signal import StepCounts, StepTotals, TokenBatch

MAX_ROWS = 1 << 20
"""Ids of sequences are unique in a step: a row holds fewer sequences than this."""


class KeelAsyncGRPOTrainer(AsyncGRPOTrainer):  # type: ignore[misc]
    """`AsyncGRPOTrainer` that trains with an objective of Keel."""

    def __init__(self, *positional: Any, objective: ObjectiveSpec, args: Any = None, **keywords: Any) -> None:
        """Create the trainer. Arguments other than `objective` are those of `AsyncGRPOTrainer`.

        `objective` is the name of a preset, a table such as `{"name": "icepop", "ratio_high": 8.0}`, or a composition.
        """
        if args is None:
            model = str(keywords.get("model") or (positional[0] if positional else "model"))
            args = AsyncGRPOConfig(f"{Path(model).name}-AsyncGRPO")
        check_replaced(args, "KeelAsyncGRPOTrainer")
        self.hosted = HostedObjective(objective, async_host(args.gradient_accumulation_steps))
        super().__init__(*positional, args=args, **keywords)
        self._metric_log = MetricLog({"is_clipped": "clip_ratio/region_mean"})
        self._skip_empty_steps = SkipEmptySteps(self)
        self.add_callback(self._skip_empty_steps)
        self._micro_batches: list[dict[str, Any]] = []
        self._next_micro_batch = 0
        self._step_counts: StepCounts | None = None

    def get_batch_samples(self, *positional: Any, **keywords: Any) -> Any:
        """Keep the micro-batches of the step, which are fetched before the first of them is computed."""
        batches, num_items = super().get_batch_samples(*positional, **keywords)
        self._micro_batches, self._next_micro_batch, self._step_counts = list(batches), 0, None
        return batches, num_items

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        capture = _CapturedModel(model)
        super().compute_loss(capture, inputs, return_outputs, num_items_in_batch)
        metrics = self._metrics["train"]
        for name in [name for name in metrics if name.startswith("clip_ratio/")]:
            del metrics[name]  # the clipping of TRL's loss, which is not used
        batch = self._token_batch(inputs, capture.outputs)
        # gradients are summed over micro-batches and averaged over processes
        loss, result = self.hosted(batch, self._totals_of_step(inputs, batch), scale=self.accelerator.num_processes)
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * capture.outputs.aux_loss / self._num_micro_batches
        self._metric_log.add("train", result.metrics)
        self._skip_empty_steps.add(result.kept_tokens)
        self._next_micro_batch += 1
        return loss

    @property
    def _num_micro_batches(self) -> int:
        return max(len(self._micro_batches), 1)

    def _token_batch(self, inputs: dict[str, Any], outputs: Any) -> TokenBatch:
        selected = inputs["token_index"] >= 0
        index = inputs["token_index"][selected]
        logprobs = outputs.log_probs.flatten()[index]
        row = self._next_micro_batch * self.accelerator.num_processes + self.accelerator.process_index
        return from_packed(
            logprobs,
            inputs["segment_id"][selected] + row * MAX_ROWS,
            sampler_logprobs=inputs["old_log_probs"][selected],
            proximal_logprobs=logprobs.detach(),  # a sample trains in one step, whose policy this is
            advantages=inputs["advantages"][selected],
            entropy=outputs.entropy.flatten()[index].detach(),
            token_ids=inputs["shift_labels"][inputs["attention_mask"].bool()][index],
        )

    def _totals_of_step(self, inputs: dict[str, Any], batch: TokenBatch) -> StepTotals | StepCounts:
        distributed = self.accelerator.num_processes > 1
        if self.hosted.needs_step_logprobs:
            return self.hosted.totals([batch], distributed=distributed)
        if self._step_counts is None:
            parts = self._micro_batches or [inputs]
            counts = torch.stack([_count_row(part) for part in parts]).sum(0).to(batch.logprobs.device)
            if distributed:
                counts = self.accelerator.reduce(counts, reduction="sum")
            tokens, sequences, invalid = counts.tolist()
            self._step_counts = StepCounts(num_trainable=tokens, num_sequences=sequences, num_invalid_logprobs=invalid)
        return self._step_counts

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        gather = gather_parts if self.accelerator.num_processes > 1 else None
        for name, value in self._metric_log.flush("train", gather).items():
            self._metrics["train"][name].append(value)
        super().log(logs, start_time)


class _CapturedModel:
    """Calls a model and keeps its last outputs."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.outputs: Any = None

    def __call__(self, **inputs: Any) -> Any:
        self.outputs = self._model(**inputs)
        return self.outputs


def _count_row(inputs: dict[str, Any]) -> Tensor:
    """Return trainable tokens, sequences and invalid sampler log-probs of this process's row of a micro-batch."""
    selected = inputs["token_index"] >= 0
    invalid = (~inputs["old_log_probs"][selected].isfinite()).sum()
    return torch.stack([selected.sum(), _num_unique(inputs["segment_id"][selected]), invalid])


def _num_unique(ids: Tensor) -> Tensor:
    return torch.tensor(len(torch.unique(ids)), device=ids.device)
