"""Score a batch: give every rollout its advantage, or the reason why it does not train.

A group whose rewards are all equal says nothing about which completion is better. Whether it is dropped or trained
(penalties still apply to it) is decided by `advantages.zero_variance_groups`; it is counted in both cases. Failed
rollouts do not count in the baseline.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import pstdev
from typing import Any

import torch

from keel.config import AdvantageSettings
from keel.config.run import GROUP_ESTIMATORS
from keel.errors import KeelError
from keel.rollout.rollout import Rollout
from keel.rollout.rollout_metrics import REWARD_COMPONENTS, completion_metrics, environment_means, sample_metrics
from keel.rollout.scheduler.accounts import RolloutBatch
from keel.rollout.scheduler.groups import DroppedRollout, Group
from keel.run.ledger import Ledger, RolloutOutcome
from keel.run.records import SampleRecord, sample_name
from keel.signal import MovingBaseline, advantages

ZERO_VARIANCE = "zero_variance"
MISMATCH_LIMIT = 0.02
"""In nats per token. bfloat16 against float32 stays 40 times below it (0.026 apart on average); a constant error of 0.2
in each log-prob reaches it."""
WARN_EVERY = 10
"""Steps with a mismatch per warning."""
CONSTANT_STEPS = 3
"""Steps after which a reward that never varied is reported."""
REWARD_STD = "reward_std"
"""Prefix of the standard deviation of an environment's reward, and of its components."""

RolloutKey = tuple[str, str, str, int, int]
"""group, environment, task_id, member, attempt"""


def score_batch(
    batch: RolloutBatch, settings: AdvantageSettings, moving_baseline: MovingBaseline | None
) -> list[SampleRecord]:
    """Return one row per sample of the batch, group by group, followed by rollouts dropped before the batch."""
    rows: list[SampleRecord] = []
    values_by_group = _advantages(batch.groups, settings, moving_baseline)
    for index, (group, values) in enumerate(zip(batch.groups, values_by_group, strict=True)):
        zero_variance = has_equal_rewards(group) if settings.name in GROUP_ESTIMATORS else not any(values)
        drop_group = zero_variance and settings.zero_variance_groups == "drop"
        remaining = iter(values)
        for member in group.members:
            key = (group.id, group.environment, group.task_id, member.member, member.attempt)
            if not member.valid:
                rows += _rollout_rows(key, member.rollout, reason=member.reason, error=member.error)
                continue
            outcome = {"reason": ZERO_VARIANCE} if drop_group else {"outcome": "trained"}
            rows += _rollout_rows(key, _scored(key, member.rollout, next(remaining), index), **outcome)
    return rows + dropped_rows(batch.dropped)


def has_equal_rewards(group: Group) -> bool:
    """Return whether all valid rollouts of a group have the same reward."""
    return len({rollout.reward for rollout in group.rollouts}) < 2


def dropped_rows(dropped: Iterable[DroppedRollout]) -> list[SampleRecord]:
    """Return the rows of rollouts that the scheduler dropped."""
    rows = []
    for entry in dropped:
        key = (entry.group, entry.environment, entry.task_id, entry.member, entry.attempt)
        rows += _rollout_rows(key, entry.rollout, reason=entry.reason, error=entry.error)
    return rows


def outcomes(rows: Sequence[SampleRecord]) -> list[RolloutOutcome]:
    """Return one outcome per rollout; all rows of a rollout share it."""
    by_rollout: dict[tuple[str, int, int], RolloutOutcome] = {}
    for row in rows:
        key = (row.group, row.member, row.attempt)
        tokens = row.sequence.trainable_count if row.sequence is not None else 0
        earlier = by_rollout[key].tokens if key in by_rollout else 0
        outcome: Any = row.outcome
        by_rollout[key] = RolloutOutcome(
            *key, row.environment, row.task_id, outcome, row.reason, row.error, row.reward, earlier + tokens
        )
    return list(by_rollout.values())


def batch_metrics(batch: RolloutBatch, rows: Sequence[SampleRecord], version: int) -> dict[str, float]:
    """Return the metrics of a batch: rewards, completions, staleness, and dropped rollouts by reason.

    Metrics of rollouts are over the rollouts without an error in the groups of the batch and in the zero-variance
    groups that others replaced: without these the mean reward would stay near the middle of the rewards however good
    the policy is.
    """
    sampled_groups = [(group.environment, group.rollouts) for group in batch.groups] + _replaced_groups(batch)
    rollouts: list[Rollout] = [rollout for _, members in sampled_groups for rollout in members]
    metrics: dict[str, float] = {"groups": len(batch.groups), "rollouts": sum(len(g.rollouts) for g in batch.groups)}
    if rollouts:
        metrics["reward"] = _mean([rollout.reward for rollout in rollouts])
        metrics["reward_std"] = _std(rollouts)
        metrics["reward_std_group"] = _mean([_std(members) for _, members in sampled_groups])
    by_environment: dict[str, list[Rollout]] = {}
    for environment, members in sampled_groups:
        by_environment.setdefault(environment, []).extend(members)
    for name, members in by_environment.items():
        metrics[f"reward/{name}"] = _mean([rollout.reward for rollout in members])
        metrics[f"{REWARD_STD}/{name}"] = _std(members)
        metrics |= environment_means(members, name)
        for component in dict.fromkeys(key for rollout in members for key in rollout.reward_components):
            values = [r.reward_components[component] for r in members if component in r.reward_components]
            metrics[f"{REWARD_STD}/{name}/{component}"] = pstdev(values)
    metrics |= completion_metrics(rollouts) | sample_metrics(rollouts)
    staleness = [
        version - sampled
        for row in rows
        if row.outcome == "trained" and row.sequence is not None
        for sampled in row.sequence.trainable_versions.tolist()
    ]
    if staleness:
        metrics |= {"trainable_tokens": len(staleness), "staleness": sum(staleness) / len(staleness)}
        metrics["staleness_max"] = max(staleness)
    reasons = Counter(outcome.reason for outcome in outcomes(rows) if outcome.reason)
    metrics |= {"dropped": sum(reasons.values())} | {f"dropped/{reason}": count for reason, count in reasons.items()}
    metrics["zero_variance_groups"] = len({row.group for row in rows if row.reason == ZERO_VARIANCE})
    metrics["refilled_groups"] = batch.counters.get("groups_refilled", 0)
    return {name: float(value) for name, value in metrics.items()}


def _replaced_groups(batch: RolloutBatch) -> list[tuple[str, list[Rollout]]]:
    """Return environment and rollouts of the zero-variance groups that another group replaced in this batch."""
    by_group: dict[str, tuple[str, list[Rollout]]] = {}
    for dropped in batch.dropped:
        if dropped.reason == ZERO_VARIANCE and dropped.rollout is not None:
            by_group.setdefault(dropped.group, (dropped.environment, []))[1].append(dropped.rollout)
    return list(by_group.values())


def mismatch_warning(metrics: Mapping[str, float]) -> str | None:
    """Return a warning if the sampler's log-probs differ from the policy's at the same version, else None.

    Only tokens without an update in between count: a difference on older tokens is expected and left to the gates.
    """
    mismatch = metrics.get("mismatch_kl/staleness=0", 0.0)
    if mismatch < MISMATCH_LIMIT:
        return None
    masked = 100 * metrics.get("is_masked", 0.0)
    return (
        f"the sampler's log-probs differ from the policy's: mismatch_kl = {mismatch:.2g} on tokens sampled with the"
        f" version being trained (below {MISMATCH_LIMIT:g} is rounding); the gates dropped {masked:.0f} % of the"
        " tokens; check the engine's temperature, its dtype and the weights it holds"
    )


def constant_rewards(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the rewards that had one value in all these steps, by `ENVIRONMENT` or `ENVIRONMENT/COMPONENT`.

    That is how a broken verifier looks. A component is named instead of the whole reward where there are several.
    """
    constant = {}
    names = dict.fromkeys(
        name.removeprefix(f"{REWARD_STD}/") for step in steps for name in step if name.startswith(f"{REWARD_STD}/")
    )
    for name in names:
        means = [step.get(f"{REWARD_COMPONENTS if '/' in name else 'reward'}/{name}", math.nan) for step in steps]
        deviations = [step.get(f"{REWARD_STD}/{name}", math.nan) for step in steps]
        if not any(deviations) and all(math.isclose(mean, means[0], abs_tol=1e-12) for mean in means):
            constant[name] = means[0]
    return {
        name: value for name, value in constant.items() if not any(other.startswith(f"{name}/") for other in constant)
    }


def constant_reward_warning(steps: Sequence[Mapping[str, float]]) -> str | None:
    """Return a warning about rewards that had one value in all steps, else None."""
    steps = [step for step in steps if "reward" in step]
    constant = constant_rewards(steps)
    if not constant:
        return None
    named = ", ".join(f"{name} was {value:g}" for name, value in constant.items())
    count = "the only step" if len(steps) == 1 else f"all {len(steps)} steps"
    return (
        f"{named} for every completion of {count}: nothing can be learned from a reward that never varies, and a broken"
        " verifier looks like this; try it on completions whose reward you know (keel reward)"
    )


def stop_if_nothing_trains(ledger: Ledger, step: int, max_empty_steps: int | None) -> None:
    """Raise if the last `max_empty_steps` steps trained nothing: more of the same would not either."""
    last = ledger.steps(after=step - max_empty_steps) if max_empty_steps is not None else []
    if max_empty_steps is None or len(last) < max_empty_steps or any(row.stepped for row in last):
        return
    metrics = last[-1].metrics.items()
    reasons = [f"{name.removeprefix('dropped/')} {count:.0f}" for name, count in metrics if name.startswith("dropped/")]
    errors = ledger.errors()
    raise KeelError(
        f"{max_empty_steps} steps in a row trained nothing (scheduler.max_empty_steps = {max_empty_steps}); dropped in"
        f" the last one: {', '.join(reasons) or 'nothing'}; {f'{errors}; ' if errors else ''}check the rewards, or set"
        ' advantages.zero_variance_groups = "train"'
    )


def all_rollouts_failed(ledger: Ledger) -> str | None:
    """Return an error message if no optimizer step was taken because every rollout of the run failed, else None."""
    errors = ledger.errors()
    if errors is None or any(row.stepped or row.metrics.get("rollouts") for row in ledger.steps()):
        return None
    return f"no optimizer step was taken: {errors}; fix the cause and start a new run"


def _advantages(
    groups: Sequence[Group], settings: AdvantageSettings, moving_baseline: MovingBaseline | None
) -> list[list[float]]:
    """Return the advantages of the valid rollouts of each group."""
    ids = [index for index, group in enumerate(groups) for _ in group.rollouts]
    if settings.name == "moving_baseline":
        ids = [0] * len(ids)  # one agent: the policy
    rewards = torch.tensor([rollout.reward for group in groups for rollout in group.rollouts], dtype=torch.float64)
    values = iter(advantages(settings, rewards, torch.tensor(ids, dtype=torch.int64), moving=moving_baseline).tolist())
    return [[next(values) for _ in group.rollouts] for group in groups]


def _scored(key: RolloutKey, rollout: Rollout | None, advantage: float, group_index: int) -> Rollout | None:
    """Return the rollout with its advantage and group in every sample."""
    if rollout is None:
        return None
    group, _, _, member, attempt = key
    samples = (
        replace(sample, advantage=advantage, group=group_index, name=sample_name(group, member, attempt, index))
        for index, sample in enumerate(rollout.samples)
    )
    return replace(rollout, samples=tuple(samples))


def _rollout_rows(key: RolloutKey, rollout: Rollout | None, **fields: Any) -> list[SampleRecord]:
    if rollout is None:
        return [SampleRecord(*key, **fields)]
    fields = {"error": rollout.error, **fields, "reward": rollout.reward, "turns": rollout.turns}
    fields |= {"seconds": rollout.seconds, "ended_at": rollout.ended_at}
    fields |= {"reward_components": rollout.reward_components, "environment_metrics": rollout.metrics}
    rows = [SampleRecord(*key, index, sample, **fields) for index, sample in enumerate(rollout.samples)]
    return rows or [SampleRecord(*key, **fields)]


def _std(rollouts: Sequence[Rollout]) -> float:
    """Return the population standard deviation of the rewards."""
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    return pstdev(rewards) if rewards else 0.0


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known)
