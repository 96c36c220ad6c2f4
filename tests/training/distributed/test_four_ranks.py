"""The trainer on four real processes: as one, and from two to four and back by a checkpoint."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.rank_trainers import (
    OBJECTIVES,
    Crews,
    assert_gone_on_with,
    assert_idle_ranks_take_part,
    assert_one_process,
)

CASES = ("token, small micro-batches", "token, LoRA", "sequence, small micro-batches", "step, LoRA, two updates")


@pytest.fixture(scope="module")
def crews() -> Iterator[Crews]:
    made = Crews()
    yield made
    made.close()


def test_a_checkpoint_of_two_ranks_is_gone_on_with_on_four(crews: Crews, tmp_path: Path) -> None:
    assert_gone_on_with(crews, 2, 4, False, tmp_path)


@pytest.mark.parametrize("case", CASES)
def test_four_ranks_are_one_process(case: str, crews: Crews, tmp_path: Path) -> None:
    assert_one_process(crews, 4, case, tmp_path)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_three_ranks_without_a_trainable_token_take_part(objective: str, crews: Crews) -> None:
    assert_idle_ranks_take_part(crews, 4, objective)


def test_a_checkpoint_of_four_ranks_is_gone_on_with_on_two(crews: Crews, tmp_path: Path) -> None:
    assert_gone_on_with(crews, 4, 2, True, tmp_path)
