"""New weights, adapters and int8 in the local engine: live before the version says so, and nothing half done."""

import asyncio
import copy
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from keel.common.atomic_files import atomic_folder, write_manifest
from keel.config import Sampling
from keel.inference.local.decoders import select_decoder
from keel.inference.local.int8 import Int8Linear, quantize_linears
from keel.inference.local.local_engine import LocalEngine
from keel.inference.protocol import EngineError, Generation, WeightSource
from keel.training import Model
from keel.training.model.weights_io import write_weights
from tests.inference.local.test_local_engine import PROMPTS, ask, off_trainer, request, together
from tests.support.policy_strategies import LORA, tiny


def folder_of(model: Model, path: Path) -> str:
    model.network.save_pretrained(path)
    return str(path)


def adapter_of(model: Model, path: Path) -> str:
    assert model.peft is not None
    model.peft.save_pretrained(str(path))
    return str(path)


def answer(engine: LocalEngine, size: int = 12) -> Awaitable[Generation]:
    return engine.generate(PROMPTS[0], Sampling(max_tokens=size, seed=1))


@pytest.mark.parametrize("family", ["tiny", "tiny-gemma3", "tiny-mixtral", "tiny-gpt-oss"])
def test_requests_after_new_weights_are_exact_to_them(family: str, tmp_path: Path) -> None:
    other = tiny(family, seed=5)
    folder = folder_of(other, tmp_path / "w")

    async def use(engine: LocalEngine) -> tuple[Generation, Generation]:
        first = await answer(engine)
        await engine.load_weights(WeightSource.folder(folder), 7)
        assert await engine.version() == 7
        return first, await answer(engine)

    first, second = ask(tiny(family), use)
    assert first.versions == (0,) * len(first.token_ids)
    assert second.versions == (7,) * len(second.token_ids)
    assert off_trainer(other, [PROMPTS[0]], [second]) < 1e-5
    assert second == ask(other, lambda engine: relabelled(answer(engine), 7))


async def relabelled(found: Awaitable[Generation], version: int) -> Generation:
    one = await found
    return Generation(one.token_ids, one.logprobs, (version,) * len(one.versions), one.finish_reason, one.temperature)


def test_a_request_in_flight_goes_on_and_its_versions_switch_once(tmp_path: Path) -> None:
    other = tiny(seed=5)
    folder = folder_of(other, tmp_path / "w")

    async def use(engine: LocalEngine) -> list[Generation]:
        running = asyncio.create_task(engine.generate(PROMPTS[0], Sampling(max_tokens=2000, seed=3, temperature=0.7)))
        while not (await engine.health()).running:
            await asyncio.sleep(0.001)
        waiting = asyncio.create_task(engine.generate(PROMPTS[0], Sampling(max_tokens=9, seed=3)))
        await engine.load_weights(WeightSource.folder(folder), 1)
        running_after = asyncio.create_task(engine.generate(PROMPTS[0], Sampling(max_tokens=9, seed=4)))
        return list(await asyncio.gather(running, waiting, running_after))

    running, waiting, after = ask(tiny(), use, max_batch=1)
    switch = running.versions.index(1)
    assert 0 < switch < len(running.versions)
    assert running.versions == (0,) * switch + (1,) * (len(running.versions) - switch)
    # its prompt had been computed by the old weights, and is computed again
    assert waiting.versions == (1,) * len(waiting.versions)
    assert off_trainer(other, [PROMPTS[0]] * 2, [waiting, after]) < 1e-5
    # the tokens before the switch are exact to the weights that sampled them
    before = Generation(
        running.token_ids[:switch], running.logprobs[:switch], running.versions[:switch], "length", temperature=0.7
    )
    assert off_trainer(tiny(), [PROMPTS[0]], [before]) < 1e-5


@pytest.mark.parametrize("kind", ["weights", "adapter"])
def test_drained_requests_end_on_the_version_they_began_with_and_waiting_ones_are_of_the_new(
    kind: str, tmp_path: Path
) -> None:
    adapter = kind == "adapter"
    folder = adapter_of(tiny(lora=LORA), tmp_path / "a") if adapter else folder_of(tiny(seed=5), tmp_path / "w")

    async def use(engine: LocalEngine) -> list[Generation]:
        begun = [asyncio.create_task(answer(engine, 400 + 100 * number)) for number in range(2)]
        queued = [asyncio.create_task(answer(engine, 5)) for _ in range(3)]
        while (await engine.health()).running < 2:
            await asyncio.sleep(0.001)
        source = WeightSource.adapter if adapter else WeightSource.folder
        loading = asyncio.create_task(engine.load_weights(source(folder), 1, drain=True))
        await asyncio.sleep(0.02)
        late = asyncio.create_task(answer(engine, 5))
        dropped = asyncio.create_task(answer(engine, 5))
        await asyncio.sleep(0.02)
        dropped.cancel()
        assert await engine.version() == 0
        await loading
        assert all(one.done() for one in begun)
        assert await engine.version() == 1
        return list(await asyncio.gather(*begun, *queued, late))

    answers = ask(tiny(), use, max_batch=2)
    assert [set(one.versions) for one in answers] == [{0}, {0}, {1}, {1}, {1}, {1}]
    assert answers[2] == answers[5]  # in line before and after: both computed by the new weights alone


def test_a_drain_that_nobody_waits_for_any_more_holds_nobody_up(tmp_path: Path) -> None:
    folder = folder_of(tiny(seed=5), tmp_path / "w")

    async def use(engine: LocalEngine) -> list[Generation]:
        begun = asyncio.create_task(answer(engine, 100_000))
        while not (await engine.health()).running:
            await asyncio.sleep(0.001)
        loading = asyncio.create_task(engine.load_weights(WeightSource.folder(folder), 1, drain=True))
        await asyncio.sleep(0.1)
        late = asyncio.create_task(answer(engine, 5))
        await asyncio.sleep(0.05)
        assert not late.done()
        loading.cancel()
        found = await late
        begun.cancel()
        return [found]

    assert set(ask(tiny(), use)[0].versions) == {0}


def test_a_token_after_the_switch_sees_old_keys_by_new_weights(tmp_path: Path) -> None:
    """The documented meaning: the model's own cache, filled by the old weights and then read by the new ones."""
    old, new = tiny(), tiny(seed=5)
    row = request(PROMPTS[0])
    decoder: Any = select_decoder(old.network, "old")
    with torch.inference_mode():
        decoder.compute_logits([row])
        row.tokens.append(65)
        decoder.compute_logits([row])
        row.tokens.append(66)
        old.network.load_state_dict(new.network.state_dict())
        decoder.fused.refresh()
        found = decoder.compute_logits([row])[0]
        reference = tiny()
        cache = reference.network(input_ids=torch.tensor([[*PROMPTS[0], 65]]), use_cache=True).past_key_values
        wanted = new.network(input_ids=torch.tensor([[66]]), past_key_values=cache, use_cache=True).logits[0, -1]
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_an_adapter_gives_what_peft_gives_and_the_next_replaces_it(tmp_path: Path) -> None:
    adapted = tiny(lora=LORA)
    first = adapter_of(adapted, tmp_path / "a")
    with torch.no_grad():
        for name, weight in adapted.parameters().items():
            if "lora_B" in name:
                weight.mul_(-2)
    second = adapter_of(adapted, tmp_path / "b")

    async def use(engine: LocalEngine) -> list[Generation]:
        found = [await answer(engine)]
        for version, folder in ((1, first), (2, second), (3, first)):
            await engine.load_weights(WeightSource.adapter(folder), version)
            found.append(await answer(engine))
        return found

    base = tiny()
    names = [name for name, _ in base.network.named_modules()]
    plain, one, two, again = ask(base, use)
    assert off_trainer(tiny(), [PROMPTS[0]], [plain]) < 1e-5
    assert [found.versions[0] for found in (plain, one, two, again)] == [0, 1, 2, 3]
    for folder, found in ((first, one), (second, two), (first, again)):
        merged = tiny()
        merged.network = PeftModel.from_pretrained(merged.network, folder).merge_and_unload()
        assert off_trainer(merged, [PROMPTS[0]], [found]) < 1e-5
    assert again.token_ids == one.token_ids
    assert off_trainer(tiny(), [PROMPTS[0]], [one]) > 1e-3
    assert [name for name, _ in base.network.named_modules()] == names


def test_an_adapter_goes_on_top_of_the_weights_loaded_last(tmp_path: Path) -> None:
    adapter, weights = adapter_of(tiny(lora=LORA), tmp_path / "a"), folder_of(tiny(seed=5), tmp_path / "w")

    async def use(engine: LocalEngine) -> list[Generation]:
        await engine.load_weights(WeightSource.adapter(adapter), 1)
        await engine.load_weights(WeightSource.folder(weights), 2)
        found = [await answer(engine)]
        await engine.load_weights(WeightSource.adapter(adapter), 3)
        return [*found, await answer(engine)]

    plain, merged = ask(tiny(), use)
    assert off_trainer(tiny(seed=5), [PROMPTS[0]], [plain]) < 1e-5
    other = tiny(seed=5)
    other.network = PeftModel.from_pretrained(other.network, adapter).merge_and_unload()
    assert off_trainer(other, [PROMPTS[0]], [merged]) < 1e-5


def _no_folder(path: Path) -> str:
    return str(path / "nothing")


def _other_model(path: Path) -> str:
    return folder_of(tiny("tiny-qwen3"), path)


def _wrong_shape(path: Path) -> str:
    model = copy.deepcopy(tiny().network)
    model.resize_token_embeddings(300, mean_resizing=False)
    model.save_pretrained(path)
    return str(path)


def _half_an_adapter(path: Path) -> str:
    folder = adapter_of(tiny(lora=LORA), path)
    state = load_file(path / "adapter_model.safetensors")
    state.popitem()
    save_file(state, path / "adapter_model.safetensors")
    return folder


def _other_adapter(path: Path) -> str:
    folder = adapter_of(tiny(lora=LORA), path)
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(config | {"peft_type": "IA3"}))
    return folder


def _other_rank(path: Path) -> str:
    folder = adapter_of(tiny(lora=LORA), path)
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(config | {"r": 3}))
    return folder


def _sealed(model: Model, path: Path) -> Path:
    with atomic_folder(path) as folder:
        write_weights(folder, model)
        write_manifest(folder)
    return path


def _flipped(folder: Path, file: str) -> None:
    content = bytearray((folder / file).read_bytes())
    content[-1] ^= 1
    (folder / file).write_bytes(content)


def _shortened(folder: Path, file: str) -> None:
    (folder / file).write_bytes((folder / file).read_bytes()[:-1])


def _removed(folder: Path, file: str) -> None:
    (folder / file).unlink()


def _added(folder: Path, file: str) -> None:
    (folder / f"more-{file}").write_bytes((folder / file).read_bytes())


@pytest.mark.parametrize("kind", ["model", "adapter_model"])
@pytest.mark.parametrize("damage", [_flipped, _shortened, _removed, _added])
def test_a_folder_whose_manifest_does_not_fit_is_refused_by_the_file(
    damage: Callable[[Path, str], None], kind: str, tmp_path: Path
) -> None:
    adapter = kind != "model"
    bad = _sealed(tiny(seed=5, lora=LORA if adapter else None), tmp_path / "bad")
    good = _sealed(tiny(seed=6, lora=LORA if adapter else None), tmp_path / "good")
    damage(bad, f"{kind}.safetensors")
    unsealed = _sealed(tiny(seed=7, lora=LORA if adapter else None), tmp_path / "unsealed")
    (unsealed / "manifest.json").unlink()

    async def use(engine: LocalEngine) -> None:
        source = WeightSource.adapter if adapter else WeightSource.folder
        before = await answer(engine)
        with pytest.raises(EngineError, match=rf"refused: .*{kind}\.safetensors (is|has|was) ") as caught:
            await engine.load_weights(source(bad), 1)
        assert not caught.value.retryable
        with pytest.raises(EngineError, match=r"manifest\.json is missing"):
            await engine.load_weights(source(unsealed), 1)
        assert await engine.version() == 0
        assert await answer(engine) == before
        await engine.load_weights(source(good), 1)
        assert await engine.version() == 1

    ask(tiny(), use)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (_no_folder, "weights"),
        (_other_model, "weights"),
        (_wrong_shape, "weights"),
        (_no_folder, "adapter"),
        (_half_an_adapter, "adapter"),
        (_other_adapter, "adapter"),
        (_other_rank, "adapter"),
    ],
)
def test_a_folder_that_does_not_fit_changes_nothing(make: Callable[[Path], str], kind: str, tmp_path: Path) -> None:
    good, bad = adapter_of(tiny(lora=LORA), tmp_path / "good"), make(tmp_path / "bad")

    async def use(engine: LocalEngine) -> None:
        await engine.load_weights(WeightSource.adapter(good), 1)
        before = await answer(engine)
        source = WeightSource.folder if kind == "weights" else WeightSource.adapter
        with pytest.raises(EngineError, match="bad") as caught:
            await engine.load_weights(source(bad), 2)
        assert not caught.value.retryable
        assert await engine.version() == 1
        assert await answer(engine) == before
        await engine.load_weights(WeightSource.adapter(good), 3)
        assert (await answer(engine)).token_ids == before.token_ids

    ask(tiny(), use)


def test_a_network_with_an_adapter_of_its_own_is_refused() -> None:
    model = tiny(lora=LORA)
    with pytest.raises(EngineError, match="load the adapter with load_weights"):
        LocalEngine(model.network, model.tokenizer)


def test_weights_can_be_loaded_from_a_state_dict_in_memory() -> None:
    other = tiny(seed=5)

    async def run() -> Generation:
        model = tiny()
        engine = LocalEngine(model.network, model.tokenizer)
        await engine.load_weights(WeightSource("in_memory", tensors=other.network.state_dict()), 4)
        found = await answer(engine)
        await engine.close()
        return found

    assert off_trainer(other, [PROMPTS[0]], [asyncio.run(run())]) < 1e-5


# int8


def mismatch(model: Model, truth: Model, folder: str | None = None) -> float:
    async def use(engine: LocalEngine) -> list[Generation]:
        if folder:
            await engine.load_weights(WeightSource.folder(folder), 1)
        asked = [(prompt, Sampling(max_tokens=24, seed=seed)) for prompt in PROMPTS for seed in range(4)]
        return await together(asked)(engine)

    found = ask(model, use, int8=True)
    return off_trainer(truth, [prompt for prompt in PROMPTS for _ in range(4)], found)


@pytest.mark.parametrize("family", ["tiny", "tiny-gemma3", "tiny-qwen2"])
def test_int8_is_close_to_the_policy_and_not_it(family: str) -> None:
    model = tiny(family)
    before = {name: weight.clone() for name, weight in model.network.state_dict().items()}
    assert 1e-4 < mismatch(model, tiny(family)) < 0.2
    assert all(torch.equal(weight, before[name]) for name, weight in model.network.state_dict().items())


def test_int8_layers_are_made_anew_for_new_weights(tmp_path: Path) -> None:
    other = tiny(seed=5)
    assert 1e-4 < mismatch(tiny(), other, folder_of(other, tmp_path / "w")) < 0.2


def test_int8_layers_are_made_anew_for_an_adapter(tmp_path: Path) -> None:
    adapter = adapter_of(tiny(lora=LORA), tmp_path / "a")

    async def use(engine: LocalEngine) -> Generation:
        await engine.load_weights(WeightSource.adapter(adapter), 1)
        return await answer(engine, 40)

    found = ask(tiny(), use, int8=True)
    assert 1e-4 < off_trainer(tiny(lora=LORA), [PROMPTS[0]], [found]) < 0.2


def test_an_int8_copy_holds_no_second_set_of_other_weights() -> None:
    network: Any = tiny().network
    twin = quantize_linears(network)
    assert twin.get_input_embeddings().weight.data_ptr() == network.get_input_embeddings().weight.data_ptr()
    assert not any(isinstance(layer, torch.nn.Linear) and type(layer) is torch.nn.Linear for layer in twin.modules())


def test_an_int8_row_depends_on_no_other_row() -> None:
    chance = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(40, 24, generator=chance), torch.randn(40, generator=chance)
    layer = Int8Linear(weight, bias)
    rows = torch.randn(6, 24, generator=chance) * torch.tensor([1e-6, 1.0, 1.0, 3.0, 500.0, 0.0])[:, None]
    alone = torch.cat([layer(row[None]) for row in rows])
    assert torch.equal(layer(rows), alone)
    # half a step of the activations' 127 and of the weights' 254, added up over the inputs
    error = (alone - rows @ weight.T - bias).abs()
    assert (error <= rows.abs().amax(1, keepdim=True) * (24 * weight.abs().amax() * (1 / 127 + 1 / 254))).all()
    assert torch.equal(alone[5], bias)


@pytest.mark.parametrize("junk", [float("nan"), float("inf")])
def test_an_int8_row_that_is_not_finite_is_its_own_trouble(junk: float) -> None:
    rows = torch.randn(4, 24, generator=torch.Generator().manual_seed(0))
    layer = Int8Linear(torch.randn(40, 24, generator=torch.Generator().manual_seed(1)), None)
    whole = layer(rows)
    rows[2, 5] = junk
    found = layer(rows)
    assert not found[2].isfinite().any()
    assert torch.equal(found[[0, 1, 3]], whole[[0, 1, 3]])


def test_int8_by_the_engines_own_forward_pass_is_int8_by_the_models_code() -> None:
    decoder: Any = select_decoder(tiny().network, "tiny")
    assert decoder.llama_forward is not None
    twin = quantize_linears(decoder.network, decoder.fused)
    decoder.network = twin

    def scores() -> torch.Tensor:
        rows = [request(prompt, max_tokens=4) for prompt in PROMPTS]
        found = []
        for word in range(4):
            found.append(decoder.compute_logits(rows).log_softmax(-1))
            for row in rows:
                row.tokens.append(word + 40)
        decoder.clear_prefix_cache()
        return torch.stack(found)

    own = scores()
    assert decoder.llama_forward.network is twin
    decoder.llama_forward = None
    # a rounding that goes the other way moves a number by a whole step of int8
    assert (own - scores()).abs().mean() < 0.02
