"""Operations on masks and runs of equal ids that are slow in torch on CPU: five to ten times the cost of an addition.

On CPU they use numpy, on the same memory and with the same result; on other devices they use torch. Nothing here
carries a gradient.
"""

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

BLOCK_ENTRIES = 131072
"""Entries per block, so that data read by several passes stays in the cache."""


def less_than(values: Float[Tensor, "n"], bound: float | Float[Tensor, "n"]) -> Bool[Tensor, "n"]:
    """Return values < bound."""
    if values.device.type != "cpu":
        return values < bound
    return torch.from_numpy(np.less(values.numpy(), bound.numpy() if isinstance(bound, Tensor) else bound))


def greater_than(values: Float[Tensor, "n"], bound: float) -> Bool[Tensor, "n"]:
    """Return values > bound."""
    return torch.from_numpy(np.greater(values.numpy(), bound)) if values.device.type == "cpu" else values > bound


def count_true(mask: Bool[Tensor, "n"], other_mask: Bool[Tensor, "n"] | None = None) -> int:
    """Return the number of entries that are true in the mask, or in both masks."""
    if mask.device.type != "cpu":
        return int(torch.count_nonzero(mask if other_mask is None else mask & other_mask))
    return int(
        np.count_nonzero(mask.numpy() if other_mask is None else np.logical_and(mask.numpy(), other_mask.numpy()))
    )


def count_signs(values: Float[Tensor, "n"], selected: Bool[Tensor, "n"] | None) -> tuple[int, int, int]:
    """Return the number of positive values, of negative values, and of positive values where `selected` is true."""
    if values.device.type != "cpu":
        is_positive = values > 0
        num_selected = 0 if selected is None else count_true(is_positive, selected)
        return count_true(is_positive), count_true(values < 0), num_selected
    positive = negative = selected_positive = 0
    array, mask = values.numpy(), None if selected is None else selected.numpy()
    buffer = np.empty(min(BLOCK_ENTRIES, len(array)), dtype=bool)
    for start in range(0, len(array), BLOCK_ENTRIES):
        block = array[start : start + BLOCK_ENTRIES]
        sign = buffer[: len(block)]
        negative += int(np.count_nonzero(np.less(block, 0.0, out=sign)))
        positive += int(np.count_nonzero(np.greater(block, 0.0, out=sign)))
        if mask is not None:
            np.logical_and(sign, mask[start : start + BLOCK_ENTRIES], out=sign)
            selected_positive += int(np.count_nonzero(sign))
    return positive, negative, selected_positive


def find_runs(ids: Int[Tensor, "n"]) -> tuple[Int[Tensor, "runs"], Int[Tensor, "runs"]]:
    """Return the value and the length of each run of equal ids."""
    if ids.device.type != "cpu" or len(ids) == 0:
        runs, lengths = torch.unique_consecutive(ids, return_counts=True)
        return runs.clone(), lengths.clone()  # its results are views of buffers with one element per entry
    array = ids.numpy()
    starts = np.concatenate(([0], np.flatnonzero(array[1:] != array[:-1]) + 1))
    lengths = np.diff(starts, append=len(array))
    return torch.from_numpy(array[starts]), torch.from_numpy(lengths)


def sum_runs(
    values: Float[Tensor, "n"], starts: Int[Tensor, "runs"], lengths: Int[Tensor, "runs"]
) -> Float[Tensor, "runs"]:
    """Return the sum over each run."""
    if values.device.type != "cpu" or len(lengths) == 0:
        return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)
    return torch.from_numpy(np.add.reduceat(values.numpy(), starts.numpy()))


def repeat_runs(values: Tensor, lengths: Int[Tensor, "runs"], size: int) -> Tensor:
    """Repeat the value of each run for all of its entries; `size` is the total number of entries."""
    if values.device.type != "cpu":
        return values.repeat_interleave(lengths, output_size=size)
    return torch.from_numpy(np.repeat(values.numpy(), lengths.numpy()))
