"""The audit bites, and bites only what is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from losses import RIGHT, WRONG, Loss, right_icepop

import keel
from keel.audit import CLASSES, Declaration, TargetError, audit
from keel.audit.declaration import declaration_of
from keel.cli import main
from keel.config import RECIPES, Composition, Gate, Policy
from keel.config.words import describe_recipe

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_holds_in_every_class(name: str) -> None:
    report = audit(name)
    assert report.held, [(finding.letter, finding.message) for finding in report.findings if finding.status == "broken"]


@pytest.mark.parametrize("loss", RIGHT, ids=lambda loss: loss.__name__)
def test_a_correct_function_raises_no_alarm(loss: Loss) -> None:
    report = audit(loss)
    assert report.held, [(finding.letter, finding.message) for finding in report.findings if finding.status == "broken"]


@pytest.mark.parametrize(("loss", "letter"), WRONG.items(), ids=lambda value: getattr(value, "__name__", value))
def test_a_wrong_loss_is_caught_under_the_right_class(loss: Loss, letter: str) -> None:
    report = audit(loss)
    assert letter in report.broken
    assert next(finding for finding in report.findings if finding.letter == letter).message


def test_there_are_at_least_fourteen_wrong_losses_over_all_classes_of_a_loss() -> None:
    assert len(WRONG) >= 14
    assert set(WRONG.values()) == set(CLASSES) - {"h", "i"}


def test_counterexamples_are_small_and_still_break() -> None:
    leak = next(loss for loss in WRONG if loss.__name__ == "sequence_mask_leaks")
    finding = next(finding for finding in audit(leak).findings if finding.letter == "d")
    assert finding.batch is not None
    assert len(finding.batch) == 2
    gradient = torch.autograd.grad(
        leak(finding.batch.replace(logprobs=(leaf := finding.batch.logprobs.detach().requires_grad_()))), leaf
    )[0]
    assert sorted((gradient == 0).tolist()) == [False, True]


def test_a_wrong_recipe_would_be_caught() -> None:
    """A composition that is told to declare something else does not hold."""
    assert "f" in audit("grpo", divisor="tokens").broken
    assert "f" in audit("icepop", divisor="kept tokens").broken
    assert "e" in audit("icepop", anchor="none").broken
    assert "c" in audit("dppo_kl", leaves="every term").broken
    assert "c" in audit("ipo_kl", leaves="policy term").broken


def test_compositions_and_parameters_are_audited_too() -> None:
    sequence_mask = Composition(gates=[Gate(on="ratio", low=0.1, scope="sequence")], policy=Policy(surrogate="linear"))
    assert audit(sequence_mask).held
    assert audit("opsm", parameters={"opsm_delta": 0.01, "denominator": "kept"}).held
    assert audit("grpo", parameters={"reference_kl_coef": 0.1}).held
    assert audit("icepop", parameters={"kl_penalty_coef": 0.1, "reduction": "sequences"}).held


def test_declarations_of_the_five_are_those_of_the_table() -> None:
    said = {name: declaration_of(keel.objective(name).composition) for name in ("icepop", "ipo_kl", "dppo_kl", "opsm")}
    assert said["icepop"] == Declaration(decisions=("token",), drops=True)
    assert said["ipo_kl"] == Declaration(decisions=("token",), drops=True)
    assert said["dppo_kl"] == Declaration(decisions=("token",), leaves="policy term", drops=True)
    assert said["opsm"] == Declaration(decisions=("sequence",), drops=True)


@pytest.mark.parametrize("name", RECIPES)
def test_the_words_of_a_recipe_are_what_the_audit_holds_it_to(name: str) -> None:
    words = describe_recipe(RECIPES[name])
    said = declaration_of(keel.objective(name).composition)
    assert said.anchor == {"interpolated": "sampler"}.get(words.anchor, words.anchor)
    assert (said.leaves == "every term") == (words.leaves == "every term")
    assert said.drops == (words.dropped != ("nobody",))
    divides = {"tokens": "N,", "sequences": "sequences x own", "constant": "sequences x length"}
    assert words.divisor.startswith(divides[said.divisor])


def test_a_declaration_with_an_unknown_word_is_refused() -> None:
    with pytest.raises(keel.ConfigError, match="did you mean sampler"):
        keel.declare(anchor="sampled")
    with pytest.raises(keel.ConfigError, match="divisr"):
        keel.declare(divisr="tokens")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_such_module:loss", "cannot be loaded"),
        ("losses:no_such_loss", "cannot be loaded"),
        ("losses:WRONG", "must be a function"),
        ("icepo", "did you mean icepop"),
    ],
)
def test_a_target_that_cannot_be_loaded_says_why(target: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    with pytest.raises(keel.KeelError, match=message):
        audit(target)


def test_a_target_that_returns_no_loss_is_refused() -> None:
    with pytest.raises(TargetError, match="one element"):
        audit(lambda batch: batch.logprobs)
    with pytest.raises(TargetError, match="ZeroDivisionError"):
        audit(lambda batch: 1 / 0)


def test_the_command_exits_0_when_all_held(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "icepop", "--ratio_high", "8"]) == 0
    out = capsys.readouterr().out
    assert "8 held, 0 broken" in out


def test_the_command_exits_1_with_the_counterexample(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    assert main(["audit", "losses:ratio_with_its_own_detach"]) == 1
    assert "wrong old policy" in capsys.readouterr().out
    assert main(["audit", "losses:sequence_mask_leaks", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["broken"] == ["d"]
    assert len(report["findings"][3]["counterexample"]["logprobs"]) == 2


def test_the_command_exits_2_when_the_target_cannot_be_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "no_such_module:loss"]) == 2
    assert "cannot be loaded" in capsys.readouterr().err


def test_declarations_can_be_given_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    assert main(["audit", "losses:token_mean_turned_sample_mean"]) == 1
    assert main(["audit", "losses:token_mean_turned_sample_mean", "--divisor", "sequences"]) == 0


def test_a_function_in_the_working_directory_is_found(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n\ndef loss(batch):\n"
        "    d = (batch.logprobs - batch.sampler_logprobs)[batch.trainable]\n"
        "    ok = (d.detach().abs() < 1)\n"
        "    return -(batch.advantages[batch.trainable][ok] * torch.exp(d[ok])).sum() / batch.trainable.sum()\n"
    )
    command = [sys.executable, "-m", "keel.cli", "audit", "mine:loss"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=dict(os.environ), check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_audit_does_not_depend_on_its_seed() -> None:
    assert audit(right_icepop, seed=5).held
    assert audit("opsm", seed=5).held
