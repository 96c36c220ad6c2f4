"""Fast ways through a decode step: tokens as columns, prompts side by side on shelves, heads laid out for products."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_strategies import tiny
from test_engine_weights import folder_of
from test_local_engine import PROMPTS, ask, off_trainer, request

from keel.config import Sampling
from keel.engine import columns, decode, fuse
from keel.engine.batch import Batch
from keel.engine.decoders import Together, choose
from keel.engine.local import LocalEngine
from keel.engine.prefix import Node, Prefixes, shelve
from keel.policy.model import Model
from keel.wire import Generation

LIKE_LLAMA = ("tiny", "tiny-llama-untied", "tiny-qwen2")
STEM = [*range(40, 80)]
TREE = [
    [*STEM, 1, 2, 3],  # short ones on a long beginning, which is not held again for them
    [*STEM, 4, 5],
    [*range(20), *range(100, 140)],  # long ones on a short beginning, which is
    [*range(20), *range(90, 120)],
    [7] * 30,
    [9],
]


def answered(decoder: Any, prompts: Sequence[Sequence[int]], size: int = 6) -> list[Generation]:
    batch = Batch(decoder, 16)
    # another length for each, so that rows leave while others go on
    asked = [request(prompt, seed=number, max_tokens=size + number % 3) for number, prompt in enumerate(prompts)]
    batch.waiting.extend(asked)
    while batch.busy:
        batch.step(0)
    return [one.future.result() for one in asked]


def noisy(family: str) -> Model:
    """With biases that do something."""
    model = tiny(family)
    with torch.no_grad():
        for name, weight in model.network.named_parameters():
            if name.endswith("bias"):
                weight.normal_(std=0.5, generator=torch.Generator().manual_seed(len(name)))
    return model


@pytest.mark.parametrize("few", [4, 256])
@pytest.mark.parametrize("family", LIKE_LLAMA)
def test_columns_give_the_models_own_numbers(family: str, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "FEW", few)
    model = noisy(family)
    decoder: Any = choose(model.network, family)
    assert decoder.columns is not None
    prompts = [prompt for prompt in TREE for _ in range(2)]
    found = answered(decoder, prompts)
    decoder.columns = None
    decoder.forget()
    own = answered(decoder, prompts)
    assert [one.token_ids for one in found] == [one.token_ids for one in own]
    for ours, theirs in zip(found, own, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=2e-5)
    decoder.fused.undo()
    assert off_trainer(model, prompts, found) < 1e-5


def test_only_networks_whose_code_is_known_are_computed_as_columns() -> None:
    for family in ("tiny-mistral", "tiny-qwen3", "tiny-gemma3", "tiny-mixtral"):
        decoder: Any = choose(tiny(family).network, family)
        assert isinstance(decoder, Together)
        assert decoder.columns is None
    half: Any = choose(tiny(dtype="bfloat16").network, "tiny")
    assert half.columns is None


def test_columns_that_a_probe_finds_wrong_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    right = columns._normed
    monkeypatch.setattr(columns, "_normed", lambda norm, states: right(norm, states) * 1.1)
    model = tiny()
    decoder: Any = choose(model.network, "tiny")
    assert isinstance(decoder, Together)
    assert decoder.columns is None
    assert off_trainer(model, TREE, answered(decoder, TREE)) < 1e-5


def test_a_short_beginning_is_held_with_what_follows_and_a_long_one_is_not() -> None:
    prefixes = Prefixes()
    nodes = prefixes.grow(map(tuple, TREE))  # held: they live as long as somebody uses them
    assert len(nodes) == 8
    leaves = [prefixes.get(tuple(prompt)) for prompt in TREE]
    assert [leaf and [(one.first, one.end) for one in leaf.path] for leaf in leaves] == [
        [(0, 40), (40, 43)],
        [(0, 40), (40, 42)],
        [(0, 60)],
        [(0, 50)],
        [(0, 30)],
        [(0, 1)],
    ]
    together = [leaf.shelf for leaf in leaves[2:4] if leaf]
    assert together[0] is together[1]
    assert (together[0].before, together[0].length) == (20, 60)


def test_rows_between_which_a_row_is_gone_stay_one_product_and_far_ones_do_not() -> None:
    nodes = [Node((number,)) for number in range(10)]
    shelve(nodes)
    device = torch.device("cpu")
    gap = list(decode._runs([nodes[0], nodes[1], nodes[3], nodes[4]], device))
    assert [(run.first, run.last) for run in gap] == [(0, 5)]
    far = list(decode._runs([nodes[0], nodes[9]], device))
    assert [(run.first, run.last) for run in far] == [(0, 1), (9, 10)]


def test_equal_answers_are_kept_once_and_those_of_a_step_side_by_side() -> None:
    decoder: Any = choose(tiny().network, "tiny")
    batch = Batch(decoder, 8)
    asked = [request(PROMPTS[0], seed=seed, max_tokens=4) for seed in (1, 1, 2, 3)]
    batch.waiting.extend(asked)
    while batch.busy:
        batch.step(0)
    ends = {(*PROMPTS[0], *one.future.result().token_ids[:-1]) for one in asked}
    kept = [decoder.prefixes.get(ids) for ids in ends]
    assert len(decoder.prefixes.kept._nodes) == len(ends) == 3
    assert len({node.shelf for node in kept}) == 1
    assert kept[0].shelf.count == 3


def test_a_wide_head_is_laid_out_anew_for_new_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse, "WORDS", 16)
    model, other = tiny(), tiny(seed=5)
    folder = folder_of(other, tmp_path / "w")

    async def use(engine: LocalEngine) -> tuple[Generation, Generation]:
        singles = engine._batch.decoder.fused.others  # type: ignore[union-attr]
        assert any(one.wide for one in singles)
        before = await engine.generate(PROMPTS[0], Sampling(max_tokens=5, seed=1))
        await engine.load_weights(folder, 1)
        return before, await engine.generate(PROMPTS[0], Sampling(max_tokens=5, seed=1))

    untouched = tiny()
    before, after = ask(model, use)
    assert off_trainer(untouched, [PROMPTS[0]], [before]) < 1e-5
    assert off_trainer(other, [PROMPTS[0]], [after]) < 1e-5


def test_int8_is_made_of_a_network_whose_head_is_laid_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse, "WORDS", 16)

    async def use(engine: LocalEngine) -> Generation:
        assert engine._batch.decoder.network is not engine._network
        return await engine.generate(PROMPTS[0], Sampling(max_tokens=5, seed=1))

    assert len(ask(tiny(), use, int8=True).token_ids) == 5
