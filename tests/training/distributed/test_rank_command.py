"""Test that micro-batches are assigned to ranks by cost and that rank commands preserve every bit."""

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


def micro_batch_cost(token_lists: list[IntArray], members: list[int]) -> float:
    """Return the cost of a micro-batch from its tree: each token once, and once against each of its ancestors."""
    tree = build_tree([token_lists[index] for index in members])
    return float(sum(cost(1, int(position)) for position in tree.positions))


@given(sequences(most=12), st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_every_sequence_is_computed_by_one_rank_and_ranks_have_equally_many_micro_batches(
    token_lists: list[IntArray], ranks: int
) -> None:
    bins = plan_micro_batches(token_lists, BUDGET, ranks=ranks)
    assigned = assign_to_ranks(token_lists, bins, ranks)
    assert len({len(own) for own in assigned}) == 1
    members = [index for own in assigned for batch in own if batch is not None for index in batch]
    assert sorted(members) == [index for index, tokens in enumerate(token_lists) if len(tokens)]
    for batch in bins:
        assert len(build_tree([token_lists[index] for index in batch])) <= BUDGET
    # a rank never has more micro-batches than a single process would have
    assert len(assigned[0]) <= len(plan_micro_batches(token_lists, BUDGET))


@given(sequences(most=12), st.integers(2, 4))
@settings(max_examples=100, deadline=None)
def test_micro_batches_that_run_at_the_same_time_have_similar_costs(token_lists: list[IntArray], ranks: int) -> None:
    assigned = assign_to_ranks(token_lists, plan_micro_batches(token_lists, BUDGET, ranks=ranks), ranks)
    rounds = [
        [micro_batch_cost(token_lists, batch) for batch in batches if batch is not None]
        for batches in zip(*assigned, strict=True)
    ]
    for costs, following in itertools.pairwise(rounds):
        assert min(costs) >= max(following) - 1e-9


def test_long_sequences_are_balanced_by_cost_and_not_by_count() -> None:
    rng = np.random.default_rng(0)
    token_lists = [rng.integers(0, 500, size) for size in (900, *[90] * 10)]
    first, second = assign_to_ranks(token_lists, plan_micro_batches(token_lists, 4096, ranks=2), 2)
    sizes = sorted(len(members) for members in (first[0] or [], second[0] or []))
    assert sizes[0] <= 3, "the long sequence shares its micro-batch with few others or none"
    costs = sorted(micro_batch_cost(token_lists, members) for members in (first[0] or [], second[0] or []))
    assert costs[1] < 1.35 * costs[0]


def test_samples_are_decoded_with_all_their_bits() -> None:
    rng = np.random.default_rng(1)
    for fields in ({}, {"version": 3, "role": 1}, {"name": "", "group": None}):
        samples = branching_samples(**fields)
        samples = [
            dataclasses.replace(sample, teacher_logprobs=rng.normal(size=len(sample)), advantage=np.pi / 7)
            for sample in samples
        ]
        arguments, decoded, rule = decode_command(encode_command(samples, version=4, folder="a/b"))
        assert arguments == {"version": 4, "folder": "a/b"} and rule is None
        for actual, expected in zip(decoded, samples, strict=True):
            for field in dataclasses.fields(expected):
                _assert_identical(getattr(actual, field.name), getattr(expected, field.name))


def _assert_identical(actual: Any, expected: Any) -> None:
    if isinstance(expected, np.ndarray):
        assert actual.dtype == expected.dtype and actual.tobytes() == expected.tobytes()
    else:
        assert actual == expected and type(actual) is type(expected)


@pytest.mark.parametrize("name", PRESETS)
def test_every_objective_is_decoded_unchanged(name: str) -> None:
    rule = keel.objective(name)
    decoded = decode_command(encode_command(objective=rule))[2]
    assert decoded is not None
    assert (decoded.composition, decoded.name, decoded.reasons) == (rule.composition, rule.name, rule.reasons)
