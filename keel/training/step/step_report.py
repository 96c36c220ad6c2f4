"""What a training step did: numbers for the log, and for every trainable token whether it trained and why."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from keel.signal import Metric, Metrics
from keel.training.step.trainable_tokens import TrainableTokens


@dataclass(frozen=True, eq=False)
class TokenReport:
    """The step's trainable tokens, sample after sample, one tensor per column, on CPU."""

    sample: Int[Tensor, "N"]
    """Which sample, by its place in the step."""
    position: Int[Tensor, "N"]
    """Where in the sample."""
    logprobs: Float[Tensor, "N"]
    """Under the policy before the update."""
    reasons: UInt8[Tensor, "N"]
    """0: trained; else why not, by the names in `StepReport.reasons`."""
    dloss_dlogprob: Float[Tensor, "N"]
    """d loss / d logprob: what the token contributed."""
    entropy: Float[Tensor, "N"] | None = None
    reference_logprobs: Float[Tensor, "N"] | None = None

    def __len__(self) -> int:
        return len(self.sample)

    def for_sample(self, sample: int) -> dict[str, Tensor]:
        """The columns of one sample."""
        here = self.sample == sample
        return {name: column[here] for name, column in self.columns()}

    def columns(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in vars(self).items():
            if value is not None:
                yield name, value


@dataclass(frozen=True, eq=False)
class StepReport:
    """One call of `Trainer.step`."""

    steps: int
    """Optimizer steps taken since the start, this one included."""
    stepped: bool
    skip_reason: str
    """Why the optimizer did not step; empty when it did."""
    loss: float
    terms: dict[str, float]
    """The loss by term."""
    grad_norm: float
    """Before clipping."""
    lr: float
    metrics: Metrics
    tokens: TokenReport
    reasons: tuple[str, ...]
    """The meaning of the numbers in `tokens.reasons`."""
    samples: int
    computed_tokens: int
    """Tokens that went through the model, in one pass over the step."""
    unshared_tokens: int
    """What it would have been had each sample been computed alone."""
    micro_batches: int
    seconds: float
    reference_kl: dict[str, Metric] = field(default_factory=dict)
    """Mean of l - f for each reference."""

    @property
    def kept_tokens(self) -> int:
        return int((self.tokens.reasons == 0).sum())

    def scalars(self) -> dict[str, float]:
        """Everything that fits a log line."""
        own: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("steps", "loss", "grad_norm", "lr", "samples", "computed_tokens", "unshared_tokens", "seconds")
        }
        own |= {f"loss/{name}": value for name, value in self.terms.items()}
        own |= {f"kl_ref/{name}": metric.mean for name, metric in self.reference_kl.items()}
        return {name: float(value) for name, value in own.items()} | self.metrics.means()


@dataclass(eq=False)
class StepColumns:
    """The columns of a step while it is being taken: tensors over all of its trainable tokens."""

    tokens: TrainableTokens
    logprobs: Tensor
    dloss_dlogprob: Tensor
    reasons: Tensor
    entropy: Tensor | None
    reference_logprobs: Tensor | None = None
    proximal_logprobs: Tensor | None = None
    """Under the policy before the first of several updates; None when there is only one."""
    teacher_logprobs: Tensor | None = None
    """Under the trainer's own teacher; None when samples bring theirs, or none is needed."""

    @classmethod
    def empty(
        cls, tokens: TrainableTokens, dtype: torch.dtype, device: torch.device, *, entropy: bool
    ) -> "StepColumns":
        blank = torch.full((len(tokens),), torch.nan, dtype=dtype, device=device)
        reasons = torch.zeros(len(tokens), dtype=torch.uint8, device=device)
        return cls(tokens, blank, torch.zeros_like(blank), reasons, blank.clone() if entropy else None)

    def to_token_report(self) -> TokenReport:
        columns = [self.logprobs, self.reasons, self.dloss_dlogprob]
        logprobs, reasons, gradient = (column.detach().cpu() for column in columns)
        return TokenReport(
            sample=torch.from_numpy(np.array(self.tokens.sample)),
            position=torch.from_numpy(np.array(self.tokens.position)),
            logprobs=logprobs,
            reasons=reasons,
            dloss_dlogprob=gradient,
            entropy=None if self.entropy is None else self.entropy.cpu(),
            reference_logprobs=None if self.reference_logprobs is None else self.reference_logprobs.cpu(),
        )
