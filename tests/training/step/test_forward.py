"""Test that a step packed as a prefix tree gives the log-probs and gradients of each sequence computed separately."""

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from keel.config import LoraSettings
from keel.errors import ConfigError, ModelError
from keel.training import Forward, Model, Sample, TrainableTokens
from keel.training.step import tree_attention as attention_module
from keel.training.step.lm_head import backward_into
from tests.support.kernels import needs_kernels
from tests.support.policy_strategies import (
    FAMILIES,
    LORA,
    attention,
    branching_samples,
    difference,
    gradients,
    own_logprobs,
    tiny,
)

SAMPLES = branching_samples()
TOKENS = TrainableTokens(SAMPLES)
LOGPROB_GRAD = torch.from_numpy(np.random.default_rng(5).normal(size=len(TOKENS)))


def packed_result(forward: Forward) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return log-probs of all trainable tokens, and the gradient of their weighted sum, as a step computes them."""
    model = forward.model
    model.network.zero_grad()
    logprobs = torch.full((len(TOKENS),), torch.nan, dtype=model.dtype)
    with forward.tree_attention_enabled():
        for batch in forward.plan(TOKENS):
            hidden = forward.hidden(batch)
            grad = LOGPROB_GRAD.to(model.dtype)[batch.token_index]
            scores, head_gradients = forward.head.score_and_grad(
                hidden.detach(), batch.targets, batch.temperature, lambda _, rows, grad=grad: grad[rows]
            )
            backward_into(forward.head, hidden, head_gradients)
            logprobs[batch.token_index] = scores.logprobs
    return logprobs, gradients(model)


def reference_result(model: Model) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return the same from the model's own forward, one sequence at a time."""
    model.network.zero_grad()
    parts = []
    for index, sample in enumerate(SAMPLES):
        if np.any(sample.trainable):
            logprobs = own_logprobs(model, sample)
            (logprobs * LOGPROB_GRAD[TOKENS.slice_of(index)].to(logprobs.dtype)).sum().backward()
            parts.append(logprobs.detach())
    return torch.cat(parts), gradients(model)


def assert_matches_reference(forward: Forward, tolerance: float) -> None:
    logprobs, actual_gradients = packed_result(forward)
    expected, expected_gradients = reference_result(forward.model)
    assert float((logprobs - expected).abs().max() / expected.abs().max()) < tolerance
    assert difference(actual_gradients, expected_gradients) < tolerance


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("float64", 1e-9)])
def test_a_prefix_tree_gives_the_logprobs_and_gradients_of_separate_sequences(
    name: str, lora: LoraSettings | None, dtype: str, tolerance: float
) -> None:
    model = tiny(name, lora=lora, dtype=dtype)
    forward = Forward(model, max_tokens=70)
    plan = forward.plan(TOKENS)
    assert forward.packing == "shared" and len(plan) > 1
    assert sum(len(batch) for batch in plan) < 0.6 * sum(len(sample.inputs) for sample in SAMPLES)
    assert_matches_reference(forward, tolerance)


@pytest.mark.parametrize("name", ["tiny", "tiny-qwen3-moe"])
def test_sdpa_and_textbook_attention_agree_in_float64(name: str) -> None:
    model = tiny(name, dtype="float64")
    torch.testing.assert_close(
        own_logprobs(model, SAMPLES[1], "sdpa"), own_logprobs(model, SAMPLES[1], "textbook"), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("name", ["tiny", "tiny-gemma3", "tiny-gpt-oss"])
def test_packing_without_shared_prefixes_is_as_exact(name: str) -> None:
    forward = Forward(tiny(name, dtype="float64"), max_tokens=100, share_prefixes=False)
    assert forward.packing == "packed"
    assert sum(len(batch) for batch in forward.plan(TOKENS)) == sum(len(sample.inputs) for sample in SAMPLES)
    assert_matches_reference(forward, 1e-9)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("name", ["tiny-gemma2", "tiny-qwen3-moe"])
def test_gradient_checkpointing_changes_nothing(name: str, lora: LoraSettings | None) -> None:
    logprobs, actual_gradients = packed_result(Forward(tiny(name, lora=lora, gradient_checkpointing=True)))
    expected, expected_gradients = packed_result(Forward(tiny(name, lora=lora)))
    torch.testing.assert_close(logprobs, expected)
    assert difference(actual_gradients, expected_gradients) < 1e-6


@pytest.mark.parametrize("max_tokens", [31, 50, 120, 4096])
def test_logprobs_do_not_depend_on_max_tokens(max_tokens: int, llama: Model) -> None:
    forward = Forward(llama, max_tokens=max_tokens, packing="shared")
    torch.testing.assert_close(forward.score(TOKENS).logprobs, reference_result(llama)[0], rtol=1e-9, atol=1e-11)


@pytest.fixture(scope="module")
def llama() -> Model:
    return tiny("tiny", dtype="float64")


@pytest.fixture
def _logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.WARNING, logger="keel"):
        yield


# fallback to sequential computation


@pytest.mark.usefixtures("_logged")
def test_a_recurrent_model_computes_sequences_separately_and_logs_why(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("tiny-mamba")
    forward = Forward(model)
    assert forward.packing == "sequential"
    (message,) = [record.getMessage() for record in caplog.records if record.name == "keel"]
    assert "tiny-mamba" in message and "separately" in message and "recurrent state" in message
    logprobs, actual_gradients = packed_result(forward)
    expected, expected_gradients = reference_result_without_hook(model)
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    assert difference(actual_gradients, expected_gradients) < 1e-4


def reference_result_without_hook(model: Model) -> tuple[Tensor, dict[str, Tensor | None]]:
    model.network.zero_grad()
    parts = []
    for index, sample in enumerate(SAMPLES):
        ids, trainable = torch.tensor(sample.token_ids), torch.tensor(sample.trainable)[1:]
        logits = model.network(input_ids=ids[None], use_cache=False).logits[0, :-1] / sample.temperature
        logprobs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0][trainable]
        (logprobs * LOGPROB_GRAD[TOKENS.slice_of(index)].float()).sum().backward()
        parts.append(logprobs.detach())
    return torch.cat(parts), gradients(model)


def _causal_attention(*states: Any, tree: Any, **rest: Any) -> tuple[Tensor, None]:
    """Ignore the tree: attend to everything earlier in the row."""
    return attention_module.tree_attention(*states, tree=_CausalRow(tree), **rest)


class _CausalRow(attention_module.TreeLayout):
    def __init__(self, layout: attention_module.TreeLayout) -> None:
        tree = layout.tree
        size = len(tree)
        row = attention_module.PrefixTree(tree.tokens, np.arange(size), np.full(size, size), tree.paths)
        super().__init__(row, layout.device, layout.dtype)


@pytest.mark.usefixtures("_logged")
def test_attention_that_ignores_the_tree_is_detected_and_not_used(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    implementations = attention_module.AttentionInterface._global_mapping
    monkeypatch.setitem(implementations, attention_module.TREE_ATTENTION, _causal_attention)
    model = tiny("tiny-qwen3", dtype="float64")
    forward = Forward(model)
    assert forward.packing == "sequential"
    (message,) = [record.getMessage() for record in caplog.records if record.name == "keel"]
    assert "tiny-qwen3" in message and "differ" in message
    assert_matches_reference(forward, 1e-9)


@pytest.mark.usefixtures("_logged")
def test_a_model_that_does_not_accept_a_tree_computes_sequences_separately(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reject(*_states: Any, **_rest: Any) -> tuple[Tensor, None]:
        raise TypeError("forward() got an unexpected keyword argument 'tree'")

    monkeypatch.setitem(attention_module.AttentionInterface._global_mapping, attention_module.TREE_ATTENTION, reject)
    model = tiny("tiny")
    assert Forward(model).packing == "sequential"
    assert "unexpected keyword argument" in caplog.text
    assert model.network.config._attn_implementation == "sdpa"


def test_experts_with_a_capacity_are_not_packed(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("tiny-mixtral")
    model.network.config.expert_capacity = 4
    assert Forward(model).packing == "sequential"
    assert "capacity" in caplog.text


def test_sequential_computation_applies_the_soft_cap() -> None:
    model = tiny("tiny-gemma2")
    assert_matches_reference(Forward(model, packing="sequential"), 1e-4)


def test_a_model_whose_logits_do_not_come_from_its_head_is_not_supported() -> None:
    model = tiny("tiny-gemma2")
    original = model.network.forward

    def doubled(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        output.logits = output.logits * 2
        return output

    model.network.forward = doubled
    with pytest.raises(ModelError, match=r"tiny-gemma2.*Gemma2ForCausalLM is not supported"):
        Forward(model)


# side effects and invalid samples


@pytest.mark.parametrize("name", ["tiny", "tiny-gemma2", "tiny-gpt-oss"])
def test_generation_is_unchanged_after_tree_attention(name: str) -> None:
    model = tiny(name)
    prompt = torch.tensor([[1, 2, 3, 4, 5]])

    def generate() -> list[int]:
        with torch.no_grad():
            out: Tensor = model.network.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False
            )
        return out[0].tolist()

    before, implementation = generate(), model.network.config._attn_implementation
    forward = Forward(model)
    packed_result(forward)
    assert model.network.config._attn_implementation == implementation
    assert generate() == before
    # the model's attention is also restored after an exception
    with pytest.raises(KeyError), forward.tree_attention_enabled():
        raise KeyError
    assert model.network.config._attn_implementation == implementation
    assert len(before) > 5 and generate() == before


def test_the_error_for_a_sample_over_the_budget_names_sample_and_setting(llama: Model) -> None:
    forward = Forward(llama, max_tokens=12, packing="shared")
    with pytest.raises(
        ConfigError, match=rf"sample s0 has {len(SAMPLES[0].inputs)} tokens .*max_tokens_per_micro_batch = 12"
    ):
        forward.plan(TOKENS)


def test_a_token_outside_the_vocabulary_raises(llama: Model) -> None:
    invalid = Sample(token_ids=[1, 2, 260], trainable=[False, True, True], advantage=1.0)
    message = "sample number 1 has token id 260, but the model's vocabulary has 260 tokens"
    with pytest.raises(ConfigError, match=message):
        Forward(llama, packing="shared").plan(TrainableTokens([SAMPLES[0], invalid]))


def test_a_sample_without_trainable_tokens_is_not_computed(llama: Model) -> None:
    untrainable = Sample(token_ids=np.arange(200), trainable=np.zeros(200, bool), advantage=1.0, name="untrainable")
    forward = Forward(llama, max_tokens=64, packing="shared")
    assert forward.plan(TrainableTokens([untrainable])) == []
    assert forward.score(TrainableTokens([untrainable])).logprobs.shape == (0,)


def test_tokens_after_the_last_trainable_one_are_not_computed(llama: Model) -> None:
    ids = np.arange(100)
    sample = Sample(token_ids=ids, trainable=ids == 10, advantage=1.0)
    (batch,) = Forward(llama, packing="shared").plan(TrainableTokens([sample]))
    assert len(batch) == 10
    expected = own_logprobs(llama, sample)
    torch.testing.assert_close(
        Forward(llama, packing="shared").score(TrainableTokens([sample])).logprobs, expected.detach()
    )


def test_entropy_is_that_of_the_full_distribution(llama: Model) -> None:
    scores = Forward(llama, max_tokens=70, packing="shared").score(TOKENS, entropy=True)
    sample, ids = SAMPLES[1], torch.tensor(SAMPLES[1].token_ids)
    with torch.no_grad(), attention(llama, "textbook"):
        logprobs = (llama.network(input_ids=ids[None]).logits[0, :-1] / sample.temperature).log_softmax(-1)
    expected = -(logprobs.exp() * logprobs).sum(-1)[torch.tensor(sample.trainable)[1:]]
    assert scores.entropy is not None
    torch.testing.assert_close(scores.entropy[TOKENS.slice_of(1)], expected)


# the native kernel


@needs_kernels
def test_the_native_kernel_and_torch_give_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = attention_module.TreeAttention.apply
    monkeypatch.setattr(attention_module.TreeAttention, "apply", lambda *args: calls.append(1) or original(*args))
    forward = Forward(tiny())
    assert forward.use_native
    native, native_gradients = packed_result(forward)
    assert calls
    calls.clear()
    forward.use_native = False
    by_torch, by_torch_gradients = packed_result(forward)
    assert not calls
    torch.testing.assert_close(native, by_torch, rtol=1e-5, atol=1e-5)
    assert difference(native_gradients, by_torch_gradients) < 1e-4


@needs_kernels
def test_a_native_kernel_that_fails_the_probe_is_not_used_and_a_warning_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = attention_module.TreeAttention.apply
    monkeypatch.setattr(attention_module.TreeAttention, "apply", lambda *args: original(*args) * 1.5)
    with caplog.at_level(logging.WARNING, "keel"):
        forward = Forward(tiny())
    assert (forward.packing, forward.use_native) == ("shared", False)
    assert "attention uses torch, not the native kernel: log-probs of a probe differ" in caplog.text
    assert_matches_reference(forward, 1e-4)
