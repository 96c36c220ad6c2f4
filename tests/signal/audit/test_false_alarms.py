"""The audit does not fail a class because of a penalty on dropped tokens, an empty divisor or a loss of NaN."""

from typing import Any

import pytest
import torch
from torch import Tensor

import keel
from keel.objectives import Composition
from keel.signal.audit import Report, audit
from tests.support.audit_losses import kept_mask, linear, right_icepop, tokens_of

SEQUENCE_KL = {"statistic": "sequence_kl", "high": 1e-4, "when": "negative_advantage"}
PENALTY_ON_ALL = {"estimator": "log_ratio_squared", "coef": 1e-3, "scope": "all"}


def problems(report: Report) -> list[tuple[str, str, str]]:
    findings = [finding for finding in report.findings if finding.status in ("failed", "error")]
    return [(finding.letter, finding.status, finding.message) for finding in findings]


def test_a_sequence_gate_on_negative_advantages_passes_with_a_penalty_on_dropped_tokens() -> None:
    composition = Composition.model_validate({"gates": [SEQUENCE_KL], "penalties": [PENALTY_ON_ALL]})
    assert problems(audit(composition)) == []
    assert problems(audit("opsm", parameters={"penalties": [PENALTY_ON_ALL]})) == []


@pytest.mark.parametrize(
    "parameters",
    [{}, {"reduction": "sequences"}, {"reduction": "constant", "length": 4}],
    ids=["tokens", "sequences", "constant"],
)
def test_a_preset_and_its_composition_are_judged_alike_with_a_penalty_and_kept_tokens_as_divisor(
    parameters: dict[str, Any],
) -> None:
    parameters = {**parameters, "denominator": "kept"}
    assert problems(audit("ipo", parameters=parameters)) == []
    assert problems(audit(keel.objective("ipo", **parameters).composition)) == []


def test_a_preset_with_a_part_added_is_judged_like_its_composition() -> None:
    parameters = {"denominator": "kept", "gates": [SEQUENCE_KL]}
    assert problems(audit("dppo_kl", seed=3, parameters=parameters)) == []
    assert problems(audit(keel.objective("dppo_kl", **parameters).composition, seed=3)) == []


def test_an_option_is_checked_with_the_other_parameters_of_the_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def record(name: Any, /, **parameters: Any) -> keel.Objective:
        seen.append(parameters)
        return keel.objective(name, **parameters)

    monkeypatch.setattr("keel.signal.audit.target.objective", record)
    audit("opsm", parameters={"denominator": "kept", "penalties": [PENALTY_ON_ALL]})
    changed = [parameters for parameters in seen if "eps" in parameters]
    assert changed
    assert all(parameters["denominator"] == "kept" and parameters["penalties"] for parameters in changed)


def nan_on_a_single_token(batch: keel.TokenBatch) -> Tensor:
    """The standard deviation of one number is NaN."""
    if int(batch.trainable.sum()) < 2:
        return right_icepop(batch) * torch.nan
    return right_icepop(batch)


def nan_gradient_on_policy(batch: keel.TokenBatch) -> Tensor:
    """The derivative of the square root at 0 is infinite, and times 0 it is NaN."""
    keep = kept_mask(batch)
    d = batch.logprobs[keep] - batch.sampler_logprobs[keep]
    return (linear(batch, keep) + 0.01 * d.square().sqrt()).sum() / tokens_of(batch)


def mean_of_kept_tokens_without_a_guard(batch: keel.TokenBatch) -> Tensor:
    return linear(batch, kept_mask(batch)).sum() / kept_mask(batch).sum()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (nan_on_a_single_token, "the loss is nan on an ordinary batch"),
        (nan_gradient_on_policy, "the gradient of a token is nan on an ordinary batch"),
    ],
    ids=["single token", "gradient"],
)
def test_a_loss_of_nan_is_an_error_with_the_batch_and_not_a_failed_class(loss: Any, message: str) -> None:
    report = audit(loss)
    assert report.failed == []
    assert {"a", "c", "e"} <= set(report.errors)
    for finding in report.findings:
        if finding.status == "error":
            assert finding.message == message
            assert finding.batch is not None
            assert len(finding.batch) == 1


def test_a_mean_over_no_token_is_an_error_and_fails_only_where_an_extreme_ratio_causes_it() -> None:
    report = audit(mean_of_kept_tokens_without_a_guard, divisor="kept tokens")
    assert report.failed == ["a"]
    assert "d" in report.errors
    assert "log-ratio of +1000" in report.findings[0].message
