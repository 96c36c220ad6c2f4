"""A poll that comes much later than expected is time in which the process was suspended."""

from keel.common.suspend_clock import SuspendClock


class ManualClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_only_polls_later_than_the_threshold_count_as_suspended() -> None:
    clock = ManualClock()
    suspend_clock = SuspendClock(4.0, clock)
    clock.now += 3.0
    assert suspend_clock.poll(expected=1.0) == 0.0
    clock.now += 11.0
    assert suspend_clock.poll(expected=1.0) == 10.0
    clock.now += 5.5
    assert suspend_clock.poll() == 5.5
    assert suspend_clock.suspended_seconds == 15.5


def test_an_interval_starts_anew_without_counting_the_time_before_it() -> None:
    clock = ManualClock()
    suspend_clock = SuspendClock(4.0, clock)
    clock.now += 60.0
    assert suspend_clock.start() == clock.now
    clock.now += 1.0
    assert suspend_clock.poll(expected=1.0) == 0.0
    assert suspend_clock.suspended_seconds == 0.0
