"""Run folders to look at: written by the run's own records and ledger, from chance with a seed instead of a model.

Every token has a sampler and a policy log-prob; whether it was kept is asked of `keel.objectives.scalar_gates`, the
second statement of the gates, so that what the lens counts can be held against it.
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
WAYS = [
    "Start with {a}. Then {b} more come, so {a} + {b} = {c}. The answer is {c}.",
    "{n} has {a} {t} and buys {b}.\nAdding them up: {a} + {b} = {c}.\n\nSo the answer is **{c}**.",
    "Let me think. {a} plus {b} is {c}, I am sure of it. Answer: {c}",
    "We need the sum.\n1. {a} {t} at first\n2. {b} {t} later\nTotal = {c}.",
    "Hmm, wait. {a} and {b}... maybe {c}? Let me check: {a} + {b} = {c}. Yes, {c}.",
]


class Vocabulary:
    """Ids for pieces of text."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def split(self, text: str) -> list[int]:
        pieces = re.findall(r"<\|\w+\|>|\n+| ?\w+| ?[^\w\s]|\s", text)
        return [self.ids.setdefault(piece, len(self.ids)) for piece in pieces]

    @property
    def pieces(self) -> dict[int, str]:
        return {number: piece for piece, number in self.ids.items()}


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
    """A run with an ending. Group 0 of every step is refused for having no signal; one rollout of the run failed."""
    chance, words = random.Random(seed), Vocabulary()
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
        for place in range(groups):
            rows += make_group(step, place, members, words, gates, chance, noise, paragraphs, skill=step / (steps + 9))
        records.write_step(path / "rollouts", step, step - 1, rows, words.pieces)
        numbers = numbers_of(rows, step, chance)
        fates = [fate_of(row) for row in rows]
        ledger.write_step(step, version=step, stepped=True, metrics=numbers, outcomes=fates, state={})
    share = 0.22 + 0.5 * steps / (steps + 9)
    ledger.write_evaluation(steps, "sums", {"reward": share, "low": share - 0.08, "high": share + 0.08, "tasks": 64.0})
    ledger.set_status(status)
    ledger.close()
    # as on an evening with a fixed clock: pictures of the page stay the same
    with sqlite3.connect(path / "run.db") as db:
        db.execute("UPDATE steps SET time = 1.7e9 + step * 60")
    db.close()
    return path


def make_group(
    step: int,
    place: int,
    members: int,
    words: Vocabulary,
    gates: Any,
    chance: random.Random,
    noise: float,
    paragraphs: int,
    skill: float,
) -> list[SampleRecord]:
    """The rollouts of one task."""
    name, thing = chance.choice(NAMES), chance.choice(THINGS)
    a, b = chance.randint(2, 60), chance.randint(2, 60)
    prompt = (
        "<|im_start|>user\n"
        f"{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have now?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    right = [place > 0 and chance.random() < 0.25 + 0.6 * skill for _ in range(members)]
    if place > 0:
        right[0], right[1] = True, False
    mean = sum(right) / members
    rows = []
    for member in range(members):
        names = {"group": f"sums/{step * 100 + place}", "environment": "sums", "task_id": f"train-{step * 100 + place}"}
        if step == 1 and place == 1 and member == members - 1:
            error = "TimeoutError: no answer within 120 s"
            rows.append(SampleRecord(**names, member=member, attempt=0, reason="failed", error=error))
            continue
        said = a + b if right[member] else a + b + chance.choice([-10, -1, 1, 2, 10])
        answer = "\n\n".join(chance.choice(WAYS).format(a=a, b=b, c=said, n=name, t=thing) for _ in range(paragraphs))
        row = SampleRecord(**names, member=member, attempt=0, sample=0, reward=float(right[member]), turns=1)
        advantage = None if place == 0 else float(right[member]) - mean
        tokens = words.split(prompt), words.split(f"{answer}<|im_end|>")
        row.sequence = sampled(*tokens, step, chance, advantage)
        if place == 0:
            row.reason = "zero_variance"
        else:
            row.outcome = "trained"
            row.token_columns = account(row, gates, step, chance, noise)
        rows.append(row)
    return rows


def sampled(prompt: list[int], answer: list[int], step: int, chance: random.Random, advantage: float | None) -> Sample:
    oldest = max(step - 1 - chance.choice([0, 0, 1, 1, 2, 3]), 0)
    turns = chance.randint(0, len(answer))
    versions = [min(oldest + (place >= turns), step - 1) for place in range(len(answer))]
    logprobs = [-chance.expovariate(1.6) - 1e-4 for _ in answer]
    return Sample(
        token_ids=(*prompt, *answer),
        trainable=(*[False] * len(prompt), *[True] * len(answer)),
        advantage=advantage,
        sampler_logprobs=(*[0.0] * len(prompt), *logprobs),
        version=(*[-1] * len(prompt), *versions),
        temperature=1.0,
        split_reason="start",
    )


def account(row: SampleRecord, gates: Any, step: int, chance: random.Random, noise: float) -> dict[str, Any]:
    """What the trainer would have said of each token."""
    assert row.sequence is not None and row.advantage is not None
    columns: dict[str, list[Any]] = {name: [] for name in ("logprobs", "entropy", "gradient", "kept")}
    for trains, b, version in zip(
        *(row.sequence.as_lists()[name] for name in ("trainable", "sampler_logprobs", "version")), strict=True
    ):
        if not trains:
            for column in columns.values():
                column.append(None)
            continue
        spread = noise * (0.15 + (step - 1 - version)) * (10 if chance.random() < 0.03 else 1)
        l = min(b + chance.gauss(0, spread), -1e-6)  # noqa: E741 - the letters of the formulas
        kept = "trained"
        for place, gate in enumerate(gates):
            side = dropped_side(gate, math.exp(l), math.exp(b), row.advantage)
            if side is not None:
                kept = f"gate {place} ({gate.statistic}) {side}"
                break
        columns["logprobs"].append(l)
        columns["entropy"].append(chance.expovariate(2.0))
        columns["gradient"].append(-row.advantage * math.exp(l - b) / 100 if kept == "trained" else 0.0)
        columns["kept"].append(kept)
    return columns


def numbers_of(rows: list[SampleRecord], step: int, chance: random.Random) -> dict[str, float]:
    """What a step's log line has, from its rows where it can be."""
    counts, distance = {"trained": 0, "low": 0, "high": 0}, 0.0
    for row in records.trained_rows(rows):
        assert row.sequence is not None
        recorded = row.sequence.as_lists()["sampler_logprobs"]
        for kept, l, b in zip(row.token_columns["kept"], row.token_columns["logprobs"], recorded, strict=True):  # noqa: E741
            if kept is not None:
                counts[kept.rpartition(" ")[2]] += 1
                distance += math.exp(l - b) - 1 - (l - b)
    tokens = sum(counts.values()) or 1
    rewards = [row.reward for row in rows if row.reward is not None]
    ages = [step - 1 - v for row in rows if row.sequence for v in row.sequence.trainable_versions.tolist()]
    return {
        "reward": sum(rewards) / len(rewards),
        "reward/sums": sum(rewards) / len(rewards),
        "loss": -0.02 - 0.01 * chance.random(),
        "grad_norm": 0.8 + chance.random(),
        "lr": 1e-6,
        "groups": len({row.group for row in rows}),
        "samples": len(rows),
        "tokens": tokens,
        "seconds": 20 + chance.random(),
        "tokens_per_second": tokens / (20 + 4 * chance.random()),
        "entropy": 0.9 - 0.004 * step + 0.05 * chance.random(),
        "mismatch_kl": distance / tokens,
        "is_masked": (counts["low"] + counts["high"]) / tokens,
        "is_masked_low": counts["low"] / tokens,
        "is_masked_high": counts["high"] / tokens,
        "staleness": sum(ages) / len(ages),
        "staleness_max": max(ages),
        **({"mismatch_kl_masked": 0.5} if step == 2 else {}),  # what is not finite is not written
        "dropped": sum(row.outcome == "dropped" for row in rows),
    }


def fate_of(row: SampleRecord) -> RolloutOutcome:
    tokens = 0 if row.sequence is None else row.sequence.trainable_count
    fate: Any = row.outcome
    return RolloutOutcome(
        row.group,
        row.member,
        row.attempt,
        row.environment,
        row.task_id,
        fate,
        row.reason,
        row.error,
        row.reward,
        tokens,
    )
