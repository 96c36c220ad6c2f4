"""Record the tokens of another trainer's steps as the parquet files that `keel compare` reads.

One file per optimizer step, one row per sequence, with the columns of Keel's own records that a host can fill. Files
are written under a temporary name and renamed.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from keel.common.atomic_files import atomic_file
from keel.signal import ObjectiveResult, TokenBatch

_FLOATS = pa.list_(pa.float64())
SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("version", pa.int32()),
        ("group", pa.string()),
        ("outcome", pa.string()),
        ("advantage", _FLOATS),
        ("temperature", pa.float64()),
        ("token_ids", pa.list_(pa.int32())),
        ("token_text", pa.list_(pa.string())),
        ("trainable", pa.list_(pa.bool_())),
        ("versions", pa.list_(pa.int32())),
        ("sampler_logprobs", _FLOATS),
        ("logprobs", _FLOATS),
        ("proximal_logprobs", _FLOATS),
        ("reference_logprobs", _FLOATS),
        ("entropy", _FLOATS),
        ("dloss_dlogprob", _FLOATS),
        ("drop_reason", pa.list_(pa.string())),
    ]
)
"""The columns of `step_NNNNNN.parquet`. A column the host has no values for is null."""

Row = dict[str, Any]


class TokenRecorder:
    """Collects the sequences of a step and writes them when it ends."""

    def __init__(self, folder: str | Path, decode: Callable[[list[int]], str], temperature: float = 1.0) -> None:
        self.folder = Path(folder)
        self._decode, self._temperature = decode, temperature
        self._texts: dict[int, str] = {}
        self._rows: list[Row] = []

    def add(
        self,
        batch: TokenBatch,
        result: ObjectiveResult,
        token_ids: Tensor,
        attention_mask: Tensor,
        loss_mask: Tensor,
    ) -> None:
        """Add a micro-batch of padded rows of prompt and completion; `loss_mask` covers the last columns of them.

        The batch must hold the tokens where `loss_mask` is nonzero, in order, as `from_padded` does.
        """
        columns = {name: value.detach().tolist() for name, value in batch.tensors().items()}
        columns["dloss_dlogprob"] = result.gradient.tolist()
        names = result.objective.reasons
        columns["drop_reason"] = [names[code] if code else None for code in result.reasons.tolist()]
        start, offset = 0, token_ids.shape[1] - loss_mask.shape[1]
        for ids, attended, trained in zip(
            token_ids.tolist(), attention_mask.bool().tolist(), loss_mask.bool().tolist(), strict=True
        ):
            present = [position for position, is_present in enumerate(attended) if is_present]
            slots = [position >= offset and trained[position - offset] for position in present]
            part = slice(start, start + sum(slots))
            start = part.stop
            self._rows.append(self._row([ids[position] for position in present], slots, columns, part))

    def _row(self, ids: list[int], trainable: list[bool], columns: dict[str, list[Any]], part: slice) -> Row:
        def scatter(name: str, fill: Any = None) -> list[Any] | None:
            if name not in columns:
                return None
            values = iter(columns[name][part])
            return [next(values) if used else fill for used in trainable]

        for token in ids:
            if token not in self._texts:
                self._texts[token] = self._decode([token])
        row: Row = {"outcome": "trained", "temperature": self._temperature, "token_ids": ids, "trainable": trainable}
        row["token_text"] = [self._texts[token] for token in ids]
        row["group"] = str(columns["group"][part.start]) if "group" in columns and any(trainable) else None
        row["advantage"], row["versions"] = scatter("advantages", 0.0), scatter("version", -1)
        per_token = ("sampler_logprobs", "logprobs", "proximal_logprobs", "reference_logprobs", "entropy")
        return row | {name: scatter(name) for name in (*per_token, "dloss_dlogprob", "drop_reason")}

    def take_rows(self) -> list[Row]:
        """Return the rows since the last call, for a host that gathers those of all ranks before they are written."""
        rows, self._rows = self._rows, []
        return rows

    def write(self, step: int, version: int, rows: list[Row]) -> Path | None:
        """Write the rows of a step; without rows, nothing."""
        if not rows:
            return None
        self.folder.mkdir(parents=True, exist_ok=True)
        target = self.folder / f"step_{step:06d}.parquet"
        for row in rows:
            row |= {"step": step, "version": version}
        columns = {name: [row.get(name) for row in rows] for name in SCHEMA.names}
        with atomic_file(target) as temporary:
            pq.write_table(pa.table(columns, schema=SCHEMA), temporary, compression="zstd")
        return target
