"""Fast ways through a decode step: the engine's own forward pass, packed weights, prompts side by side on shelves."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from keel.config import Sampling
from keel.inference.kernels.build import load_kernels
from keel.inference.kernels.packed_matmul import PackedMatrix
from keel.inference.local import decode_attention, decoders, torch_rows
from keel.inference.local import llama_forward as own_pass
from keel.inference.local.continuous_batch import ContinuousBatch
from keel.inference.local.decoders import BatchedDecoder, select_decoder
from keel.inference.local.local_engine import LocalEngine
from keel.inference.local.prefix_cache import PrefixCache, PrefixNode, allocate_blocks
from keel.inference.protocol import Generation, WeightSource
from keel.training.model.model import Model
from tests.inference.local.test_local_engine import PROMPTS, ask, off_trainer, request
from tests.inference.local.test_weight_loading import folder_of
from tests.support.kernels import needs_kernels
from tests.support.policy_strategies import tiny

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
    batch = ContinuousBatch(decoder, 16)
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


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("family", LIKE_LLAMA)
def test_the_engines_own_pass_gives_the_models_own_numbers(family: str, compiled: bool) -> None:
    model = noisy(family)
    decoder: Any = select_decoder(model.network, family, native_kernels=compiled)
    assert decoder.llama_forward is not None
    assert decoder.native_kernels is (compiled and load_kernels() is not None)
    prompts = [prompt for prompt in TREE for _ in range(2)]
    found = answered(decoder, prompts)
    decoder.llama_forward = None
    decoder.clear_prefix_cache()
    own = answered(decoder, prompts)
    assert [one.token_ids for one in found] == [one.token_ids for one in own]
    for ours, theirs in zip(found, own, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=2e-5)
    decoder.fused.restore()
    assert off_trainer(model, prompts, found) < 1e-5


@needs_kernels
@pytest.mark.parametrize("family", ["tiny-qwen3", "tiny-gemma3", "tiny-mistral"])
def test_kernels_in_c_serve_families_whose_code_is_their_own(family: str) -> None:
    model = noisy(family)
    decoder: Any = select_decoder(model.network, family)
    assert decoder.native_kernels
    assert all(one.packed_matrix is not None for one in (*decoder.fused.groups, *decoder.fused.singles))
    found = answered(decoder, TREE)
    decoder.fused.restore()
    assert off_trainer(model, TREE, found) < 1e-5


@needs_kernels
def test_with_kernels_in_c_an_answer_is_the_same_bit_for_bit_whatever_is_decoded_beside_it() -> None:
    """Of answers: prompts of a shelf are computed side by side by torch."""
    decoder: Any = select_decoder(noisy("tiny-qwen2").network, "tiny-qwen2")
    prompt = [7] * 30

    def rows(count: int) -> torch.Tensor:
        asked = [request(prompt, seed=0, max_tokens=5)]
        found = [decoder.compute_logits(asked)[0]]
        # others join when the prompt is there
        asked += [request(prompt, seed=number, max_tokens=5) for number in range(1, count)]
        for row in asked:
            row.tokens.append(3)
            row.leaf = decoder.prefix_cache.get(row.prompt)
        for word in range(3):
            found.append(decoder.compute_logits(asked)[0])
            for number, row in enumerate(asked):
                row.tokens.append(word + number * (number > 0))
        decoder.clear_prefix_cache()
        return torch.stack(found)

    alone = rows(1)
    for count in (2, 5, 13):
        assert torch.equal(alone, rows(count))


def test_only_networks_whose_code_is_known_get_the_engines_own_pass() -> None:
    for family in ("tiny-mistral", "tiny-qwen3", "tiny-gemma3", "tiny-mixtral"):
        decoder: Any = select_decoder(tiny(family).network, family)
        assert isinstance(decoder, BatchedDecoder)
        assert decoder.llama_forward is None
    half: Any = select_decoder(tiny(dtype="bfloat16").network, "tiny")
    assert half.llama_forward is None


def test_an_own_pass_that_a_probe_finds_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    right = own_pass._rms_norm
    monkeypatch.setattr(own_pass, "_rms_norm", lambda states, norm: right(states, norm) * 1.1)
    model = tiny()
    decoder: Any = select_decoder(model.network, "tiny")
    assert isinstance(decoder, BatchedDecoder)
    assert decoder.llama_forward is None
    assert off_trainer(model, TREE, answered(decoder, TREE)) < 1e-5


@needs_kernels
@pytest.mark.parametrize("wrong", ["times", "attend_rows"])
def test_kernels_that_a_probe_finds_wrong_are_not_used(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if wrong == "times":
        right = PackedMatrix.matmul
        monkeypatch.setattr(PackedMatrix, "matmul", lambda self, left, **given: right(self, left, **given).mul_(2))
    else:
        monkeypatch.setattr(decode_attention, "attend_rows", lambda *given: given[-1].zero_())
    model = tiny()
    decoder: Any = select_decoder(model.network, "tiny")
    assert isinstance(decoder, BatchedDecoder)
    assert not decoder.native_kernels
    assert decoder.llama_forward is not None
    assert off_trainer(model, TREE, answered(decoder, TREE)) < 1e-5


def test_without_a_compiler_everything_goes_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "load_kernels", lambda: None)
    model = tiny()
    decoder: Any = select_decoder(model.network, "tiny")
    assert not decoder.native_kernels
    assert decoder.llama_forward is not None
    assert all(one.packed_matrix is None for one in (*decoder.fused.groups, *decoder.fused.singles))
    assert off_trainer(model, TREE, answered(decoder, TREE)) < 1e-5


@needs_kernels
def test_kernels_torch_is_obeyed_and_int8_packs_nothing() -> None:

    async def decoder_of(engine: LocalEngine) -> Any:
        return engine._batch.decoder

    plain = ask(tiny(), decoder_of, native_kernels="off")
    assert not plain.native_kernels
    small = ask(tiny(), decoder_of, int8=True)
    assert small.native_kernels
    packed = ask(tiny(), decoder_of)
    assert packed.native_kernels
    for decoder, pack in ((plain, False), (small, False), (packed, True)):
        assert decoder.llama_forward is not None
        # after close nothing is fused any more; what multiplied is still known to the layers
        assert all(
            (one.qkv_proj.packed_matrix is not None) is pack for one in decoder.llama_forward.layers if hasattr(one.qkv_proj, "packed_matrix")
        )


def test_a_short_beginning_is_held_with_what_follows_and_a_long_one_is_not() -> None:
    prefixes = PrefixCache()
    nodes = prefixes.insert(map(tuple, TREE))  # held: they live as long as somebody uses them
    assert len(nodes) == 8
    leaves = [prefixes.get(tuple(prompt)) for prompt in TREE]
    assert [leaf and [(one.kv_start, one.end) for one in leaf.kv_path] for leaf in leaves] == [
        [(0, 40), (40, 43)],
        [(0, 40), (40, 42)],
        [(0, 60)],
        [(0, 50)],
        [(0, 30)],
        [(0, 1)],
    ]
    together = [leaf.block for leaf in leaves[2:4] if leaf]
    assert together[0] is together[1]
    assert (together[0].parent_tokens, together[0].length) == (20, 60)


def test_rows_between_which_a_row_is_gone_stay_one_product_and_far_ones_do_not() -> None:
    nodes = [PrefixNode((number,)) for number in range(10)]
    allocate_blocks(nodes)
    device = torch.device("cpu")
    gap = list(torch_rows._group_rows_by_block([nodes[0], nodes[1], nodes[3], nodes[4]], device))
    assert [(run.first_node, run.end_node) for run in gap] == [(0, 5)]
    far = list(torch_rows._group_rows_by_block([nodes[0], nodes[9]], device))
    assert [(run.first_node, run.end_node) for run in far] == [(0, 1), (9, 10)]


def test_equal_answers_are_kept_once_and_those_of_a_step_side_by_side() -> None:
    decoder: Any = select_decoder(tiny().network, "tiny")
    batch = ContinuousBatch(decoder, 8)
    asked = [request(PROMPTS[0], seed=seed, max_tokens=4) for seed in (1, 1, 2, 3)]
    batch.waiting.extend(asked)
    while batch.busy:
        batch.step(0)
    ends = {(*PROMPTS[0], *one.future.result().token_ids[:-1]) for one in asked}
    kept = [decoder.prefix_cache.get(ids) for ids in ends]
    assert len(decoder.prefix_cache.retained._nodes) == len(ends) == 3
    assert len({node.block for node in kept}) == 1
    assert kept[0].block.node_count == 3


@needs_kernels
def test_weights_are_packed_anew_when_they_have_changed(tmp_path: Path) -> None:
    model, other = tiny(), tiny(seed=5)
    folder = folder_of(other, tmp_path / "w")

    async def use(engine: LocalEngine) -> tuple[Generation, Generation]:
        fused = engine._batch.decoder.fused
        assert fused is not None
        assert all(one.packed_matrix is not None for one in (*fused.groups, *fused.singles))
        before = await engine.generate(PROMPTS[0], Sampling(max_tokens=5, seed=1))
        await engine.load_weights(WeightSource.folder(folder), 1)
        return before, await engine.generate(PROMPTS[0], Sampling(max_tokens=5, seed=1))

    untouched = tiny()
    before, after = ask(model, use)
    assert off_trainer(untouched, [PROMPTS[0]], [before]) < 1e-5
    assert off_trainer(other, [PROMPTS[0]], [after]) < 1e-5


def test_int8_is_made_of_a_network_whose_layers_are_fused() -> None:
    async def use(engine: LocalEngine) -> Generation:
        assert engine._batch.decoder.network is not engine._network
        return await engine.generate(PROMPTS[0], Sampling(max_tokens=5, seed=1))

    assert len(ask(tiny(), use, int8=True).token_ids) == 5
