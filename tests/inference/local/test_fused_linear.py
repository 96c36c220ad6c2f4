"""Fused linear layers: detected by their common input, stored once, and removed when the engine closes."""

from pathlib import Path
from typing import Any

import torch

from keel.config import Sampling
from keel.inference.local.decoder_selection import select_decoder
from keel.inference.local.local_engine import LocalEngine
from keel.inference.protocol import WeightSource
from tests.support.local_engine import PROMPTS, save_adapter, save_weights, with_engine
from tests.support.policy_strategies import FAMILIES, LORA, tiny


def test_layers_with_a_common_input_are_fused_without_a_second_copy_of_their_weights() -> None:
    for family in FAMILIES:
        network: Any = tiny(family).network
        size = sum(weight.numel() for weight in network.parameters())
        fused = select_decoder(network, family).fused
        assert fused is not None
        layers = len(network.model.layers)
        dense = hasattr(network.model.layers[0].mlp, "up_proj")
        assert [len(group.layers) for group in fused.groups] == ([3, 2] if dense else [3]) * layers, family
        storages = {weight.untyped_storage().data_ptr(): weight for weight in network.parameters()}
        assert sum(weight.untyped_storage().nbytes() // 4 for weight in storages.values()) == size
        assert all(group.views_intact for group in fused.groups)


def test_closing_the_engine_restores_the_network(tmp_path: Path) -> None:
    model = tiny()
    before = {name: weight.clone() for name, weight in model.network.state_dict().items()}
    with_engine(model, lambda engine: engine.generate(PROMPTS[0], Sampling(max_tokens=2)))
    assert not any("forward" in vars(layer) for layer in model.network.modules())
    assert all(torch.equal(weight, before[name]) for name, weight in model.network.state_dict().items())
    storages = [weight.untyped_storage().data_ptr() for weight in model.network.parameters()]
    assert len(set(storages)) == len(storages)
    save_weights(model, tmp_path / "w")


def test_refresh_takes_over_replaced_weights() -> None:
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


def test_an_adapter_is_merged_into_fused_layers_with_and_without_int8(tmp_path: Path) -> None:
    adapter = save_adapter(tiny(lora=LORA), tmp_path / "a")

    async def use(engine: LocalEngine) -> None:
        await engine.load_weights(WeightSource.adapter(adapter), 1)
        fused = engine._batch.decoder.fused
        assert fused is not None
        assert all(group.views_intact for group in fused.groups)

    with_engine(tiny(), use)
    with_engine(tiny(), use, int8=True)
