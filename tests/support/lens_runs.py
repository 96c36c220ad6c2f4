"""Synthetic run folders for tests of the lens, written with the run's own records and ledger from seeded random data.

Every token has a sampler and a policy log-prob. Whether it is dropped is decided by `keel.objectives.scalar_gates`, the
scalar form of the gates, so that tests can compare the lens with it.
"""

import json
import math
import random
import re
import sqlite3
from pathlib import Path
from typing import Any

from keel.common.sample import Sample
from keel.config import load_settings
from keel.config.toml_writer import toml_lines
from keel.objectives.scalar_gates import dropped_side
from keel.run import records
from keel.run.ledger import Ledger, RolloutOutcome
from keel.run.records import SampleRecord

NAMES = ["Ana", "Ben", "Chloe", "Dmitri", "Emeka", "Farah"]
THINGS = ["apples", "marbles", "stamps", "tickets", "pencils"]
COMPLETIONS = [
    "Start with {a}. Then {b} more come, so {a} + {b} = {c}. The answer is {c}.",
    "{n} has {a} {t} and buys {b}.\nAdding them up: {a} + {b} = {c}.\n\nSo the answer is **{c}**.",
    "Let me think. {a} plus {b} is {c}, I am sure of it. Answer: {c}",
    "We need the sum.\n1. {a} {t} at first\n2. {b} {t} later\nTotal = {c}.",
    "Hmm, wait. {a} and {b}... maybe {c}? Let me check: {a} + {b} = {c}. Yes, {c}.",
]


class Vocabulary:
    """Assigns ids to token texts."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def split(self, text: str) -> list[int]:
        texts = re.findall(r"<\|\w+\|>|\n+| ?\w+| ?[^\w\s]|\s", text)
        return [self.ids.setdefault(text, len(self.ids)) for text in texts]

    @property
    def texts(self) -> dict[int, str]:
        return {number: text for text, number in self.ids.items()}


def make_run(
    path: Path,
    *,
    steps: int = 4,
    groups: int = 4,
    members: int = 4,
    objective: str = "icepop",
    overrides: tuple[str, ...] = (),
    seed: int = 0,
    noise: float = 0.12,
    status: Any = "finished",
    paragraphs: int = 1,
) -> Path:
    """Write a run. Group 0 of every step is dropped as a zero-variance group, and one rollout of the run failed."""
    rng, vocabulary = random.Random(seed), Vocabulary()
    path.mkdir(parents=True)
    loaded = load_settings(overrides=["--objective.name", objective, "--steps", str(max(steps, 1)), *overrides])
    (path / "config.toml").write_text("".join(f"{line}{comment}\n" for line, comment in toml_lines(loaded)))
    origin = {"format": 1, "name": path.name, "created": 1.7e9 + seed, "git": {"commit": "0" * 40}}
    (path / "run.json").write_text(json.dumps(origin))
    (path / "rollouts").mkdir()
    gates = loaded.settings.objective.composition.gates
    ledger = Ledger(path / "run.db", create=True)
    ledger.set_status("running")
    ledger.write_evaluation(0, "sums", {"reward": 0.22, "low": 0.15, "high": 0.31, "tasks": 64.0})
    for step in range(1, steps + 1):
        rows = []
        for index in range(groups):
            rows += make_group(
                step, index, members, vocabulary, gates, rng, noise, paragraphs, skill=step / (steps + 9)
            )
        records.write_step(path / "rollouts", step, step - 1, rows, vocabulary.texts)
        metrics = step_metrics(rows, step, rng)
        outcomes = [outcome_of(row) for row in rows]
        ledger.write_step(step, version=step, stepped=True, metrics=metrics, outcomes=outcomes, state={})
    reward = 0.22 + 0.5 * steps / (steps + 9)
    ledger.write_evaluation(
        steps, "sums", {"reward": reward, "low": reward - 0.08, "high": reward + 0.08, "tasks": 64.0}
    )
    ledger.set_status(status)
    ledger.close()
    # fixed times, so that screenshots of the page do not change
    with sqlite3.connect(path / "run.db") as db:
        db.execute("UPDATE steps SET time = 1.7e9 + step * 60")
    db.close()
    return path


def make_group(
    step: int,
    index: int,
    members: int,
    vocabulary: Vocabulary,
    gates: Any,
    rng: random.Random,
    noise: float,
    paragraphs: int,
    skill: float,
) -> list[SampleRecord]:
    """Return the rollouts of one task."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    a, b = rng.randint(2, 60), rng.randint(2, 60)
    prompt = (
        "<|im_start|>user\n"
        f"{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have now?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    right = [index > 0 and rng.random() < 0.25 + 0.6 * skill for _ in range(members)]
    if index > 0:
        right[0], right[1] = True, False
    mean = sum(right) / members
    rows = []
    for member in range(members):
        names = {"group": f"sums/{step * 100 + index}", "environment": "sums", "task_id": f"train-{step * 100 + index}"}
        if step == 1 and index == 1 and member == members - 1:
            error = "TimeoutError: no completion within 120 s"
            rows.append(SampleRecord(**names, member=member, attempt=0, reason="failed", error=error))
            continue
        total = a + b if right[member] else a + b + rng.choice([-10, -1, 1, 2, 10])
        completion = "\n\n".join(
            rng.choice(COMPLETIONS).format(a=a, b=b, c=total, n=name, t=thing) for _ in range(paragraphs)
        )
        row = SampleRecord(**names, member=member, attempt=0, sample=0, reward=float(right[member]), turns=1)
        row.reward_components = {"correct": float(right[member])}
        row.environment_metrics = {"guess": float(total)}
        advantage = None if index == 0 else float(right[member]) - mean
        tokens = vocabulary.split(prompt), vocabulary.split(f"{completion}<|im_end|>")
        row.sequence = make_sample(*tokens, step, rng, advantage)
        if index == 0:
            row.reason = "zero_variance"
        else:
            row.outcome = "trained"
            row.token_columns = token_report(row, gates, step, rng, noise)
        rows.append(row)
    return rows


def make_sample(
    prompt: list[int], completion: list[int], step: int, rng: random.Random, advantage: float | None
) -> Sample:
    oldest = max(step - 1 - rng.choice([0, 0, 1, 1, 2, 3]), 0)
    switch = rng.randint(0, len(completion))
    versions = [min(oldest + (position >= switch), step - 1) for position in range(len(completion))]
    logprobs = [-rng.expovariate(1.6) - 1e-4 for _ in completion]
    return Sample(
        token_ids=(*prompt, *completion),
        trainable=(*[False] * len(prompt), *[True] * len(completion)),
        advantage=advantage,
        sampler_logprobs=(*[0.0] * len(prompt), *logprobs),
        version=(*[-1] * len(prompt), *versions),
        temperature=1.0,
        split_reason="start",
    )


def token_report(row: SampleRecord, gates: Any, step: int, rng: random.Random, noise: float) -> dict[str, Any]:
    """Return what the trainer reports about each token."""
    assert row.sequence is not None and row.advantage is not None
    columns: dict[str, list[Any]] = {name: [] for name in ("logprobs", "entropy", "dloss_dlogprob", "drop_reason")}
    for trains, b, version in zip(
        *(row.sequence.as_lists()[name] for name in ("trainable", "sampler_logprobs", "version")), strict=True
    ):
        if not trains:
            for column in columns.values():
                column.append(None)
            continue
        spread = noise * (0.15 + (step - 1 - version)) * (10 if rng.random() < 0.03 else 1)
        l = min(b + rng.gauss(0, spread), -1e-6)  # noqa: E741 - the names in the formulas
        drop_reason = None
        for index, gate in enumerate(gates):
            side = dropped_side(gate, math.exp(l), math.exp(b), row.advantage)
            if side is not None:
                drop_reason = f"gate {index} ({gate.statistic}) {side}"
                break
        columns["logprobs"].append(l)
        columns["entropy"].append(rng.expovariate(2.0))
        columns["dloss_dlogprob"].append(0.0 if drop_reason else -row.advantage * math.exp(l - b) / 100)
        columns["drop_reason"].append(drop_reason)
    return columns


def step_metrics(rows: list[SampleRecord], step: int, rng: random.Random) -> dict[str, float]:
    """Return the metrics of a step, computed from its rows where possible."""
    counts, distance = {"trained": 0, "low": 0, "high": 0}, 0.0
    for row in records.trained_rows(rows):
        assert row.sequence is not None
        reasons, logprobs = row.token_columns["drop_reason"], row.token_columns["logprobs"]
        sampler_logprobs = row.sequence.as_lists()["sampler_logprobs"]
        for drop_reason, l, b in zip(reasons, logprobs, sampler_logprobs, strict=True):  # noqa: E741
            if l is not None:
                counts[(drop_reason or "trained").rpartition(" ")[2]] += 1
                distance += math.exp(l - b) - 1 - (l - b)
    tokens = sum(counts.values()) or 1
    rewards = [row.reward for row in rows if row.reward is not None]
    staleness = [step - 1 - v for row in rows if row.sequence for v in row.sequence.trainable_versions.tolist()]
    return {
        "reward": sum(rewards) / len(rewards),
        "reward/sums": sum(rewards) / len(rewards),
        "loss": -0.02 - 0.01 * rng.random(),
        "grad_norm": 0.8 + rng.random(),
        "lr": 1e-6,
        "groups": len({row.group for row in rows}),
        "samples": len(rows),
        "trainable_tokens": tokens,
        "seconds": 20 + rng.random(),
        "tokens_per_second": tokens / (20 + 4 * rng.random()),
        "entropy": 0.9 - 0.004 * step + 0.05 * rng.random(),
        "mismatch_kl": distance / tokens,
        "is_masked": (counts["low"] + counts["high"]) / tokens,
        "is_masked_low": counts["low"] / tokens,
        "is_masked_high": counts["high"] / tokens,
        "staleness": sum(staleness) / len(staleness),
        "staleness_max": max(staleness),
        **({"mismatch_kl_masked": 0.5} if step == 2 else {}),  # metrics that are not finite are not recorded
        "dropped": sum(row.outcome == "dropped" for row in rows),
    }


def outcome_of(row: SampleRecord) -> RolloutOutcome:
    tokens = 0 if row.sequence is None else row.sequence.trainable_count
    outcome: Any = row.outcome
    return RolloutOutcome(
        row.group,
        row.member,
        row.attempt,
        row.environment,
        row.task_id,
        outcome,
        row.reason,
        row.error,
        row.reward,
        tokens,
    )
