"""The Llama forward pass, native kernels and int8 in the decoder: same results as the model, used only if they are."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from keel.config import Sampling
from keel.inference.kernels.build import load_kernels
from keel.inference.kernels.packed_matmul import PackedMatrix
from keel.inference.local import decode_attention, decoder_selection, llama_forward
from keel.inference.local.continuous_batch import ContinuousBatch
from keel.inference.local.decoder_selection import select_decoder
from keel.inference.local.decoders import BatchedDecoder
from keel.inference.local.local_engine import LocalEngine
from keel.inference.protocol import Generation, WeightSource
from keel.training.model.model import Model
from tests.support.kernels import needs_kernels
from tests.support.local_engine import PROMPTS, logprob_error, make_request, run_batch, save_weights, with_engine
from tests.support.policy_strategies import tiny
from tests.support.prompt_trees import BRANCHING_PROMPTS

LLAMA_LIKE = ("tiny", "tiny-llama-untied", "tiny-qwen2")


def decode(decoder: Any, prompts: Sequence[Sequence[int]], max_tokens: int = 6) -> list[Generation]:
    # different lengths, so that rows leave while others continue
    requests = [
        make_request(prompt, seed=number, max_tokens=max_tokens + number % 3) for number, prompt in enumerate(prompts)
    ]
    return run_batch(ContinuousBatch(decoder, 16), requests)


def tiny_with_biases(family: str) -> Model:
    """Return a model whose biases, if it has any, are not zero."""
    model = tiny(family)
    with torch.no_grad():
        for name, weight in model.network.named_parameters():
            if name.endswith("bias"):
                weight.normal_(std=0.5, generator=torch.Generator().manual_seed(len(name)))
    return model


@pytest.mark.parametrize("native_kernels", [True, False])
@pytest.mark.parametrize("family", LLAMA_LIKE)
def test_llama_forward_gives_the_results_of_the_models_own_code(family: str, native_kernels: bool) -> None:
    model = tiny_with_biases(family)
    decoder: Any = select_decoder(model.network, family, native_kernels=native_kernels)
    assert decoder.llama_forward is not None
    assert decoder.native_kernels is (native_kernels and load_kernels() is not None)
    prompts = [prompt for prompt in BRANCHING_PROMPTS for _ in range(2)]
    fast = decode(decoder, prompts)
    decoder.llama_forward = None
    decoder.clear_prefix_cache()
    reference = decode(decoder, prompts)
    assert [generation.token_ids for generation in fast] == [generation.token_ids for generation in reference]
    for actual, expected in zip(fast, reference, strict=True):
        assert actual.logprobs == pytest.approx(expected.logprobs, abs=2e-5)
    decoder.fused.restore()
    assert logprob_error(model, prompts, fast) < 1e-5


@needs_kernels
@pytest.mark.parametrize("family", ["tiny-qwen3", "tiny-gemma3", "tiny-mistral"])
def test_native_kernels_serve_families_with_their_own_forward_code(family: str) -> None:
    model = tiny_with_biases(family)
    decoder: Any = select_decoder(model.network, family)
    assert decoder.native_kernels
    assert all(linear.packed_matrix is not None for linear in (*decoder.fused.groups, *decoder.fused.singles))
    generations = decode(decoder, BRANCHING_PROMPTS)
    decoder.fused.restore()
    assert logprob_error(model, BRANCHING_PROMPTS, generations) < 1e-5


@needs_kernels
def test_with_native_kernels_a_completion_does_not_depend_on_other_rows_bit_for_bit() -> None:
    """This holds for completions only: torch computes the prompts of a block together."""
    decoder: Any = select_decoder(tiny_with_biases("tiny-qwen2").network, "tiny-qwen2")
    prompt = [7] * 30

    def first_row_logits(count: int) -> torch.Tensor:
        rows = [make_request(prompt, seed=0, max_tokens=5)]
        logits = [decoder.compute_logits(rows)[0]]
        # other rows join after the prompt is computed
        rows += [make_request(prompt, seed=number, max_tokens=5) for number in range(1, count)]
        for row in rows:
            row.tokens.append(3)
            row.leaf = decoder.prefix_cache.get(row.prompt)
        for token in range(3):
            logits.append(decoder.compute_logits(rows)[0])
            for number, row in enumerate(rows):
                row.tokens.append(token + number * (number > 0))
        decoder.clear_prefix_cache()
        return torch.stack(logits)

    alone = first_row_logits(1)
    for count in (2, 5, 13):
        assert torch.equal(alone, first_row_logits(count))


def test_only_supported_networks_use_llama_forward() -> None:
    for family in ("tiny-mistral", "tiny-qwen3", "tiny-gemma3", "tiny-mixtral"):
        decoder: Any = select_decoder(tiny(family).network, family)
        assert isinstance(decoder, BatchedDecoder)
        assert decoder.llama_forward is None
    half: Any = select_decoder(tiny(dtype="bfloat16").network, "tiny")
    assert half.llama_forward is None


def test_llama_forward_is_not_used_if_the_probe_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    correct = llama_forward._rms_norm
    monkeypatch.setattr(llama_forward, "_rms_norm", lambda states, norm: correct(states, norm) * 1.1)
    model = tiny()
    decoder: Any = select_decoder(model.network, "tiny")
    assert isinstance(decoder, BatchedDecoder)
    assert decoder.llama_forward is None
    assert logprob_error(model, BRANCHING_PROMPTS, decode(decoder, BRANCHING_PROMPTS)) < 1e-5


@needs_kernels
@pytest.mark.parametrize("kernel", ["matmul", "attend_rows"])
def test_native_kernels_are_not_used_if_the_probe_differs(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel == "matmul":
        correct = PackedMatrix.matmul
        monkeypatch.setattr(PackedMatrix, "matmul", lambda self, left, **kwargs: correct(self, left, **kwargs).mul_(2))
    else:
        monkeypatch.setattr(decode_attention, "attend_rows", lambda *args: args[-1].zero_())
    model = tiny()
    decoder: Any = select_decoder(model.network, "tiny")
    assert isinstance(decoder, BatchedDecoder)
    assert not decoder.native_kernels
    assert decoder.llama_forward is not None
    assert logprob_error(model, BRANCHING_PROMPTS, decode(decoder, BRANCHING_PROMPTS)) < 1e-5


def test_without_native_kernels_everything_is_computed_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_selection, "load_kernels", lambda: None)
    model = tiny()
    decoder: Any = select_decoder(model.network, "tiny")
    assert not decoder.native_kernels
    assert decoder.llama_forward is not None
    assert all(linear.packed_matrix is None for linear in (*decoder.fused.groups, *decoder.fused.singles))
    assert logprob_error(model, BRANCHING_PROMPTS, decode(decoder, BRANCHING_PROMPTS)) < 1e-5


@needs_kernels
def test_native_kernels_can_be_turned_off_and_int8_packs_no_weights() -> None:

    async def get_decoder(engine: LocalEngine) -> Any:
        return engine._batch.decoder

    torch_only = with_engine(tiny(), get_decoder, native_kernels="off")
    assert not torch_only.native_kernels
    int8 = with_engine(tiny(), get_decoder, int8=True)
    assert int8.native_kernels
    packed = with_engine(tiny(), get_decoder)
    assert packed.native_kernels
    for decoder, is_packed in ((torch_only, False), (int8, False), (packed, True)):
        assert decoder.llama_forward is not None
        # after close no layers are fused; the layers of the forward pass still refer to the operations
        assert all(
            (layer.qkv_proj.packed_matrix is not None) is is_packed
            for layer in decoder.llama_forward.layers
            if hasattr(layer.qkv_proj, "packed_matrix")
        )


@needs_kernels
def test_weights_are_packed_again_after_a_weight_update(tmp_path: Path) -> None:
    model, other = tiny(), tiny(seed=5)
    folder = save_weights(other, tmp_path / "w")

    async def use(engine: LocalEngine) -> tuple[Generation, Generation]:
        fused = engine._batch.decoder.fused
        assert fused is not None
        assert all(linear.packed_matrix is not None for linear in (*fused.groups, *fused.singles))
        before = await engine.generate(PROMPTS[0], Sampling(max_tokens=5, seed=1))
        await engine.load_weights(WeightSource.folder(folder), 1)
        return before, await engine.generate(PROMPTS[0], Sampling(max_tokens=5, seed=1))

    original = tiny()
    before, after = with_engine(model, use)
    assert logprob_error(original, [PROMPTS[0]], [before]) < 1e-5
    assert logprob_error(other, [PROMPTS[0]], [after]) < 1e-5
