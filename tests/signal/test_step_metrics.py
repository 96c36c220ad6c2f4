"""Metrics: merging of pairs, values compared with their definitions, histograms, sampling, most dropped tokens."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import keel
from keel.signal.metrics import NUM_BINS, DerivedMetric, Histogram, Metric, Metrics
from tests.support.strategies import batch, pairs, random_step, steps, without_trainer_version

# Pairs


@given(values=st.lists(st.tuples(st.integers(-99, 99), st.integers(0, 9)), min_size=1, max_size=6))
def test_adding_metrics_adds_sums_and_counts(values: list[tuple[int, int]]) -> None:
    total = sum((Metric(a, b) for a, b in values[1:]), Metric(*values[0]))
    assert total == Metric(sum(a for a, _ in values), sum(b for _, b in values))


def test_the_mean_of_merged_metrics_is_not_a_mean_of_means() -> None:
    assert (Metric(1, 1) + Metric(0, 3)).mean == 0.25


def test_the_mean_of_no_values_is_nan() -> None:
    assert math.isnan(Metric(0, 0).mean)
    assert math.isnan(DerivedMetric((Metric(0, 0), Metric(1, 1)), lambda a, b: a + b).mean)
    assert math.isnan(histogram([]).quantile(0.5))


def test_a_derived_metric_is_computed_from_the_merged_pairs() -> None:
    def formula(a: float, b: float) -> float:
        return a * b

    first = DerivedMetric((Metric(2, 1), Metric(4, 2)), formula)
    second = DerivedMetric((Metric(6, 3), Metric(0, 2)), formula)
    assert (first + second).mean == (8 / 4) * (4 / 4)


def test_metrics_merge_by_name_and_keep_names_of_one_side() -> None:
    first = Metrics({"a": Metric(1, 2), "b": Metric(5, 5)}, Counter({3: 1}))
    second = Metrics({"a": Metric(3, 4), "c": Metric(0, 0)}, Counter({3: 2, 4: 1}))
    total = first + second
    assert dict(total) == {"a": Metric(4, 6), "b": Metric(5, 5), "c": Metric(0, 0)}
    assert total.dropped_tokens == {3: 3, 4: 1}
    assert dict(first) == {"a": Metric(1, 2), "b": Metric(5, 5)}


@pytest.mark.parametrize("case", ["icepop", "opsm", "m2po"])
def test_metrics_of_two_steps_merge_by_name(case: str) -> None:
    first, second = (keel.objective(case)(random_step(seed)).metrics for seed in (40, 41))
    total = pairs(first + second)
    for name in first:
        if isinstance(first[name], Metric) and name in second:
            assert total[name] == pytest.approx(
                [first[name].sum + second[name].sum, first[name].count + second[name].count]
            )
        elif isinstance(first[name], Histogram) and name in second:
            assert torch.equal((first + second)[name].counts, first[name].counts + second[name].counts)


# Values


def naive(step: keel.TokenBatch, keep: Tensor, selected: Tensor) -> dict[str, float]:
    """Return the metrics of the selected tokens, each computed from its definition."""
    positions = selected.nonzero().squeeze(1).tolist()
    logp = [step.logprobs[t].item() for t in positions]
    b = [step.sampler_logprobs[t].item() for t in positions]
    adv = [step.advantages[t].item() for t in positions]
    masked = [not bool(keep[t]) for t in positions]
    n = len(positions)
    r = [math.exp(x - y) for x, y in zip(logp, b, strict=True)]
    p, q = [math.exp(x) for x in logp], [math.exp(y) for y in b]
    mismatch = [ratio - math.log(ratio) - 1 for ratio in r]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values) if values else math.nan

    def where(flags: list[bool], values: list[Any]) -> list[float]:
        return [float(value) for flag, value in zip(flags, values, strict=True) if flag]

    centred_p, centred_q = [x - mean(p) for x in p], [y - mean(q) for y in q]
    covariance = sum(x * y for x, y in zip(centred_p, centred_q, strict=True))
    deviations = math.sqrt(sum(x * x for x in centred_p) * sum(y * y for y in centred_q))
    return {
        "mismatch_kl": mean(mismatch),
        "mismatch_kl_masked": mean(where(masked, mismatch)),
        "mismatch_kl_unmasked": mean(where([not m for m in masked], mismatch)),
        "is_masked": mean([float(m) for m in masked]),
        "is_masked_low": mean([float(m and ratio < 1) for m, ratio in zip(masked, r, strict=True)]),
        "is_masked_high": mean([float(m and ratio > 1) for m, ratio in zip(masked, r, strict=True)]),
        "is_masked_adv_pos": mean(where([a > 0 for a in adv], masked)),
        "is_masked_adv_neg": mean(where([a < 0 for a in adv], masked)),
        "chi_square": mean([(ratio - 1) ** 2 for ratio in r]),
        "effective_sample_size": sum(r) ** 2 / (n * sum(ratio**2 for ratio in r)),
        "sampler_perplexity": math.exp(-mean(b)),
        "trainer_perplexity": math.exp(-mean(logp)),
        "entropy": mean([step.entropy[t].item() for t in positions]),
        "correlation": covariance / deviations if deviations else math.nan,
        "kl_policy_ref": mean([step.logprobs[t].item() - step.reference_logprobs[t].item() for t in positions]),
    }


@pytest.mark.parametrize("name", ["icepop", "dppo_tv", "kpop", "m2po", "dppo_binary_kl"])
@pytest.mark.parametrize("seed", [42, 43])
def test_metrics_equal_their_definitions_over_the_step_and_by_staleness(name: str, seed: int) -> None:
    step = random_step(seed, spread=1.2)
    result = keel.objective(name)(step)
    means = result.metrics.means()
    assert 0 < means["is_masked"] < 1
    for metric, value in naive(step, result.keep, step.trainable).items():
        assert means[metric] == pytest.approx(value, rel=1e-9, nan_ok=True), metric
    staleness = 8 - step.version
    for s in staleness[step.trainable].unique().tolist():
        for metric, value in naive(step, result.keep, step.trainable & (staleness == s)).items():
            assert means[f"{metric}/staleness={s}"] == pytest.approx(value, rel=1e-7, abs=1e-9, nan_ok=True), metric


@given(step=steps())
def test_metrics_by_staleness_add_up_to_the_step(step: keel.TokenBatch) -> None:
    metrics = pairs(keel.objective("icepop")(step).metrics)
    for name in (
        "mismatch_kl",
        "is_masked_low",
        "is_masked_adv_pos",
        "chi_square",
        "entropy",
        "effective_sample_size",
    ):
        by_staleness = [value for key, value in metrics.items() if key.startswith(f"{name}/staleness=")]
        if name in metrics and by_staleness:
            assert [sum(column) for column in zip(*by_staleness, strict=True)] == pytest.approx(metrics[name])


def test_staleness_is_measured_from_the_trainer_version_or_the_newest_version() -> None:
    step = batch([-1.0] * 3, [-1.0] * 3, version=[4, 6, 6], trainer_version=9)
    names = {name for name in keel.objective("icepop")(step).metrics if name.startswith("mismatch_kl/")}
    assert names == {"mismatch_kl/staleness=5", "mismatch_kl/staleness=3"}
    metrics = keel.objective("icepop")(without_trainer_version(step)).metrics
    names = {name for name in metrics if name.startswith("mismatch_kl/")}
    assert names == {"mismatch_kl/staleness=2", "mismatch_kl/staleness=0"}


def test_staleness_is_measured_from_the_newest_version_of_the_whole_step() -> None:
    old, new = batch([-1.0], [-1.0], version=[4]), batch([-1.0], [-1.0], version=[6])
    objective = keel.objective("icepop")
    metrics = objective(old, objective.totals([old, new])).metrics
    assert "mismatch_kl/staleness=2" in metrics
    assert "mismatch_kl/staleness=0" not in metrics


def test_many_versions_share_the_metrics_of_old_tokens() -> None:
    """One version per token would otherwise make twenty metrics per token."""
    size = 8_000
    step = batch([-1.0] * size, [-1.5] * size, version=list(range(size)), trainer_version=size - 1)
    metrics = keel.objective("icepop")(step).metrics
    split = [name for name in metrics if name.startswith("mismatch_kl/staleness=")]
    assert split == [f"mismatch_kl/staleness={s}" for s in [*range(16), "16+"]]
    assert metrics["mismatch_kl/staleness=16+"].count == size - 16
    assert len(metrics) < 600


def test_tokens_newer_than_the_trainer_are_named() -> None:
    step = batch([-1.0] * 3, [-1.5] * 3, version=[4, 9, 12], trainer_version=5)
    names = {name for name in keel.objective("icepop")(step).metrics if name.startswith("mismatch_kl/")}
    assert names == {"mismatch_kl/staleness=1", "mismatch_kl/staleness=<0"}


def test_without_versions_no_metric_is_split_by_staleness() -> None:
    assert not [name for name in keel.objective("icepop")(batch([-1.0], [-1.2])).metrics if "staleness" in name]


def test_sequence_chi_square_uses_the_product_of_ratios_of_each_sequence() -> None:
    step = batch([-1.0, -1.0, -1.0, -2.0], [-1.5, -1.25, -1.0, -1.75], sequence=[8, 8, 3, 3])
    for name in ("icepop", "opsm", "vespo", "gspo"):
        metric = keel.objective(name)(step).metrics["sequence_chi_square"]
        assert metric.sum == pytest.approx((math.exp(0.75) - 1) ** 2 + (math.exp(-0.25) - 1) ** 2)
        assert metric.count == 2


def test_the_staleness_of_a_sequence_is_that_of_its_oldest_token() -> None:
    step = batch(
        [-2.0] * 4, [-1.0] * 4, sequence=[1, 1, 2, 2], version=[5, 3, 5, 5], advantages=[-1.0] * 4, trainer_version=6
    )
    metrics = keel.objective("opsm")(step).metrics
    assert metrics["masked_sequences/staleness=3"].count == 1
    assert metrics["masked_sequences/staleness=1"].count == 1
    assert metrics["masked_sequence_tokens/staleness=3"] == Metric(2.0, 2.0)
    assert metrics["sequence_chi_square/staleness=3"].mean == pytest.approx((math.exp(-2) - 1) ** 2)


def test_masked_fractions_count_sequences_and_tokens() -> None:
    """One long sequence is dropped and two short ones are kept."""
    step = batch(
        [-2.0, -2.0, -2.0, -1.0, -1.0],
        [-1.0] * 5,
        sequence=[1, 1, 1, 2, 3],
        advantages=[-1.0, -1.0, -1.0, -1.0, 1.0],
    )
    metrics = keel.objective("opsm")(step).metrics
    assert metrics["masked_sequences"] == Metric(1.0, 3.0)
    assert metrics["masked_sequence_tokens"] == Metric(3.0, 5.0)
    assert metrics["is_masked_low"] == Metric(3, 5)
    assert metrics["is_masked_high"] == Metric(0, 5)


def test_entropy_without_recorded_entropies_is_estimated_from_log_probs() -> None:
    """E_q[r * -log p] is the entropy of p; with one token per outcome of q it is exact."""
    p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([1 / 3, 1 / 3, 1 / 3])
    metrics = keel.objective("icepop")(batch(p.double().log(), q.double().log())).metrics
    assert metrics["entropy"].mean == pytest.approx(1.5 * math.log(2))


def test_the_mismatch_is_zero_on_policy_and_accurate_near_it() -> None:
    on_policy = keel.objective("icepop")(batch([-1.0, -0.3], [-1.0, -0.3])).metrics
    assert on_policy["mismatch_kl"].mean == 0.0
    assert on_policy["chi_square"].mean == 0.0
    assert on_policy["effective_sample_size"].mean == 1.0
    near = keel.objective("icepop")(batch([-1.0 + 1e-4], [-1.0])).metrics
    assert near["mismatch_kl"].mean == pytest.approx(0.5e-8, rel=1e-3)


@pytest.mark.parametrize("versions", [1, 2])
def test_metrics_of_many_extreme_tokens_are_finite(versions: int) -> None:
    """Squared ratios that each fit float32 must not overflow in their sum."""
    size = 20_000
    step = keel.TokenBatch(
        logprobs=torch.full((size,), -1.0),
        sampler_logprobs=torch.full((size,), -1001.0),
        advantages=torch.ones(size),
        trainable=torch.ones(size, dtype=torch.bool),
        sequence=torch.arange(size) // 10,
        version=torch.arange(size) % versions,
    )
    for name, values in pairs(keel.objective("icepop")(step).metrics).items():
        assert all(map(math.isfinite, values)), name


def test_is_clipped_counts_tokens_without_gradient_because_of_a_clip() -> None:
    step = batch([0.0] * 4, [-1.0, -0.1, 1.0, 1.0], advantages=[1.0, 1.0, 1.0, -1.0])
    assert keel.objective("dapo")(step).metrics["is_clipped"] == Metric(2, 4)


def test_metrics_count_only_trainable_tokens() -> None:
    step = random_step(44)
    metrics = keel.objective("icepop")(step).metrics
    trainable = int(step.trainable.sum())
    for name in ("mismatch_kl", "is_masked", "chi_square", "entropy", "kl_policy_ref", "signal/invalid_logprob_tokens"):
        assert metrics[name].count == trainable


# Histograms


def histogram(values: list[float], log: bool = False) -> Histogram:
    codes = Histogram.bin_indices(torch.tensor(values, dtype=torch.float32))
    return Histogram(torch.bincount(codes, minlength=NUM_BINS), log)


floats = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False).map(
    lambda value: 0.0 if abs(value) < 1e-30 else value
)


@given(values=st.lists(floats, min_size=1, max_size=40), fraction=st.sampled_from([0.01, 0.25, 0.5, 0.75, 0.99, 1.0]))
def test_a_quantile_is_exact_to_within_a_bin(values: list[float], fraction: float) -> None:
    exact = sorted(values)[max(math.ceil(fraction * len(values)) - 1, 0)]
    assert histogram(values).quantile(fraction) == pytest.approx(exact, rel=0.0626, abs=1e-30)


def test_the_quantile_of_0_is_the_smallest_value() -> None:
    assert histogram([2.0, 3.0, 4.0]).quantile(0.0) == pytest.approx(2.0, rel=0.0626)
    assert histogram([-2.0, 3.0]).quantile(0.0) == pytest.approx(-2.0, rel=0.0626)


@given(values=st.lists(st.floats(-80, 80, width=32), min_size=1, max_size=40))
def test_quantiles_of_a_histogram_of_logarithms_are_exponentiated(values: list[float]) -> None:
    exact = sorted(values)[math.ceil(0.5 * len(values)) - 1]
    median = histogram(values, log=True).median
    assert math.log(median) == pytest.approx(exact, rel=0.0626, abs=1e-12)


def test_a_histogram_has_a_median_and_no_mean() -> None:
    skewed = histogram([1.0, 1.0, 1.0, 1.0, 100.0])
    assert skewed.median == pytest.approx(1.0, rel=0.0626)
    assert not hasattr(skewed, "mean")


def test_quantiles_of_ratio_and_probability_difference() -> None:
    step = random_step(45, lengths=(40, 50, 5, 60))
    d = (step.logprobs - step.sampler_logprobs)[step.trainable]
    difference = (step.logprobs.exp() - step.sampler_logprobs.exp())[step.trainable].abs()
    means = keel.objective("icepop")(step).metrics.means()
    for fraction, percentile in ((0.01, "p01"), (0.5, "p50"), (0.99, "p99")):
        rank = math.ceil(fraction * len(d)) - 1
        assert math.log(means[f"ratio_{percentile}"]) == pytest.approx(d.sort().values[rank].item(), rel=0.0626)
        assert means[f"probability_difference_{percentile}"] == pytest.approx(
            difference.sort().values[rank].item(), rel=0.0626
        )
    assert any(name.startswith("ratio_p50/staleness=") for name in means)


@given(first=st.lists(floats, max_size=20), second=st.lists(floats, max_size=20))
def test_merging_histograms_is_exact(first: list[float], second: list[float]) -> None:
    merged = histogram(first) + histogram(second)
    assert torch.equal(merged.counts, histogram(first + second).counts)
    assert merged.count == len(first) + len(second)


def test_counts_are_exact_beyond_the_range_of_float32() -> None:
    """2^24 + 1 is not a float32."""
    single = keel.objective("icepop")(batch([-1.0], [-1.2])).metrics["ratio"]
    many = Histogram(single.counts * 2**24, single.values_are_logs)
    assert (many + single).count == 2**24 + 1


def test_bins_are_in_increasing_order_and_contain_every_value() -> None:
    values = [-1e20, -3.0, -1e-9, -0.0, 0.0, 1e-9, 0.5, 7.0, 1e30]
    edges, counts = histogram(values).bins()
    assert (edges[1:] > edges[:-1]).all()
    assert counts.sum() == len(values)
    for value in values:
        index = int((edges <= value).sum()) - 1
        assert counts[index] > 0 or counts[index - 1] > 0


# Sampling


def large_step() -> keel.TokenBatch:
    generator = torch.Generator().manual_seed(7)
    size = 30_000
    sampler = -torch.rand(size, generator=generator, dtype=torch.float64) * 3
    return keel.TokenBatch(
        logprobs=(sampler + 0.7 * torch.randn(size, generator=generator, dtype=torch.float64)).clamp(max=0.0),
        sampler_logprobs=sampler,
        advantages=torch.randn(size, generator=generator, dtype=torch.float64),
        trainable=torch.rand(size, generator=generator) > 0.2,
        sequence=torch.arange(size) // 10 * 37 - 5000,
        version=torch.arange(size) // 10 % 3,
        token_ids=torch.arange(size) % 97,
    )


def test_the_sample_of_micro_batches_is_as_large_as_that_of_the_whole_step() -> None:
    """Each micro-batch samples its part of metrics_sample_size, and its metrics are scaled to all of its tokens."""
    step = large_step()
    objective = keel.objective("icepop", metrics_sample_size=4000)
    parts = [step.take(part) for part in torch.arange(len(step)).tensor_split(3)]
    totals = objective.totals(parts)
    first, second, third = (objective(part, totals).metrics for part in parts)
    merged, whole = first + second + third, objective(step).metrics
    assert merged["mismatch_kl"].count == pytest.approx(whole["mismatch_kl"].count)
    assert merged["mismatch_kl"].mean == pytest.approx(whole["mismatch_kl"].mean, rel=0.15)


def test_sampled_metrics_approximate_the_step_and_counts_are_exact() -> None:
    step = large_step()
    sampled = keel.objective("icepop", metrics_sample_size=6000)(step).metrics
    exact = keel.objective("icepop", metrics_sample_size=0)(step).metrics
    names = ("mismatch_kl", "mismatch_kl_unmasked", "effective_sample_size", "trainer_perplexity", "correlation")
    assert sampled["mismatch_kl"].mean != exact["mismatch_kl"].mean
    for name in names:
        assert sampled[name].mean == pytest.approx(exact[name].mean, rel=0.08), name
        for staleness in range(3):
            key = f"{name}/staleness={staleness}"
            assert sampled[key].mean == pytest.approx(exact[key].mean, rel=0.15), key
    for name in ("mismatch_kl", "chi_square"):
        assert sampled[name].count == pytest.approx(exact[name].count)
    for fraction in (0.1, 0.5, 0.9):
        assert sampled["ratio"].quantile(fraction) == pytest.approx(exact["ratio"].quantile(fraction), rel=0.15)
    for name in ("is_masked", "is_masked_low", "is_masked_high", "is_masked_adv_pos", "signal/invalid_logprob_tokens"):
        assert (sampled[name].sum, sampled[name].count) == (exact[name].sum, exact[name].count)
    assert sampled.dropped_tokens == exact.dropped_tokens


def test_sampled_metrics_do_not_change_loss_or_decisions() -> None:
    step = large_step()
    few, all_tokens = (keel.objective("opsm", metrics_sample_size=size)(step) for size in (100, 0))
    assert few.metrics["mismatch_kl"].count == pytest.approx(all_tokens.metrics["mismatch_kl"].count)
    assert torch.equal(few.loss, all_tokens.loss)
    assert torch.equal(few.reasons, all_tokens.reasons)


def test_metrics_of_steps_up_to_metrics_sample_size_are_exact() -> None:
    step = random_step(46)
    trainable = int(step.trainable.sum())
    exact = keel.objective("icepop", metrics_sample_size=0)(step).metrics
    assert pairs(keel.objective("icepop", metrics_sample_size=trainable)(step).metrics) == pairs(exact)


# Dropped tokens


def test_most_dropped_lists_token_texts_with_counts() -> None:
    step = batch(
        [-1.0] * 6,
        [-9.0, -9.0, -1.0, -9.0, -9.0, -9.0],
        token_ids=[5, 5, 5, 6, 5, 7],
        trainable=[True, True, True, True, False, True],
    )
    metrics = keel.objective("icepop")(step).metrics
    assert metrics.dropped_tokens == {5: 2, 6: 1, 7: 1}
    assert metrics.most_dropped(1) == [("5", 2)]
    assert metrics.most_dropped(1, decode={5: "five"}.__getitem__) == [("five", 2)]
    merged = metrics + metrics
    assert merged.most_dropped(1) == [("5", 4)]


def test_without_token_ids_most_dropped_is_empty() -> None:
    assert keel.objective("icepop")(batch([-1.0], [-9.0])).metrics.most_dropped() == []


# Names


def test_every_metric_is_reported_for_the_step_and_by_staleness() -> None:
    names = {
        "mismatch_kl", "mismatch_kl_masked", "mismatch_kl_unmasked", "is_masked", "is_masked_low", "is_masked_high",
        "is_masked_adv_pos", "is_masked_adv_neg", "masked_sequences", "masked_sequence_tokens", "ratio",
        "probability_difference", "effective_sample_size", "chi_square", "sequence_chi_square", "sampler_perplexity",
        "trainer_perplexity", "entropy", "correlation",
    }  # fmt: skip
    for preset in ("icepop", "opsm", "gspo", "cispo", "decoupled_ppo"):
        metrics = keel.objective(preset)(random_step(47)).metrics
        assert names <= metrics.keys()
        assert "signal/invalid_logprob_tokens" in metrics
        staleness_values = {name.rpartition("=")[2] for name in metrics if "/staleness=" in name}
        assert staleness_values
        for staleness in staleness_values:
            assert {f"{name}/staleness={staleness}" for name in names} <= metrics.keys()


def test_means_are_numbers() -> None:
    means = keel.objective("icepop")(random_step(48)).metrics.means()
    assert all(isinstance(value, float | int) for value in means.values())
    assert {"ratio_p01", "ratio_p50", "ratio_p99"} <= means.keys()
