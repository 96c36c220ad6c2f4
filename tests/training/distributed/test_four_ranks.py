"""Test that the trainer on four real processes equals one process, and that checkpoints move between two and four."""

from pathlib import Path

import pytest

from tests.support.rank_trainers import (
    OBJECTIVES,
    RankPool,
    assert_idle_ranks_take_part,
    assert_matches_one_process,
    assert_resumes_on_other_ranks,
)

CASES = (
    "token, small micro-batches",
    "token, LoRA",
    "sequence, small micro-batches",
    "step, LoRA, two optimizer steps",
)

pytestmark = pytest.mark.process


def test_a_checkpoint_of_two_ranks_resumes_on_four(pool: RankPool, tmp_path: Path) -> None:
    assert_resumes_on_other_ranks(pool, 2, 4, False, tmp_path)


@pytest.mark.parametrize("case", CASES)
def test_four_ranks_match_one_process(case: str, pool: RankPool, tmp_path: Path) -> None:
    assert_matches_one_process(pool, 4, case, tmp_path)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_three_ranks_without_a_trainable_token_take_part(objective: str, pool: RankPool) -> None:
    assert_idle_ranks_take_part(pool, 4, objective)


def test_a_checkpoint_of_four_ranks_resumes_on_two(pool: RankPool, tmp_path: Path) -> None:
    assert_resumes_on_other_ranks(pool, 4, 2, True, tmp_path)
