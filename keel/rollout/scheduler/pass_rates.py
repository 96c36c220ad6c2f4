"""Running pass rates of the tasks of one environment, and the pools of tasks that follow from them.

A group counts once, in the step whose batch it belongs to, also if refill replaced it there: the scheduler records the
groups of a batch when it cuts the batch, and the caller saves the changed records together with its snapshot. Memory
grows with the tasks that were sampled, not with those that exist.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from keel.config.rollout import CurriculumSettings

THRESHOLD_TOLERANCE = 1e-9
"""A weighted sum such as 0.7 + 0.2 + 0.1 passes a threshold of 1."""
RATE_SCALE = 2**40
"""Pass rates are summed in this many parts, as integers: the mean then does not depend on the order of the updates."""


class TaskRecord(NamedTuple):
    """What is known about one task; a row of the ledger."""

    environment: str
    task_index: int
    """The index of the task among those of its environment."""
    task_id: str
    groups: int
    """Groups that count."""
    rollouts: int
    """Rollouts with a reward in these groups."""
    pass_rate: float | None
    """The moving average over groups; None before the first."""
    last_pass_rate: float | None
    """The fraction of the last group's rollouts that passed."""
    solved_in_a_row: int
    """Consecutive groups, up to the last one, in which every rollout passed."""
    state: str
    """"active"; "failed": the last group had no result; "retired"; "retest": was retired, and may be drawn again."""
    last_step: int
    """The step of the last group."""


class IndexPool:
    """The numbers below `size` without excluded ones, in order. Reading one takes time logarithmic in the excluded.

    It depends on the excluded numbers alone and not on the order in which they were excluded.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._excluded: list[int] = []

    def __len__(self) -> int:
        return self._size - len(self._excluded)

    def __contains__(self, index: int) -> bool:
        position = bisect_left(self._excluded, index)
        return position == len(self._excluded) or self._excluded[position] != index

    def __getitem__(self, position: int) -> int:
        """Return the number at this position of the pool."""
        # excluded[j] - j numbers of the pool are below excluded[j]
        excluded = self._excluded
        return position + bisect_right(range(len(excluded)), position, key=lambda j: excluded[j] - j)

    @property
    def num_excluded(self) -> int:
        return len(self._excluded)

    def set_included(self, index: int, included: bool) -> None:
        position = bisect_left(self._excluded, index)
        is_excluded = position < len(self._excluded) and self._excluded[position] == index
        if included and is_excluded:
            del self._excluded[position]
        elif not included and not is_excluded:
            self._excluded.insert(position, index)


class PassRates:
    """Records of the tasks that were sampled, and the pools `active` and `target` of all tasks.

    - The pass rate of a group is the fraction of its rollouts whose reward is at least `pass_threshold`. The pass rate
      of a task is that of its first group, and then moves by `smoothing` times the difference towards each later one.
    - `active`: tasks that are not retired. A task is retired when all rollouts passed in `retire_after` groups in a
      row, and is active again `retest_after` steps later; one more group in which all pass retires it again.
    - `target`: active tasks whose pass rate is in the band, was never measured, or is out of date because the task was
      retired. A task whose last group had no result (its rollouts failed) is not in it.
    """

    def __init__(self, environment: str, num_tasks: int, settings: CurriculumSettings) -> None:
        self.environment, self.num_tasks, self._settings = environment, num_tasks, settings
        self.records: dict[int, TaskRecord] = {}
        self.active, self.target = IndexPool(num_tasks), IndexPool(num_tasks)
        self.step = 0
        """The number of batches cut so far."""
        self._retired: deque[tuple[int, int]] = deque()
        """(step, index) of tasks to be tested again, in the order in which they were retired."""
        self._changed: set[int] = set()
        self._seen = self._solved = self._unsolved = self._rate_sum = 0

    def record_group(self, task_index: int, task_id: str, rewards: Sequence[float]) -> None:
        """Count a group of a task with the rewards of its valid rollouts; empty: the group had no result."""
        old = self.records.get(task_index) or TaskRecord(
            self.environment, task_index, task_id, 0, 0, None, None, 0, "active", 0
        )
        if not rewards:
            state = old.state if old.state == "retired" else "failed"
            self._store(old._replace(state=state, last_step=self.step))
            return
        threshold, settings = self._settings.pass_threshold - THRESHOLD_TOLERANCE, self._settings
        last = sum(reward >= threshold for reward in rewards) / len(rewards)
        rate = last if old.pass_rate is None else old.pass_rate + settings.smoothing * (last - old.pass_rate)
        streak = old.solved_in_a_row + 1 if last == 1 else 0
        self._store(
            old._replace(
                groups=old.groups + 1,
                rollouts=old.rollouts + len(rewards),
                pass_rate=rate,
                last_pass_rate=last,
                solved_in_a_row=streak,
                state="retired" if settings.retire_after is not None and streak >= settings.retire_after else "active",
                last_step=self.step,
            )
        )

    def begin_step(self) -> None:
        """Count another batch; its groups are recorded next."""
        self.step += 1

    def end_step(self) -> None:
        """Make retired tasks active again when it is time to test them."""
        while self._retired and self._retired[0][0] + self._settings.retest_steps <= self.step:
            record = self.records[self._retired.popleft()[1]]
            if record.state == "retired" and not self._is_retired(record):  # it may have been retired again since
                self._store(record._replace(state="retest"))

    def restore(self, step: int, records: Iterable[TaskRecord]) -> None:
        """Continue after `step` batches with the records that were saved."""
        self.step = step
        for record in sorted(records, key=lambda record: (record.last_step, record.task_index)):
            self._store(record)
        self._changed.clear()

    def drain_changes(self) -> list[TaskRecord]:
        """Return the records that changed since the last call."""
        changed, self._changed = sorted(self._changed), set()
        return [self.records[index] for index in changed]

    def metrics(self) -> dict[str, float]:
        """Return shares and means over the tasks of the environment; empty before the first group."""
        if not self._seen:
            return {}
        name = self.environment
        return {
            f"tasks_seen/{name}": self._seen / self.num_tasks,
            f"pass_rate/{name}": self._rate_sum / RATE_SCALE / self._seen,
            f"tasks_solved/{name}": self._solved / self._seen,
            f"tasks_unsolved/{name}": self._unsolved / self._seen,
            f"tasks_retired/{name}": float(self.active.num_excluded),
        }

    def _store(self, record: TaskRecord) -> None:
        for known, sign in ((self.records.get(record.task_index), -1), (record, 1)):
            if known is not None and known.pass_rate is not None:
                self._seen += sign
                self._solved += sign * (known.last_pass_rate == 1)
                self._unsolved += sign * (known.last_pass_rate == 0)
                self._rate_sum += sign * round(known.pass_rate * RATE_SCALE)
        self.records[record.task_index] = record
        self._changed.add(record.task_index)
        if self._is_retired(record):
            self._retired.append((record.last_step, record.task_index))
        self._update_pools(record)

    def _update_pools(self, record: TaskRecord) -> None:
        retired = self._is_retired(record)
        is_out_of_date = record.state in ("retired", "retest") and not retired
        self.active.set_included(record.task_index, not retired)
        self.target.set_included(record.task_index, is_out_of_date or (not retired and self._is_in_band(record)))

    def _is_retired(self, record: TaskRecord) -> bool:
        if record.state != "retired" or self._settings.retire_after is None:
            return False
        return record.last_step + self._settings.retest_steps > self.step

    def _is_in_band(self, record: TaskRecord) -> bool:
        if record.state == "failed":
            return False
        low, high = self._settings.target_band
        return record.pass_rate is None or low <= record.pass_rate <= high
