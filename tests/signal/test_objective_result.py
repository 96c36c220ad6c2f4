"""Properties of an objective and of its result."""

import pytest
import torch
from torch import Tensor

import keel
from keel.signal.audit import audit
from tests.support.audit_losses import kept_mask, linear, right_icepop, tokens_of

LOCAL = {"icepop": True, "dppo_kl": True, "dr_grpo": True, "grpo": False, "opsm": False, "gspo": False, "m2po": False}


@pytest.mark.parametrize(("name", "local"), LOCAL.items())
def test_objectives_that_depend_on_sequences_or_the_step_are_not_token_local(name: str, local: bool) -> None:
    assert keel.objective(name).token_local is local


def test_a_kl_mean_over_the_step_is_token_local_only_with_the_sampled_source() -> None:
    assert not keel.objective("icepop", kl_penalty_coef=0.1).token_local
    assert keel.objective("icepop", kl_penalty_coef=0.1, kl_penalty_source="sampled").token_local


def test_the_terms_add_up_to_the_loss() -> None:
    batch = keel.TokenBatch(
        logprobs=torch.tensor([-1.0, -0.5, -2.0], dtype=torch.float64),
        sampler_logprobs=torch.tensor([-1.2, -0.4, -2.1], dtype=torch.float64),
        advantages=torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64),
        trainable=torch.ones(3, dtype=torch.bool),
        sequence=torch.tensor([0, 0, 1]),
    )
    result = keel.objective("ipo_kl", kl_tau=0.5)(batch)
    assert list(result.terms) == ["policy", "log_ratio_squared policy/sampler"]
    assert float(result.terms["log_ratio_squared policy/sampler"]) == pytest.approx(0.5 * (0.04 + 0.01 + 0.01) / 3)
    assert float(sum(result.terms.values())) == pytest.approx(float(result.loss))


def computes_in_float32(batch: keel.TokenBatch) -> Tensor:
    keep = kept_mask(batch)
    d = (batch.logprobs - batch.sampler_logprobs)[keep].float()
    return -(torch.exp(d) * batch.advantages[keep].float()).sum() / tokens_of(batch)


def asserts_finite_sampler_logprobs(batch: keel.TokenBatch) -> Tensor:
    assert batch.sampler_logprobs[batch.trainable].isfinite().all()
    return right_icepop(batch)


def ignores_options(batch: keel.TokenBatch, **options: float) -> Tensor:
    return linear(batch, kept_mask(batch)).sum() / tokens_of(batch)


def test_audit_accepts_float32_and_raising_on_nan_but_not_ignored_options() -> None:
    assert audit(computes_in_float32).passed
    assert audit(asserts_finite_sampler_logprobs).passed
    assert audit(ignores_options).failed == ["g"]
