"""Runs of supervised fine-tuning with the tiny model, in this process and in one that is killed."""

import asyncio
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keel.cli.run.sft import load
from keel.run.folder import RunFolder
from keel.run.monitor.callbacks import NullCallback
from keel.run.sft.loop import SftRun

SETTINGS = {
    "steps": 6,
    "model.name": "tiny",
    "sft.rows_per_step": 4,
    "trainer.optimizer.lr": 1e-3,
    "trainer.optimizer.lr_schedule": "cosine",
    "evaluation.every": 3,
    "checkpoints.every": 3,
}


class SftWatcher(NullCallback):
    """Records the steps, evaluations and notices of a run."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}
        self.losses: dict[int, float] = {}
        self.notices: list[str] = []

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps[step] = dict(metrics)

    def loss_evaluated(self, step: int, name: str, metrics: Mapping[str, float]) -> None:
        self.losses[step] = metrics["loss"]

    def notice(self, text: str) -> None:
        self.notices.append(text)


def write_rows(path: Path, rows: list[dict[str, Any]] | None = None) -> Path:
    """Write rows to a JSON-lines file; by default forty conversations of different lengths."""
    rng = random.Random(0)
    if rows is None:
        rows = [
            {"messages": [m for _ in range(1 + number % 3) for m in _exchange(rng)], "number": number}
            for number in range(40)
        ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _exchange(rng: random.Random) -> list[dict[str, str]]:
    word = "".join(rng.choices("abcdefgh", k=rng.randint(2, 9)))
    return [{"role": "user", "content": f"say {word}"}, {"role": "assistant", "content": word}]


def sft_overrides(dataset: Path, **changes: Any) -> list[str]:
    """Return overrides for a run on a file; `sft__epochs=2` sets sft.epochs, None leaves a setting out."""
    values = {**SETTINGS, "sft.dataset.path": str(dataset)}
    values |= {name.replace("__", "."): value for name, value in changes.items()}
    return [f"--{name}={json.dumps(value)}" for name, value in values.items() if value is not None]


def run_sft(folder: RunFolder, stop_after: int | None = None) -> SftWatcher:
    """Train to the end, or stop after a step."""
    watcher = SftWatcher()
    try:
        run = SftRun(folder, watcher)
        watched = watcher.step

        def step(number: int, metrics: Mapping[str, float]) -> None:
            watched(number, metrics)
            if number == stop_after:
                run.stop()

        watcher.step = step  # type: ignore[method-assign]
        asyncio.run(run.train())
    finally:
        folder.close()
    return watcher


def train_sft(folder: Path, dataset: Path, *, stop_after: int | None = None, **changes: Any) -> SftWatcher:
    return run_sft(RunFolder.create(folder, load(None, sft_overrides(dataset, **changes))), stop_after)


def resume_sft(folder: Path) -> SftWatcher:
    return run_sft(RunFolder.open(folder))
