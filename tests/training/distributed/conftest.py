"""Fixtures of the tests of several ranks."""

from collections.abc import Iterator

import pytest

from tests.support.rank_trainers import RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    rank_pool = RankPool()
    yield rank_pool
    rank_pool.close()
