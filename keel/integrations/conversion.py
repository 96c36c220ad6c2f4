"""Convert a host's tensors to token batches and per-token results back to the host's layout.

Hosts hold completions padded to [sequences, tokens], packed into one row with an id per token, or as one tensor per
sequence. Only trainable tokens enter the batch, selected by index: what a host stores at padding, prompts and tool
output cannot reach the arithmetic.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from keel.errors import BatchError
from keel.signal import TokenBatch
from keel.signal.token_batch import FLOAT_FIELDS, ID_FIELDS

Field = Tensor | None
"""A value for each token or for each sequence; None where the host has none."""


def from_padded(
    logprobs: Float[Tensor, "B T"],
    mask: Int[Tensor, "B T"] | Bool[Tensor, "B T"],
    *,
    sequence: Int[Tensor, "B"] | None = None,
    trainer_version: int | None = None,
    **fields: Field,
) -> TokenBatch:
    """Return the tokens where the mask is nonzero. Fields are [B, T], [B, 1] or [B]; the latter hold for a sequence.

    `sequence` defaults to the row number. Use ids that are unique in the step if totals cover several micro-batches.
    """
    if logprobs.shape != mask.shape or logprobs.dim() != 2:
        raise BatchError(
            f"logprobs has shape {list(logprobs.shape)} and mask {list(mask.shape)}; both must be [sequences, tokens]"
        )
    rows, length = logprobs.shape
    selected_tokens = mask.bool()
    index = selected_tokens.reshape(-1).nonzero().squeeze(1)
    row_index = torch.arange(rows, device=mask.device).repeat_interleave(selected_tokens.sum(1), output_size=len(index))

    def select(name: str, value: Tensor) -> Tensor:
        if value.shape == (rows, length):
            return value.reshape(-1).index_select(0, index)
        if value.shape in ((rows,), (rows, 1)):
            return value.reshape(-1).index_select(0, row_index)
        raise BatchError(
            f"{name} has shape {list(value.shape)}; it must be {[rows, length]}, one value per token, or {[rows]}"
        )

    if sequence is None:
        sequence = torch.arange(rows, device=logprobs.device)
    all_fields = {"logprobs": logprobs, "sequence": sequence, **fields}
    return _make_batch(
        {name: select(name, value) for name, value in all_fields.items() if value is not None}, trainer_version
    )


def to_padded(values: Tensor, mask: Tensor, fill: float = 0) -> Tensor:
    """Return per-token values of a batch from `from_padded` at their positions, and `fill` elsewhere."""
    padded = torch.full((mask.numel(),), fill, dtype=values.dtype, device=values.device)
    index = mask.reshape(-1).nonzero().squeeze(1)
    return padded.index_copy_(0, index, values).view(mask.shape)


def from_packed(
    logprobs: Float[Tensor, "T"],
    sequence: Int[Tensor, "T"],
    *,
    mask: Tensor | None = None,
    trainer_version: int | None = None,
    **fields: Field,
) -> TokenBatch:
    """Return the tokens of a packed row where the mask is nonzero; without a mask, all of them.

    `sequence` has the id of each token's sequence. Every field has a value for each token.
    """
    all_fields = {"logprobs": logprobs, "sequence": sequence, **fields}
    values = {name: value for name, value in all_fields.items() if value is not None}
    if mask is not None:
        index = mask.nonzero().squeeze(1)
        values = {name: value.index_select(0, index) for name, value in values.items()}
    return _make_batch(values, trainer_version)


def from_sequences(
    logprobs: Sequence[Float[Tensor, "t"]],
    masks: Sequence[Tensor] | None = None,
    *,
    trainer_version: int | None = None,
    **fields: Sequence[Tensor | float | int] | None,
) -> TokenBatch:
    """Return the tokens of several sequences, numbered in order. A number holds for all tokens of its sequence."""
    values: dict[str, Tensor] = {"logprobs": torch.cat(list(logprobs))}
    ids = [torch.full((len(row),), number, device=row.device) for number, row in enumerate(logprobs)]
    values["sequence"] = torch.cat(ids)
    for name, column in fields.items():
        if column is None:
            continue
        pairs = zip(logprobs, column, strict=True)
        values[name] = torch.cat([_expand(name, value, row) for row, value in pairs])
    mask = None if masks is None else torch.cat(list(masks))
    return from_packed(
        values.pop("logprobs"), values.pop("sequence"), mask=mask, trainer_version=trainer_version, **values
    )


def _expand(name: str, value: Tensor | float | int, row: Tensor) -> Tensor:
    if isinstance(value, Tensor) and value.dim():
        return value
    dtype = torch.int64 if name in ID_FIELDS else row.dtype
    return torch.full((len(row),), float(value) if name in FLOAT_FIELDS else int(value), dtype=dtype, device=row.device)


def _make_batch(values: dict[str, Tensor], trainer_version: int | None) -> TokenBatch:
    unknown = [name for name in values if name not in (*FLOAT_FIELDS, *ID_FIELDS)]
    if unknown:
        raise BatchError(f"{unknown[0]} is not a field of a token batch")
    trainable = torch.ones(len(values["logprobs"]), dtype=torch.bool, device=values["logprobs"].device)
    arguments: dict[str, Any] = {"sampler_logprobs": None, **values}
    if "version" not in values:
        trainer_version = None
    return TokenBatch(**arguments, trainable=trainable, trainer_version=trainer_version)
