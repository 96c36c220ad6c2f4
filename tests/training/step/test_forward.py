"""The forward pass: packed in a tree, a step has the log-probs and gradients of each sequence alone."""

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
WORTH = torch.from_numpy(np.random.default_rng(5).normal(size=len(TOKENS)))


def computed(forward: Forward) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Log-probs of all trainable tokens, and the gradient of their weighted sum, as a step computes them."""
    model = forward.model
    model.network.zero_grad()
    found = torch.full((len(TOKENS),), torch.nan, dtype=model.dtype)
    with forward.tree_attention_enabled():
        for batch in forward.plan(TOKENS):
            hidden = forward.hidden(batch)
            worth = WORTH.to(model.dtype)[batch.token_index]
            scores, given = forward.head.score_and_grad(
                hidden.detach(), batch.targets, batch.temperature, lambda _, rows, worth=worth: worth[rows]
            )
            backward_into(forward.head, hidden, given)
            found[batch.token_index] = scores.logprobs
    return found, gradients(model)


def alone(model: Model) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The same by the model's own forward, one sequence at a time."""
    model.network.zero_grad()
    parts = []
    for number, sample in enumerate(SAMPLES):
        if np.any(sample.trainable):
            found = own_logprobs(model, sample)
            (found * WORTH[TOKENS.slice_of(number)].to(found.dtype)).sum().backward()
            parts.append(found.detach())
    return torch.cat(parts), gradients(model)


def check(forward: Forward, tolerance: float) -> None:
    found, given = computed(forward)
    wanted, expected = alone(forward.model)
    assert float((found - wanted).abs().max() / wanted.abs().max()) < tolerance
    assert difference(given, expected) < tolerance


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("float64", 1e-9)])
def test_a_tree_gives_logprobs_and_every_gradient_of_each_sequence_alone(
    name: str, lora: LoraSettings | None, dtype: str, tolerance: float
) -> None:
    model = tiny(name, lora=lora, dtype=dtype)
    forward = Forward(model, max_tokens=70)
    plan = forward.plan(TOKENS)
    assert forward.packing == "shared" and len(plan) > 1
    assert sum(len(batch) for batch in plan) < 0.6 * sum(len(sample.inputs) for sample in SAMPLES)
    check(forward, tolerance)


@pytest.mark.parametrize("name", ["tiny", "tiny-qwen3-moe"])
def test_model_and_textbook_attention_agree_in_float64(name: str) -> None:
    model = tiny(name, dtype="float64")
    torch.testing.assert_close(
        own_logprobs(model, SAMPLES[1], "sdpa"), own_logprobs(model, SAMPLES[1], "textbook"), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("name", ["tiny", "tiny-gemma3", "tiny-gpt-oss"])
def test_side_by_side_is_as_exact_as_shared(name: str) -> None:
    forward = Forward(tiny(name, dtype="float64"), max_tokens=100, share_prefixes=False)
    assert forward.packing == "packed"
    assert sum(len(batch) for batch in forward.plan(TOKENS)) == sum(len(sample.inputs) for sample in SAMPLES)
    check(forward, 1e-9)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("name", ["tiny-gemma2", "tiny-qwen3-moe"])
def test_gradient_checkpointing_changes_nothing(name: str, lora: LoraSettings | None) -> None:
    found, given = computed(Forward(tiny(name, lora=lora, gradient_checkpointing=True)))
    wanted, expected = computed(Forward(tiny(name, lora=lora)))
    torch.testing.assert_close(found, wanted)
    assert difference(given, expected) < 1e-6


@pytest.mark.parametrize("max_tokens", [31, 50, 120, 4096])
def test_logprobs_do_not_depend_on_the_budget(max_tokens: int, llama: Model) -> None:
    forward = Forward(llama, max_tokens=max_tokens, packing="shared")
    torch.testing.assert_close(forward.score(TOKENS).logprobs, alone(llama)[0], rtol=1e-9, atol=1e-11)


@pytest.fixture(scope="module")
def llama() -> Model:
    return tiny("tiny", dtype="float64")


@pytest.fixture
def _logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.WARNING, logger="keel"):
        yield


# falling back


@pytest.mark.usefixtures("_logged")
def test_a_recurrent_model_gets_each_sequence_alone_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("tiny-mamba")
    forward = Forward(model)
    assert forward.packing == "alone"
    (line,) = [record.getMessage() for record in caplog.records if record.name == "keel"]
    assert "tiny-mamba" in line and "alone" in line and "recurrent state" in line
    found, given = computed(forward)
    wanted, expected = _alone_without_hook(model)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert difference(given, expected) < 1e-4


def _alone_without_hook(model: Model) -> tuple[Tensor, dict[str, Tensor | None]]:
    model.network.zero_grad()
    parts = []
    for number, sample in enumerate(SAMPLES):
        ids, trainable = torch.tensor(sample.token_ids), torch.tensor(sample.trainable)[1:]
        logits = model.network(input_ids=ids[None], use_cache=False).logits[0, :-1] / sample.temperature
        found = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0][trainable]
        (found * WORTH[TOKENS.slice_of(number)].float()).sum().backward()
        parts.append(found.detach())
    return torch.cat(parts), gradients(model)


def _deaf(*states: Any, tree: Any, **rest: Any) -> tuple[Tensor, None]:
    """Attention that forgets who sees whom: all that came before in the row."""
    return attention_module.tree_attention(*states, tree=_PlainRow(tree), **rest)


class _PlainRow(attention_module.TreeLayout):
    def __init__(self, layout: attention_module.TreeLayout) -> None:
        tree = layout.tree
        size = len(tree)
        row = attention_module.PrefixTree(tree.tokens, np.arange(size), np.full(size, size), tree.paths)
        super().__init__(row, layout.device, layout.dtype)


@pytest.mark.usefixtures("_logged")
def test_attention_that_lies_about_the_tree_is_found_out_and_not_used(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(attention_module.AttentionInterface._global_mapping, attention_module.TREE_ATTENTION, _deaf)
    model = tiny("tiny-qwen3", dtype="float64")
    forward = Forward(model)
    assert forward.packing == "alone"
    (line,) = [record.getMessage() for record in caplog.records if record.name == "keel"]
    assert "tiny-qwen3" in line and "differ" in line
    check(forward, 1e-9)


@pytest.mark.usefixtures("_logged")
def test_a_model_that_does_not_take_a_tree_gets_each_sequence_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_states: Any, **_rest: Any) -> tuple[Tensor, None]:
        raise TypeError("forward() got an unexpected keyword argument 'tree'")

    monkeypatch.setitem(attention_module.AttentionInterface._global_mapping, attention_module.TREE_ATTENTION, refuse)
    model = tiny("tiny")
    assert Forward(model).packing == "alone"
    assert "unexpected keyword argument" in caplog.text
    assert model.network.config._attn_implementation == "sdpa"


def test_experts_with_a_capacity_are_not_packed(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("tiny-mixtral")
    model.network.config.expert_capacity = 4
    assert Forward(model).packing == "alone"
    assert "capacity" in caplog.text


def test_a_soft_cap_is_kept_when_sequences_are_computed_alone() -> None:
    model = tiny("tiny-gemma2")
    check(Forward(model, packing="alone"), 1e-4)


def test_a_model_whose_logits_are_not_those_of_its_head_is_refused() -> None:
    model = tiny("tiny-gemma2")
    own = model.network.forward

    def shifted(*args: Any, **given: Any) -> Any:
        output = own(*args, **given)
        output.logits = output.logits * 2
        return output

    model.network.forward = shifted
    with pytest.raises(ModelError, match=r"tiny-gemma2.*Gemma2ForCausalLM is not supported"):
        Forward(model)


# what is left as it was, and what is refused


@pytest.mark.parametrize("name", ["tiny", "tiny-gemma2", "tiny-gpt-oss"])
def test_generation_is_the_same_after_attending_by_tree(name: str) -> None:
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
    computed(forward)
    assert model.network.config._attn_implementation == implementation
    assert generate() == before
    # an error on the way gives the model's own attention back too
    with pytest.raises(KeyError), forward.tree_attention_enabled():
        raise KeyError
    assert model.network.config._attn_implementation == implementation
    assert len(before) > 5 and generate() == before


def test_a_sample_over_the_budget_is_refused_naming_both(llama: Model) -> None:
    forward = Forward(llama, max_tokens=12, packing="shared")
    with pytest.raises(
        ConfigError, match=rf"sample s0 has {len(SAMPLES[0].inputs)} tokens .*max_tokens_per_micro_batch = 12"
    ):
        forward.plan(TOKENS)


def test_a_token_that_the_model_does_not_know_is_refused(llama: Model) -> None:
    odd = Sample(token_ids=[1, 2, 260], trainable=[False, True, True], advantage=1.0)
    with pytest.raises(ConfigError, match="sample number 1 has token id 260; the model knows 260"):
        Forward(llama, packing="shared").plan(TrainableTokens([SAMPLES[0], odd]))


def test_a_sample_that_trains_nothing_is_not_computed(llama: Model) -> None:
    silent = Sample(token_ids=np.arange(200), trainable=np.zeros(200, bool), advantage=1.0, name="silent")
    forward = Forward(llama, max_tokens=64, packing="shared")
    assert forward.plan(TrainableTokens([silent])) == []
    assert forward.score(TrainableTokens([silent])).logprobs.shape == (0,)


def test_what_comes_after_the_last_trainable_token_is_not_computed(llama: Model) -> None:
    ids = np.arange(100)
    sample = Sample(token_ids=ids, trainable=ids == 10, advantage=1.0)
    (batch,) = Forward(llama, packing="shared").plan(TrainableTokens([sample]))
    assert len(batch) == 10
    wanted = own_logprobs(llama, sample)
    torch.testing.assert_close(
        Forward(llama, packing="shared").score(TrainableTokens([sample])).logprobs, wanted.detach()
    )


def test_entropy_is_that_of_the_whole_distribution(llama: Model) -> None:
    scores = Forward(llama, max_tokens=70, packing="shared").score(TOKENS, entropy=True)
    sample, ids = SAMPLES[1], torch.tensor(SAMPLES[1].token_ids)
    with torch.no_grad(), attention(llama, "textbook"):
        every = (llama.network(input_ids=ids[None]).logits[0, :-1] / sample.temperature).log_softmax(-1)
    wanted = -(every.exp() * every).sum(-1)[torch.tensor(sample.trainable)[1:]]
    assert scores.entropy is not None
    torch.testing.assert_close(scores.entropy[TOKENS.slice_of(1)], wanted)


# the kernel in C


@needs_kernels
def test_the_kernel_in_c_and_torch_give_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    right = attention_module.TreeAttention.apply
    monkeypatch.setattr(attention_module.TreeAttention, "apply", lambda *given: calls.append(1) or right(*given))
    forward = Forward(tiny())
    assert forward.use_native
    by_c, by_c_gradients = computed(forward)
    assert calls
    calls.clear()
    forward.use_native = False
    by_torch, by_torch_gradients = computed(forward)
    assert not calls
    torch.testing.assert_close(by_c, by_torch, rtol=1e-5, atol=1e-5)
    assert difference(by_c_gradients, by_torch_gradients) < 1e-4


@needs_kernels
def test_a_kernel_that_a_probe_finds_wrong_is_not_used_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = attention_module.TreeAttention.apply
    monkeypatch.setattr(attention_module.TreeAttention, "apply", lambda *given: right(*given) * 1.5)
    with caplog.at_level(logging.WARNING, "keel"):
        forward = Forward(tiny())
    assert (forward.packing, forward.use_native) == ("shared", False)
    assert "the kernel in C is off: log-probs of a probe differ" in caplog.text
    check(forward, 1e-4)
