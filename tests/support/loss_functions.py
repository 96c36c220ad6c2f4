"""Loss functions as a user would write them, for `objective = "tests.support.loss_functions:NAME"`."""

from types import SimpleNamespace
from typing import Any

from torch import Tensor

import keel
from keel import TokenBatch


def icepop(batch: TokenBatch) -> Any:
    """The preset itself, called by a function."""
    return keel.objective("icepop")(batch)


def _log_ratio(batch: TokenBatch) -> tuple[TokenBatch, Tensor]:
    tokens = batch.take((batch.trainable & batch.sampler_logprobs.isfinite()).nonzero().squeeze(1))
    return tokens, (tokens.logprobs - tokens.sampler_logprobs).clamp(-30.0, 30.0)


def plain_icepop(batch: TokenBatch, low: float = 0.5, high: float = 2.0) -> Tensor:
    """IcePop in plain torch."""
    tokens, log_ratio = _log_ratio(batch)
    ratio = log_ratio.exp()
    kept = (ratio.detach() >= low) & (ratio.detach() <= high)
    return -(tokens.advantages[kept] * ratio[kept]).sum() / batch.trainable.sum().clamp(min=1)


def masks(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    log_ratio = (batch.logprobs - batch.sampler_logprobs).detach().nan_to_num(0.0, 0.0, 0.0)
    return (log_ratio < -1e-3) & batch.trainable, (log_ratio > 1e-3) & batch.trainable


def narrow_with_reasons(batch: TokenBatch) -> dict[str, Any]:
    """Drop tokens whose ratio differs from 1 by more than 0.001, and say why."""
    low, high = masks(batch)
    tokens, log_ratio = _log_ratio(batch)
    kept = log_ratio.detach().abs() <= 1e-3
    loss = -(tokens.advantages[kept] * log_ratio[kept].exp()).sum() / batch.trainable.sum().clamp(min=1)
    return {"loss": loss, "reasons": {"ratio fell": low, "ratio rose": high}}


def narrow_with_keep(batch: TokenBatch) -> SimpleNamespace:
    """The same, with a mask of the kept tokens only, as an attribute."""
    result = narrow_with_reasons(batch)
    low, high = masks(batch)
    return SimpleNamespace(loss=result["loss"], keep=~(low | high))


def keeps_gradient_of_dropped(batch: TokenBatch) -> dict[str, Any]:
    """Say that tokens are dropped that the loss trains on."""
    return {"loss": plain_icepop(batch), "keep": batch.advantages > 0}


def mean_of_kept(batch: TokenBatch) -> Tensor:
    """Divide by the kept tokens without declaring it, and read values of untrainable tokens."""
    return -(batch.advantages * (batch.logprobs - batch.sampler_logprobs).exp()).mean()


def reads_reference(batch: TokenBatch) -> Tensor:
    """Add a KL to the reference."""
    tokens, log_ratio = _log_ratio(batch)
    distance = tokens.reference_logprobs - tokens.logprobs
    terms = -tokens.advantages * log_ratio.exp() + 0.01 * (distance.clamp(-30, 30).exp() - distance - 1)
    return terms.sum() / batch.trainable.sum().clamp(min=1)


def returns_token_losses(batch: TokenBatch) -> Tensor:
    return batch.logprobs


def raises(batch: TokenBatch) -> Tensor:
    raise ZeroDivisionError("no tokens today")


NOT_A_FUNCTION = 3
