"""What holds a simulated run up, in words, and what changing it would bring.

The words come from where the trainer's time goes and from what the engines were kept from. The changes are not guessed:
each is simulated, one at a time, and only those that matter are told, with what they bring.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from keel.config import RunSettings
from keel.config.simulate import SimulateSettings
from keel.tools.simulate.prediction import Prediction, predict
from keel.tools.simulate.simulated_pool import resolve_max_batch

MIN_GAIN = 0.05
"""Of its speed: what a change must bring to be told, and what fewer engines may cost."""
MAX_WHAT_IF_ROLLOUTS = 60_000
"""Rollouts of a simulation beyond which changes are only tried when they are asked for."""
NEGLIGIBLE_SHARE = 0.05
MAX_IDLE_SHARE = 0.1
"""Share of time that a trainer may wait for something and still be what the run waits for."""


@dataclass(frozen=True)
class ProposedChange:
    """One thing to do otherwise, and what the run is like then."""

    description: str
    prediction: Prediction
    gain: float
    """Of its steps an hour, as a share."""

    def as_json(self) -> dict[str, Any]:
        return {"change": self.description, "steps_per_hour": self.prediction.steps_per_hour, "gain": self.gain}


def describe_bottleneck(prediction: Prediction, settings: RunSettings, assumed: SimulateSettings) -> str:
    """What the run waits for most, and how one can tell."""
    if max(prediction.waiting, prediction.publishing) < MAX_IDLE_SHARE:
        return (
            f"the trainer: it computes {_percent(prediction.trainer_busy)} of the time, and the engines sample at"
            f" {_percent(prediction.engine_fill)} of their full speed"
        )
    if prediction.publishing > prediction.waiting:
        return f"the way of weights: the trainer waits for it {_percent(prediction.publishing)} of the time"
    waits = f"the trainer waits for rollouts {_percent(prediction.waiting)} of the time"
    schedule, places = settings.scheduler, assumed.engines * resolve_max_batch(settings, assumed)
    if schedule.max_off_policy_steps == 0:
        return f"the synchronous schedule: {waits}, and the engines are idle {_percent(1 - prediction.engine_busy)}"
    if prediction.wasted_share - prediction.wasted.get("zero_variance", 0.0) > 0.25:
        worst = max(prediction.wasted, key=lambda reason: prediction.wasted[reason])
        return (
            f"waste: {waits}, and {_percent(prediction.wasted_share)} of the tokens are sampled for nothing ({worst})"
        )
    if prediction.in_flight > 0.9 * schedule.max_in_flight and prediction.in_flight < 0.9 * places:
        return (
            f"scheduler.max_in_flight = {schedule.max_in_flight}: {waits}, and the engines have room for {places:,}"
            " rollouts"
        )
    if prediction.engine_fill > 0.6 or prediction.in_flight > 0.7 * places:
        return f"the engines: {waits}, and the engines sample at {_percent(prediction.engine_fill)} of their full speed"
    ahead = (schedule.max_off_policy_steps + 1) * schedule.groups_per_step * schedule.group_size
    return (
        f"too little work under way: {waits}, {prediction.in_flight:,.0f} rollouts are in flight of {ahead:,} that"
        f" scheduler.groups_per_step and max_off_policy_steps allow, and the engines have room for {places:,}"
    )


def propose_changes(prediction: Prediction, settings: RunSettings, assumed: SimulateSettings) -> list[ProposedChange]:
    """What would make it faster, the best first; then what could be saved."""
    few = min(prediction.steps, 6 * settings.scheduler.max_off_policy_steps + 12)
    base = prediction if few == prediction.steps else predict(settings, assumed.model_copy(update={"steps": few}))
    tried = []
    for words, run, cluster in _candidates(prediction, settings, assumed):
        then = predict(run, cluster.model_copy(update={"steps": few}))
        tried.append(ProposedChange(words, then, then.steps_per_hour / base.steps_per_hour - 1))
    better = sorted((one for one in tried if one.gain >= MIN_GAIN), key=lambda one: -one.gain)
    saving = _fewer_engines(prediction, assumed)
    if saving is not None:
        then = predict(settings, assumed.model_copy(update={"steps": few, "engines": saving}))
        gain = then.steps_per_hour / base.steps_per_hour - 1
        if gain > -MIN_GAIN:
            better.append(ProposedChange(f"engines {saving:,} in place of {assumed.engines:,}", then, gain))
    return better


def _fewer_engines(prediction: Prediction, assumed: SimulateSettings) -> int | None:
    """A number of engines that would still be enough by what they sample now."""
    wanted = max(round(assumed.engines * prediction.engine_fill / 0.7), 1)
    return wanted if wanted < 0.8 * assumed.engines and prediction.waiting < NEGLIGIBLE_SHARE else None


def _candidates(
    prediction: Prediction, settings: RunSettings, assumed: SimulateSettings
) -> Iterator[tuple[str, RunSettings, SimulateSettings]]:
    """One change each, of those that could act."""
    schedule = settings.scheduler
    if prediction.trainer_busy > 0.3:
        ranks = 2 * prediction.ranks
        yield f"trainer ranks {ranks}", settings, assumed.model_copy(update={"ranks": ranks})
    if prediction.waiting > NEGLIGIBLE_SHARE:
        engines = 2 * assumed.engines
        yield f"engines {engines:,}", settings, assumed.model_copy(update={"engines": engines})
        more = schedule.max_off_policy_steps + 1
        yield f"scheduler.max_off_policy_steps {more}", _with_scheduler(settings, max_off_policy_steps=more), assumed
        if prediction.in_flight > 0.8 * schedule.max_in_flight:
            room = 2 * schedule.max_in_flight
            yield f"scheduler.max_in_flight {room}", _with_scheduler(settings, max_in_flight=room), assumed
    if prediction.publishing > NEGLIGIBLE_SHARE:
        faster = assumed.model_copy(update={"bandwidth": 4 * assumed.bandwidth})
        yield f"bandwidth {faster.bandwidth:g}", settings, faster
        every = 2 * settings.publish.every
        if every - 1 <= schedule.max_off_policy_steps:
            publish = settings.publish.model_copy(update={"every": every})
            yield f"publish.every {every}", settings.model_copy(update={"publish": publish}), assumed
    if prediction.dropped.get("stale", 0.0) > NEGLIGIBLE_SHARE and prediction.waiting <= NEGLIGIBLE_SHARE:
        more = schedule.max_off_policy_steps + 1
        yield f"scheduler.max_off_policy_steps {more}", _with_scheduler(settings, max_off_policy_steps=more), assumed


def _with_scheduler(settings: RunSettings, **changes: int) -> RunSettings:
    return settings.model_copy(update={"scheduler": settings.scheduler.model_copy(update=changes)})


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
