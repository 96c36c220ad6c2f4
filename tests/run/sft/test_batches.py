"""Every epoch contains each row once in its own order, which depends on the seed and the step alone."""

from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from keel.config import load_settings
from keel.run.sft.batches import RowOrder, steps_of_epochs
from keel.run.sft.conversations import SftData
from tests.support.sft_runs import sft_overrides


def order_of(rows: int, rows_per_step: int, **changes: Any) -> tuple[RowOrder, int | None]:
    changes = {"sft__rows_per_step": rows_per_step, **changes}
    settings = load_settings(None, sft_overrides(Path("rows.jsonl"), **changes)).settings
    assert settings.sft is not None
    data = SftData(range(rows), range(0), "", settings.sft.dataset)  # type: ignore[arg-type]
    return RowOrder(settings, data), steps_of_epochs(settings.sft, rows)


@given(st.integers(1, 30), st.integers(1, 8), st.floats(0.2, 4), st.booleans())
def test_epochs_train_every_row_equally_often(rows: int, rows_per_step: int, epochs: float, shuffle: bool) -> None:
    order, steps = order_of(rows, rows_per_step, sft__epochs=epochs, sft__shuffle=shuffle)
    assert steps is not None
    taken = [pair for step in range(1, steps + 1) for pair in order.step_rows(step)]
    assert [position for position, _ in taken] == list(range(max(round(epochs * rows), 1)))
    for start in range(0, len(taken), rows):
        epoch = [row for _, row in taken[start : start + rows]]
        assert len(set(epoch)) == len(epoch)
        assert shuffle or epoch == list(range(len(epoch)))
    assert not list(order.step_rows(steps + 1))


def rows_of(order: RowOrder, steps: range) -> list[int]:
    return [row for step in steps for _, row in order.step_rows(step)]


def test_the_order_depends_on_the_seed_and_the_epoch_and_on_nothing_before_a_step() -> None:
    order, steps = order_of(40, 8)
    assert steps is None
    first, second = rows_of(order, range(1, 6)), rows_of(order, range(6, 11))
    assert sorted(first) == sorted(second) == list(range(40)) and first != second
    again, _ = order_of(40, 8)
    assert rows_of(again, range(6, 11)) == second
    other, _ = order_of(40, 8, seed=1)
    assert rows_of(other, range(1, 6)) != first
