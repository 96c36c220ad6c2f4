"""Counts of the step are enough for micro-batches of complete sequences, unless the objective reads the whole step."""

import pytest
import torch

import keel
from keel.objectives import PRESETS
from keel.signal import StepCounts
from tests.support.strategies import close, random_step

KL_PENALTY = {"kl_penalty_coef": 0.3, "kl_penalty_source": "sampled"}
CASES = [(name, {}) for name in PRESETS] + [("icepop", KL_PENALTY), ("grpo", {"reduction": "constant", "length": 7})]


def step() -> keel.TokenBatch:
    """Return a step with a sampler log-prob missing, in float64."""
    batch = random_step(7)
    sampler = batch.sampler_logprobs
    assert sampler is not None
    sampler[batch.trainable.nonzero()[3]] = torch.nan
    return batch


def counts(batch: keel.TokenBatch) -> StepCounts:
    assert batch.sampler_logprobs is not None and batch.reference_logprobs is not None
    valid = batch.trainable & batch.sampler_logprobs.isfinite()
    return StepCounts(
        num_trainable=int(batch.trainable.sum()),
        num_sequences=len(torch.unique(batch.sequence[batch.trainable])),
        num_invalid_logprobs=int(batch.trainable.sum() - valid.sum()),
        kl_sum=float((batch.sampler_logprobs - batch.reference_logprobs)[valid].sum()),
        trainer_version=batch.trainer_version,
    )


@pytest.mark.parametrize(("name", "parameters"), CASES)
def test_micro_batches_with_the_counts_of_the_step_add_up_to_its_loss(name: str, parameters: dict[str, object]) -> None:
    objective = keel.objective(name, **parameters, max_invalid_logprob_fraction=0.5)
    if objective.composition.step_logprob_parts():
        with pytest.raises(keel.BatchError, match="whole step"):
            objective(step(), counts(step()))
        return
    batch = step()
    whole = objective(batch)
    parts = [(batch.sequence % 3 == remainder).nonzero().squeeze(1) for remainder in range(3)]
    loss, gradient = 0.0, torch.zeros(len(batch), dtype=torch.float64)
    for part in parts:
        result = objective(batch.take(part), counts(batch))
        loss += float(result.loss)
        gradient[part] = result.gradient
    close(torch.tensor(loss), whole.loss.float(), rtol=1e-6)
    close(gradient, whole.gradient)


def test_too_many_missing_log_probs_are_judged_over_the_step() -> None:
    batch = step()
    few = keel.objective("icepop", max_invalid_logprob_fraction=0.1)
    (missing,) = (~batch.sampler_logprobs.isfinite() & batch.trainable).nonzero().squeeze(1).tolist()  # type: ignore[union-attr]
    alone = torch.tensor([missing])
    with pytest.raises(keel.InvalidSignalError):
        few(batch.take(alone))
    assert few(batch.take(alone), counts(batch)).kept_tokens == 0
    with pytest.raises(keel.InvalidSignalError, match="1 of 27"):
        keel.objective("icepop", max_invalid_logprob_fraction=0.01)(batch, counts(batch))
