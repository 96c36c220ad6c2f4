"""From a checkpoint to a plain Hugging Face folder that needs neither Keel nor peft.

An adapter is merged into its base; all weights are written with config, tokenizer and chat template. Before the folder
gets its name it is loaded back from the disk, and its log-probs are compared with those of the checkpoint's model: a
folder that exists is one that was verified. Training state is left out: to go on training, use the checkpoint.
"""

from dataclasses import dataclass
from pathlib import Path

import peft
import torch
import transformers
from torch import Tensor

from keel.common import atomic_files
from keel.common.lora_config_check import check_adapter
from keel.config.trainer import CheckpointSettings, ModelSettings
from keel.errors import ModelError
from keel.training.model.checkpoint import Checkpoints
from keel.training.model.model import load_model
from keel.training.model.model_source import ModelSource, resolve_model, suppress_hf_output
from keel.training.model.weights_io import ADAPTER_CONFIG_FILE, IDENTITY_FILE, dtype_name, read_network, write_network

DTYPES = ("float32", "bfloat16", "float16", "float64")
TOLERANCE = 1e-4
"""Relative difference of log-probs that merging may cause: sums are taken in another order, in float32."""
_PROBE_SEQUENCES, _PROBE_LENGTH = 4, 16


@dataclass(frozen=True)
class ExportResult:
    """What was written, and how it was verified."""

    folder: Path
    checkpoint: Path
    kind: str
    """"full" or "adapter", which was merged."""
    base: str
    dtype: str
    size_bytes: int
    compared_positions: int
    """How many positions were compared, over the whole vocabulary each."""
    max_logprob_difference: float
    """Largest difference between a log-prob of the folder and of the checkpoint's model."""


def export(
    checkpoint: Path, target: Path, *, dtype: str | None = None, base: str | None = None, force: bool = False
) -> ExportResult:
    """Write a checkpoint as a plain folder, verified.

    `checkpoint` is a step's folder, or the folder of a run or of its checkpoints, of which the newest whole one is
    taken. `dtype`: as in the checkpoint where not given. `base` says where an adapter's base model is now, if it moved.
    `force` replaces a model that is at `target`.
    """
    folder = find_checkpoint(checkpoint)
    said = atomic_files.read_json(folder / IDENTITY_FILE)
    trained, written = _parse_dtype(str(said.get("dtype"))), _parse_dtype(dtype or str(said.get("dtype")))
    _check_target(target, folder, force)
    kind = said.get("kind")
    if kind not in ("full", "adapter"):
        raise ModelError(f'{folder / IDENTITY_FILE} has kind "{kind}"; this version of keel knows full and adapter')
    network, origin, expected = _load_merged(folder, kind == "adapter", trained, base)
    tokenizer = _load_tokenizer(folder)
    _cast_weights(network, written)
    with atomic_files.atomic_folder(target.resolve()) as draft:
        write_network(draft, network, tokenizer, origin)
        difference = _verify(draft, network, expected, written)
        size = sum(path.stat().st_size for path in draft.iterdir())
        if target.exists():
            atomic_files.remove_folder(target.resolve())
    return ExportResult(
        folder=target,
        checkpoint=folder,
        kind=kind,
        base=str(said.get("base")),
        dtype=dtype_name(written),
        size_bytes=size,
        compared_positions=_PROBE_SEQUENCES * _PROBE_LENGTH,
        max_logprob_difference=difference,
    )


def find_checkpoint(path: Path) -> Path:
    """The step's folder that a path means, whole: itself, or the newest of a run."""
    if not path.is_dir():
        raise ModelError(f"checkpoint {path} does not exist")
    if (path / IDENTITY_FILE).is_file() or (path / atomic_files.MANIFEST_FILE).is_file():
        atomic_files.verify_manifest(path)
        return path
    for folder in (path, path / "checkpoints"):
        kept = Checkpoints(folder, CheckpointSettings())
        if kept.steps():
            step = kept.latest()
            if step is None:
                raise ModelError(f"no checkpoint in {folder} is whole; steps: {', '.join(map(str, kept.steps()))}")
            return kept.path(step)
    raise ModelError(
        f"{path} is no checkpoint: it has no {IDENTITY_FILE}, and no step_N folders are in it or its checkpoints/"
    )


def _check_target(target: Path, checkpoint: Path, force: bool) -> None:
    here, there = target.resolve(), checkpoint.resolve()
    if here.is_relative_to(there) or there.is_relative_to(here):
        raise ModelError(f"target {target} and checkpoint {checkpoint} must not hold one another")
    if not target.exists():
        return
    if not target.is_dir():
        raise ModelError(f"target {target} is a file")
    if any(target.iterdir()):
        if not force:
            raise ModelError(f"target {target} exists and is not empty; --force replaces a model that is there")
        if not (target / "config.json").is_file():
            # the wrong folder, given with --force, must not cost someone their files
            raise ModelError(f"target {target} is not empty and holds no model (no config.json): it is not replaced")


def _load_merged(
    folder: Path, adapter: bool, dtype: torch.dtype, base: str | None
) -> tuple[transformers.PreTrainedModel, Path, list[Tensor]]:
    """The network with its adapter merged, the folder whose config it has, and the log-probs it must keep.

    Weights are read in the dtype they were trained in and then computed with in float32 or better: what is merged is
    what was trained, and the comparison is not one of roundings.
    """
    if not adapter:
        network = _read_rounded(folder, dtype)
        return network, folder, _probe_logprobs(network)
    origin = _resolve_base(folder, base)
    # by the loader of training, which also knows bases that are stored in other forms
    settings = {"name": str(origin.folder), "dtype": dtype_name(_compute_dtype(dtype)), "device": "cpu"}
    network = _round_weights(load_model(ModelSettings.model_validate(settings)).network, dtype)
    check_adapter(folder)
    with suppress_hf_output():
        wrapper = peft.PeftModel.from_pretrained(network, str(folder), local_files_only=True)
        expected = _probe_logprobs(wrapper)
        merged: transformers.PreTrainedModel = wrapper.merge_and_unload()
    difference = _max_difference(_probe_logprobs(merged), expected, relative=True)
    if not difference <= TOLERANCE:
        raise ModelError(
            f"merging the adapter in {folder} moved log-probs by {difference:.1e}, more than {TOLERANCE:.0e}:"
            " nothing was written"
        )
    return merged, origin.folder, expected


def _resolve_base(folder: Path, base_name: str | None) -> ModelSource:
    said, config = atomic_files.read_json(folder / IDENTITY_FILE), atomic_files.read_json(folder / ADAPTER_CONFIG_FILE)
    path = str(config.get("base_model_name_or_path"))
    source = resolve_model(base_name or (path if Path(path).is_dir() else str(said.get("base"))))
    if source.fingerprint != said.get("base_fingerprint"):
        raise ModelError(
            f"{folder} is an adapter of {said.get('base')} (fingerprint {str(said.get('base_fingerprint'))[:12]});"
            f" {source.name} in {source.folder} has {source.fingerprint[:12]}: say with --base where its base is"
        )
    return source


def _load_tokenizer(folder: Path) -> transformers.PreTrainedTokenizerBase:
    try:
        with suppress_hf_output():
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"the tokenizer in {folder} cannot be loaded: {error}") from error
    assert isinstance(tokenizer, transformers.PreTrainedTokenizerBase)
    return tokenizer


def _verify(
    written_folder: Path, network: transformers.PreTrainedModel, expected: list[Tensor], dtype: torch.dtype
) -> float:
    """Compare what is on the disk with what was meant, and return how far it is from the checkpoint's model."""
    found = _probe_logprobs(_read_rounded(written_folder, dtype))
    meant = _probe_logprobs(_cast_weights(network, _compute_dtype(dtype)))
    difference = _max_difference(found, meant, relative=True)
    if not difference <= TOLERANCE:
        raise ModelError(f"the folder read back differs by {difference:.1e} in its log-probs: it was removed")
    return _max_difference(found, expected)


def _probe_logprobs(network: torch.nn.Module) -> list[Tensor]:
    """Log-probs of every token of the vocabulary along a few fixed sequences."""
    config = network.config.get_text_config()  # type: ignore[operator, union-attr]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (_PROBE_SEQUENCES, _PROBE_LENGTH), generator=generator)
    network.eval()
    with torch.no_grad():
        # one at a time: all logits at once would be gigabytes for a large vocabulary
        return [network(input_ids=row[None], use_cache=False).logits[0].log_softmax(-1) for row in tokens]


def _max_difference(actual: list[Tensor], expected: list[Tensor], *, relative: bool = False) -> float:
    largest = 0.0
    for one, other in zip(actual, expected, strict=True):
        gap = (one.double() - other.double()).abs()
        if relative:
            gap = gap / other.double().abs().clamp(min=1.0)
        # NaN is no small difference, and max() of Python would let it pass
        largest = max(largest, float(gap.max())) if bool(gap.isfinite().all()) else float("inf")
    return largest


def _read_rounded(folder: Path, dtype: torch.dtype) -> transformers.PreTrainedModel:
    return _round_weights(read_network(folder, transformers.AutoModelForCausalLM, _compute_dtype(dtype)), dtype)


def _round_weights(network: transformers.PreTrainedModel, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """The network with its weights rounded to a dtype, to be computed with in float32 or better."""
    return _cast_weights(_cast_weights(network, dtype), _compute_dtype(dtype))


def _cast_weights(network: transformers.PreTrainedModel, dtype: torch.dtype) -> transformers.PreTrainedModel:
    # not network.to(): that would round the frequencies of rotary embeddings too, which no folder holds
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype)
    return network


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _parse_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ModelError(f'dtype "{name}" is none of {", ".join(DTYPES)}')
    dtype: torch.dtype = getattr(torch, name)
    return dtype
