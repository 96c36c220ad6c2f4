"""Token sequences with shared prefixes, tiny models, and reference log-probs, for tests of the trainer."""

import math
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor
from transformers import AttentionInterface

from keel.config import LoraSettings, ModelSettings
from keel.training import Model, Sample, load_model
from keel.training.step.prefix_tree import IntArray

LORA = LoraSettings(rank=4, alpha=8)
FAMILIES = (
    "tiny",
    "tiny-llama-untied",
    "tiny-qwen2",
    "tiny-qwen3",
    "tiny-mistral",
    "tiny-gemma2",
    "tiny-gemma3",
    "tiny-gpt-oss",
    "tiny-mixtral",
    "tiny-qwen3-moe",
)
OWN_ATTENTION = {"tiny-gemma2": "eager", "tiny-gpt-oss": "eager"}
"""The correct attention implementation per family: sdpa ignores soft caps and sinks."""


@st.composite
def sequences(draw: st.DrawFn, most: int = 9, words: int = 3) -> list[IntArray]:
    """Draw sequences over a small vocabulary: many share prefixes, some are equal, empty or prefixes of others."""
    tails: list[bytes] = draw(st.lists(st.binary(max_size=12), min_size=1, max_size=most))
    grown = []
    for index, tail in enumerate(tails):
        stem = grown[draw(st.integers(0, index - 1))] if index and draw(st.booleans()) else b""
        cut = draw(st.integers(0, len(stem)))
        grown.append(stem[:cut] + bytes(byte % words for byte in tail[: draw(st.integers(0, len(tail)))]))
    return [np.frombuffer(data, np.uint8).astype(np.int64) for data in grown]


def prefixes(sequences: Sequence[IntArray]) -> set[tuple[int, ...]]:
    """Return all distinct non-empty prefixes: the nodes of the prefix tree."""
    return {tuple(sequence[: size + 1].tolist()) for sequence in sequences for size in range(len(sequence))}


def branching_samples(seed: int = 1, **fields: Any) -> list[Sample]:
    """Return samples of three prompts with a common root and different lengths and temperatures.

    Some completions share their first turn. One sample is a duplicate, one a prefix of another, one has trainable
    tokens only in its middle, and one has none.
    """
    rng = np.random.default_rng(seed)
    root, samples = rng.integers(0, 200, 9), []

    def sample(ids: IntArray, trainable: IntArray, **changes: Any) -> Sample:
        values = {
            "advantage": float(rng.normal()),
            "sampler_logprobs": -4 * rng.random(len(ids)) - 0.5,
            "name": f"s{len(samples)}",
        }
        return Sample(token_ids=ids, trainable=trainable, **(values | changes | fields))

    for group in range(3):
        prompt = np.concatenate([root, rng.integers(0, 200, rng.integers(1, 14))])
        turn = np.concatenate([prompt, rng.integers(0, 200, 5)])
        for number in range(3):
            stem = turn if number % 2 else prompt
            ids = np.concatenate([stem, rng.integers(0, 200, rng.integers(1, 9))])
            temperature = 1.0 + 0.2 * number
            samples.append(sample(ids, np.arange(len(ids)) >= len(prompt), group=group, temperature=temperature))
    first, second = samples[0], samples[1]
    samples.append(sample(first.token_ids, first.trainable, group=0))
    samples.append(sample(second.token_ids[:-1], second.trainable[:-1], group=0))
    middle = np.arange(len(samples[5]))
    samples.append(sample(samples[5].token_ids, (middle > 8) & (middle < 12), group=1))
    samples.append(sample(first.token_ids, np.zeros(len(first), bool), group=2))
    return samples


def tiny(
    name: str = "tiny", *, lora: LoraSettings | None = None, dtype: str = "float32", seed: int = 0, **settings: Any
) -> Model:
    """Return a tiny model on the CPU; a LoRA adapter is non-zero, and float64 is used throughout if requested."""
    values = {"name": name, "lora": lora, "dtype": dtype, "device": "cpu"} | settings
    model = load_model(ModelSettings.model_validate(values), seed)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for label, weight in model.parameters().items():
            if "lora_B" in label:
                weight.copy_(0.1 * torch.randn(weight.shape, generator=generator))
    if dtype == "float64":
        _widen(model)
    return model


def _widen(model: Model) -> None:
    """Replace norms and routers, which always compute in float32, and grouped experts, which have no float64 kernel."""

    def norm(self: Any, states: Tensor) -> Tensor:
        eps = getattr(self, "variance_epsilon", None) or self.eps
        factor = 1 + self.weight if "Gemma" in type(self).__name__ else self.weight
        return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + eps) * factor

    def route(self: Any, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = torch.nn.functional.linear(states.reshape(-1, states.shape[-1]), self.weight)
        best, chosen = logits.softmax(-1).topk(self.top_k, dim=-1)
        return logits, best / best.sum(-1, keepdim=True), chosen

    for module in model.network.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(norm, module)
        if type(module).__name__ in ("MixtralTopKRouter", "Qwen3MoeTopKRouter"):
            module.forward = types.MethodType(route, module)
    model.network.set_experts_implementation("eager")


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute softmax(cap(q k)) v over [heads, T, D] with a dense mask; return [T, heads, D]."""
    groups = len(query) // len(key)
    scores = query @ key.repeat_interleave(groups, 0).transpose(1, 2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, scores.shape[1], 1)], -1)
    attn_weights = scores.softmax(-1)[..., : key.shape[1]]
    return (attn_weights @ value.repeat_interleave(groups, 0)).transpose(0, 1)


def _textbook(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_rest: Any,
) -> tuple[Tensor, None]:
    position = torch.arange(query.shape[2])
    seen = position[:, None] >= position
    if sliding_window is not None:
        seen &= position[:, None] - position < sliding_window
    return dense_attention(query[0], key[0], value[0], seen, scaling, softcap, s_aux)[None], None


AttentionInterface.register("textbook", _textbook)


@contextmanager
def attention(model: Model, name: str) -> Iterator[None]:
    before = model.network.config._attn_implementation
    model.network.set_attn_implementation(name)
    try:
        yield
    finally:
        model.network.set_attn_implementation(before)


def own_logprobs(model: Model, sample: Sample, name: str | None = None) -> Tensor:
    """Return the log-probs of a sample's trainable tokens, computed with the model's own forward and log_softmax."""
    name = name or ("textbook" if model.dtype == torch.float64 else OWN_ATTENTION.get(model.source.name, "sdpa"))
    ids = torch.tensor(np.asarray(sample.token_ids))
    with attention(model, name):
        logits = model.network(input_ids=ids[None], use_cache=False).logits[0]
    all_logprobs = torch.log_softmax(logits[:-1] / sample.temperature, -1)
    return all_logprobs.gather(1, ids[1:, None])[:, 0][torch.tensor(np.asarray(sample.trainable))[1:]]


def gradients(model: Model) -> dict[str, Tensor | None]:
    return {name: None if weight.grad is None else weight.grad.clone() for name, weight in model.parameters().items()}


def difference(actual_gradients: dict[str, Tensor | None], expected_gradients: dict[str, Tensor | None]) -> float:
    """Return the largest relative difference of the gradients; if one side has none, the other must be zero."""
    assert actual_gradients.keys() == expected_gradients.keys()
    largest = 0.0
    for name, expected in expected_gradients.items():
        actual = actual_gradients[name]
        if expected is None or actual is None:
            assert expected is None or not expected.any(), name
            assert actual is None or not actual.any(), name
            continue
        assert expected.any(), f"{name} has no gradient to compare"
        largest = max(largest, float((actual - expected).norm() / expected.norm()))
    return largest
