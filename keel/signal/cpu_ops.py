"""Passes over masks and runs of equal ids, which torch does slowly on a CPU: five to ten times the cost of an addition.

On a CPU they go through numpy, on the same memory and with the same result; on other devices torch does them.
Nothing here carries a gradient.
"""

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

BLOCK_ENTRIES = 131072
"""Entries that several passes look at together."""


def less_than(values: Float[Tensor, "n"], bound: float | Float[Tensor, "n"]) -> Bool[Tensor, "n"]:
    """values < bound"""
    if values.device.type != "cpu":
        return values < bound
    return torch.from_numpy(np.less(values.numpy(), bound.numpy() if isinstance(bound, Tensor) else bound))


def greater_than(values: Float[Tensor, "n"], bound: float) -> Bool[Tensor, "n"]:
    """values > bound"""
    return torch.from_numpy(np.greater(values.numpy(), bound)) if values.device.type == "cpu" else values > bound


def count_true(mask: Bool[Tensor, "n"], other_mask: Bool[Tensor, "n"] | None = None) -> int:
    """How many entries are true: in the mask, or in both."""
    if mask.device.type != "cpu":
        return int(torch.count_nonzero(mask if other_mask is None else mask & other_mask))
    return int(
        np.count_nonzero(mask.numpy() if other_mask is None else np.logical_and(mask.numpy(), other_mask.numpy()))
    )


def count_signs(values: Float[Tensor, "n"], selected: Bool[Tensor, "n"] | None) -> tuple[int, int, int]:
    """How many values are positive, how many negative, and how many of those within a mask positive."""
    if values.device.type != "cpu":
        up = values > 0
        return count_true(up), count_true(values < 0), 0 if selected is None else count_true(up, selected)
    ups = downs = inside = 0
    array, mask = values.numpy(), None if selected is None else selected.numpy()
    sign = np.empty(min(BLOCK_ENTRIES, len(array)), dtype=bool)
    for first in range(0, len(array), BLOCK_ENTRIES):  # what is read twice stays in the cache
        some = array[first : first + BLOCK_ENTRIES]
        here = sign[: len(some)]
        downs += int(np.count_nonzero(np.less(some, 0.0, out=here)))
        ups += int(np.count_nonzero(np.greater(some, 0.0, out=here)))
        if mask is not None:
            inside += int(np.count_nonzero(np.logical_and(here, mask[first : first + BLOCK_ENTRIES], out=here)))
    return ups, downs, inside


def find_runs(ids: Int[Tensor, "n"]) -> tuple[Int[Tensor, "runs"], Int[Tensor, "runs"]]:
    """The value and the length of each run of equal ids."""
    if ids.device.type != "cpu" or len(ids) == 0:
        runs, lengths = torch.unique_consecutive(ids, return_counts=True)
        return runs.clone(), lengths.clone()  # clones, since what it returns holds memory for a run per entry
    array = ids.numpy()
    starts = np.concatenate(([0], np.flatnonzero(array[1:] != array[:-1]) + 1))
    lengths = np.diff(starts, append=len(array))
    return torch.from_numpy(array[starts]), torch.from_numpy(lengths)


def sum_runs(
    values: Float[Tensor, "n"], starts: Int[Tensor, "runs"], lengths: Int[Tensor, "runs"]
) -> Float[Tensor, "runs"]:
    """The sum over each run."""
    if values.device.type != "cpu" or len(lengths) == 0:
        return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)
    return torch.from_numpy(np.add.reduceat(values.numpy(), starts.numpy()))


def repeat_runs(values: Tensor, lengths: Int[Tensor, "runs"], size: int) -> Tensor:
    """Each run's value for all of its entries, `size` of them in total."""
    if values.device.type != "cpu":
        return values.repeat_interleave(lengths, output_size=size)
    return torch.from_numpy(np.repeat(values.numpy(), lengths.numpy()))
