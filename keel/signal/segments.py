"""Sums by id, from which all values of sequences and groups are computed.

Ids may be any integers in any order; position and stride do not matter. If equal ids are mostly adjacent, as in a
packed batch, sums are computed over runs, which is much cheaper than a scatter and gives the same result. There is no
padding and no Python loop over sequences.
"""

from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from keel.errors import BatchError
from keel.signal.cpu_ops import find_runs, repeat_runs, sum_runs


class Segments:
    """Entries grouped into rows by id: one row per distinct id, in increasing order of id."""

    def __init__(self, ids: Int[Tensor, "n"]) -> None:
        self._size = len(ids)
        runs, lengths = find_runs(ids)
        self._lengths: Int[Tensor, "runs"] | None = None
        """Lengths of the runs of equal ids; None if there are too many runs for them to be faster."""
        if 4 * len(runs) <= self._size:
            ids, self._lengths, self._starts = runs, lengths, lengths.cumsum(0) - lengths
        self.ids: Int[Tensor, "rows"] = ids.long()
        self._row_index: Int[Tensor, "runs or n"] | None = None
        """The row of each run, or of each entry without runs; None if the runs are the rows."""
        if self._lengths is None or (len(ids) > 1 and not bool((ids[1:] > ids[:-1]).all())):
            self.ids, self._row_index = torch.unique(self.ids, return_inverse=True)

    def __len__(self) -> int:
        return len(self.ids)

    def sum(self, values: Float[Tensor, "n"] | Bool[Tensor, "n"]) -> Float[Tensor, "rows"]:
        """Return the sum of `values` over each row."""
        if values.dtype == torch.bool:
            values = values.float()
        if self._lengths is not None:
            values = sum_runs(values, self._starts, self._lengths)
        return values if self._row_index is None else values.new_zeros(len(self)).index_add_(0, self._row_index, values)

    def count(self) -> Int[Tensor, "rows"]:
        """Return the number of entries in each row."""
        if self._lengths is None:
            return torch.bincount(cast(Tensor, self._row_index), minlength=len(self))
        if self._row_index is None:
            return self._lengths
        return self._lengths.new_zeros(len(self)).index_add_(0, self._row_index, self._lengths)

    def expand(self, rows: Tensor) -> Tensor:
        """Return for each entry the value of its row."""
        if self._row_index is not None:
            rows = rows[self._row_index]
        return rows if self._lengths is None else repeat_runs(rows, self._lengths, self._size)

    def max(self, values: Tensor) -> Tensor:
        """Return the largest value in each row."""
        if self._lengths is not None:
            largest = torch.segment_reduce(values.double(), "max", lengths=self._lengths, unsafe=True)
            values = largest.to(values.dtype)
        if self._row_index is None:
            return values
        return values.new_zeros(len(self)).scatter_reduce_(0, self._row_index, values, "amax", include_self=False)

    def positions_by_row(self) -> Int[Tensor, "n"] | None:
        """Return the positions of all entries ordered by row; None if they already are."""
        return None if self._row_index is None else self._run_entries(self._row_index.argsort(stable=True))

    def _run_entries(self, run_indices: Int[Tensor, "m"]) -> Int[Tensor, "m"]:
        """Return the positions of the entries of these runs, ordered by run."""
        if self._lengths is None:
            return run_indices
        lengths = self._lengths[run_indices]
        size = int(lengths.sum())
        shift = self._starts[run_indices] - (lengths.cumsum(0) - lengths)
        return repeat_runs(shift, lengths, size) + torch.arange(size, device=shift.device)


class SequenceTable:
    """Columns of sums per id, in increasing order of id, that can be merged across batches and ranks."""

    def __init__(self, ids: Int[Tensor, "rows"], columns: dict[str, Tensor]) -> None:
        self.ids = ids
        self.columns = columns

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    @staticmethod
    def merge(tables: list["SequenceTable"]) -> "SequenceTable":
        """Add tables over the union of their ids. A missing column counts as zero."""
        if len(tables) == 1:
            return tables[0]
        if not tables:
            return SequenceTable(torch.zeros(0, dtype=torch.int64), {})
        ids, row = torch.unique(torch.cat([table.ids for table in tables]), return_inverse=True)
        rows = row.split([len(table.ids) for table in tables])
        columns: dict[str, Tensor] = {}
        for table, row_index in zip(tables, rows, strict=True):
            for name, values in table.columns.items():
                if name not in columns:
                    columns[name] = values.new_zeros(len(ids))
                columns[name].index_add_(0, row_index, values)
        return SequenceTable(ids, columns)

    def select_rows(self, ids: Int[Tensor, "rows"]) -> "SequenceTable":
        """Return the rows with these ids, in their order. A missing id raises a `BatchError`."""
        if ids is self.ids:
            return self
        row_index = torch.searchsorted(self.ids, ids)
        present = row_index < len(self.ids)
        present[present.clone()] = self.ids[row_index[present]] == ids[present]
        if not bool(present.all()):
            missing = int(ids[~present][0])
            raise BatchError(
                f"batch.sequence contains {missing}, which is not in the totals: they were computed from other batches"
            )
        return SequenceTable(ids, {name: values[row_index] for name, values in self.columns.items()})
