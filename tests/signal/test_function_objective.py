"""A loss function of the user has the interface of an objective: gradient, dropped tokens, reasons and metrics."""

import re
from typing import Any

import pytest
import torch

import keel
from keel import TokenBatch
from keel.config import load_settings
from keel.config.load import load_settings_from_text
from keel.config.toml_writer import toml_lines
from keel.errors import ConfigError, KeelError
from keel.objectives.describe import describe
from keel.signal import objective
from keel.signal.audit import audit
from keel.signal.audit.loss_function_check import check_loss_function
from keel.signal.function_objective import FunctionObjective, function_objective
from keel.training.distributed.rank_command import decode_command, encode_command
from tests.support import loss_functions

MODULE = "tests.support.loss_functions"


def batch(count: int = 64, **changes: Any) -> TokenBatch:
    generator = torch.Generator().manual_seed(3)
    sampler = -torch.rand(count, generator=generator, dtype=torch.float64) - 0.1
    fields = {
        "logprobs": (sampler + 0.8 * torch.randn(count, generator=generator, dtype=torch.float64)).clamp(max=-0.01),
        "sampler_logprobs": sampler,
        "advantages": torch.randn(count, generator=generator, dtype=torch.float64),
        "trainable": torch.rand(count, generator=generator) < 0.8,
        "sequence": torch.arange(count) // 8,
        "token_ids": torch.arange(count) % 5,
    }
    return TokenBatch(**(fields | changes))


def test_a_function_that_returns_the_result_of_a_preset_equals_the_preset() -> None:
    expected, actual = objective("icepop")(batch()), objective(loss_functions.icepop)(batch())
    assert torch.equal(expected.gradient, actual.gradient)
    assert torch.equal(expected.loss, actual.loss)
    assert torch.equal(expected.keep, actual.keep)
    assert {expected.objective.reasons[code] for code in expected.reasons.tolist()} == {
        actual.objective.reasons[code] for code in actual.reasons.tolist()
    }
    assert {name: value for name, value in expected.metrics.means().items() if name in actual.metrics.means()} == (
        pytest.approx(actual.metrics.means(), nan_ok=True)
    )


def test_a_function_in_plain_torch_has_the_gradient_of_its_preset() -> None:
    parameters = {"ratio_low": 0.5, "ratio_high": 2.0}
    expected, actual = objective("icepop", **parameters)(batch()), objective(f"{MODULE}:plain_icepop")(batch())
    torch.testing.assert_close(actual.gradient, expected.gradient)
    torch.testing.assert_close(actual.loss, expected.loss)


def test_the_loss_is_differentiable_with_respect_to_the_log_probs() -> None:
    tokens = batch()
    leaf = tokens.logprobs.clone().requires_grad_()
    result = objective(loss_functions.plain_icepop)(tokens.replace(logprobs=leaf))
    (gradient,) = torch.autograd.grad(result.loss, leaf)
    assert torch.equal(gradient, result.gradient)


@pytest.mark.parametrize(("name", "reasons"), [("narrow_with_reasons", 2), ("narrow_with_keep", 1)])
def test_dropped_tokens_are_counted_with_their_reason(name: str, reasons: int) -> None:
    tokens = batch()
    result = objective(f"{MODULE}:{name}")(tokens)
    low, high = loss_functions.masks(tokens)
    dropped, trainable = int((low | high).sum()), int(tokens.trainable.sum())
    assert torch.equal(result.keep, tokens.trainable & ~low & ~high)
    named = {result.objective.reasons[code] for code in result.reasons.tolist()} - {"trained", "not trainable"}
    assert len(named) == reasons
    metrics = result.metrics.means()
    assert metrics["is_masked"] == pytest.approx(dropped / trainable)
    assert metrics["is_masked_low"] == pytest.approx(int(low.sum()) / trainable)
    assert metrics["is_masked_high"] == pytest.approx(int(high.sum()) / trainable)
    assert sum(result.metrics.dropped_tokens.values()) == dropped
    assert result.kept_tokens == trainable - dropped


def test_a_dropped_token_with_a_gradient_is_an_error() -> None:
    with pytest.raises(KeelError, match=r"drops .* tokens that have a gradient"):
        objective(loss_functions.keeps_gradient_of_dropped)(batch())
    declared = keel.declare(dropped_from="policy term")(lambda tokens: loss_functions.keeps_gradient_of_dropped(tokens))
    assert not objective(declared)(batch()).keep.all()


def test_invalid_sampler_log_probs_are_dropped_and_bounded() -> None:
    tokens = batch(trainable=torch.ones(64, dtype=torch.bool))
    sampler = tokens.sampler_logprobs.clone()
    sampler[5] = torch.nan
    loss = objective({"name": f"{MODULE}:plain_icepop", "max_invalid_logprob_fraction": 0.5})
    result = loss(tokens.replace(sampler_logprobs=sampler))
    assert result.objective.reasons[int(result.reasons[5])] == "invalid sampler log-prob"
    with pytest.raises(keel.KeelError, match="max_invalid_logprob_fraction"):
        objective(f"{MODULE}:plain_icepop")(tokens.replace(sampler_logprobs=sampler))


def test_options_and_log_probs_that_are_read_reach_the_function() -> None:
    wide = objective(f"{MODULE}:plain_icepop", options={"low": 0.0, "high": 1e9})
    assert float(wide(batch()).loss) != float(objective(f"{MODULE}:plain_icepop")(batch()).loss)
    tokens = batch(reference_logprobs=batch().sampler_logprobs)
    assert objective(loss_functions.reads_reference, reads=["reference"])(tokens).loss.isfinite()
    with pytest.raises(KeelError, match=r"raised TypeError: .*\(.*loss_functions.py:\d+, in reads_reference\)"):
        objective(loss_functions.reads_reference)(tokens)


def test_only_tokens_of_the_roles_belong_to_the_objective() -> None:
    tokens = batch(role=torch.arange(64) % 2)
    result = objective({"name": f"{MODULE}:plain_icepop", "roles": [1]})(tokens)
    alone = tokens.take((tokens.role == 1).nonzero().squeeze(1))
    assert float(result.loss) == pytest.approx(float(objective(f"{MODULE}:plain_icepop")(alone).loss))
    assert not result.gradient[tokens.role == 0].any()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:loss", 'objective.name = "no_such_module:loss" cannot be imported: No module named'),
        (f"{MODULE}:missing", "has no attribute 'missing'"),
        (f"{MODULE}:NOT_A_FUNCTION", "is a int, not a class or function; it must be a function from a TokenBatch"),
        ("a b:c", 'objective.name = "a b:c": string should match pattern'),
    ],
)
def test_a_function_that_cannot_be_loaded_is_an_error_that_names_the_setting(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        objective(name)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"loss": 1.0}, "returned a float; a loss must be a tensor with one element"),
        ({"keep": torch.ones(64, dtype=torch.bool)}, "returned a NoneType"),
        ({"loss": torch.ones(()), "keep": torch.ones(63, dtype=torch.bool)}, r"keep = .*shape \[63\]; .* shape \[64\]"),
        ({"loss": torch.ones(()), "keep": torch.ones(64)}, "keep = a torch.float32 tensor"),
        ({"loss": torch.ones(()), "reasons": torch.zeros(64)}, "must be a mapping from the name of a reason"),
        (
            {"loss": torch.ones(()), "keep": torch.ones(64) > 0, "reasons": {"x": torch.ones(64) > 0}},
            "reasons for 64 tokens that keep does not drop",
        ),
    ],
)
def test_a_result_that_breaks_the_contract_is_an_error(result: dict[str, Any], message: str) -> None:
    with pytest.raises(KeelError, match=message):
        objective(lambda tokens: result)(batch())


def test_the_settings_accept_a_name_and_keep_it_in_the_written_recipe() -> None:
    text = f'objective = "{MODULE}:icepop"'
    loaded = load_settings_from_text(text, "recipe")
    assert loaded.settings.objective.name == f"{MODULE}:icepop"
    assert not loaded.settings.objective.composition.token_local
    written = "".join(f"{line}\n" for line, _ in toml_lines(loaded))
    again = load_settings_from_text(written, "written").settings.objective
    assert (again.name, again.parameters) == (loaded.settings.objective.name, loaded.settings.objective.parameters)
    assert load_settings(None, ["--objective=icepop"]).settings.objective.name == "icepop"
    assert f"{MODULE}:icepop(batch)" in describe(loaded.settings.objective.composition).formula
    with pytest.raises(ConfigError, match=r"objective\.ratio_high is not a setting"):
        load_settings(None, [f"--objective.name={MODULE}:icepop", "--objective.ratio_high=3"])
    with pytest.raises(ConfigError, match="has no effect: the objective reads no reference"):
        load_settings_from_text(f'{text}\n[references.base]\nsource = "base"', "recipe")


def test_the_check_before_training_accepts_a_sound_function_and_names_what_is_wrong() -> None:
    for name in ("plain_icepop", "narrow_with_reasons", "narrow_with_keep"):
        check_loss_function(function_objective(f"{MODULE}:{name}"), pytest.fail)
    with pytest.raises(ConfigError, match=r"fails the audit:\n  a. masked values reach the loss: "):
        check_loss_function(function_objective(f"{MODULE}:mean_of_kept"), pytest.fail)
    notices: list[str] = []
    check_loss_function(function_objective({"name": f"{MODULE}:mean_of_kept", "audit": "warn"}), notices.append)
    assert "it trains nevertheless" in notices[0]
    with pytest.raises(KeelError, match=r"cannot be called: .*TypeError.*\n.*objective.reads = \[\] are None"):
        check_loss_function(function_objective(f"{MODULE}:reads_reference"), pytest.fail)
    with pytest.raises(KeelError, match="tokens that have a gradient"):
        check_loss_function(function_objective(f"{MODULE}:keeps_gradient_of_dropped"), pytest.fail)


def test_the_audit_tries_the_options_of_a_bound_function() -> None:
    bound = function_objective(f"{MODULE}:plain_icepop", options={"low": 0.25}).function
    assert audit(bound).passed


def test_a_rank_loads_the_same_function() -> None:
    sent = function_objective(f"{MODULE}:plain_icepop", options={"low": 0.25})
    _, _, received = decode_command(encode_command(objective=sent))
    assert isinstance(received, FunctionObjective)
    assert torch.equal(received(batch()).gradient, sent(batch()).gradient)
    with pytest.raises(ConfigError, match="cannot be sent to other ranks"):
        encode_command(objective=function_objective(loss_functions.icepop))


def test_a_part_of_a_step_is_refused() -> None:
    loss, tokens = function_objective(loss_functions.icepop), batch()
    totals = loss.totals([tokens])
    with pytest.raises(KeelError, match="needs all tokens of the step in one batch"):
        loss(tokens.take(torch.arange(8)), totals)
