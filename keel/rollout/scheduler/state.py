"""The scheduler's state as plain data, and back.

Tasks are not written down: a source gives them again by their number, and their ids are compared. Nor are rollouts:
they are recalled by their names, from wherever the caller stored them as they ended.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any

from keel.errors import KeelError
from keel.rollout.scheduler.groups import OpenGroup, Refusal, Result
from keel.rollout.scheduler.task_sources import Sources

Recall = Callable[[str, int, int], Result | None]
"""From group, member and attempt to the rollout that ended under that name; None: it did not end, or was not stored."""

FORMAT = 1
"""Of a snapshot; a change that an older version could not read, or that cannot read an older one, raises it."""

GROUP = ("number", "environment", "index", "task_id", "version", "oldest", "overtaken", "rounds", "state")
SEAT = ("member", "attempt", "failures", "state", "reason", "error")
REFUSAL = tuple(field.name for field in fields(Refusal) if field.name != "rollout")


def freeze(line: Iterable[OpenGroup], refused: Iterable[Refusal]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "groups": [_fields(group, GROUP) | {"seats": [_fields(seat, SEAT) for seat in group.seats]} for group in line],
        "refused": [_fields(refusal, REFUSAL) for refusal in refused],
    }


def thaw(snapshot: Mapping[str, Any], sources: Sources, recall: Recall | None) -> tuple[list[OpenGroup], list[Refusal]]:
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
        wanted.setdefault(written["environment"], set()).add(written["index"])
    tasks = sources.resume(snapshot["positions"], wanted)

    recall = recall or (lambda _group, _member, _attempt: None)
    refused = [
        Refusal(**_fields(written, REFUSAL), rollout=recall(written["group"], written["member"], written["attempt"]))
        for written in snapshot["refused"]
    ]
    groups = [
        _group(written, tasks[written["environment"], written["index"]], recall) for written in snapshot["groups"]
    ]
    return groups, refused


def _group(written: Mapping[str, Any], task: Any, recall: Recall) -> OpenGroup:
    size = len(written["seats"])
    group = OpenGroup(written["number"], written["environment"], written["index"], task, size, written["version"])
    if group.task_id != written["task_id"]:
        raise KeelError(
            f"task {group.index} of environment {group.environment} is {group.task_id}, and was {written['task_id']}"
            " when the snapshot was taken; restore with the same tasks in the same order"
        )
    group.overtaken, group.rounds, group.state = written["overtaken"], written["rounds"], written["state"]
    for seat, was in zip(group.seats, written["seats"], strict=True):
        seat.attempt, seat.failures, seat.state = was["attempt"], was["failures"], was["state"]
        if seat.state == "queued":
            continue
        rollout = recall(group.id, seat.member, seat.attempt)
        if was["reason"]:
            seat.finish(rollout, was["reason"], was["error"])
        elif rollout is not None and rollout.error_kind is None:
            seat.finish(rollout)
            group.saw(rollout.oldest_version)
        else:
            seat.state = "flying"
    if group.state != "dropped":
        group.state = "open" if group.pending else "ready"
    return group


def _fields(thing: Any, names: tuple[str, ...]) -> dict[str, Any]:
    get = thing.__getitem__ if isinstance(thing, Mapping) else lambda name: getattr(thing, name)
    return {name: get(name) for name in names}
