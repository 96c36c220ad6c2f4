"""The scheduler's state as plain data, and back.

Tasks are not written down: a source gives them again by their number, and their ids are compared. Nor are rollouts:
they are recalled by their names, from wherever the caller stored them as they ended.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any

from keel.errors import KeelError
from keel.rollout.scheduler.groups import DroppedRollout, PendingGroup, RolloutLike
from keel.rollout.scheduler.task_sources import TaskSampler

RolloutLookup = Callable[[str, int, int], RolloutLike | None]
"""From group, member and attempt to the rollout that ended under that name; None: it did not end, or was not stored."""

FORMAT = 2
"""Of a snapshot; a change that an older version could not read, or that cannot read an older one, raises it."""

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
SLOT_FIELDS = ("member", "attempt", "failures", "state", "reason", "error")
DROPPED_FIELDS = tuple(field.name for field in fields(DroppedRollout) if field.name != "rollout")


def dump_state(groups: Iterable[PendingGroup], dropped: Iterable[DroppedRollout]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "groups": [
            _pick_fields(group, GROUP_FIELDS) | {"slots": [_pick_fields(seat, SLOT_FIELDS) for seat in group.slots]}
            for group in groups
        ],
        "dropped": [_pick_fields(refusal, DROPPED_FIELDS) for refusal in dropped],
    }


def load_state(
    snapshot: Mapping[str, Any], task_sampler: TaskSampler, lookup: RolloutLookup | None
) -> tuple[list[PendingGroup], list[DroppedRollout]]:
    """The groups in line and the refusals not yet emitted.

    A seat whose rollout is not recalled counts as in flight, and one that was in flight when the snapshot was taken
    and has ended well since is done.
    """
    if snapshot.get("format") != FORMAT:
        raise KeelError(
            f"the snapshot has format {snapshot.get('format')}, and this version reads {FORMAT}; go on with the version"
            " that wrote it, or start the schedule anew"
        )
    wanted: dict[str, set[int]] = {}
    for written in snapshot["groups"]:
        wanted.setdefault(written["environment"], set()).add(written["task_index"])
    tasks = task_sampler.resume(snapshot["positions"], wanted)

    lookup = lookup or (lambda _group, _member, _attempt: None)
    refused = [
        DroppedRollout(
            **_pick_fields(written, DROPPED_FIELDS),
            rollout=lookup(written["group"], written["member"], written["attempt"]),
        )
        for written in snapshot["dropped"]
    ]
    groups = [
        _load_group(written, tasks[written["environment"], written["task_index"]], lookup)
        for written in snapshot["groups"]
    ]
    return groups, refused


def _load_group(saved: Mapping[str, Any], task: Any, lookup: RolloutLookup) -> PendingGroup:
    size = len(saved["slots"])
    group = PendingGroup(saved["number"], saved["environment"], saved["task_index"], task, size, saved["version"])
    if group.task_id != saved["task_id"]:
        raise KeelError(
            f"task {group.task_index} of environment {group.environment} is {group.task_id}, and was {saved['task_id']}"
            " when the snapshot was taken; restore with the same tasks in the same order"
        )
    group.overtaken, group.retry_rounds, group.state = saved["overtaken"], saved["retry_rounds"], saved["state"]
    for seat, was in zip(group.slots, saved["slots"], strict=True):
        seat.attempt, seat.failures, seat.state = was["attempt"], was["failures"], was["state"]
        if seat.state == "queued":
            continue
        rollout = lookup(group.id, seat.member, seat.attempt)
        if was["reason"]:
            seat.finish(rollout, was["reason"], was["error"])
        elif rollout is not None and rollout.error_kind is None:
            seat.finish(rollout)
            group.note_version(rollout.oldest_version)
        else:
            seat.state = "in_flight"
    if group.state != "dropped":
        group.state = "open" if group.pending else "ready"
    return group


def _pick_fields(record: Any, names: tuple[str, ...]) -> dict[str, Any]:
    get = record.__getitem__ if isinstance(record, Mapping) else lambda name: getattr(record, name)
    return {name: get(name) for name in names}
