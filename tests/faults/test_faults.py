"""A few of all faults, with every test run: what `python -m tests.faults` does in full."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import disk, kills, scenes
from .lives import Lives
from .proxy import LOST, SPOILT
from .world import Result, World


@pytest.fixture(scope="module")
def lives() -> Iterator[Lives]:
    with Lives() as made:
        yield made


@pytest.fixture(scope="module")
def straight(lives: Lives, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synchronous run that nobody interrupted."""
    return kills.straight(lives, tmp_path_factory.mktemp("straight"), 12)


@pytest.fixture(scope="module")
def stopped(lives: Lives, tmp_path_factory: pytest.TempPathFactory) -> World:
    """A synchronous run that was killed in the middle."""
    return disk.stopped_run(lives, tmp_path_factory.mktemp("stopped"))


def assert_held(result: Result, *, stopped: int = 0) -> None:
    assert not result.violations, "\n".join(result.violations)
    assert result.injected and result.continued + result.stopped == result.runs
    assert result.stopped == stopped


def test_a_synchronous_run_is_killed_at_the_worst_moments_and_ends_with_the_same_bits(
    lives: Lives, straight: Path, tmp_path: Path
) -> None:
    told = kills.campaign(
        lives, tmp_path, kind="local", synchronous=True, victims=["trainer"], kills=3, compare=straight, seed=1
    )
    assert_held(told)


def test_trainer_and_servers_of_an_asynchronous_run_are_killed_and_nothing_is_lost_or_trained_twice(
    lives: Lives, tmp_path: Path
) -> None:
    assert_held(kills.campaign(lives, tmp_path, kind="pool", synchronous=False, victims=["both", "engine"], kills=2))


def test_answers_that_are_late_lost_cut_off_or_impossible_are_asked_for_again(lives: Lives, tmp_path: Path) -> None:
    faults = [fault for fault in (*LOST, *SPOILT) if fault not in ("hang", scenes.MISMATCH)]
    assert_held(scenes.wire(lives, tmp_path, *faults, share=0.4, steps=4))


def test_log_probs_that_do_not_match_are_said(lives: Lives, tmp_path: Path) -> None:
    assert_held(scenes.wire(lives, tmp_path, scenes.MISMATCH, share=1.0, steps=3))


def test_an_engine_that_never_answers_stops_the_run_and_is_named(lives: Lives, tmp_path: Path) -> None:
    assert_held(scenes.wire(lives, tmp_path, "error 500", share=1.0, stall=4), stopped=1)


def test_a_disk_without_room_stops_the_run_and_room_lets_it_go_on(lives: Lives, straight: Path, tmp_path: Path) -> None:
    assert_held(disk.limited(lives, tmp_path, 90_000, compare=straight), stopped=1)


@pytest.mark.parametrize("how", ["flip", "cut"])
def test_a_damaged_checkpoint_is_passed_over(stopped: World, straight: Path, tmp_path: Path, how: disk.Harm) -> None:
    chance = random.Random(how)
    assert_held(disk.checkpoint(stopped, tmp_path, how, chance, straight, all_=how == "cut"))


def test_a_damaged_record_stops_the_run_by_its_name(stopped: World, straight: Path, tmp_path: Path) -> None:
    assert_held(disk.record(stopped, tmp_path, "flip", random.Random(0), straight, needed=True), stopped=1)


def test_a_ledger_that_lost_its_log_is_refused(stopped: World, straight: Path, tmp_path: Path) -> None:
    assert_held(disk.ledger(stopped, tmp_path, "run.db-wal", "gone", random.Random(0), straight), stopped=1)


def test_episodes_that_fail_in_every_way_under_a_clock_that_jumps_are_tried_again(lives: Lives, tmp_path: Path) -> None:
    options = {"share": 0.3, "way": ["raise", "nan", "exit", "wait"], "clock": True}
    assert_held(scenes.episodes(lives, tmp_path, "all of them", options, seconds=1.0))


def test_an_episode_that_holds_the_event_loop_ends_the_process_and_is_named(lives: Lives, tmp_path: Path) -> None:
    assert_held(scenes.held(lives, tmp_path), stopped=1)
