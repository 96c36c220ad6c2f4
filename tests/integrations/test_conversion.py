"""Padded, packed and separate sequences become the same tokens, and values at other positions cannot matter."""

import pytest
import torch

import keel
from keel.integrations.conversion import from_packed, from_padded, from_sequences, to_padded

MASK = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 1], [0, 0, 0, 0]])
LOGPROBS = torch.tensor([[-0.1, -0.2, torch.nan, 9.0], [-0.3, torch.nan, -0.4, -0.5], [torch.nan] * 4])


def padded() -> keel.TokenBatch:
    return from_padded(
        LOGPROBS,
        MASK,
        sampler_logprobs=LOGPROBS - 0.1,
        advantages=torch.tensor([1.0, -1.0, 5.0]),
        group=torch.tensor([7, 7, 8]),
        version=torch.tensor([3, 4, 4]),
        trainer_version=4,
    )


def test_padded_rows_become_their_trainable_tokens() -> None:
    batch = padded()
    assert batch.logprobs.tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.4, -0.5])
    assert batch.sequence.tolist() == [0, 0, 1, 1, 1]
    assert batch.advantages.tolist() == [1, 1, -1, -1, -1]
    assert batch.group is not None and batch.group.tolist() == [7] * 5
    assert batch.version is not None and batch.version.tolist() == [3, 3, 4, 4, 4]
    assert bool(batch.trainable.all())


def test_the_three_layouts_are_the_same_batch() -> None:
    rows = [LOGPROBS[0, :2], LOGPROBS[1], LOGPROBS[2, :1]]
    masks = [MASK[0, :2], MASK[1], MASK[2, :1]]
    separate = from_sequences(
        rows,
        masks,
        sampler_logprobs=[row - 0.1 for row in rows],
        advantages=[1.0, -1.0, 5.0],
        group=[7, 7, 8],
        version=[3, 4, 4],
        trainer_version=4,
    )
    flat = torch.cat(rows)
    packed = from_packed(
        flat,
        torch.tensor([0, 0, 1, 1, 1, 1, 2]),
        mask=torch.cat(masks),
        sampler_logprobs=flat - 0.1,
        advantages=torch.tensor([1.0, 1, -1, -1, -1, -1, 5]),
        group=torch.tensor([7] * 6 + [8]),
        version=torch.tensor([3, 3, 4, 4, 4, 4, 4]),
        trainer_version=4,
    )
    for other in (separate, packed):
        for name, value in padded().tensors().items():
            assert torch.equal(other.tensors()[name], value), name


def test_gradients_and_outcomes_return_to_their_positions() -> None:
    logprobs = LOGPROBS.clone().requires_grad_()
    batch = from_padded(logprobs, MASK, sampler_logprobs=LOGPROBS - 0.1, advantages=torch.ones(3))
    result = keel.objective("icepop")(batch)
    result.loss.backward()
    assert logprobs.grad is not None
    assert torch.equal(logprobs.grad != 0, MASK.bool())
    assert torch.equal(to_padded(result.gradient, MASK), logprobs.grad)
    assert torch.equal(to_padded(result.keep, MASK, fill=False), MASK.bool())


def test_a_micro_batch_without_trainable_tokens_has_a_loss_of_zero() -> None:
    logprobs = LOGPROBS.clone().requires_grad_()
    batch = from_padded(logprobs, MASK * 0, sampler_logprobs=LOGPROBS, advantages=torch.ones(3))
    loss = keel.objective("grpo")(batch).loss
    loss.backward()
    assert loss.item() == 0 and logprobs.grad is not None and not logprobs.grad.any()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"advantages": torch.ones(4)}, r"advantages has shape \[4\]; it must be \[3, 4\]"),
        ({"rewards": torch.ones(3)}, "rewards is not a field"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(keel.BatchError, match=message):
        from_padded(LOGPROBS, MASK, **fields)
