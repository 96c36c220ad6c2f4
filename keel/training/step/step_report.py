"""Report a training step: metrics for the log, and for every trainable token whether it trained and why."""

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
    """The step's trainable tokens in sample order, one CPU tensor per column."""

    sample: Int[Tensor, "N"]
    """Index of the sample in the step."""
    position: Int[Tensor, "N"]
    """Position in the sample."""
    logprobs: Float[Tensor, "N"]
    """Log-probs of the policy before the optimizer step."""
    reasons: UInt8[Tensor, "N"]
    """0 if the token trained; otherwise the drop reason, an index into `StepReport.reasons`."""
    dloss_dlogprob: Float[Tensor, "N"]
    """Gradient of the loss with respect to the log-prob."""
    entropy: Float[Tensor, "N"] | None = None
    reference_logprobs: Float[Tensor, "N"] | None = None

    def __len__(self) -> int:
        return len(self.sample)

    def for_sample(self, sample: int) -> dict[str, Tensor]:
        """Return the columns of one sample."""
        rows = self.sample == sample
        return {name: column[rows] for name, column in self.columns()}

    def columns(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in vars(self).items():
            if value is not None:
                yield name, value


@dataclass(frozen=True, eq=False)
class StepReport:
    """The result of one call of `Trainer.step`."""

    steps: int
    """Optimizer steps taken since the start, including this one."""
    stepped: bool
    skip_reason: str
    """Why no optimizer step was taken; empty if one was."""
    loss: float
    terms: dict[str, float]
    """Loss by term."""
    grad_norm: float
    """Gradient norm before clipping."""
    lr: float
    metrics: Metrics
    tokens: TokenReport
    reasons: tuple[str, ...]
    """Names of the values in `tokens.reasons`."""
    samples: int
    computed_tokens: int
    """Tokens computed by the model in one pass over the step."""
    unshared_tokens: int
    """Tokens that would be computed without shared prefixes."""
    micro_batches: int
    seconds: float
    reference_kl: dict[str, Metric] = field(default_factory=dict)
    """Mean of (policy log-prob - reference log-prob) for each reference."""

    @property
    def kept_tokens(self) -> int:
        return int((self.tokens.reasons == 0).sum())

    def scalars(self) -> dict[str, float]:
        """Return all scalar values by metric name."""
        values: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("steps", "loss", "grad_norm", "lr", "samples", "computed_tokens", "unshared_tokens", "seconds")
        }
        values |= {f"loss/{name}": value for name, value in self.terms.items()}
        values |= {f"kl_ref/{name}": metric.mean for name, metric in self.reference_kl.items()}
        return {name: float(value) for name, value in values.items()} | self.metrics.means()


@dataclass(eq=False)
class StepColumns:
    """Per-token columns of a step in progress: tensors over all of its trainable tokens."""

    tokens: TrainableTokens
    logprobs: Tensor
    dloss_dlogprob: Tensor
    reasons: Tensor
    entropy: Tensor | None
    reference_logprobs: Tensor | None = None
    proximal_logprobs: Tensor | None = None
    """Log-probs of the policy before the first of several optimizer steps; None if there is only one."""
    teacher_logprobs: Tensor | None = None
    """Log-probs of the trainer's teacher; None if the samples have teacher log-probs or none are needed."""

    @classmethod
    def empty(
        cls, tokens: TrainableTokens, dtype: torch.dtype, device: torch.device, *, entropy: bool
    ) -> "StepColumns":
        """Return columns to be filled: log-probs and entropy are NaN, gradients and reasons zero."""
        nans = torch.full((len(tokens),), torch.nan, dtype=dtype, device=device)
        reasons = torch.zeros(len(tokens), dtype=torch.uint8, device=device)
        return cls(tokens, nans, torch.zeros_like(nans), reasons, nans.clone() if entropy else None)

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
