"""The prefix cache: shared prefixes, multi-turn conversations, retained completions and block layout."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keel.config import Sampling
from keel.inference.local import decoders, torch_rows
from keel.inference.local.continuous_batch import ContinuousBatch
from keel.inference.local.decoder_selection import select_decoder
from keel.inference.local.local_engine import LocalEngine
from keel.inference.local.prefix_cache import (
    MIN_SHARED_TOKENS,
    PrefixCache,
    PrefixNode,
    RetainedPrefixes,
    allocate_blocks,
)
from keel.inference.protocol import Generation, WeightSource
from tests.support.local_engine import (
    PROMPTS,
    counting_decoder,
    logprob_error,
    make_request,
    run_batch,
    save_weights,
    with_engine,
)
from tests.support.policy_strategies import tiny
from tests.support.prompt_trees import BRANCHING_PROMPTS

USER_TURN = [*b"\nuser\nHigher.\n"]


def run_conversation(decoder: Any, turns: int, max_tokens: int = 5) -> tuple[list[list[int]], list[Generation]]:
    """Run a conversation in which each prompt is the previous prompt, its completion and the next user turn."""
    batch, prompt = ContinuousBatch(decoder, 4), list(PROMPTS[0])
    prompts, generations = [], []
    for turn in range(turns):
        generations += run_batch(batch, [make_request(prompt, max_tokens=max_tokens, seed=turn)])
        prompts.append(prompt)
        prompt = [*prompt, *generations[-1].token_ids, *USER_TURN]
    return prompts, generations


# conversations


def test_the_next_turn_computes_only_its_new_tokens() -> None:
    decoder = counting_decoder(tiny())
    run_conversation(decoder, 3)
    # the last token of a completion is not in the cache yet, and is computed with the next user turn
    turn = [1 + len(USER_TURN), 1, 1, 1, 1]
    assert decoder.computed == [len(PROMPTS[0]), 1, 1, 1, 1, *turn, *turn]


@pytest.mark.parametrize("family", ["tiny", "tiny-gemma3", "tiny-gpt-oss"])
def test_turns_on_retained_prefixes_are_exact(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "MAX_DEPTH", 3)  # the later turns use merged nodes
    model = tiny(family)
    decoder = counting_decoder(model)
    prompts, generations = run_conversation(decoder, 5)
    assert max(node.depth for node in decoder.prefix_cache.retained._nodes.values()) <= 4
    assert logprob_error(model, prompts, generations) < 1e-5


def test_a_long_completion_that_spilled_is_retained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "SPILL_TOKENS", 4)
    model = tiny()
    decoder = counting_decoder(model)
    prompts, generations = run_conversation(decoder, 2, max_tokens=15)
    assert decoder.computed[15] == 1 + len(USER_TURN)
    assert logprob_error(model, prompts, generations) < 1e-5


def test_prefixes_computed_by_old_weights_are_not_reused(tmp_path: Path) -> None:
    other = tiny(seed=5)
    folder = save_weights(other, tmp_path / "w")

    async def use(engine: LocalEngine) -> tuple[list[int], Generation]:
        long_task = asyncio.create_task(engine.generate(PROMPTS[1], Sampling(max_tokens=800, seed=2)))
        short = await engine.generate(PROMPTS[0], Sampling(max_tokens=5, seed=1))
        await engine.load_weights(WeightSource.folder(folder), 1)
        mixed = await long_task  # sampled by both versions, so its keys belong to neither
        assert set(mixed.versions) == {0, 1}
        for first_prompt, generation in ((PROMPTS[1], mixed), (PROMPTS[0], short)):
            prompt = [*first_prompt, *generation.token_ids, *USER_TURN]
            next_turn = await engine.generate(prompt, Sampling(max_tokens=5, seed=1))
            assert logprob_error(other, [prompt], [next_turn]) < 1e-5
        return prompt, next_turn

    with_engine(tiny(), use)


def test_clearing_the_prefix_cache_recomputes_prompts() -> None:
    async def use(engine: LocalEngine) -> None:
        first = await engine.generate(PROMPTS[0], Sampling(max_tokens=5, seed=1))
        cache = engine._batch.decoder.prefix_cache  # type: ignore[attr-defined]
        assert len(cache) > 0
        await engine.clear_prefix_cache()
        assert len(cache) == 0
        assert await engine.version() == 0
        assert await engine.generate(PROMPTS[0], Sampling(max_tokens=5, seed=1)) == first

    with_engine(tiny(), use)


# retained completions


def test_retained_prefixes_use_bounded_memory_and_the_oldest_are_evicted_first() -> None:
    def make_node(token: int, parent: PrefixNode | None = None) -> PrefixNode:
        node = PrefixNode((*(parent.ids if parent else ()), *[token] * 16), parent)
        allocate_blocks([node])
        node.store_kv(0, torch.zeros(1, 16, 8), torch.zeros(1, 16, 8))
        return node

    size = 2 * 16 * 8 * 4
    retained, root = RetainedPrefixes(3 * size), make_node(0)
    first, second, third = (make_node(token, root) for token in (1, 2, 3))
    retained.add(first)
    retained.add(second)
    assert retained.used_bytes == 3 * size  # the root is counted once
    retained.add(first)
    retained.add(third)
    assert list(retained._nodes.values()) == [first, third]
    assert retained.used_bytes == 3 * size
    retained.add(make_node(4))
    assert retained.used_bytes == 3 * size
    too_small = RetainedPrefixes(size - 1)
    too_small.add(root)  # larger than the limit: not retained at all
    assert too_small.used_bytes == 0


def test_equal_completions_are_retained_once_and_those_of_a_step_share_a_block() -> None:
    decoder: Any = select_decoder(tiny().network, "tiny")
    requests = [make_request(PROMPTS[0], seed=seed, max_tokens=4) for seed in (1, 1, 2, 3)]
    generations = run_batch(ContinuousBatch(decoder, 8), requests)
    ids = {(*PROMPTS[0], *generation.token_ids[:-1]) for generation in generations}
    nodes = [decoder.prefix_cache.get(prefix) for prefix in ids]
    assert len(decoder.prefix_cache.retained._nodes) == len(ids) == 3
    assert len({node.block for node in nodes}) == 1
    assert nodes[0].block.node_count == 3


# nodes and blocks


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40), st.integers(0, 2)), min_size=1, max_size=12))
def test_the_nodes_of_a_prompt_contain_its_tokens_and_follow_their_parents(
    shapes: list[tuple[int, int, int]],
) -> None:
    rng = random.Random(0)
    stems = [tuple(rng.choices(range(3), k=30)) for _ in range(3)]
    prompts = [
        (*stems[stem % 3][: 10 * (stem + 1)], *(token for _ in range(size % 5 + 1))) for stem, size, token in shapes
    ]
    cache = PrefixCache()
    nodes: list[PrefixNode] = []
    for batch in (prompts[: len(prompts) // 2], prompts[len(prompts) // 2 :]):
        new = cache.insert(batch)
        assert all(node.parent is None or node.parent in [*nodes, *new[: new.index(node)]] for node in new)
        nodes += new
    assert len({node.ids for node in nodes}) == len(nodes)
    for prompt in prompts:
        leaf = cache.get(prompt)
        assert leaf is not None
        path = [*leaf.ancestors][::-1]
        assert [token for node in path for token in node.ids[node.start :]] == list(prompt)
        assert [token for node in leaf.kv_path for token in node.ids[node.kv_start :]] == list(prompt)
        assert all(len(node) >= 1 for node in path)


def test_a_long_common_prefix_gets_one_node_and_a_short_one_none() -> None:
    stem = tuple(range(MIN_SHARED_TOKENS))
    nodes = PrefixCache().insert([(*stem, 100), (*stem, 101, 102), (*stem[:3], 7)])
    assert sorted(len(node) for node in nodes) == [1, 2, 4, MIN_SHARED_TOKENS]


def test_a_short_prefix_is_stored_with_its_children_and_a_long_one_is_not() -> None:
    cache = PrefixCache()
    nodes = cache.insert(map(tuple, BRANCHING_PROMPTS))  # the cache holds only weak references
    assert len(nodes) == 8
    leaves = [cache.get(tuple(prompt)) for prompt in BRANCHING_PROMPTS]
    assert [leaf and [(node.kv_start, node.end) for node in leaf.kv_path] for leaf in leaves] == [
        [(0, 40), (40, 43)],
        [(0, 40), (40, 42)],
        [(0, 60)],
        [(0, 50)],
        [(0, 30)],
        [(0, 1)],
    ]
    blocks = [leaf.block for leaf in leaves[2:4] if leaf]
    assert blocks[0] is blocks[1]
    assert (blocks[0].parent_tokens, blocks[0].length) == (20, 60)


def test_rows_with_a_small_gap_between_their_nodes_share_a_product_and_distant_ones_do_not() -> None:
    nodes = [PrefixNode((token,)) for token in range(10)]
    allocate_blocks(nodes)
    device = torch.device("cpu")
    gap = list(torch_rows._group_rows_by_block([nodes[0], nodes[1], nodes[3], nodes[4]], device))
    assert [(rows.first_node, rows.end_node) for rows in gap] == [(0, 5)]
    distant = list(torch_rows._group_rows_by_block([nodes[0], nodes[9]], device))
    assert [(rows.first_node, rows.end_node) for rows in distant] == [(0, 1), (9, 10)]
