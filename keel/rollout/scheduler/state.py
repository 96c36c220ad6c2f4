"""Convert the scheduler's state to plain data and back.

Tasks are not part of the data: task sources return them again by index, and their ids are compared. Neither are
rollouts: the caller stores them when they end and returns them by name.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any

from keel.errors import KeelError
from keel.rollout.scheduler.groups import DroppedRollout, PendingGroup, RolloutLike
from keel.rollout.scheduler.pass_rates import TaskRecord
from keel.rollout.scheduler.task_sources import TaskSampler

RolloutLookup = Callable[[str, int, int], RolloutLike | None]
"""Returns the finished rollout of a group, member and attempt, or None if it did not end or was not stored."""

FORMAT = 3
"""The format version of a snapshot; increased by every incompatible change. Since 3 the order of the tasks depends on
the seed: a run that began in another order would repeat some tasks and leave out others."""

GROUP_FIELDS = (
    "number",
    "environment",
    "task_index",
    "task_id",
    "version",
    "oldest_version",
    "overtaken",
    "retry_rounds",
    "state",
)
SLOT_FIELDS = ("member", "attempt", "failures", "last_exception", "state", "reason", "error")
DROPPED_FIELDS = tuple(field.name for field in fields(DroppedRollout) if field.name != "rollout")


def dump_state(groups: Iterable[PendingGroup], dropped: Iterable[DroppedRollout]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "groups": [
            _pick_fields(group, GROUP_FIELDS) | {"slots": [_pick_fields(slot, SLOT_FIELDS) for slot in group.slots]}
            for group in groups
        ],
        "dropped": [_pick_fields(rollout, DROPPED_FIELDS) for rollout in dropped],
    }


def load_state(
    snapshot: Mapping[str, Any],
    task_sampler: TaskSampler,
    lookup: RolloutLookup | None,
    task_records: Iterable[TaskRecord] = (),
) -> tuple[list[PendingGroup], list[DroppedRollout]]:
    """Return the queued groups and the dropped rollouts that were not emitted yet.

    A slot whose rollout is not found counts as in flight; a slot that was in flight and whose rollout has succeeded
    since the snapshot is done.
    """
    if snapshot.get("format") != FORMAT:
        raise KeelError(
            f"the scheduler snapshot has format {snapshot.get('format')}, and this version of Keel reads {FORMAT};"
            " resume with the version that wrote it, or start a new run from its last checkpoint (model.name)"
        )
    task_indices: dict[str, set[int]] = {}
    for saved in snapshot["groups"]:
        task_indices.setdefault(saved["environment"], set()).add(saved["task_index"])
    tasks = task_sampler.resume(snapshot["tasks"], task_indices, task_records)

    lookup = lookup or (lambda _group, _member, _attempt: None)
    dropped = [
        DroppedRollout(
            **_pick_fields(saved, DROPPED_FIELDS),
            rollout=lookup(saved["group"], saved["member"], saved["attempt"]),
        )
        for saved in snapshot["dropped"]
    ]
    groups = [
        _load_group(saved, tasks[saved["environment"], saved["task_index"]], lookup) for saved in snapshot["groups"]
    ]
    return groups, dropped


def _load_group(saved: Mapping[str, Any], task: Any, lookup: RolloutLookup) -> PendingGroup:
    size = len(saved["slots"])
    group = PendingGroup(saved["number"], saved["environment"], saved["task_index"], task, size, saved["version"])
    if group.task_id != saved["task_id"]:
        raise KeelError(
            f"task {group.task_index} of environment {group.environment} is {group.task_id}, but was {saved['task_id']}"
            " when the snapshot was taken; resume with the same tasks in the same order"
        )
    group.overtaken, group.retry_rounds, group.state = saved["overtaken"], saved["retry_rounds"], saved["state"]
    for slot, saved_slot in zip(group.slots, saved["slots"], strict=True):
        slot.attempt, slot.failures, slot.state = saved_slot["attempt"], saved_slot["failures"], saved_slot["state"]
        slot.last_exception = saved_slot.get("last_exception")  # absent in snapshots of earlier versions
        if slot.state == "queued":
            continue
        rollout = lookup(group.id, slot.member, slot.attempt)
        if saved_slot["reason"]:
            slot.finish(rollout, saved_slot["reason"], saved_slot["error"])
        elif rollout is not None and rollout.error_kind is None:
            slot.finish(rollout)
            group.note_version(rollout.oldest_version)
        else:
            slot.state = "in_flight"
    if group.state != "dropped":
        group.state = "open" if group.pending else "ready"
    return group


def _pick_fields(record: Any, names: tuple[str, ...]) -> dict[str, Any]:
    get = record.__getitem__ if isinstance(record, Mapping) else lambda name: getattr(record, name)
    return {name: get(name) for name in names}
