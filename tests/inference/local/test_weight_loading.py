"""Weight updates and adapters in the local engine: live before the version changes, and applied fully or not at all."""

import asyncio
import copy
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from keel.common.atomic_files import atomic_folder, write_manifest
from keel.config import Sampling
from keel.inference.local.decoder_selection import select_decoder
from keel.inference.local.local_engine import LocalEngine
from keel.inference.protocol import EngineError, Generation, WeightSource
from keel.training import Model
from keel.training.model.weights_io import write_weights
from tests.support.local_engine import (
    PROMPTS,
    generate,
    logprob_error,
    make_request,
    save_adapter,
    save_weights,
    with_engine,
)
from tests.support.policy_strategies import LORA, tiny


@pytest.mark.parametrize("family", ["tiny", "tiny-gemma3", "tiny-mixtral", "tiny-gpt-oss"])
def test_requests_after_a_weight_update_are_exact_for_the_new_weights(family: str, tmp_path: Path) -> None:
    other = tiny(family, seed=5)
    folder = save_weights(other, tmp_path / "w")

    async def use(engine: LocalEngine) -> tuple[Generation, Generation]:
        first = await generate(engine)
        await engine.load_weights(WeightSource.folder(folder), 7)
        assert await engine.version() == 7
        return first, await generate(engine)

    first, second = with_engine(tiny(family), use)
    assert first.versions == (0,) * len(first.token_ids)
    assert second.versions == (7,) * len(second.token_ids)
    assert logprob_error(other, [PROMPTS[0]], [second]) < 1e-5
    assert second == with_engine(other, lambda engine: with_version(generate(engine), 7))


async def with_version(pending: Awaitable[Generation], version: int) -> Generation:
    generation = await pending
    return replace(generation, versions=(version,) * len(generation.versions))


def test_a_request_in_flight_continues_and_its_versions_change_once(tmp_path: Path) -> None:
    other = tiny(seed=5)
    folder = save_weights(other, tmp_path / "w")

    async def use(engine: LocalEngine) -> list[Generation]:
        running = asyncio.create_task(engine.generate(PROMPTS[0], Sampling(max_tokens=2000, seed=3, temperature=0.7)))
        while not (await engine.health()).running:
            await asyncio.sleep(0.001)
        waiting = asyncio.create_task(engine.generate(PROMPTS[0], Sampling(max_tokens=9, seed=3)))
        await engine.load_weights(WeightSource.folder(folder), 1)
        running_after = asyncio.create_task(engine.generate(PROMPTS[0], Sampling(max_tokens=9, seed=4)))
        return list(await asyncio.gather(running, waiting, running_after))

    running, waiting, after = with_engine(tiny(), use, max_batch=1)
    switch = running.versions.index(1)
    assert 0 < switch < len(running.versions)
    assert running.versions == (0,) * switch + (1,) * (len(running.versions) - switch)
    # its prompt was computed by the old weights, and is computed again
    assert waiting.versions == (1,) * len(waiting.versions)
    assert logprob_error(other, [PROMPTS[0]] * 2, [waiting, after]) < 1e-5
    # the tokens before the switch are exact for the old weights
    before = Generation(
        running.token_ids[:switch], running.logprobs[:switch], running.versions[:switch], "length", temperature=0.7
    )
    assert logprob_error(tiny(), [PROMPTS[0]], [before]) < 1e-5


@pytest.mark.parametrize("kind", ["weights", "adapter"])
def test_with_drain_running_requests_keep_the_old_version_and_waiting_ones_get_the_new(
    kind: str, tmp_path: Path
) -> None:
    adapter = kind == "adapter"
    folder = save_adapter(tiny(lora=LORA), tmp_path / "a") if adapter else save_weights(tiny(seed=5), tmp_path / "w")

    async def use(engine: LocalEngine) -> list[Generation]:
        running = [asyncio.create_task(generate(engine, 400 + 100 * number)) for number in range(2)]
        queued = [asyncio.create_task(generate(engine, 5)) for _ in range(3)]
        while (await engine.health()).running < 2:
            await asyncio.sleep(0.001)
        source = WeightSource.adapter if adapter else WeightSource.folder
        loading = asyncio.create_task(engine.load_weights(source(folder), 1, drain=True))
        await asyncio.sleep(0.02)
        late = asyncio.create_task(generate(engine, 5))
        cancelled = asyncio.create_task(generate(engine, 5))
        await asyncio.sleep(0.02)
        cancelled.cancel()
        assert await engine.version() == 0
        await loading
        assert all(task.done() for task in running)
        assert await engine.version() == 1
        return list(await asyncio.gather(*running, *queued, late))

    generations = with_engine(tiny(), use, max_batch=2)
    assert [set(generation.versions) for generation in generations] == [{0}, {0}, {1}, {1}, {1}, {1}]
    assert generations[2] == generations[5]  # queued before and during the drain: both use only the new weights


def test_a_cancelled_drain_does_not_block_later_requests(tmp_path: Path) -> None:
    folder = save_weights(tiny(seed=5), tmp_path / "w")

    async def use(engine: LocalEngine) -> list[Generation]:
        running = asyncio.create_task(generate(engine, 100_000))
        while not (await engine.health()).running:
            await asyncio.sleep(0.001)
        loading = asyncio.create_task(engine.load_weights(WeightSource.folder(folder), 1, drain=True))
        await asyncio.sleep(0.1)
        late = asyncio.create_task(generate(engine, 5))
        await asyncio.sleep(0.05)
        assert not late.done()
        loading.cancel()
        generation = await late
        running.cancel()
        return [generation]

    assert set(with_engine(tiny(), use)[0].versions) == {0}


def test_after_an_update_new_weights_attend_to_keys_of_the_old_weights() -> None:
    """The result equals that of the model's own cache, filled by the old weights and read by the new ones."""
    old, new = tiny(), tiny(seed=5)
    row = make_request(PROMPTS[0])
    decoder: Any = select_decoder(old.network, "old")
    with torch.inference_mode():
        decoder.compute_logits([row])
        row.tokens.append(65)
        decoder.compute_logits([row])
        row.tokens.append(66)
        old.network.load_state_dict(new.network.state_dict())
        decoder.fused.refresh()
        logits = decoder.compute_logits([row])[0]
        reference = tiny()
        cache = reference.network(input_ids=torch.tensor([[*PROMPTS[0], 65]]), use_cache=True).past_key_values
        expected = new.network(input_ids=torch.tensor([[66]]), past_key_values=cache, use_cache=True).logits[0, -1]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_an_adapter_gives_the_results_of_peft_and_the_next_one_replaces_it(tmp_path: Path) -> None:
    adapted = tiny(lora=LORA)
    first = save_adapter(adapted, tmp_path / "a")
    with torch.no_grad():
        for name, weight in adapted.parameters().items():
            if "lora_B" in name:
                weight.mul_(-2)
    second = save_adapter(adapted, tmp_path / "b")

    async def use(engine: LocalEngine) -> list[Generation]:
        generations = [await generate(engine)]
        for version, folder in ((1, first), (2, second), (3, first)):
            await engine.load_weights(WeightSource.adapter(folder), version)
            generations.append(await generate(engine))
        return generations

    base = tiny()
    names = [name for name, _ in base.network.named_modules()]
    generations = with_engine(base, use)
    without, with_first, with_second, with_first_again = generations
    assert logprob_error(tiny(), [PROMPTS[0]], [without]) < 1e-5
    assert [generation.versions[0] for generation in generations] == [0, 1, 2, 3]
    for folder, generation in ((first, with_first), (second, with_second), (first, with_first_again)):
        merged = tiny()
        merged.network = PeftModel.from_pretrained(merged.network, folder).merge_and_unload()
        assert logprob_error(merged, [PROMPTS[0]], [generation]) < 1e-5
    assert with_first_again.token_ids == with_first.token_ids
    assert logprob_error(tiny(), [PROMPTS[0]], [with_first]) > 1e-3
    assert [name for name, _ in base.network.named_modules()] == names


def test_an_adapter_is_merged_into_the_weights_loaded_last(tmp_path: Path) -> None:
    adapter, weights = save_adapter(tiny(lora=LORA), tmp_path / "a"), save_weights(tiny(seed=5), tmp_path / "w")

    async def use(engine: LocalEngine) -> list[Generation]:
        await engine.load_weights(WeightSource.adapter(adapter), 1)
        await engine.load_weights(WeightSource.folder(weights), 2)
        without = await generate(engine)
        await engine.load_weights(WeightSource.adapter(adapter), 3)
        return [without, await generate(engine)]

    without, merged = with_engine(tiny(), use)
    assert logprob_error(tiny(seed=5), [PROMPTS[0]], [without]) < 1e-5
    other = tiny(seed=5)
    other.network = PeftModel.from_pretrained(other.network, adapter).merge_and_unload()
    assert logprob_error(other, [PROMPTS[0]], [merged]) < 1e-5


def _missing_folder(path: Path) -> str:
    return str(path / "missing")


def _other_model(path: Path) -> str:
    return save_weights(tiny("tiny-qwen3"), path)


def _wrong_shape(path: Path) -> str:
    model = copy.deepcopy(tiny().network)
    model.resize_token_embeddings(300, mean_resizing=False)
    model.save_pretrained(path)
    return str(path)


def _incomplete_adapter(path: Path) -> str:
    folder = save_adapter(tiny(lora=LORA), path)
    state = load_file(path / "adapter_model.safetensors")
    state.popitem()
    save_file(state, path / "adapter_model.safetensors")
    return folder


def _unsupported_adapter(path: Path) -> str:
    folder = save_adapter(tiny(lora=LORA), path)
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(config | {"peft_type": "IA3"}))
    return folder


def _wrong_rank(path: Path) -> str:
    folder = save_adapter(tiny(lora=LORA), path)
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(config | {"r": 3}))
    return folder


def _write_with_manifest(model: Model, path: Path) -> Path:
    with atomic_folder(path) as folder:
        write_weights(folder, model)
        write_manifest(folder)
    return path


def _flip_bit(folder: Path, file: str) -> None:
    content = bytearray((folder / file).read_bytes())
    content[-1] ^= 1
    (folder / file).write_bytes(content)


def _truncate(folder: Path, file: str) -> None:
    (folder / file).write_bytes((folder / file).read_bytes()[:-1])


def _remove(folder: Path, file: str) -> None:
    (folder / file).unlink()


def _add_file(folder: Path, file: str) -> None:
    (folder / f"more-{file}").write_bytes((folder / file).read_bytes())


@pytest.mark.parametrize("kind", ["model", "adapter_model"])
@pytest.mark.parametrize("damage", [_flip_bit, _truncate, _remove, _add_file])
def test_a_folder_that_differs_from_its_manifest_raises_an_error_that_names_the_file(
    damage: Callable[[Path, str], None], kind: str, tmp_path: Path
) -> None:
    adapter = kind != "model"
    bad = _write_with_manifest(tiny(seed=5, lora=LORA if adapter else None), tmp_path / "bad")
    good = _write_with_manifest(tiny(seed=6, lora=LORA if adapter else None), tmp_path / "good")
    damage(bad, f"{kind}.safetensors")
    without_manifest = _write_with_manifest(tiny(seed=7, lora=LORA if adapter else None), tmp_path / "without_manifest")
    (without_manifest / "manifest.json").unlink()

    async def use(engine: LocalEngine) -> None:
        source = WeightSource.adapter if adapter else WeightSource.folder
        before = await generate(engine)
        with pytest.raises(EngineError, match=rf"invalid: .*{kind}\.safetensors (is|has|was) ") as caught:
            await engine.load_weights(source(bad), 1)
        assert not caught.value.retryable
        with pytest.raises(EngineError, match=r"manifest\.json is missing"):
            await engine.load_weights(source(without_manifest), 1)
        assert await engine.version() == 0
        assert await generate(engine) == before
        await engine.load_weights(source(good), 1)
        assert await engine.version() == 1

    with_engine(tiny(), use)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (_missing_folder, "weights"),
        (_other_model, "weights"),
        (_wrong_shape, "weights"),
        (_missing_folder, "adapter"),
        (_incomplete_adapter, "adapter"),
        (_unsupported_adapter, "adapter"),
        (_wrong_rank, "adapter"),
    ],
)
def test_an_incompatible_folder_raises_an_error_and_changes_nothing(
    make: Callable[[Path], str], kind: str, tmp_path: Path
) -> None:
    good, bad = save_adapter(tiny(lora=LORA), tmp_path / "good"), make(tmp_path / "bad")

    async def use(engine: LocalEngine) -> None:
        await engine.load_weights(WeightSource.adapter(good), 1)
        before = await generate(engine)
        source = WeightSource.folder if kind == "weights" else WeightSource.adapter
        with pytest.raises(EngineError, match="bad") as caught:
            await engine.load_weights(source(bad), 2)
        assert not caught.value.retryable
        assert await engine.version() == 1
        assert await generate(engine) == before
        await engine.load_weights(WeightSource.adapter(good), 3)
        assert (await generate(engine)).token_ids == before.token_ids

    with_engine(tiny(), use)


def test_a_network_that_already_has_an_adapter_raises_an_error() -> None:
    model = tiny(lora=LORA)
    with pytest.raises(EngineError, match="load the adapter with load_weights"):
        LocalEngine(model.network, model.tokenizer)


def test_weights_can_be_loaded_from_a_state_dict_in_memory() -> None:
    other = tiny(seed=5)

    async def run() -> Generation:
        model = tiny()
        engine = LocalEngine(model.network, model.tokenizer)
        await engine.load_weights(WeightSource("in_memory", tensors=other.network.state_dict()), 4)
        generation = await generate(engine)
        await engine.close()
        return generation

    assert logprob_error(other, [PROMPTS[0]], [asyncio.run(run())]) < 1e-5
