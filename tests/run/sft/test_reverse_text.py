"""A short form of the example: supervised fine-tuning on demonstrations, then reinforcement learning from it."""

from pathlib import Path

import pytest

from keel.cli import main
from keel.run.ledger import Ledger

OPTIONS = "--environments.reverse_text.options={min_length = 1, max_length = 2, train_tasks = 300}"


@pytest.mark.model
def test_the_two_recipes_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["sft", "reverse_text_sft", "--steps", "90", "--trainer.optimizer.warmup_steps", "5", OPTIONS]) == 0
    ledger = Ledger(Path("runs/reverse_text_sft/run.db"))
    losses = [metrics["loss"] for _, _, metrics in ledger.evaluations()]
    ledger.close()
    assert losses[-1] < 0.5 < losses[0]
    short = ["--steps", "3", "--scheduler.groups_per_step", "4", "--evaluation.num_tasks", "16"]
    assert main(["train", "reverse_text", OPTIONS, *short]) == 0
    ledger = Ledger(Path("runs/reverse_text/run.db"))
    formatted = [metrics["environment_metrics/formatted"] for _, _, metrics in ledger.evaluations()]
    steps = ledger.steps()
    ledger.close()
    assert formatted[0] > 0.2  # a model with random weights never writes the tags
    assert any(row.stepped for row in steps)
