"""Describe what limits a simulated run, and propose changes that make it faster.

The bottleneck follows from how the trainer's time is spent and how busy the engines are. Proposed changes are not
guesses: each is simulated on its own, and only those with a gain of at least `MIN_GAIN` are reported.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from keel.config import RunSettings
from keel.config.simulate import SimulateSettings
from keel.tools.simulate.prediction import Prediction, predict
from keel.tools.simulate.simulated_pool import resolve_max_batch

MIN_GAIN = 0.05
"""Relative change in steps per hour: the least gain worth reporting, and the most that using fewer engines may cost."""
MAX_WHAT_IF_ROLLOUTS = 60_000
"""Simulations with more rollouts than this try changes only with --what-if."""
NEGLIGIBLE_SHARE = 0.05
"""Shares of time or rollouts up to this are ignored."""
MAX_IDLE_SHARE = 0.1
"""If the trainer waits for less than this share of the time, the trainer itself is the bottleneck."""


@dataclass(frozen=True)
class ProposedChange:
    """One changed setting or assumption, and the prediction with it."""

    description: str
    prediction: Prediction
    gain: float
    """Relative change in steps per hour."""

    def as_json(self) -> dict[str, Any]:
        return {"change": self.description, "steps_per_hour": self.prediction.steps_per_hour, "gain": self.gain}


def describe_bottleneck(prediction: Prediction, settings: RunSettings, assumed: SimulateSettings) -> str:
    """Return what the run waits for most, with the numbers that show it; the text before ":" is the short form."""
    if max(prediction.waiting, prediction.publishing) < MAX_IDLE_SHARE:
        return (
            f"the trainer: it computes {_percent(prediction.trainer_busy)} of the time, and the engines sample at"
            f" {_percent(prediction.engine_fill)} of their full speed"
        )
    if prediction.publishing > prediction.waiting:
        return f"publishing weights: the trainer waits for it {_percent(prediction.publishing)} of the time"
    waits = f"the trainer waits for rollouts {_percent(prediction.waiting)} of the time"
    scheduler, capacity = settings.scheduler, assumed.engines * resolve_max_batch(settings, assumed)
    if scheduler.max_off_policy_steps == 0:
        return (
            f"synchronous training: with scheduler.max_off_policy_steps = 0 {waits}, and the engines are idle"
            f" {_percent(1 - prediction.engine_busy)} of the time"
        )
    if prediction.wasted_share - prediction.wasted.get("zero_variance", 0.0) > 0.25:
        main_reason = max(prediction.wasted, key=lambda reason: prediction.wasted[reason])
        return (
            f"wasted tokens: {waits}, and {_percent(prediction.wasted_share)} of the sampled tokens are never trained"
            f" (mostly {main_reason})"
        )
    if prediction.in_flight > 0.9 * scheduler.max_in_flight and prediction.in_flight < 0.9 * capacity:
        return (
            f"scheduler.max_in_flight = {scheduler.max_in_flight}: {waits}, and the engines can run {capacity:,}"
            " rollouts concurrently"
        )
    if prediction.engine_fill > 0.6 or prediction.in_flight > 0.7 * capacity:
        return f"the engines: {waits}, and the engines sample at {_percent(prediction.engine_fill)} of their full speed"
    max_allowed = round((scheduler.max_off_policy_steps + 1) * scheduler.groups_per_step * settings.mean_group_size)
    return (
        f"too few rollouts in flight: {waits}, {prediction.in_flight:,.0f} rollouts are in flight of {max_allowed:,}"
        f" that scheduler.groups_per_step and max_off_policy_steps allow, and the engines can run {capacity:,}"
        " concurrently"
    )


def propose_changes(prediction: Prediction, settings: RunSettings, assumed: SimulateSettings) -> list[ProposedChange]:
    """Simulate single changes and return those that help, the largest gain first, then a possible saving of engines."""
    num_steps = min(prediction.steps, 6 * settings.scheduler.max_off_policy_steps + 12)
    base = (
        prediction
        if num_steps == prediction.steps
        else predict(settings, assumed.model_copy(update={"steps": num_steps}))
    )
    tried = []
    for description, new_settings, new_assumed in _candidates(prediction, settings, assumed):
        changed = predict(new_settings, new_assumed.model_copy(update={"steps": num_steps}))
        tried.append(ProposedChange(description, changed, changed.steps_per_hour / base.steps_per_hour - 1))
    better = sorted((change for change in tried if change.gain >= MIN_GAIN), key=lambda change: -change.gain)
    fewer = _fewer_engines(prediction, assumed)
    if fewer is not None:
        changed = predict(settings, assumed.model_copy(update={"steps": num_steps, "engines": fewer}))
        gain = changed.steps_per_hour / base.steps_per_hour - 1
        if gain > -MIN_GAIN:
            better.append(ProposedChange(f"engines {fewer:,} instead of {assumed.engines:,}", changed, gain))
    return better


def _fewer_engines(prediction: Prediction, assumed: SimulateSettings) -> int | None:
    """Return a smaller number of engines that could sample the same tokens at 70 % of full speed, if there is one."""
    needed = max(round(assumed.engines * prediction.engine_fill / 0.7), 1)
    return needed if needed < 0.8 * assumed.engines and prediction.waiting < NEGLIGIBLE_SHARE else None


def _candidates(
    prediction: Prediction, settings: RunSettings, assumed: SimulateSettings
) -> Iterator[tuple[str, RunSettings, SimulateSettings]]:
    """Yield single changes that could have an effect: description, settings, assumptions."""
    scheduler = settings.scheduler
    if prediction.trainer_busy > 0.3:
        ranks = 2 * prediction.ranks
        yield f"trainer ranks {ranks}", settings, assumed.model_copy(update={"ranks": ranks})
    if prediction.waiting > NEGLIGIBLE_SHARE:
        engines = 2 * assumed.engines
        yield f"engines {engines:,}", settings, assumed.model_copy(update={"engines": engines})
        more = scheduler.max_off_policy_steps + 1
        yield f"scheduler.max_off_policy_steps {more}", _with_scheduler(settings, max_off_policy_steps=more), assumed
        if prediction.in_flight > 0.8 * scheduler.max_in_flight:
            more = 2 * scheduler.max_in_flight
            yield f"scheduler.max_in_flight {more}", _with_scheduler(settings, max_in_flight=more), assumed
    if prediction.publishing > NEGLIGIBLE_SHARE:
        faster = assumed.model_copy(update={"bandwidth": 4 * assumed.bandwidth})
        yield f"bandwidth {faster.bandwidth:g}", settings, faster
        every = 2 * settings.publish.every
        if every - 1 <= scheduler.max_off_policy_steps:
            publish = settings.publish.model_copy(update={"every": every})
            yield f"publish.every {every}", settings.model_copy(update={"publish": publish}), assumed
    if prediction.dropped.get("stale", 0.0) > NEGLIGIBLE_SHARE and prediction.waiting <= NEGLIGIBLE_SHARE:
        more = scheduler.max_off_policy_steps + 1
        yield f"scheduler.max_off_policy_steps {more}", _with_scheduler(settings, max_off_policy_steps=more), assumed


def _with_scheduler(settings: RunSettings, **changes: int) -> RunSettings:
    return settings.model_copy(update={"scheduler": settings.scheduler.model_copy(update=changes)})


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
