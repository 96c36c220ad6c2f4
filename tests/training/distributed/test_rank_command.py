"""Work dealt to ranks by what it costs, and what rank 0 sends to the others: every bit arrives."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import keel
from keel.objectives.catalog import PRESETS
from keel.training.distributed.rank_command import decode_command, encode_command
from keel.training.step.prefix_tree import IntArray, assign_to_ranks, build_tree, cost, plan_micro_batches
from tests.support.policy_strategies import branching_samples, sequences

BUDGET = 24


def price(found: list[IntArray], members: list[int]) -> float:
    """What a micro-batch costs, from its tree: each token once, and once against each before it in its sequence."""
    tree = build_tree([found[index] for index in members])
    return float(sum(cost(1, int(position)) for position in tree.positions))


@given(sequences(most=12), st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_every_sequence_is_computed_by_one_rank_in_equally_many_turns(found: list[IntArray], ranks: int) -> None:
    bins = plan_micro_batches(found, BUDGET, ranks=ranks)
    dealt = assign_to_ranks(found, bins, ranks)
    assert len({len(mine) for mine in dealt}) == 1
    members = [index for mine in dealt for one in mine if one is not None for index in one]
    assert sorted(members) == [index for index, one in enumerate(found) if len(one)]
    for one in bins:
        assert len(build_tree([found[index] for index in one])) <= BUDGET
    # never more turns than one process would have micro-batches
    assert len(dealt[0]) <= len(plan_micro_batches(found, BUDGET))


@given(sequences(most=12), st.integers(2, 4))
@settings(max_examples=100, deadline=None)
def test_what_runs_at_the_same_time_is_of_like_cost(found: list[IntArray], ranks: int) -> None:
    dealt = assign_to_ranks(found, plan_micro_batches(found, BUDGET, ranks=ranks), ranks)
    turns = [[price(found, one) for one in turn if one is not None] for turn in zip(*dealt, strict=True)]
    for turn, following in itertools.pairwise(turns):
        assert min(turn) >= max(following) - 1e-9


def test_long_sequences_are_balanced_by_cost_and_not_by_count() -> None:
    chance = np.random.default_rng(0)
    found = [chance.integers(0, 500, size) for size in (900, *[90] * 10)]
    first, second = assign_to_ranks(found, plan_micro_batches(found, 4096, ranks=2), 2)
    sizes = sorted(len(members) for members in (first[0] or [], second[0] or []))
    assert sizes[0] <= 3, "the long one has little or nothing beside it"
    prices = sorted(price(found, members) for members in (first[0] or [], second[0] or []))
    assert prices[1] < 1.35 * prices[0]


def test_samples_arrive_with_all_their_bits() -> None:
    chance = np.random.default_rng(1)
    for fields in ({}, {"version": 3, "role": 1}, {"name": "", "group": None}):
        samples = branching_samples(**fields)
        samples = [
            dataclasses.replace(sample, teacher_logprobs=chance.normal(size=len(sample)), advantage=np.pi / 7)
            for sample in samples
        ]
        said, found, rule = decode_command(encode_command(samples, version=4, folder="a/b"))
        assert said == {"version": 4, "folder": "a/b"} and rule is None
        for one, other in zip(found, samples, strict=True):
            for field in dataclasses.fields(other):
                _same(getattr(one, field.name), getattr(other, field.name))


def _same(found: Any, wanted: Any) -> None:
    if isinstance(wanted, np.ndarray):
        assert found.dtype == wanted.dtype and found.tobytes() == wanted.tobytes()
    else:
        assert found == wanted and type(found) is type(wanted)


@pytest.mark.parametrize("name", PRESETS)
def test_every_objective_arrives_as_it_was(name: str) -> None:
    rule = keel.objective(name)
    found = decode_command(encode_command(objective=rule))[2]
    assert found is not None
    assert (found.composition, found.name, found.reasons) == (rule.composition, rule.name, rule.reasons)
