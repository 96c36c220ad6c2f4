"""Worked examples of the definitions of objectives, exact to float32."""

import pytest
import torch

import keel

F32 = torch.float32


def leak_example() -> keel.TokenBatch:
    """Return a sequence with negative mean advantage and a sequence KL of 1 that contains one positive token."""
    return keel.TokenBatch(
        logprobs=torch.tensor([-1.0, -1.0, -1.0], dtype=F32, requires_grad=True),
        sampler_logprobs=torch.zeros(3, dtype=F32),
        advantages=torch.tensor([-1.0, 0.25, -1.0], dtype=F32),
        trainable=torch.ones(3, dtype=torch.bool),
        sequence=torch.zeros(3, dtype=torch.int64),
    )


def test_opsm_drops_the_positive_token_of_a_dropped_sequence() -> None:
    step = leak_example()
    result = keel.objective("opsm", opsm_delta=1e-4)(step)
    result.loss.backward()
    assert result.loss.item() == 0.0
    assert result.keep.tolist() == [False, False, False]
    assert result.kept_tokens == 0
    assert step.logprobs.grad is not None
    assert step.logprobs.grad.tolist() == [0.0, 0.0, 0.0]
    assert result.metrics["masked_sequence_tokens"].mean == 1.0
    assert result.metrics["masked_sequences"].mean == 1.0


def test_a_decision_per_token_would_keep_the_positive_token() -> None:
    """The same tokens as three sequences: the positive one is kept, with a loss sum of -0.09196986."""
    result = keel.objective("opsm")(leak_example().replace(sequence=torch.arange(3)))
    assert result.keep.tolist() == [False, True, False]
    assert result.loss.item() == pytest.approx(-0.03065662, rel=1e-6)
    assert 3 * result.loss.item() == pytest.approx(-0.09196986, rel=1e-6)
    assert result.metrics["masked_sequence_tokens"].mean == pytest.approx(2 / 3)


def test_opsm_compares_the_sequence_kl_with_its_delta() -> None:
    """The sequence KL is 1: a delta just below 1 drops the sequence, a delta of 1 keeps it."""
    assert keel.objective("opsm", opsm_delta=0.999999)(leak_example()).kept_tokens == 0
    assert keel.objective("opsm", opsm_delta=1.0)(leak_example()).kept_tokens == 3


@pytest.mark.parametrize("delta", [0.999999, 1.0])
def test_opsm_ignores_untrainable_tokens(delta: float) -> None:
    def example(ignored_logprob: float, ignored_advantage: float) -> keel.TokenBatch:
        return keel.TokenBatch(
            logprobs=torch.tensor([-1.0, -1.0, -1.0], dtype=F32),
            sampler_logprobs=torch.tensor([0.0, ignored_logprob, 0.0], dtype=F32),
            advantages=torch.tensor([-1.0, ignored_advantage, -1.0], dtype=F32),
            trainable=torch.tensor([True, False, True]),
            sequence=torch.zeros(3, dtype=torch.int64),
        )

    objective = keel.objective("opsm", opsm_delta=delta)
    result, expected = objective(example(9.0, 5.0)), objective(example(0.0, -1.0))
    kept = [False, False, False] if delta < 1 else [True, False, True]
    assert result.keep.tolist() == expected.keep.tolist() == kept
    assert result.loss.item() == expected.loss.item()
    assert result.metrics["masked_sequence_tokens"].mean == (1.0 if delta < 1 else 0.0)
    assert result.metrics["masked_sequence_tokens"].count == 2


def test_the_kl_penalty_lowers_the_advantage_of_tokens_above_the_mean() -> None:
    """k = [0.5, -0.5, 1.0] with coefficient 0.1. The gradient of an on-policy linear term shows the adjustment."""
    k = torch.tensor([0.5, -0.5, 1.0], dtype=F32)
    logprobs = torch.tensor([-1.0, -1.0, -1.0], dtype=F32)
    step = keel.TokenBatch(
        logprobs=logprobs,
        sampler_logprobs=logprobs,
        advantages=torch.zeros(3, dtype=F32),
        trainable=torch.ones(3, dtype=torch.bool),
        sequence=torch.tensor([0, 1, 1]),
        reference_logprobs=logprobs - k,
    )
    result = keel.objective("icepop", kl_penalty_coef=0.1)(step)
    adjustment = -3 * result.gradient
    torch.testing.assert_close(adjustment, torch.tensor([-0.0166667, 0.0833333, -0.0666667]), rtol=1e-5, atol=1e-7)
    assert adjustment.sum().item() == pytest.approx(0.0, abs=1e-7)
    assert result.metrics["kl_policy_ref"].mean == pytest.approx(1 / 3)
