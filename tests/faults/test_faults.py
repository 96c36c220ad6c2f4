"""A few faults of each kind; `python -m tests.faults` runs all of them."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import disk, kills, scenarios
from .processes import ForkServer
from .proxy import CORRUPTIONS, TRANSPORT_FAULTS
from .target_run import Result, TargetRun

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer() as started:
        yield started


@pytest.fixture(scope="module")
def uninterrupted(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an uninterrupted synchronous run."""
    return kills.uninterrupted(fork_server, tmp_path_factory.mktemp("uninterrupted"), 12)


@pytest.fixture(scope="module")
def stopped(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> TargetRun:
    """Return a synchronous run that was killed in the middle."""
    return disk.stopped_run(fork_server, tmp_path_factory.mktemp("stopped"))


def assert_no_violations(result: Result, *, stopped: int = 0) -> None:
    assert not result.violations, "\n".join(result.violations)
    assert result.injected and result.continued + result.stopped == result.runs
    assert result.stopped == stopped


def test_a_killed_synchronous_run_ends_with_the_same_bits(
    fork_server: ForkServer, uninterrupted: Path, tmp_path: Path
) -> None:
    result = kills.campaign(
        fork_server,
        tmp_path,
        kind="local",
        synchronous=True,
        victims=["trainer"],
        kills=3,
        compare=uninterrupted,
        seed=1,
    )
    assert_no_violations(result)


def test_kills_of_an_asynchronous_run_lose_no_rollout_and_train_none_twice(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    assert_no_violations(
        kills.campaign(fork_server, tmp_path, kind="pool", synchronous=False, victims=["both", "engine"], kills=2)
    )


def test_late_lost_truncated_or_invalid_completions_are_retried(fork_server: ForkServer, tmp_path: Path) -> None:
    faults = [fault for fault in (*TRANSPORT_FAULTS, *CORRUPTIONS) if fault not in ("hang", scenarios.MISMATCH)]
    assert_no_violations(scenarios.engine_faults(fork_server, tmp_path, *faults, share=0.4, steps=4))


def test_mismatched_log_probs_cause_a_warning(fork_server: ForkServer, tmp_path: Path) -> None:
    assert_no_violations(scenarios.engine_faults(fork_server, tmp_path, scenarios.MISMATCH, share=1.0, steps=3))


def test_an_engine_that_always_fails_stops_the_run_with_its_error(fork_server: ForkServer, tmp_path: Path) -> None:
    assert_no_violations(scenarios.engine_faults(fork_server, tmp_path, "error 500", share=1.0, stall=4), stopped=1)


def test_a_full_disk_stops_the_run_and_it_resumes_with_free_space(
    fork_server: ForkServer, uninterrupted: Path, tmp_path: Path
) -> None:
    assert_no_violations(disk.limited(fork_server, tmp_path, 90_000, compare=uninterrupted), stopped=1)


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_a_damaged_checkpoint_is_skipped(
    stopped: TargetRun, uninterrupted: Path, tmp_path: Path, damage: disk.Damage
) -> None:
    rng = random.Random(damage)
    assert_no_violations(
        disk.checkpoint(stopped, tmp_path, damage, rng, uninterrupted, all_checkpoints=damage == "cut")
    )


def test_a_damaged_record_stops_the_run_with_an_error_that_names_it(
    stopped: TargetRun, uninterrupted: Path, tmp_path: Path
) -> None:
    assert_no_violations(
        disk.record(stopped, tmp_path, "flip", random.Random(0), uninterrupted, needed=True), stopped=1
    )


def test_a_ledger_without_its_log_stops_the_run(stopped: TargetRun, uninterrupted: Path, tmp_path: Path) -> None:
    assert_no_violations(
        disk.ledger(stopped, tmp_path, "run.db-wal", "gone", random.Random(0), uninterrupted), stopped=1
    )


def test_failed_episodes_are_retried_while_the_clock_jumps(fork_server: ForkServer, tmp_path: Path) -> None:
    options = {"share": 0.3, "failure": ["raise", "nan", "exit", "wait"], "clock": True}
    assert_no_violations(scenarios.episodes(fork_server, tmp_path, "all of them", options, seconds=1.0))


def test_an_episode_that_blocks_the_event_loop_stops_the_run_and_is_named(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    assert_no_violations(scenarios.blocked_event_loop(fork_server, tmp_path), stopped=1)
