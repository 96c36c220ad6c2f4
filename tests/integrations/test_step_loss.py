"""The loss of a micro-batch is its part of the step's, in the units of its host."""

import pytest
import torch

import keel
from keel.integrations.conversion import from_padded, from_sequences
from keel.integrations.requirements import Host
from keel.integrations.step_loss import METRICS_SAMPLE_SIZE, SUM, HostedObjective, count_padded, to_step_counts

GIVES = ("sampler_logprobs", "token_count", "sequence_count", "complete_sequences")
HOST = Host(name="a host", gives=dict.fromkeys(GIVES, ""))  # type: ignore[arg-type]
torch.manual_seed(3)
MASKS = [torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]]), torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])]
SAMPLER = [-2 * torch.rand(2, 4) for _ in MASKS]
LOGPROBS = [(values + 0.5 * torch.randn(2, 4)).clamp(max=-0.01) for values in SAMPLER]
ADVANTAGES = [torch.tensor([1.0, -1.0]), torch.tensor([0.5, 9.0])]
PARTS = list(zip(LOGPROBS, MASKS, SAMPLER, ADVANTAGES, strict=True))


def batch(part: int) -> keel.TokenBatch:
    logprobs, mask, sampler, advantages = PARTS[part]
    ids = torch.arange(2) + 2 * part
    return from_padded(logprobs, mask, sequence=ids, sampler_logprobs=sampler, advantages=advantages)


@pytest.mark.parametrize("name", ["icepop", "gspo", "dr_grpo", "opsm"])
def test_a_host_that_averages_over_processes_gets_the_loss_of_the_step(name: str) -> None:
    hosted = HostedObjective(name, HOST)
    counts = to_step_counts(sum(count_padded(mask, sampler) for _, mask, sampler, _ in PARTS))  # type: ignore[arg-type]
    assert (counts.num_trainable, counts.num_sequences) == (8, 3)
    losses = [hosted(batch(part), counts, scale=2)[0].item() for part in range(2)]
    whole = keel.objective(name)(keel.TokenBatch.cat([batch(0), batch(1)])).loss
    assert sum(losses) / 2 == pytest.approx(whole.item(), rel=1e-5)


def test_a_host_that_divides_by_itself_gets_sums_of_single_sequences() -> None:
    hosted = HostedObjective("icepop", HOST)
    whole = keel.TokenBatch.cat([batch(0), batch(1)])
    total = 0.0
    for number in (0, 1, 2):
        one = (whole.sequence == number).nonzero().squeeze(1)
        single = whole.take(one)
        assert single.sampler_logprobs is not None
        alone = from_sequences(
            [single.logprobs], sampler_logprobs=[single.sampler_logprobs], advantages=[float(single.advantages[0])]
        )
        total += hosted(alone, SUM)[0].item()
    assert total / len(whole) == pytest.approx(keel.objective("icepop")(whole).loss.item(), rel=1e-5)


def test_missing_log_probs_are_counted_and_the_kl_sum_leaves_them_out() -> None:
    sampler = SAMPLER[0].clone()
    sampler[0, 1] = torch.nan
    counts = to_step_counts(count_padded(MASKS[0], sampler, SAMPLER[0] - 1), trainer_version=3)
    assert (counts.num_invalid_logprobs, counts.trainer_version) == (1, 3)
    assert counts.kl_sum == pytest.approx(3.0)


def test_metrics_of_a_micro_batch_are_sampled_from_fewer_tokens_unless_the_objective_says() -> None:
    assert HostedObjective("icepop", HOST).composition.metrics_sample_size == METRICS_SAMPLE_SIZE
    table = {"name": "icepop", "metrics_sample_size": 100}
    assert HostedObjective(table, HOST).composition.metrics_sample_size == 100
    assert HostedObjective(table, HOST).objective.parameters["ratio_high"] == 5.0


def test_an_objective_the_host_cannot_compute_is_refused() -> None:
    with pytest.raises(keel.ConfigError, match="m2po"):
        HostedObjective("m2po", HOST)
