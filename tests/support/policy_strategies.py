"""Token sequences that share prefixes, and what a model itself says about a sample, for tests of the policy."""

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
"""What computes a family as it was meant to be: sdpa leaves out soft caps and sinks."""


@st.composite
def sequences(draw: st.DrawFn, most: int = 9, words: int = 3) -> list[IntArray]:
    """Sequences of few words, so that many share prefixes; some equal, empty, or the start of another."""
    found: list[bytes] = draw(st.lists(st.binary(max_size=12), min_size=1, max_size=most))
    grown = []
    for place, tail in enumerate(found):
        stem = grown[draw(st.integers(0, place - 1))] if place and draw(st.booleans()) else b""
        cut = draw(st.integers(0, len(stem)))
        grown.append(stem[:cut] + bytes(byte % words for byte in tail[: draw(st.integers(0, len(tail)))]))
    return [np.frombuffer(one, np.uint8).astype(np.int64) for one in grown]


def prefixes(found: Sequence[IntArray]) -> set[tuple[int, ...]]:
    """Every distinct non-empty beginning: the nodes of the prefix tree."""
    return {tuple(one[: size + 1].tolist()) for one in found for size in range(len(one))}


def branching_samples(seed: int = 1, **fields: Any) -> list[Sample]:
    """Three prompts with one root, of uneven lengths; answers that share their first turn or not; one given twice, one
    the beginning of another, one that trains a stretch in its middle, one that trains nothing. Temperatures differ."""
    chance = np.random.default_rng(seed)
    root, made = chance.integers(0, 200, 9), []

    def sample(ids: IntArray, trainable: IntArray, **own: Any) -> Sample:
        values = {
            "advantage": float(chance.normal()),
            "sampler_logprobs": -4 * chance.random(len(ids)) - 0.5,
            "name": f"s{len(made)}",
        }
        return Sample(token_ids=ids, trainable=trainable, **(values | own | fields))

    for group in range(3):
        prompt = np.concatenate([root, chance.integers(0, 200, chance.integers(1, 14))])
        turn = np.concatenate([prompt, chance.integers(0, 200, 5)])
        for number in range(3):
            stem = turn if number % 2 else prompt
            ids = np.concatenate([stem, chance.integers(0, 200, chance.integers(1, 9))])
            heat = 1.0 + 0.2 * number
            made.append(sample(ids, np.arange(len(ids)) >= len(prompt), group=group, temperature=heat))
    first, second = made[0], made[1]
    made.append(sample(first.token_ids, first.trainable, group=0))
    made.append(sample(second.token_ids[:-1], second.trainable[:-1], group=0))
    middle = np.arange(len(made[5]))
    made.append(sample(made[5].token_ids, (middle > 8) & (middle < 12), group=1))
    made.append(sample(first.token_ids, np.zeros(len(first), bool), group=2))
    return made


def tiny(
    name: str = "tiny", *, lora: LoraSettings | None = None, dtype: str = "float32", seed: int = 0, **settings: Any
) -> Model:
    """A tiny model on the CPU; an adapter that is there does something, and float64 is float64 throughout."""
    given = {"name": name, "lora": lora, "dtype": dtype, "device": "cpu"} | settings
    model = load_model(ModelSettings.model_validate(given), seed)
    chance = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for label, weight in model.parameters().items():
            if "lora_B" in label:
                weight.copy_(0.1 * torch.randn(weight.shape, generator=chance))
    if dtype == "float64":
        _widen(model)
    return model


def _widen(model: Model) -> None:
    """Norms and routers compute in float32 whatever the model is in; grouped experts have no kernel for float64."""

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
    """softmax(cap(q k)) v over [heads, T, D], every pair of tokens at once; gives [T, heads, D]."""
    groups = len(query) // len(key)
    scores = query @ key.repeat_interleave(groups, 0).transpose(1, 2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, scores.shape[1], 1)], -1)
    shares = scores.softmax(-1)[..., : key.shape[1]]
    return (shares @ value.repeat_interleave(groups, 0)).transpose(0, 1)


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
    place = torch.arange(query.shape[2])
    seen = place[:, None] >= place
    if sliding_window is not None:
        seen &= place[:, None] - place < sliding_window
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
    """The log-probs of a sample's trainable tokens by the model's own forward, alone, and log_softmax."""
    name = name or ("textbook" if model.dtype == torch.float64 else OWN_ATTENTION.get(model.source.name, "sdpa"))
    ids = torch.tensor(np.asarray(sample.token_ids))
    with attention(model, name):
        logits = model.network(input_ids=ids[None], use_cache=False).logits[0]
    every = torch.log_softmax(logits[:-1] / sample.temperature, -1)
    return every.gather(1, ids[1:, None])[:, 0][torch.tensor(np.asarray(sample.trainable))[1:]]


def gradients(model: Model) -> dict[str, Tensor | None]:
    return {name: None if weight.grad is None else weight.grad.clone() for name, weight in model.parameters().items()}


def difference(found: dict[str, Tensor | None], wanted: dict[str, Tensor | None]) -> float:
    """The largest relative difference of a parameter's gradient; without one on one side, it is zero on the other."""
    assert found.keys() == wanted.keys()
    worst = 0.0
    for name, expected in wanted.items():
        actual = found[name]
        if expected is None or actual is None:
            assert expected is None or not expected.any(), name
            assert actual is None or not actual.any(), name
            continue
        assert expected.any(), f"{name} has no gradient to compare"
        worst = max(worst, float((actual - expected).norm() / expected.norm()))
    return worst
