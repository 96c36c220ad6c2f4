"""`keel audit --like PRESET` passes a preset written again, and fails one with a mistake no other class can see."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

import keel
from keel.cli import main
from keel.objectives import PRESETS
from keel.signal.audit import CLASSES, Finding, TargetError, audit
from keel.signal.audit.preset_comparison import find_comparison
from keel.signal.audit.suite import compare_with_preset
from keel.signal.audit.target import find_target
from tests.support.paths import ROOT
from tests.support.reimplemented_presets import (
    MISTAKEN,
    REIMPLEMENTED,
    Loss,
    dapo,
    dapo_min_max_swapped,
    float32_dapo,
    gspo,
)

Preset = tuple[str, dict[str, Any]]


def compare(loss: Any, preset: Preset, seed: int = 0) -> Finding:
    """Run the comparison alone, without the ten classes."""
    target = replace(find_target(loss), exact=loss is not float32_dapo)
    return compare_with_preset(target, find_comparison(*preset), seed)


@pytest.mark.parametrize(("loss", "preset"), REIMPLEMENTED.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_preset_written_again_is_equal_to_it(loss: Loss, preset: Preset) -> None:
    for seed in (0, 1):
        finding = compare(loss, preset, seed)
        assert (finding.status, finding.message) == ("passed", "")


@pytest.mark.parametrize(("loss", "preset"), MISTAKEN.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_mistake_fails_with_a_counterexample_of_one_or_two_tokens(loss: Loss, preset: Preset) -> None:
    for seed in (0, 1):
        finding = compare(loss, preset, seed)
        assert finding.status == "failed"
        assert f"with {preset[0]}" in finding.message
        assert finding.batch is not None
        assert len(finding.batch) <= 2
        expected = keel.objective(preset[0], **preset[1])(finding.batch)
        actual = find_target(loss).evaluate(finding.batch)
        assert actual.loss != float(expected.loss) or not torch.equal(actual.gradient, expected.gradient)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_equal_to_itself_and_different_from_another(name: str) -> None:
    assert compare_with_preset(find_target(name), find_comparison(name)).status == "passed"
    other = "dapo" if name != "dapo" else "icepop"
    assert compare_with_preset(find_target(name), find_comparison(other)).status == "failed"


def test_swapped_min_and_max_pass_every_class_and_fail_only_the_comparison() -> None:
    report = audit(dapo_min_max_swapped, like="dapo")
    assert [finding.letter for finding in report.findings] == [*CLASSES, "k"]
    assert report.failed == ["k"]
    assert report.errors == []
    assert report.findings[-1].title == "differs from dapo"


def test_a_function_without_a_declaration_is_checked_against_that_of_the_preset() -> None:
    assert "f" in audit(gspo).failed  # a mean over sequences, not declared
    assert audit(gspo, like="gspo").passed
    assert "f" in audit(gspo, like="gspo", divisor="tokens").failed


def test_an_exception_or_nan_in_the_loss_is_an_error_of_the_comparison() -> None:
    def raises(batch: keel.TokenBatch) -> Any:
        if len(batch) > 4:
            raise IndexError("five tokens")
        return dapo(batch)

    assert compare(raises, ("dapo", {})).status == "error"
    finding = compare(lambda batch: dapo(batch) * (float("nan") if len(batch) > 4 else 1.0), ("dapo", {}))
    assert (finding.status, finding.message) == ("error", "the loss is nan on an ordinary batch")


def test_an_unknown_preset_or_parameter_or_a_function_is_an_error() -> None:
    with pytest.raises(keel.ConfigError, match="did you mean dapo"):
        audit(dapo, like="dpao")
    with pytest.raises(keel.ConfigError, match="eps_hih"):
        audit(dapo, like="dapo", parameters={"eps_hih": 0.3})
    with pytest.raises(TargetError, match=r'like = "audit_losses:right_clip" must be a preset or a TOML file'):
        audit(dapo, like="audit_losses:right_clip")


def test_the_command_compares_with_a_preset_and_its_parameters(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "support"))
    monkeypatch.setenv("COLUMNS", "160")
    target = "reimplemented_presets:proximal_dapo"
    assert main(["audit", target, "--like", "dapo", "--anchor", "proximal", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["findings"][-1]["class"] == "k"
    assert report["findings"][-1]["title"] == "differs from dapo"
    assert main(["audit", "reimplemented_presets:dapo", "--like", "dapo", "--eps_high", "0.3"]) == 1
    out = capsys.readouterr().out
    assert "k. smallest counterexample found" in out
    assert "8 passed, 1 failed: k" in out
