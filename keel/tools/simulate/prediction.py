"""From the steps of a simulated run to what it predicts.

The first steps are left out of all rates: a run begins with nothing under way, and gets faster or slower until as much
is in line as its staleness allows. All numbers are means over the steps that are left.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from keel.config import RunSettings
from keel.config.simulate import SimulateSettings
from keel.tools.simulate.engines import DecodeSpeed
from keel.tools.simulate.simulated_pool import resolve_max_batch
from keel.tools.simulate.simulated_run import ProgressCallback, SimulatedStep, resolve_ranks, simulate


@dataclass(frozen=True)
class Prediction:
    """What a run will be like."""

    steps: int
    """That were simulated."""
    counted_steps: int
    """The last of them, which the numbers are of."""
    rollouts: int
    """That had a fate, in all steps."""
    hours: float
    """Of virtual time, all steps."""
    engines: int
    ranks: int

    step_seconds: float
    steps_per_hour: float
    sampled_tokens_per_second: float
    trained_tokens_per_second: float

    engine_busy: float
    """Share of time in which an engine has a request at all."""
    engine_fill: float
    """Tokens sampled, as a share of what engines with full batches would sample."""
    engine_down: float
    in_flight: float
    """Rollouts under way."""
    trainer_busy: float
    """Share of time in which the trainer computes."""
    waiting: float
    """Share in which it waits for a batch."""
    publishing: float
    saving: float

    staleness: float
    """Versions that a trained token is old, in the mean."""
    staleness_shares: dict[int, float]
    """Tokens by how many versions old they were."""
    dropped: dict[str, float]
    """Rollouts by reason, as shares of all that had a fate."""
    wasted: dict[str, float]
    """Tokens that were sampled for nothing, by reason, as shares of all sampled; crash: lost with an engine."""
    truncated: float
    """Share of the trained rollouts that were cut at their longest."""

    @property
    def dropped_share(self) -> float:
        return sum(self.dropped.values())

    @property
    def wasted_share(self) -> float:
        return sum(self.wasted.values())

    def as_json(self) -> dict[str, Any]:
        shares = {str(age): share for age, share in self.staleness_shares.items()}
        return {
            **asdict(self),
            "staleness_shares": shares,
            "dropped_share": self.dropped_share,
            "wasted_share": self.wasted_share,
        }


def predict(
    settings: RunSettings, assumed: SimulateSettings, on_progress: ProgressCallback | None = None
) -> Prediction:
    """Simulate, and say what came of it."""
    return summarise(settings, assumed, simulate(settings, assumed, on_progress))


def summarise(settings: RunSettings, assumed: SimulateSettings, steps: Sequence[SimulatedStep]) -> Prediction:
    """The means of a run's steps, without its beginning."""
    first = count_warmup_steps(settings, len(steps))
    counted, before = steps[first:], steps[first - 1] if first else SimulatedStep()
    last, start = counted[-1], before.engine_totals
    seconds = last.ended_at - before.ended_at
    sampled = last.engine_totals.sampled_tokens - start.sampled_tokens
    batch = resolve_max_batch(settings, assumed)
    full = DecodeSpeed.from_settings(assumed, batch).rates()[-1] * batch * assumed.engines
    refused = sum((one.dropped for one in counted), Counter[str]())
    wasted = sum((one.wasted_tokens for one in counted), Counter[str]())
    wasted["crash"] = round(last.engine_totals.lost_tokens - start.lost_tokens)
    ages = sum((one.staleness for one in counted), Counter[int]())
    rollouts, tokens = sum(one.trained_rollouts for one in counted), sum(one.trained_tokens for one in counted)
    fates, used = rollouts + refused.total(), tokens + wasted.total()
    return Prediction(
        steps=len(steps),
        counted_steps=len(counted),
        rollouts=sum(one.trained_rollouts + one.dropped.total() for one in steps),
        hours=last.ended_at / 3600,
        engines=assumed.engines,
        ranks=resolve_ranks(settings, assumed),
        step_seconds=seconds / len(counted),
        steps_per_hour=3600 * len(counted) / seconds,
        sampled_tokens_per_second=sampled / seconds,
        trained_tokens_per_second=tokens / seconds,
        engine_busy=(last.engine_totals.busy_seconds - start.busy_seconds) / seconds / assumed.engines,
        engine_fill=sampled / seconds / full,
        engine_down=(last.engine_totals.down_seconds - start.down_seconds) / seconds / assumed.engines,
        in_flight=(last.engine_totals.rollout_seconds - start.rollout_seconds) / seconds,
        trainer_busy=sum(one.training_seconds for one in counted) / seconds,
        waiting=sum(one.waiting_seconds for one in counted) / seconds,
        publishing=sum(one.publishing_seconds for one in counted) / seconds,
        saving=sum(one.saving_seconds for one in counted) / seconds,
        staleness=sum(age * count for age, count in ages.items()) / max(ages.total(), 1),
        staleness_shares={age: ages[age] / ages.total() for age in sorted(ages)},
        dropped={reason: count / max(fates, 1) for reason, count in refused.most_common()},
        wasted={reason: count / max(used, 1) for reason, count in wasted.most_common() if count},
        truncated=sum(one.truncated for one in counted) / max(rollouts, 1),
    )


def count_warmup_steps(settings: RunSettings, num_steps: int) -> int:
    """Steps at the beginning that say little about the rest: until the line is full and what was in it has trained."""
    return min(2 * settings.scheduler.max_off_policy_steps + 1, num_steps // 3)
