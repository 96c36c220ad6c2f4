"""The scheduler's state as plain data, and back.

Tasks are not written down: a source gives them again by their number, and their ids are compared. Rollouts are written
down as whatever the caller's `keep` makes of them.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any

from keel.errors import KeelError
from keel.rollout.groups import OpenGroup, Refusal, Result
from keel.rollout.sources import Sources

Keep = Callable[[Any], Any]
"""A finished rollout as JSON-able data."""

Fetch = Callable[[Any], Result]

FORMAT = 1
"""Of a snapshot; a change that an older version could not read, or that cannot read an older one, raises it."""

GROUP = ("number", "environment", "index", "task_id", "version", "oldest", "overtaken", "rounds", "state")
SEAT = ("member", "attempt", "failures", "state", "reason", "error")
REFUSAL = tuple(field.name for field in fields(Refusal) if field.name != "rollout")


def freeze(line: Iterable[OpenGroup], refused: Iterable[Refusal], keep: Keep | None) -> dict[str, Any]:
    def kept(rollout: Any) -> dict[str, Any]:
        return {} if keep is None or rollout is None else {"rollout": keep(rollout)}

    return {
        "format": FORMAT,
        "groups": [
            _fields(group, GROUP) | {"seats": [_fields(seat, SEAT) | kept(seat.rollout) for seat in group.seats]}
            for group in line
        ],
        "refused": [_fields(refusal, REFUSAL) | kept(refusal.rollout) for refusal in refused],
    }


def thaw(snapshot: Mapping[str, Any], sources: Sources, fetch: Fetch | None) -> tuple[list[OpenGroup], list[Refusal]]:
    """The groups in line and the refusals not yet emitted. A seat whose rollout was not kept counts as in flight."""
    if snapshot.get("format") != FORMAT:
        raise KeelError(
            f"the snapshot has format {snapshot.get('format')}, and this version reads {FORMAT}; go on with the version"
            " that wrote it, or start the schedule anew"
        )
    wanted: dict[str, set[int]] = {}
    for written in snapshot["groups"]:
        wanted.setdefault(written["environment"], set()).add(written["index"])
    tasks = sources.resume(snapshot["positions"], wanted)

    def fetched(written: Mapping[str, Any]) -> Any:
        return None if fetch is None or "rollout" not in written else fetch(written["rollout"])

    refused = [Refusal(**_fields(written, REFUSAL), rollout=fetched(written)) for written in snapshot["refused"]]
    groups = []
    for written in snapshot["groups"]:
        task = tasks[written["environment"], written["index"]]
        groups.append(_group(written, task, [fetched(seat) for seat in written["seats"]]))
    return groups, refused


def _group(written: Mapping[str, Any], task: Any, rollouts: list[Any]) -> OpenGroup:
    group = OpenGroup(
        written["number"], written["environment"], written["index"], task, len(rollouts), written["version"]
    )
    if group.task_id != written["task_id"]:
        raise KeelError(
            f"task {group.index} of environment {group.environment} is {group.task_id}, and was {written['task_id']}"
            " when the snapshot was taken; restore with the same tasks in the same order"
        )
    group.overtaken, group.rounds, group.state = written["overtaken"], written["rounds"], written["state"]
    for seat, was, rollout in zip(group.seats, written["seats"], rollouts, strict=True):
        seat.attempt, seat.failures, seat.state = was["attempt"], was["failures"], was["state"]
        if seat.state == "done" and (rollout is not None or was["reason"]):
            seat.finish(rollout, was["reason"], was["error"])
            if not was["reason"]:
                group.saw(rollout.oldest_version)
        elif seat.state == "done":
            seat.state = "flying"
    if group.state == "ready" and group.pending:
        group.state = "open"
    return group


def _fields(thing: Any, names: tuple[str, ...]) -> dict[str, Any]:
    get = thing.__getitem__ if isinstance(thing, Mapping) else lambda name: getattr(thing, name)
    return {name: get(name) for name in names}
