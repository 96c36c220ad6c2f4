"""Summarise the steps of a simulated run as a prediction.

The first steps are left out: a run starts with nothing in flight, and its speed changes until as many rollouts are
queued as its staleness limit allows. All numbers are averages over the remaining steps.
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
    """Predicted speed, utilisation, staleness and waste of a run."""

    steps: int
    """Simulated steps."""
    counted_steps: int
    """Steps at the end that the averages are over."""
    rollouts: int
    """Rollouts that were trained or dropped, in all steps."""
    hours: float
    """Virtual hours of all steps."""
    engines: int
    ranks: int

    step_seconds: float
    steps_per_hour: float
    sampled_tokens_per_second: float
    trained_tokens_per_second: float

    engine_busy: float
    """Share of time in which an engine has at least one request."""
    engine_fill: float
    """Sampled tokens, as a share of what engines with full batches would sample."""
    engine_down: float
    in_flight: float
    """Rollouts in flight."""
    trainer_busy: float
    """Share of time in which the trainer computes."""
    waiting: float
    """Share of time in which the trainer waits for a batch."""
    publishing: float
    saving: float

    staleness: float
    """Average staleness of a trained token, in versions."""
    staleness_shares: dict[int, float]
    """Share of trained tokens by staleness."""
    dropped: dict[str, float]
    """Dropped rollouts by reason, as shares of all trained or dropped rollouts."""
    wasted: dict[str, float]
    """Sampled tokens that were not trained, by reason, as shares of all sampled tokens; crash: lost with an engine."""
    truncated: float
    """Share of the trained rollouts that were truncated at the token limit."""

    @property
    def dropped_share(self) -> float:
        return sum(self.dropped.values())

    @property
    def wasted_share(self) -> float:
        return sum(self.wasted.values())

    def as_json(self) -> dict[str, Any]:
        shares = {str(staleness): share for staleness, share in self.staleness_shares.items()}
        return {
            **asdict(self),
            "staleness_shares": shares,
            "dropped_share": self.dropped_share,
            "wasted_share": self.wasted_share,
        }


def predict(
    settings: RunSettings, assumed: SimulateSettings, on_progress: ProgressCallback | None = None
) -> Prediction:
    """Simulate a run and summarise its steps."""
    return summarise(settings, assumed, simulate(settings, assumed, on_progress))


def summarise(settings: RunSettings, assumed: SimulateSettings, steps: Sequence[SimulatedStep]) -> Prediction:
    """Average over a run's steps, without the warm-up steps."""
    first = count_warmup_steps(settings, len(steps))
    counted, before = steps[first:], steps[first - 1] if first else SimulatedStep()
    last, start = counted[-1], before.engine_totals
    seconds = last.ended_at - before.ended_at
    sampled = last.engine_totals.sampled_tokens - start.sampled_tokens
    batch = resolve_max_batch(settings, assumed)
    full_speed = DecodeSpeed.from_settings(assumed, batch).rates()[-1] * batch * assumed.engines
    dropped = sum((step.dropped for step in counted), Counter[str]())
    wasted = sum((step.wasted_tokens for step in counted), Counter[str]())
    wasted["crash"] = round(last.engine_totals.lost_tokens - start.lost_tokens)
    staleness = sum((step.staleness for step in counted), Counter[int]())
    rollouts, tokens = sum(step.trained_rollouts for step in counted), sum(step.trained_tokens for step in counted)
    all_rollouts, all_tokens = rollouts + dropped.total(), tokens + wasted.total()
    return Prediction(
        steps=len(steps),
        counted_steps=len(counted),
        rollouts=sum(step.trained_rollouts + step.dropped.total() for step in steps),
        hours=last.ended_at / 3600,
        engines=assumed.engines,
        ranks=resolve_ranks(settings, assumed),
        step_seconds=seconds / len(counted),
        steps_per_hour=3600 * len(counted) / seconds,
        sampled_tokens_per_second=sampled / seconds,
        trained_tokens_per_second=tokens / seconds,
        engine_busy=(last.engine_totals.busy_seconds - start.busy_seconds) / seconds / assumed.engines,
        engine_fill=sampled / seconds / full_speed,
        engine_down=(last.engine_totals.down_seconds - start.down_seconds) / seconds / assumed.engines,
        in_flight=(last.engine_totals.rollout_seconds - start.rollout_seconds) / seconds,
        trainer_busy=sum(step.training_seconds for step in counted) / seconds,
        waiting=sum(step.waiting_seconds for step in counted) / seconds,
        publishing=sum(step.publishing_seconds for step in counted) / seconds,
        saving=sum(step.saving_seconds for step in counted) / seconds,
        staleness=sum(versions * count for versions, count in staleness.items()) / max(staleness.total(), 1),
        staleness_shares={versions: staleness[versions] / staleness.total() for versions in sorted(staleness)},
        dropped={reason: count / max(all_rollouts, 1) for reason, count in dropped.most_common()},
        wasted={reason: count / max(all_tokens, 1) for reason, count in wasted.most_common() if count},
        truncated=sum(step.truncated for step in counted) / max(rollouts, 1),
    )


def count_warmup_steps(settings: RunSettings, num_steps: int) -> int:
    """Return the number of first steps to leave out: until the queue is full and its first content has trained."""
    return min(2 * settings.scheduler.max_off_policy_steps + 1, num_steps // 3)
