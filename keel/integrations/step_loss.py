"""Compute the loss of one micro-batch inside a host, scaled so that the host's own arithmetic gives the step's loss.

A host sums gradients over the micro-batches of a step and averages them over ranks; some divide by a count of their
own. Keel's loss of a micro-batch is its part of the step's loss, so it is multiplied by whatever the host divides by.
The divisor of the step comes from counts over all of its micro-batches and ranks, never from one of them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from keel.integrations.requirements import Host
from keel.objectives import Composition
from keel.signal import Objective, ObjectiveResult, StepCounts, StepTotals, TokenBatch, objective
from keel.signal.segments import SequenceTable

SUM = StepCounts(num_trainable=1, num_sequences=1)
"""Counts for hosts that divide by themselves: the loss is then a sum over tokens, or over sequences."""

METRICS_SAMPLE_SIZE = 4096
"""Tokens of a micro-batch from which distributions are estimated, if the objective does not set it. Hosts compute
metrics for every micro-batch, Keel's own trainer once a step."""
DEFAULT_SAMPLE_SIZE = Composition.model_fields["metrics_sample_size"].default


class HostedObjective:
    """An objective that its host can compute exactly."""

    def __init__(self, spec: str | Mapping[str, Any] | Composition | Objective, host: Host) -> None:
        """Resolve a preset's name, a table or a composition. Raises `ConfigError` if the host cannot compute it."""
        resolved = spec if isinstance(spec, Objective) else objective(spec)
        host.check(resolved.composition, resolved.name)
        composition = resolved.composition
        if composition.metrics_sample_size == DEFAULT_SAMPLE_SIZE:
            composition = composition.model_copy(update={"metrics_sample_size": METRICS_SAMPLE_SIZE})
        self.host = host
        self.objective = Objective(composition, name=resolved.name, parameters=resolved.parameters)

    @property
    def composition(self) -> Composition:
        return self.objective.composition

    @property
    def needs_step_logprobs(self) -> bool:
        """Whether totals must be computed from the log-probs of the whole step, not from counts alone."""
        return bool(self.composition.step_logprob_parts())

    def totals(self, batches: Sequence[TokenBatch], *, distributed: bool = False) -> StepTotals:
        """Return the totals of a step from its micro-batches on this rank, or on all ranks of torch.distributed."""
        return self.objective.totals(batches, gather_parts if distributed else None)

    def __call__(
        self, batch: TokenBatch, step: StepTotals | StepCounts, *, scale: float = 1.0
    ) -> tuple[Tensor, ObjectiveResult]:
        """Return the loss for the host to differentiate and the result with every token's outcome.

        `scale` undoes what the host divides by afterwards: the number of ranks if it averages their gradients, and the
        number of micro-batches if it averages those too.
        """
        result = self.objective(batch, step)
        return (result.loss if scale == 1 else result.loss * scale), result


def count_padded(mask: Tensor, sampler_logprobs: Tensor | None, reference_logprobs: Tensor | None = None) -> Tensor:
    """Return trainable tokens, sequences, invalid log-probs and the sum of b - f of one padded micro-batch.

    Counts of micro-batches and ranks can be added; `to_step_counts` interprets the sum.
    """
    trainable = mask.bool()
    counts = [trainable.sum(), trainable.any(1).sum()]
    valid = trainable
    if sampler_logprobs is None:
        counts.append(counts[0] * 0)
    else:
        valid = trainable & sampler_logprobs.isfinite()
        counts.append(counts[0] - valid.sum())
    values = torch.stack(counts).float() if mask.device.type == "mps" else torch.stack(counts).double()
    kl_sum = values.new_zeros(1)
    if reference_logprobs is not None and sampler_logprobs is not None:
        kl_sum = (sampler_logprobs - reference_logprobs)[valid].sum(dtype=values.dtype).view(1)
    return torch.cat([values, kl_sum])


def to_step_counts(summed: Tensor, trainer_version: int | None = None) -> StepCounts:
    """Return the counts of a step from the sum of `count_padded` over its micro-batches and ranks."""
    tokens, sequences, invalid, kl_sum = summed.tolist()
    return StepCounts(
        num_trainable=int(tokens),
        num_sequences=int(sequences),
        num_invalid_logprobs=int(invalid),
        kl_sum=kl_sum,
        trainer_version=trainer_version,
    )


def gather_parts(part: Any) -> list[Any]:
    """Return the parts of all ranks of torch.distributed, in the order of ranks, on the device of this rank's part."""
    parts: list[Any] = [None] * torch.distributed.get_world_size()
    device = _device_of(part)
    torch.distributed.all_gather_object(parts, _to_device(part, torch.device("cpu")))
    return parts if device is None else [_to_device(other, device) for other in parts]


def _device_of(part: Any) -> torch.device | None:
    if isinstance(part, SequenceTable):
        return part.ids.device
    return part.device if isinstance(part, Tensor) else None


def _to_device(part: Any, device: torch.device) -> Any:
    if isinstance(part, SequenceTable):
        return SequenceTable(part.ids.to(device), {name: column.to(device) for name, column in part.columns.items()})
    return part.to(device) if isinstance(part, Tensor) else part
