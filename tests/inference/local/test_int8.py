"""Int8 linear layers: close to the policy, independent rows, and rebuilt after every weight update."""

from pathlib import Path
from typing import Any

import pytest
import torch

from keel.config import Sampling
from keel.inference.local.decoder_selection import select_decoder
from keel.inference.local.int8 import Int8Linear, quantize_linears
from keel.inference.local.local_engine import LocalEngine
from keel.inference.protocol import Generation, WeightSource
from keel.training import Model
from tests.support.local_engine import (
    PROMPTS,
    generate,
    generate_all,
    logprob_error,
    make_request,
    save_adapter,
    save_weights,
    with_engine,
)
from tests.support.policy_strategies import LORA, tiny


def int8_logprob_error(model: Model, reference: Model, folder: str | None = None) -> float:
    """Return the mean difference between int8 log-probs and the reference's, after loading the folder if given."""

    async def use(engine: LocalEngine) -> list[Generation]:
        if folder:
            await engine.load_weights(WeightSource.folder(folder), 1)
        requests = [(prompt, Sampling(max_tokens=24, seed=seed)) for prompt in PROMPTS for seed in range(4)]
        return await generate_all(requests)(engine)

    generations = with_engine(model, use, int8=True)
    return logprob_error(reference, [prompt for prompt in PROMPTS for _ in range(4)], generations)


@pytest.mark.parametrize("family", ["tiny", "tiny-gemma3", "tiny-qwen2"])
def test_int8_is_close_to_the_policy_but_not_equal(family: str) -> None:
    model = tiny(family)
    before = {name: weight.clone() for name, weight in model.network.state_dict().items()}
    assert 1e-4 < int8_logprob_error(model, tiny(family)) < 0.2
    assert all(torch.equal(weight, before[name]) for name, weight in model.network.state_dict().items())


def test_int8_layers_are_rebuilt_for_new_weights(tmp_path: Path) -> None:
    other = tiny(seed=5)
    assert 1e-4 < int8_logprob_error(tiny(), other, save_weights(other, tmp_path / "w")) < 0.2


def test_int8_layers_are_rebuilt_for_an_adapter(tmp_path: Path) -> None:
    adapter = save_adapter(tiny(lora=LORA), tmp_path / "a")

    async def use(engine: LocalEngine) -> Generation:
        await engine.load_weights(WeightSource.adapter(adapter), 1)
        return await generate(engine, 40)

    generation = with_engine(tiny(), use, int8=True)
    assert 1e-4 < logprob_error(tiny(lora=LORA), [PROMPTS[0]], [generation]) < 0.2


def test_int8_works_on_a_network_with_fused_layers() -> None:
    async def use(engine: LocalEngine) -> Generation:
        assert engine._batch.decoder.network is not engine._network
        return await engine.generate(PROMPTS[0], Sampling(max_tokens=5, seed=1))

    assert len(with_engine(tiny(), use, int8=True).token_ids) == 5


def test_an_int8_copy_shares_all_other_weights() -> None:
    network: Any = tiny().network
    quantized = quantize_linears(network)
    assert quantized.get_input_embeddings().weight.data_ptr() == network.get_input_embeddings().weight.data_ptr()
    assert not any(type(layer) is torch.nn.Linear for layer in quantized.modules())


def test_an_int8_row_does_not_depend_on_other_rows() -> None:
    rng = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(40, 24, generator=rng), torch.randn(40, generator=rng)
    layer = Int8Linear(weight, bias)
    rows = torch.randn(6, 24, generator=rng) * torch.tensor([1e-6, 1.0, 1.0, 3.0, 500.0, 0.0])[:, None]
    alone = torch.cat([layer(row[None]) for row in rows])
    assert torch.equal(layer(rows), alone)
    # half a step of the activations (127 levels) and of the weights (254 levels), summed over the inputs
    error = (alone - rows @ weight.T - bias).abs()
    assert (error <= rows.abs().amax(1, keepdim=True) * (24 * weight.abs().amax() * (1 / 127 + 1 / 254))).all()
    assert torch.equal(alone[5], bias)


@pytest.mark.parametrize("invalid", [float("nan"), float("inf")])
def test_an_int8_row_that_is_not_finite_does_not_affect_other_rows(invalid: float) -> None:
    rows = torch.randn(4, 24, generator=torch.Generator().manual_seed(0))
    layer = Int8Linear(torch.randn(40, 24, generator=torch.Generator().manual_seed(1)), None)
    clean = layer(rows)
    rows[2, 5] = invalid
    result = layer(rows)
    assert not result[2].isfinite().any()
    assert torch.equal(result[[0, 1, 3]], clean[[0, 1, 3]])


def test_int8_with_llama_forward_matches_int8_with_the_models_own_code() -> None:
    decoder: Any = select_decoder(tiny().network, "tiny")
    assert decoder.llama_forward is not None
    quantized = quantize_linears(decoder.network, decoder.fused)
    decoder.network = quantized

    def decode_logprobs() -> torch.Tensor:
        rows = [make_request(prompt, max_tokens=4) for prompt in PROMPTS]
        logprobs = []
        for token in range(4):
            logprobs.append(decoder.compute_logits(rows).log_softmax(-1))
            for row in rows:
                row.tokens.append(token + 40)
        decoder.clear_prefix_cache()
        return torch.stack(logprobs)

    fast = decode_logprobs()
    assert decoder.llama_forward.network is quantized
    decoder.llama_forward = None
    # rounding in the other direction changes a value by one step of int8
    assert (fast - decode_logprobs()).abs().mean() < 0.02
