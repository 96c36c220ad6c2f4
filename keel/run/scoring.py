"""From a batch of the scheduler to rows: each rollout with its advantage, or with the reason why it does not train.

A group whose rewards are all equal teaches nothing about which answer is better; whether it is dropped or trained
(penalties still act on it) is `advantages.zero_variance_groups`, and it is counted either way. Rollouts that failed
have no vote in the baseline.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from keel.config import AdvantageSettings
from keel.errors import KeelError
from keel.rollout.rollout import Rollout
from keel.rollout.scheduler.accounts import RolloutBatch
from keel.rollout.scheduler.groups import DroppedRollout, Group
from keel.run.ledger import Ledger, RolloutOutcome
from keel.run.records import SampleRecord
from keel.signal import MovingBaseline, advantages

ZERO_VARIANCE = "zero_variance"
MISMATCH_LIMIT = 0.02
"""Nats a token. bfloat16 against float32 is 40 times below it (0.026 apart in the mean), and a constant error of 0.2 in
each log-prob reaches it."""
WARN_EVERY = 10
"""Steps with the same complaint for each time that it is made."""
_GROUP_ESTIMATORS = ("group_mean", "group_mean_std", "leave_one_out", "mean_normalised")


def score_batch(
    batch: RolloutBatch, settings: AdvantageSettings, moving_baseline: MovingBaseline | None
) -> list[SampleRecord]:
    """One row for each sample of the batch, trained ones in order of their groups, then what was refused."""
    rows: list[SampleRecord] = []
    for group, values in zip(batch.groups, _advantages(batch.groups, settings, moving_baseline), strict=True):
        rewards = [rollout.reward for rollout in group.rollouts]
        flat = len(set(rewards)) < 2 if settings.name in _GROUP_ESTIMATORS else not any(values)
        dropped = flat and settings.zero_variance_groups == "drop"
        chances = iter(values)
        for member in group.members:
            place = (group.id, group.environment, group.task_id, member.member, member.attempt)
            if not member.valid:
                rows += _rollout_rows(place, member.rollout, reason=member.reason, error=member.error)
            elif dropped:
                rows += _rollout_rows(place, member.rollout, reason=ZERO_VARIANCE, advantage=next(chances))
            else:
                rows += _rollout_rows(place, member.rollout, advantage=next(chances), outcome="trained")
    return rows + dropped_rows(batch.dropped)


def dropped_rows(dropped: Iterable[DroppedRollout]) -> list[SampleRecord]:
    """Rows of what left the schedule without a batch."""
    rows = []
    for one in dropped:
        place = (one.group, one.environment, one.task_id, one.member, one.attempt)
        rows += _rollout_rows(place, one.rollout, reason=one.reason, error=one.error)
    return rows


def outcomes(rows: Sequence[SampleRecord]) -> list[RolloutOutcome]:
    """One fate for each rollout: its rows share it."""
    found: dict[tuple[str, int, int], RolloutOutcome] = {}
    for row in rows:
        name = (row.group, row.member, row.attempt)
        tokens = sum(row.data.trainable) if row.data is not None else 0
        before = found[name].tokens if name in found else 0
        fate: Any = row.outcome
        found[name] = RolloutOutcome(
            *name, row.environment, row.task_id, fate, row.reason, row.error, row.reward, before + tokens
        )
    return list(found.values())


def batch_metrics(batch: RolloutBatch, rows: Sequence[SampleRecord], version: int) -> dict[str, float]:
    """What a batch was like."""
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    told: dict[str, float] = {"groups": len(batch.groups), "rollouts": len(rollouts)}
    if rollouts:
        told["reward"] = _mean([rollout.reward for rollout in rollouts])
    for name in dict.fromkeys(group.environment for group in batch.groups):
        told[f"reward/{name}"] = _mean([r.reward for g in batch.groups if g.environment == name for r in g.rollouts])
    ages = [
        version - sampled
        for row in rows
        if row.outcome == "trained" and row.data is not None
        for sampled, trains in zip(row.data.versions, row.data.trainable, strict=True)
        if trains
    ]
    if ages:
        told |= {"trainable_tokens": len(ages), "staleness": sum(ages) / len(ages), "staleness_max": max(ages)}
    reasons = Counter(fate.reason for fate in outcomes(rows) if fate.reason)
    told |= {"dropped": sum(reasons.values())} | {f"dropped/{reason}": count for reason, count in reasons.items()}
    told["zero_variance_groups"] = len({row.group for row in rows if row.reason == ZERO_VARIANCE})
    return {name: float(value) for name, value in told.items()}


def mismatch_warning(metrics: Mapping[str, float]) -> str | None:
    """What to say of a sampler whose log-probs are not those of the policy whose version it names; none: they are.

    Only of tokens that no update lies between: what older ones are off by is no fault, and the gates' business.
    """
    apart = metrics.get("mismatch_kl/staleness=0", 0.0)
    if apart < MISMATCH_LIMIT:
        return None
    return (
        f"the sampler's log-probs are not those of the policy: mismatch_kl = {apart:.2g} on tokens of the very version"
        f" that trains (below {MISMATCH_LIMIT:g} is rounding); the gates dropped {100 * metrics.get('is_masked', 0.0):.0f} % of"
        " the tokens; look at the engine's temperature, its dtype and the weights that it holds"
    )


def stop_if_nothing_trains(ledger: Ledger, step: int, max_empty_steps: int | None) -> None:
    """Raise when the last so many steps trained nothing: more of the same would not either."""
    last = ledger.steps(after=step - max_empty_steps) if max_empty_steps is not None else []
    if max_empty_steps is None or len(last) < max_empty_steps or any(row.stepped for row in last):
        return
    told = last[-1].metrics.items()
    reasons = [f"{name.removeprefix('dropped/')} {count:.0f}" for name, count in told if name.startswith("dropped/")]
    raise KeelError(
        f"{max_empty_steps} steps in a row trained nothing (scheduler.max_empty_steps = {max_empty_steps}); refused in the last one:"
        f' {", ".join(reasons) or "nothing"}; look at the rewards, or set advantages.zero_variance_groups = "train"'
    )


def _advantages(
    groups: Sequence[Group], settings: AdvantageSettings, moving_baseline: MovingBaseline | None
) -> list[list[float]]:
    """Of the valid rollouts of each group."""
    ids = [number for number, group in enumerate(groups) for _ in group.rollouts]
    if settings.name == "moving_baseline":
        ids = [0] * len(ids)  # one agent: the policy
    rewards = torch.tensor([rollout.reward for group in groups for rollout in group.rollouts], dtype=torch.float64)
    found = iter(advantages(settings, rewards, torch.tensor(ids, dtype=torch.int64), moving=moving_baseline).tolist())
    return [[next(found) for _ in group.rollouts] for group in groups]


def _rollout_rows(
    rollout_key: tuple[str, str, str, int, int], rollout: Rollout | None, **fields: Any
) -> list[SampleRecord]:
    if rollout is None:
        return [SampleRecord(*rollout_key, **fields)]
    fields = {"error": rollout.error, **fields, "reward": rollout.reward, "turns": rollout.turns}
    fields |= {"seconds": rollout.seconds, "ended_at": rollout.ended_at}
    samples = [SampleRecord(*rollout_key, number, sample, **fields) for number, sample in enumerate(rollout.samples)]
    return samples or [SampleRecord(*rollout_key, **fields)]


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known)
