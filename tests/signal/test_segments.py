"""Sums by id equal a loop, for ids in any order: in sorted or unsorted runs, or scattered; and counts of signs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import keel
from keel.signal import cpu_ops
from keel.signal.segments import Segments, SequenceTable

LAYOUTS = {
    "packed and sorted": [1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 9, 9, 9, 9, 9],
    "packed, not sorted": [9, 9, 9, 9, 9, -4, -4, -4, -4, -4, -4, 2, 2, 2, 2, 2],
    "packed, one id in two runs": [3, 3, 3, 3, 3, 3, 8, 8, 8, 8, 8, 8, 3, 3, 3, 3, 3, 3],
    "scattered": [5, 1, 5, 2, 1, 5, 2, 2, 1, 0],
    "all different": [4, 3, 2, 1, 0],
    "one row": [7, 7, 7, 7, 7],
    "one entry": [10**15],
    "empty": [],
}
layouts = pytest.mark.parametrize("ids", LAYOUTS.values(), ids=LAYOUTS.keys())
id_lists = st.lists(st.integers(-3, 3), max_size=30) | st.lists(st.integers(-3, 3), max_size=5).map(
    lambda runs: [run_id for run_id in runs for _ in range(5)]
)


def check_against_loop(ids: list[int]) -> None:
    unique_ids = sorted(set(ids))
    positions = {row: [index for index, entry in enumerate(ids) if entry == row] for row in unique_ids}
    values = torch.arange(1.0, len(ids) + 1, dtype=torch.float64) / 4
    segments = Segments(torch.tensor(ids, dtype=torch.int64))
    assert segments.ids.tolist() == unique_ids
    assert len(segments) == len(unique_ids)
    assert segments.count().tolist() == [len(positions[row]) for row in unique_ids]
    assert segments.sum(values).tolist() == [sum(values[i].item() for i in positions[row]) for row in unique_ids]
    assert segments.sum(values > 2).tolist() == [
        sum(values[i].item() > 2 for i in positions[row]) for row in unique_ids
    ]
    row_values = torch.arange(len(unique_ids), dtype=torch.float64)
    assert segments.expand(row_values).tolist() == [float(unique_ids.index(entry)) for entry in ids]
    assert segments.max(-values).tolist() == [max(-values[i].item() for i in positions[row]) for row in unique_ids]


@layouts
def test_sums_counts_expansions_and_maxima_equal_a_loop(ids: list[int]) -> None:
    check_against_loop(ids)


@given(ids=id_lists)
def test_random_ids_equal_a_loop(ids: list[int]) -> None:
    check_against_loop(ids)


@layouts
def test_positions_by_row_are_ordered_by_row(ids: list[int]) -> None:
    order = Segments(torch.tensor(ids, dtype=torch.int64)).positions_by_row()
    positions = list(range(len(ids))) if order is None else order.tolist()
    assert positions == sorted(range(len(ids)), key=lambda index: ids[index])


def test_counts_of_long_rows_are_exact() -> None:
    """Counts are integers, and sums of booleans are exact at this size."""
    segments = Segments(torch.zeros(300_000, dtype=torch.int64))
    assert segments.count().tolist() == [300_000]
    assert segments.sum(torch.ones(300_000, dtype=torch.bool)).tolist() == [300_000.0]


def table(ids: list[int], **columns: list[float]) -> SequenceTable:
    return SequenceTable(torch.tensor(ids), {name: torch.tensor(values) for name, values in columns.items()})


def test_merging_tables_adds_by_id_and_treats_missing_columns_as_zero() -> None:
    merged = SequenceTable.merge([table([1, 5], a=[1.0, 2.0]), table([0, 5], a=[10.0, 20.0], b=[3.0, 4.0])])
    assert merged.ids.tolist() == [0, 1, 5]
    assert merged["a"].tolist() == [10.0, 1.0, 22.0]
    assert merged["b"].tolist() == [3.0, 0.0, 4.0]


def test_merging_does_not_modify_the_tables() -> None:
    parts = [table([1, 5], a=[1.0, 2.0]), table([5], a=[20.0])]
    SequenceTable.merge(parts)
    assert parts[0]["a"].tolist() == [1.0, 2.0]
    assert parts[1]["a"].tolist() == [20.0]


def test_merging_does_not_depend_on_the_order() -> None:
    parts = [table([1, 5], a=[1.0, 2.0]), table([], a=[]), table([0, 5], a=[8.0, 4.0])]
    parts[1] = SequenceTable(torch.zeros(0, dtype=torch.int64), {"a": torch.zeros(0)})
    forward, backward = SequenceTable.merge(parts), SequenceTable.merge(parts[::-1])
    assert forward.ids.tolist() == backward.ids.tolist()
    assert forward["a"].tolist() == backward["a"].tolist() == [8.0, 1.0, 6.0]


@pytest.mark.parametrize("ids", [[5, 1], [1], [5], []])
def test_selected_rows_are_in_the_requested_order(ids: list[int]) -> None:
    rows = table([1, 3, 5], a=[1.0, 3.0, 5.0]).select_rows(torch.tensor(ids, dtype=torch.int64))
    assert rows["a"].tolist() == [float(row) for row in ids]


@pytest.mark.parametrize("ids", [[0], [2], [9], [1, 4]])
def test_selecting_a_missing_row_is_an_error(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="other batches"):
        table([1, 3, 5], a=[1.0, 3.0, 5.0]).select_rows(torch.tensor(ids))


def test_groups_are_identified_by_id_and_not_by_stride() -> None:
    """Three groups of different sizes, interleaved: each rollout is compared with its own group only."""
    group = torch.tensor([2, 1, 2, 3, 1, 2, 3])
    rewards = torch.tensor([1.0, 0.0, 2.0, 5.0, 1.0, 3.0, 5.0])
    expected: Tensor = torch.tensor([-1.0, -0.5, 0.0, 0.0, 0.5, 1.0, 0.0])
    assert torch.equal(keel.advantages("group_mean", rewards, group), expected)


# Counts of signs


@given(
    st.lists(st.tuples(st.sampled_from([-2.0, -0.0, 0.0, 1e-30, 3.0]), st.booleans()), max_size=40),
    st.booleans(),
    st.sampled_from([1, 7, 64]),
)
def test_counts_of_signs_do_not_depend_on_the_block_size(
    values: list[tuple[float, bool]], masked: bool, block: int
) -> None:
    tensor = torch.tensor([value for value, _ in values])
    mask = torch.tensor([inside for _, inside in values], dtype=torch.bool) if masked else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_ops, "BLOCK_ENTRIES", block)
        counts = cpu_ops.count_signs(tensor, mask)
    positive = [value > 0 for value, _ in values]
    inside = sum(up and selected for up, (_, selected) in zip(positive, values, strict=True)) if masked else 0
    assert counts == (sum(positive), sum(value < 0 for value, _ in values), inside)
