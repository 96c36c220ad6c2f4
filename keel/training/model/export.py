"""Export a checkpoint to a plain Hugging Face folder that needs neither Keel nor peft.

An adapter is merged into its base; all weights are written with config, tokenizer and chat template. The folder is
loaded back from disk and its log-probs are compared with those of the checkpoint before it is renamed to its final
name, so every exported folder has been verified. Training state is not exported; to resume training, use the
checkpoint.
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
"""Largest relative log-prob difference that merging may cause: float32 sums are taken in another order."""
_PROBE_SEQUENCES, _PROBE_LENGTH = 4, 16


@dataclass(frozen=True)
class ExportResult:
    """What was written and how it was verified."""

    folder: Path
    checkpoint: Path
    kind: str
    """"full", or "adapter" if an adapter was merged."""
    base: str
    dtype: str
    size_bytes: int
    compared_positions: int
    """Number of positions compared, each over the full vocabulary."""
    max_logprob_difference: float
    """Largest difference between a log-prob of the exported folder and of the checkpoint's model."""


def export(
    checkpoint: Path, target: Path, *, dtype: str | None = None, base: str | None = None, force: bool = False
) -> ExportResult:
    """Write a checkpoint as a plain, verified Hugging Face folder.

    `checkpoint` is a step's folder, or the folder of a run or of its checkpoints, whose newest intact step is used.
    `dtype` defaults to that of the checkpoint. `base` is the current location of an adapter's base model, if it moved.
    `force` replaces a model at `target`.
    """
    folder = find_checkpoint(checkpoint)
    identity = atomic_files.read_json(folder / IDENTITY_FILE)
    trained_dtype = _parse_dtype(str(identity.get("dtype")))
    target_dtype = _parse_dtype(dtype or str(identity.get("dtype")))
    _check_target(target, folder, force)
    kind = identity.get("kind")
    if kind not in ("full", "adapter"):
        raise ModelError(f'{folder / IDENTITY_FILE} has kind "{kind}"; this version of keel supports full and adapter')
    network, origin, expected = _load_merged(folder, kind == "adapter", trained_dtype, base)
    tokenizer = _load_tokenizer(folder)
    _cast_weights(network, target_dtype)
    with atomic_files.atomic_folder(target.resolve()) as draft:
        write_network(draft, network, tokenizer, origin)
        difference = _verify(draft, network, expected, target_dtype)
        size = sum(path.stat().st_size for path in draft.iterdir())
        if target.exists():
            atomic_files.remove_folder(target.resolve())
    return ExportResult(
        folder=target,
        checkpoint=folder,
        kind=kind,
        base=str(identity.get("base")),
        dtype=dtype_name(target_dtype),
        size_bytes=size,
        compared_positions=_PROBE_SEQUENCES * _PROBE_LENGTH,
        max_logprob_difference=difference,
    )


def find_checkpoint(path: Path) -> Path:
    """Return the verified step folder a path refers to: the path itself, or the newest intact step of a run."""
    if not path.is_dir():
        raise ModelError(f"checkpoint {path} does not exist")
    if (path / IDENTITY_FILE).is_file() or (path / atomic_files.MANIFEST_FILE).is_file():
        atomic_files.verify_manifest(path)
        return path
    for folder in (path, path / "checkpoints"):
        checkpoints = Checkpoints(folder, CheckpointSettings())
        if checkpoints.steps():
            step = checkpoints.latest()
            if step is None:
                raise ModelError(
                    f"no checkpoint in {folder} is intact; steps: {', '.join(map(str, checkpoints.steps()))}"
                )
            return checkpoints.path(step)
    raise ModelError(
        f"{path} is not a checkpoint: it has no {IDENTITY_FILE}, and neither it nor its checkpoints/ has step_N folders"
    )


def _check_target(target: Path, checkpoint: Path, force: bool) -> None:
    target_path, checkpoint_path = target.resolve(), checkpoint.resolve()
    if target_path.is_relative_to(checkpoint_path) or checkpoint_path.is_relative_to(target_path):
        raise ModelError(f"target {target} and checkpoint {checkpoint} must not contain one another")
    if not target.exists():
        return
    if not target.is_dir():
        raise ModelError(f"target {target} is a file; choose a new or empty folder")
    if any(target.iterdir()):
        if not force:
            raise ModelError(f"target {target} exists and is not empty; use --force to replace the model in it")
        if not (target / "config.json").is_file():
            # --force with the wrong folder must not delete the user's files
            raise ModelError(f"target {target} is not empty and contains no model (no config.json): it is not replaced")


def _load_merged(
    folder: Path, adapter: bool, dtype: torch.dtype, base: str | None
) -> tuple[transformers.PreTrainedModel, Path, list[Tensor]]:
    """Return the network with its adapter merged, the folder its config comes from, and its expected log-probs.

    Weights are rounded to the dtype they were trained in and computed with in float32 or float64, so that the merged
    weights are the trained ones and rounding does not affect the comparison.
    """
    if not adapter:
        network = _read_rounded(folder, dtype)
        return network, folder, _probe_logprobs(network)
    origin = _resolve_base(folder, base)
    # load_model also handles bases that are stored quantised
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
            f"merging the adapter in {folder} changed log-probs by {difference:.1e}, more than {TOLERANCE:.0e};"
            " nothing was written"
        )
    return merged, origin.folder, expected


def _resolve_base(folder: Path, base_name: str | None) -> ModelSource:
    identity = atomic_files.read_json(folder / IDENTITY_FILE)
    path = str(atomic_files.read_json(folder / ADAPTER_CONFIG_FILE).get("base_model_name_or_path"))
    source = resolve_model(base_name or (path if Path(path).is_dir() else str(identity.get("base"))))
    if source.fingerprint != identity.get("base_fingerprint"):
        raise ModelError(
            f"{folder} is an adapter of {identity.get('base')} (fingerprint"
            f" {str(identity.get('base_fingerprint'))[:12]}), but {source.name} in {source.folder} has fingerprint"
            f" {source.fingerprint[:12]}; set --base to the base model"
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
    """Compare the written folder with the network, and return its log-prob difference from the checkpoint's model."""
    actual = _probe_logprobs(_read_rounded(written_folder, dtype))
    in_memory = _probe_logprobs(_cast_weights(network, _compute_dtype(dtype)))
    difference = _max_difference(actual, in_memory, relative=True)
    if not difference <= TOLERANCE:
        raise ModelError(f"log-probs of the exported folder, read back, differ by {difference:.1e}: it was removed")
    return _max_difference(actual, expected)


def _probe_logprobs(network: torch.nn.Module) -> list[Tensor]:
    """Return log-probs over the full vocabulary along a few fixed sequences."""
    config = network.config.get_text_config()  # type: ignore[operator, union-attr]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (_PROBE_SEQUENCES, _PROBE_LENGTH), generator=generator)
    network.eval()
    with torch.no_grad():
        # one sequence at a time: the logits of all would take gigabytes for a large vocabulary
        return [network(input_ids=row[None], use_cache=False).logits[0].log_softmax(-1) for row in tokens]


def _max_difference(actual: list[Tensor], expected: list[Tensor], *, relative: bool = False) -> float:
    largest = 0.0
    for actual_row, expected_row in zip(actual, expected, strict=True):
        difference = (actual_row.double() - expected_row.double()).abs()
        if relative:
            difference = difference / expected_row.double().abs().clamp(min=1.0)
        # Python's max() would silently ignore NaN
        largest = max(largest, float(difference.max())) if bool(difference.isfinite().all()) else float("inf")
    return largest


def _read_rounded(folder: Path, dtype: torch.dtype) -> transformers.PreTrainedModel:
    return _round_weights(read_network(folder, transformers.AutoModelForCausalLM, _compute_dtype(dtype)), dtype)


def _round_weights(network: transformers.PreTrainedModel, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """Round the network's weights to a dtype and return it ready to compute in float32 or float64."""
    return _cast_weights(_cast_weights(network, dtype), _compute_dtype(dtype))


def _cast_weights(network: transformers.PreTrainedModel, dtype: torch.dtype) -> transformers.PreTrainedModel:
    # not network.to(), which would also round the rotary embedding frequencies; these are not stored in the folder
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype)
    return network


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _parse_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ModelError(f'dtype "{name}" is not one of {", ".join(DTYPES)}')
    dtype: torch.dtype = getattr(torch, name)
    return dtype
