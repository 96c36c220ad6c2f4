"""Two processes of accelerate train the step that one would: the logged loss is that of all of their tokens."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing as mp

import keel
from keel.tools.compare.readers import Recording
from tests.support.trl_trainers import NO_TRL, make_trainer

pytest.importorskip("trl", reason=NO_TRL)
pytestmark = [pytest.mark.hosts, pytest.mark.process]

TABLES: dict[str, dict[str, Any]] = {
    "counts": {"name": "gspo"},
    "whole step": {"name": "m2po", "tau": 0.01, "denominator": "kept"},
}


def train(rank: int, folder: str, port: int) -> None:
    """Train two objectives on one of two processes and write what rank 0 logs."""
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in environment.items()} | {"CI": "1"})
    for name, table in TABLES.items():
        trainer = make_trainer(
            Path(folder) / name,
            table,
            trainer={"record_tokens": Path(folder) / name / "tokens"},
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            num_iterations=2,
        )
        trainer.train()
        if rank == 0:
            (Path(folder) / f"{name}.json").write_text(json.dumps(trainer.state.log_history))


def test_the_loss_is_that_of_both_processes(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(train, args=(str(tmp_path), port), nprocs=2)
    for name, table in TABLES.items():
        logged = [entry for entry in json.loads((tmp_path / f"{name}.json").read_text()) if "loss" in entry]
        steps = list(Recording(tmp_path / name / "tokens").steps())
        assert len(logged) == len(steps) == 2
        for entry, step in zip(logged, steps, strict=True):
            result = keel.objective(table)(step.batch)
            assert len(step.rows) == 8
            assert entry["loss"] == pytest.approx(result.loss.item(), rel=1e-4, abs=1e-6)
            assert entry["keel/is_masked"] == pytest.approx(float((~result.keep).float().mean()))
