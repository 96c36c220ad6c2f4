"""The audit fails every wrong loss under its class and passes every correct one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import keel
from keel.cli import main
from keel.objectives import PRESETS, Composition, Gate, PolicyTerm
from keel.objectives.describe import describe_preset
from keel.signal.audit import CLASSES, Declaration, Report, TargetError, audit
from keel.signal.audit.declaration import declaration_of
from tests.support.audit_losses import CORRECT_STYLES, RIGHT, WRONG, Loss, right_icepop
from tests.support.paths import ROOT

SUPPORT_FOLDER = ROOT / "tests" / "support"


def problems(report: Report) -> list[tuple[str, str, str]]:
    """Return letter, status and message of the classes that did not pass."""
    findings = [finding for finding in report.findings if finding.status in ("failed", "error")]
    return [(finding.letter, finding.status, finding.message) for finding in findings]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_passes_every_class(name: str) -> None:
    assert problems(audit(name)) == []


@pytest.mark.parametrize("loss", RIGHT, ids=lambda loss: loss.__name__)
def test_a_correct_loss_passes(loss: Loss) -> None:
    assert problems(audit(loss)) == []


@pytest.mark.parametrize("loss", CORRECT_STYLES, ids=lambda loss: loss.__name__)
def test_a_correct_loss_passes_in_every_common_style_of_reducing_over_sequences(loss: Loss) -> None:
    assert problems(audit(loss)) == []


def test_a_function_is_only_given_small_non_negative_ids() -> None:
    def loss(batch: keel.TokenBatch) -> Tensor:
        for ids in (batch.sequence, batch.group):
            assert int(ids.min()) >= 0
            assert int(ids.max()) < 2 * len(batch) + 40  # gaps stay small, so tables of max + 1 rows do too
        return right_icepop(batch)

    assert problems(audit(loss)) == []


def raises_on_three_sequences(batch: keel.TokenBatch) -> Tensor:
    if len(torch.unique(batch.sequence)) == 3:
        raise IndexError("three sequences")
    return right_icepop(batch)


def test_an_exception_in_the_loss_is_an_error_with_its_location_and_not_a_failed_class() -> None:
    report = audit(raises_on_three_sequences)
    assert report.failed == []
    assert not report.passed
    assert "b" in report.errors
    finding = next(finding for finding in report.findings if finding.letter == "b")
    line = raises_on_three_sequences.__code__.co_firstlineno + 2
    assert finding.message.startswith("IndexError: three sequences (")
    assert finding.message.endswith(f"test_suite.py:{line}, in raises_on_three_sequences)")
    assert finding.batch is not None
    assert len(finding.batch) == 3  # reduced to one token per sequence


def test_an_exception_in_the_backward_pass_is_an_error() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, values: Tensor) -> Tensor:
            return values.clone()

        @staticmethod
        def backward(ctx: object, *gradients: Tensor) -> Tensor:
            raise RuntimeError("no gradient here")

    report = audit(lambda batch: right_icepop(batch.replace(logprobs=Broken.apply(batch.logprobs))))
    assert report.failed == []
    assert report.errors == [letter for letter in CLASSES if letter not in "ghi"]
    assert "no gradient here" in report.findings[0].message


def test_a_class_fails_when_a_check_fails_on_one_batch_and_the_loss_raises_on_another() -> None:
    reshape = next(loss for loss in WRONG if loss.__name__ == "groups_by_reshape")
    report = audit(reshape)
    assert "b" in report.failed
    assert "d" in report.errors
    assert "changes from" in next(finding.message for finding in report.findings if finding.letter == "b")


@pytest.mark.parametrize(("loss", "letter"), WRONG.items(), ids=lambda value: getattr(value, "__name__", value))
def test_a_wrong_loss_fails_under_its_class(loss: Loss, letter: str) -> None:
    report = audit(loss)
    assert letter in report.failed
    assert next(finding for finding in report.findings if finding.letter == letter).message


def test_at_least_fourteen_wrong_losses_cover_every_class_of_a_loss() -> None:
    assert len(WRONG) >= 14
    assert set(WRONG.values()) == set(CLASSES) - {"h", "i"}


def test_a_counterexample_is_small_and_still_fails() -> None:
    leak = next(loss for loss in WRONG if loss.__name__ == "sequence_mask_leaks")
    finding = next(finding for finding in audit(leak).findings if finding.letter == "d")
    assert finding.batch is not None
    assert len(finding.batch) == 2
    gradient = torch.autograd.grad(
        leak(finding.batch.replace(logprobs=(leaf := finding.batch.logprobs.detach().requires_grad_()))), leaf
    )[0]
    assert sorted((gradient == 0).tolist()) == [False, True]


def test_a_preset_with_a_wrong_declaration_fails() -> None:
    assert "f" in audit("grpo", divisor="tokens").failed
    assert "f" in audit("icepop", divisor="kept tokens").failed
    assert "e" in audit("icepop", anchor="none").failed
    assert "c" in audit("dppo_kl", dropped_from="every term").failed
    assert "c" in audit("ipo_kl", dropped_from="policy term").failed


def test_compositions_and_presets_with_parameters_pass() -> None:
    sequence_mask = Composition(
        gates=[Gate(statistic="ratio", low=0.1, scope="sequence")], policy=PolicyTerm(surrogate="linear")
    )
    assert audit(sequence_mask).passed
    assert audit("opsm", parameters={"opsm_delta": 0.01, "denominator": "kept"}).passed
    assert audit("grpo", parameters={"reference_kl_coef": 0.1}).passed
    assert audit("icepop", parameters={"kl_penalty_coef": 0.1, "reduction": "sequences"}).passed


def test_declarations_follow_from_the_gates_and_penalties_of_a_preset() -> None:
    declarations = {
        name: declaration_of(keel.objective(name).composition) for name in ("icepop", "ipo_kl", "dppo_kl", "opsm")
    }
    assert declarations["icepop"] == Declaration(decisions=("token",), drops=True)
    assert declarations["ipo_kl"] == Declaration(decisions=("token",), drops=True)
    assert declarations["dppo_kl"] == Declaration(decisions=("token",), dropped_from="policy term", drops=True)
    assert declarations["opsm"] == Declaration(decisions=("sequence",), drops=True)


@pytest.mark.parametrize("name", PRESETS)
def test_the_description_of_a_preset_agrees_with_its_declaration(name: str) -> None:
    description = describe_preset(PRESETS[name])
    declaration = declaration_of(keel.objective(name).composition)
    assert declaration.anchor == {"interpolated": "sampler"}.get(description.anchor, description.anchor)
    assert (declaration.dropped_from == "every term") == (description.dropped_from == "every term")
    assert declaration.drops == (description.dropped != ("none",))
    divisors = {"tokens": "N,", "sequences": "sequences x own", "constant": "sequences x length"}
    assert description.divisor.startswith(divisors[declaration.divisor])


def test_a_declaration_with_an_unknown_field_or_value_raises() -> None:
    with pytest.raises(keel.ConfigError, match="did you mean sampler"):
        keel.declare(anchor="sampled")
    with pytest.raises(keel.ConfigError, match="divisr"):
        keel.declare(divisr="tokens")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_such_module:loss", "cannot be loaded"),
        ("audit_losses:no_such_loss", "cannot be loaded"),
        ("audit_losses:WRONG", "must be a function"),
        ("icepo", "did you mean icepop"),
    ],
)
def test_loading_an_unknown_target_raises_with_the_reason(
    target: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SUPPORT_FOLDER))
    with pytest.raises(keel.KeelError, match=message):
        audit(target)


def test_a_target_that_returns_no_loss_or_always_raises_is_a_target_error() -> None:
    with pytest.raises(TargetError, match="one element"):
        audit(lambda batch: batch.logprobs)
    with pytest.raises(TargetError, match="ZeroDivisionError"):
        audit(lambda batch: 1 / 0)


def test_the_command_exits_0_when_every_class_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "icepop", "--ratio_high", "8"]) == 0
    out = capsys.readouterr().out
    assert "8 passed, 0 failed" in out


def test_the_command_exits_1_and_prints_the_counterexample(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.syspath_prepend(str(SUPPORT_FOLDER))
    assert main(["audit", "audit_losses:ratio_with_its_own_detach"]) == 1
    assert "ratio against the wrong policy" in capsys.readouterr().out
    assert main(["audit", "audit_losses:sequence_mask_leaks", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["failed"] == ["d"]
    assert len(report["findings"][3]["counterexample"]["logprobs"]) == 2


def test_the_command_exits_2_when_the_target_cannot_be_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "no_such_module:loss"]) == 2
    assert "cannot be loaded" in capsys.readouterr().err


def test_the_command_exits_2_when_the_loss_raises_and_no_class_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "fragile.py").write_text(
        "import audit_losses\n\ndef loss(batch):\n    if len(batch) == 5:\n        raise IndexError('five [tokens]')\n"
        "    return audit_losses.right_icepop(batch)\n"
    )
    monkeypatch.syspath_prepend(str(SUPPORT_FOLDER))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["audit", "fragile:loss", "--json"]) == 2
    report = json.loads(capsys.readouterr().out)
    assert (report["passed"], report["failed"]) == (False, [])
    assert report["errors"]
    assert main(["audit", "fragile:loss"]) == 2
    out = capsys.readouterr().out
    assert "IndexError: five [tokens] (fragile.py:5, in loss)" in out
    assert "0 failed" in out


def test_a_declaration_can_be_given_on_the_command_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SUPPORT_FOLDER))
    assert main(["audit", "audit_losses:sequence_mean_undeclared"]) == 1
    assert "declare that if it is intended" in " ".join(capsys.readouterr().out.split())
    assert main(["audit", "audit_losses:sequence_mean_undeclared", "--divisor", "sequences"]) == 0


@pytest.mark.process
def test_a_function_in_the_working_directory_can_be_audited(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n\ndef loss(batch):\n"
        "    d = (batch.logprobs - batch.sampler_logprobs)[batch.trainable]\n"
        "    ok = (d.detach().abs() < 1)\n"
        "    return -(batch.advantages[batch.trainable][ok] * torch.exp(d[ok])).sum() / batch.trainable.sum()\n"
    )
    command = [sys.executable, "-m", "keel.cli", "audit", "mine:loss"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=dict(os.environ), check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_correct_losses_pass_with_another_seed() -> None:
    assert audit(right_icepop, seed=5).passed
    assert audit("opsm", seed=5).passed
