"""Sums by id against a loop, for ids in any order: packed in runs, sorted or not, or scattered; and counts of signs."""

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
    "packed, an id returning": [3, 3, 3, 3, 3, 3, 8, 8, 8, 8, 8, 8, 3, 3, 3, 3, 3, 3],
    "scattered": [5, 1, 5, 2, 1, 5, 2, 2, 1, 0],
    "all different": [4, 3, 2, 1, 0],
    "one row": [7, 7, 7, 7, 7],
    "one entry": [10**15],
    "nothing": [],
}
layouts = pytest.mark.parametrize("ids", LAYOUTS.values(), ids=LAYOUTS.keys())
id_lists = st.lists(st.integers(-3, 3), max_size=30) | st.lists(st.integers(-3, 3), max_size=5).map(
    lambda runs: [each for each in runs for _ in range(5)]
)


def check(ids: list[int]) -> None:
    names = sorted(set(ids))
    places = {name: [place for place, each in enumerate(ids) if each == name] for name in names}
    values = torch.arange(1.0, len(ids) + 1, dtype=torch.float64) / 4
    segments = Segments(torch.tensor(ids, dtype=torch.int64))
    assert segments.ids.tolist() == names
    assert len(segments) == len(names)
    assert segments.count().tolist() == [len(places[name]) for name in names]
    assert segments.sum(values).tolist() == [sum(values[place].item() for place in places[name]) for name in names]
    assert segments.sum(values > 2).tolist() == [
        sum(values[place].item() > 2 for place in places[name]) for name in names
    ]
    row_values = torch.arange(len(names), dtype=torch.float64)
    assert segments.expand(row_values).tolist() == [float(names.index(each)) for each in ids]
    assert segments.max(-values).tolist() == [max(-values[place].item() for place in places[name]) for name in names]


@layouts
def test_sums_counts_spreads_and_maxima_equal_a_loop(ids: list[int]) -> None:
    check(ids)


@given(ids=id_lists)
def test_any_ids_in_any_order(ids: list[int]) -> None:
    check(ids)


@layouts
def test_in_order_puts_row_after_row(ids: list[int]) -> None:
    order = Segments(torch.tensor(ids, dtype=torch.int64)).positions_by_row()
    places = list(range(len(ids))) if order is None else order.tolist()
    assert places == sorted(range(len(ids)), key=lambda place: ids[place])


def test_long_rows_lose_no_count() -> None:
    """A count must stay exact where a float32 running sum of ones would still be, and in integers beyond."""
    segments = Segments(torch.zeros(300_000, dtype=torch.int64))
    assert segments.count().tolist() == [300_000]
    assert segments.sum(torch.ones(300_000, dtype=torch.bool)).tolist() == [300_000.0]


def table(ids: list[int], **columns: list[float]) -> SequenceTable:
    return SequenceTable(torch.tensor(ids), {name: torch.tensor(values) for name, values in columns.items()})


def test_merged_tables_add_by_id_and_count_missing_columns_as_zero() -> None:
    merged = SequenceTable.merge([table([1, 5], a=[1.0, 2.0]), table([0, 5], a=[10.0, 20.0], b=[3.0, 4.0])])
    assert merged.ids.tolist() == [0, 1, 5]
    assert merged["a"].tolist() == [10.0, 1.0, 22.0]
    assert merged["b"].tolist() == [3.0, 0.0, 4.0]


def test_merging_does_not_change_the_parts() -> None:
    parts = [table([1, 5], a=[1.0, 2.0]), table([5], a=[20.0])]
    SequenceTable.merge(parts)
    assert parts[0]["a"].tolist() == [1.0, 2.0]
    assert parts[1]["a"].tolist() == [20.0]


def test_merging_is_the_same_in_any_order() -> None:
    parts = [table([1, 5], a=[1.0, 2.0]), table([], a=[]), table([0, 5], a=[8.0, 4.0])]
    parts[1] = SequenceTable(torch.zeros(0, dtype=torch.int64), {"a": torch.zeros(0)})
    forward, backward = SequenceTable.merge(parts), SequenceTable.merge(parts[::-1])
    assert forward.ids.tolist() == backward.ids.tolist()
    assert forward["a"].tolist() == backward["a"].tolist() == [8.0, 1.0, 6.0]


@pytest.mark.parametrize("ids", [[5, 1], [1], [5], []])
def test_rows_come_back_in_the_order_asked_for(ids: list[int]) -> None:
    rows = table([1, 3, 5], a=[1.0, 3.0, 5.0]).select_rows(torch.tensor(ids, dtype=torch.int64))
    assert rows["a"].tolist() == [float(each) for each in ids]


@pytest.mark.parametrize("ids", [[0], [2], [9], [1, 4]])
def test_row_that_is_not_there_is_an_error(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="other batches"):
        table([1, 3, 5], a=[1.0, 3.0, 5.0]).select_rows(torch.tensor(ids))


def test_grouping_is_by_id_and_never_by_stride() -> None:
    """Three groups of different sizes, interleaved: each rollout is compared with its own group only."""
    group = torch.tensor([2, 1, 2, 3, 1, 2, 3])
    rewards = torch.tensor([1.0, 0.0, 2.0, 5.0, 1.0, 3.0, 5.0])
    expected: Tensor = torch.tensor([-1.0, -0.5, 0.0, 0.0, 0.5, 1.0, 0.0])
    assert torch.equal(keel.advantages("group_mean", rewards, group), expected)


# --- passes


@given(
    st.lists(st.tuples(st.sampled_from([-2.0, -0.0, 0.0, 1e-30, 3.0]), st.booleans()), max_size=40),
    st.booleans(),
    st.sampled_from([1, 7, 64]),
)
def test_signs_are_counted_whatever_the_block(values: list[tuple[float, bool]], masked: bool, block: int) -> None:
    numbers = torch.tensor([value for value, _ in values])
    mask = torch.tensor([inside for _, inside in values], dtype=torch.bool) if masked else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_ops, "BLOCK_ENTRIES", block)
        found = cpu_ops.count_signs(numbers, mask)
    ups = [value > 0 for value, _ in values]
    inside = sum(up and seen for up, (_, seen) in zip(ups, values, strict=True)) if masked else 0
    assert found == (sum(ups), sum(value < 0 for value, _ in values), inside)
