"""Metrics reach a logger as means over tokens, under the host's names where they mean the same."""

import pytest
import torch

import keel
from keel.integrations.metric_log import MetricLog


def metrics(size: int, dropped: int, version: int = 1) -> keel.Metrics:
    logprobs = torch.full((size,), -1.0)
    logprobs[:dropped] = -8.0
    batch = keel.TokenBatch(
        logprobs=logprobs,
        sampler_logprobs=torch.full((size,), -1.0),
        advantages=torch.ones(size),
        trainable=torch.ones(size, dtype=torch.bool),
        sequence=torch.arange(size),
        version=torch.full((size,), version),
        trainer_version=2,
    )
    return keel.objective("icepop")(batch).metrics


def test_the_mean_is_over_tokens_of_all_micro_batches_and_ranks() -> None:
    log = MetricLog({"is_masked": "clip_ratio"})
    log.add("train", metrics(10, 1))
    log.add("train", metrics(30, 1))
    logged = log.flush("train", lambda part: [part, metrics(60, 8)])
    assert logged["keel/is_masked"] == logged["clip_ratio"] == pytest.approx(0.1)
    assert log.flush("train") == {}


def test_metrics_by_staleness_are_logged_if_there_are_several() -> None:
    log = MetricLog()
    log.add("train", metrics(10, 1))
    assert not [name for name in log.flush("train") if "staleness" in name]
    log.add("train", metrics(10, 1))
    log.add("train", metrics(10, 4, version=0))
    logged = log.flush("train")
    assert logged["keel/is_masked/staleness=1"] == pytest.approx(0.1)
    assert logged["keel/is_masked/staleness=2"] == pytest.approx(0.4)


def test_modes_are_separate() -> None:
    log = MetricLog()
    log.add("eval", metrics(10, 1))
    assert log.flush("train") == {} and log.flush("eval")["keel/is_masked"] == pytest.approx(0.1)
