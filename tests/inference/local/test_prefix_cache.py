"""What the engine computes only once: turns of a conversation, layers that read one input; and streams of tokens."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from keel.config import Sampling
from keel.inference.local import decoders
from keel.inference.local.continuous_batch import ContinuousBatch
from keel.inference.local.decoders import select_decoder
from keel.inference.local.local_engine import LocalEngine
from keel.inference.local.prefix_cache import PrefixNode, RetainedPrefixes, allocate_blocks
from keel.inference.protocol import EngineError, Generation, WeightSource
from keel.inference.server.openai_responses import TokenChunk
from tests.inference.local.test_local_engine import PROMPTS, ask, counting, off_trainer, request
from tests.inference.local.test_weight_loading import adapter_of, folder_of
from tests.support.policy_strategies import FAMILIES, LORA, tiny

MORE = [*b"\nuser\nHigher.\n"]


def turns(decoder: Any, count: int, size: int = 5) -> tuple[list[list[int]], list[Generation]]:
    """A conversation: each prompt is all that came before and what the user says next."""
    batch, prompt = ContinuousBatch(decoder, 4), list(PROMPTS[0])
    prompts, found = [], []
    for turn in range(count):
        one = request(prompt, max_tokens=size, seed=turn)
        batch.waiting.append(one)
        while batch.busy:
            batch.step(0)
        prompts.append(prompt)
        found.append(one.future.result())
        prompt = [*prompt, *found[-1].token_ids, *MORE]
    return prompts, found


# turns


def test_the_next_turn_computes_only_what_is_new() -> None:
    decoder = counting(tiny())
    turns(decoder, 3)
    # the last token of an answer has not been through the model, and is computed with what the user says
    turn = [1 + len(MORE), 1, 1, 1, 1]
    assert decoder.computed == [len(PROMPTS[0]), 1, 1, 1, 1, *turn, *turn]


@pytest.mark.parametrize("family", ["tiny", "tiny-gemma3", "tiny-gpt-oss"])
def test_turns_on_kept_beginnings_are_exact(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "MAX_DEPTH", 3)  # the later turns stand on pieces that were put together
    model = tiny(family)
    decoder = counting(model)
    prompts, found = turns(decoder, 5)
    assert max(node.depth for node in decoder.prefix_cache.retained._nodes.values()) <= 4
    assert off_trainer(model, prompts, found) < 1e-5


def test_a_long_answer_that_spilled_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "SPILL_TOKENS", 4)
    model = tiny()
    decoder = counting(model)
    prompts, found = turns(decoder, 2, size=15)
    assert decoder.computed[15] == 1 + len(MORE)
    assert off_trainer(model, prompts, found) < 1e-5


def test_nothing_that_other_weights_computed_is_reused(tmp_path: Path) -> None:
    other = tiny(seed=5)
    folder = folder_of(other, tmp_path / "w")

    async def use(engine: LocalEngine) -> tuple[list[int], Generation]:
        across = asyncio.create_task(engine.generate(PROMPTS[1], Sampling(max_tokens=800, seed=2)))
        first = await engine.generate(PROMPTS[0], Sampling(max_tokens=5, seed=1))
        await engine.load_weights(WeightSource.folder(folder), 1)
        crossed = await across  # sampled by both: its keys are of neither
        assert set(crossed.versions) == {0, 1}
        for before, one in ((PROMPTS[1], crossed), (PROMPTS[0], first)):
            prompt = [*before, *one.token_ids, *MORE]
            found = await engine.generate(prompt, Sampling(max_tokens=5, seed=1))
            assert off_trainer(other, [prompt], [found]) < 1e-5
        return prompt, found

    ask(tiny(), use)


def test_kept_beginnings_take_bounded_memory_and_the_oldest_go_first() -> None:
    def node(first: int, parent: PrefixNode | None = None) -> PrefixNode:
        one = PrefixNode((*(parent.ids if parent else ()), *[first] * 16), parent)
        allocate_blocks([one])
        one.store_kv(0, torch.zeros(1, 16, 8), torch.zeros(1, 16, 8))
        return one

    size = 2 * 16 * 8 * 4
    kept, root = RetainedPrefixes(3 * size), node(0)
    first, second, third = (node(number, root) for number in (1, 2, 3))
    kept.add(first)
    kept.add(second)
    assert kept.used_bytes == 3 * size  # the root once
    kept.add(first)
    kept.add(third)
    assert list(kept._nodes.values()) == [first, third]
    assert kept.used_bytes == 3 * size
    kept.add(node(4))
    assert kept.used_bytes == 3 * size
    RetainedPrefixes(size - 1).add(root)  # more than there is room for is not kept at all


def test_forgetting_prompts_computes_them_anew() -> None:
    async def use(engine: LocalEngine) -> None:
        first = await engine.generate(PROMPTS[0], Sampling(max_tokens=5, seed=1))
        prefixes = engine._batch.decoder.prefix_cache  # type: ignore[attr-defined]
        assert len(prefixes) > 0
        await engine.clear_prefix_cache()
        assert len(prefixes) == 0
        assert await engine.version() == 0
        assert await engine.generate(PROMPTS[0], Sampling(max_tokens=5, seed=1)) == first

    ask(tiny(), use)


# layers that are computed as one


def test_layers_of_one_input_are_one_product_and_hold_no_second_weight() -> None:
    for family in FAMILIES:
        network: Any = tiny(family).network
        size = sum(weight.numel() for weight in network.parameters())
        fused = select_decoder(network, family).fused
        assert fused is not None
        layers = len(network.model.layers)
        dense = hasattr(network.model.layers[0].mlp, "up_proj")
        assert [len(group.layers) for group in fused.groups] == ([3, 2] if dense else [3]) * layers, family
        held = {weight.untyped_storage().data_ptr(): weight for weight in network.parameters()}
        assert sum(weight.untyped_storage().nbytes() // 4 for weight in held.values()) == size
        assert all(group.views_intact for group in fused.groups)


def test_closing_leaves_the_network_as_it_was(tmp_path: Path) -> None:
    model = tiny()
    before = {name: weight.clone() for name, weight in model.network.state_dict().items()}
    ask(model, lambda engine: engine.generate(PROMPTS[0], Sampling(max_tokens=2)))
    assert not any("forward" in vars(layer) for layer in model.network.modules())
    assert all(torch.equal(weight, before[name]) for name, weight in model.network.state_dict().items())
    storages = [weight.untyped_storage().data_ptr() for weight in model.network.parameters()]
    assert len(set(storages)) == len(storages)
    folder_of(model, tmp_path / "w")


def test_weights_put_in_place_of_others_are_followed(tmp_path: Path) -> None:
    model = tiny()
    fused = select_decoder(model.network, "tiny").fused
    assert fused is not None
    layer = fused.groups[0].layers[1]
    layer.weight.data = layer.weight.data * 2
    assert not fused.groups[0].views_intact
    fused.refresh()
    assert fused.groups[0].views_intact
    states = torch.randn(3, layer.in_features)
    torch.testing.assert_close(layer(states), torch.nn.functional.linear(states, layer.weight))


def test_an_adapter_on_int8_and_fused_layers_is_still_merged(tmp_path: Path) -> None:
    adapter = adapter_of(tiny(lora=LORA), tmp_path / "a")

    async def use(engine: LocalEngine) -> None:
        await engine.load_weights(WeightSource.adapter(adapter), 1)
        fused = engine._batch.decoder.fused
        assert fused is not None
        assert all(group.views_intact for group in fused.groups)

    ask(tiny(), use)
    ask(tiny(), use, int8=True)


# streams


def test_pieces_of_a_stream_joined_are_the_answer_and_come_while_it_is_sampled() -> None:
    sampling = Sampling(max_tokens=40, seed=3)

    async def use(engine: LocalEngine) -> tuple[list[TokenChunk], Generation]:
        pieces = [piece async for piece in engine.stream(PROMPTS[0], sampling)]
        return pieces, await engine.generate(PROMPTS[0], sampling)

    pieces, whole = ask(tiny(), use)
    assert len(pieces) > 2
    assert tuple(token for piece in pieces for token in piece.token_ids) == whole.token_ids
    assert [value for piece in pieces for value in piece.logprobs] == pytest.approx(whole.logprobs, abs=1e-5)
    assert tuple(value for piece in pieces for value in piece.versions) == whole.versions
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [whole.finish_reason]


def test_a_stream_that_is_closed_frees_its_row_and_one_that_fails_says_so() -> None:
    async def use(engine: LocalEngine) -> None:
        stream: Any = engine.stream(PROMPTS[0], Sampling(max_tokens=2000))
        assert (await anext(stream)).token_ids
        await stream.aclose()
        await engine.generate(PROMPTS[1], Sampling(max_tokens=1))
        assert (await engine.health()).running == 0
        other: Any = engine.stream(PROMPTS[0], Sampling(max_tokens=2000))
        await anext(other)
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            async for _ in other:
                pass

    ask(tiny(), use, max_batch=1)
