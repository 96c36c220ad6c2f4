"""Supervised fine-tuning computes transformers' cross-entropy, records what it trained, and resumes bit for bit."""

import itertools
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from keel.common.sample import Sample
from keel.config import LoraSettings, RendererSettings, SftSettings, TrainerSettings
from keel.errors import ConfigError, KeelError
from keel.rollout.rendering.renderer import Renderer
from keel.run.records import read_step, step_path, trained_samples
from keel.run.sft.batches import SampleRenderer
from keel.run.sft.conversations import Conversation
from keel.run.sft.loop import mean_loss
from keel.training import Model, Trainer
from tests.support.paths import ROOT
from tests.support.policy_strategies import difference, gradients, tiny
from tests.support.sft_runs import resume_sft, sft_overrides, train_sft, write_rows
from tests.training.step.test_optimizer_step import captured_gradients

BITS = ("model.safetensors", "training/optimizer.safetensors")


class Listed(list[Conversation]):
    """Conversations in memory."""

    def place(self, index: int) -> str:
        return f"row {index}"


def samples_of(model: Model, replies: list[str]) -> list[Sample]:
    listed = Listed(
        Conversation(
            str(n), [{"role": "user", "content": "hi"}, {"role": "assistant", "content": text}] * (1 + n % 2), []
        )
        for n, text in enumerate(replies)
    )
    for conversation in listed:
        conversation.trained.extend(range(1, len(conversation.messages), 2))
    settings = SftSettings.model_validate({"dataset": "unused.jsonl"})
    renderer = SampleRenderer(Renderer(model.tokenizer, RendererSettings()), settings)
    return renderer.held_out_samples(listed, len(listed))


def transformers_loss(model: Model, samples: list[Sample]) -> Tensor:
    """Return the loss of transformers' own model, with padding and labels of -100 outside the assistant's tokens."""
    size = max(map(len, samples))
    ids, labels = torch.zeros(len(samples), size, dtype=torch.long), torch.full((len(samples), size), -100)
    mask = torch.zeros(len(samples), size, dtype=torch.long)
    for row, sample in enumerate(samples):
        tokens, trainable = torch.tensor(np.asarray(sample.token_ids)), torch.tensor(np.asarray(sample.trainable))
        ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
        labels[row, : len(tokens)][trainable] = tokens[trainable]
    loss: Tensor = model.network(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
    return loss


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4)], ids=["full", "lora"])
@pytest.mark.parametrize(("max_tokens", "share"), [(4096, True), (110, True), (4096, False), (110, False)])
def test_loss_and_gradient_are_those_of_transformers_however_samples_are_packed(
    lora: LoraSettings | None, max_tokens: int, share: bool
) -> None:
    model = tiny(dtype="float64", lora=lora)
    samples = samples_of(model, ["a", "some longer reply", "", "x" * 30, "the same", "the same"])
    model.network.zero_grad()
    loss = transformers_loss(model, samples)
    loss.backward()  # type: ignore[no-untyped-call]
    expected, loss = gradients(model), loss.detach()
    settings = TrainerSettings(max_tokens_per_micro_batch=max_tokens, share_prefixes=share, max_grad_norm=None)
    trainer = Trainer(model, settings)
    with captured_gradients(trainer) as captured:
        report = trainer.step(samples, "cross_entropy")
    # transformers computes its loss in float32 whatever the type of the weights is
    assert report.loss == pytest.approx(float(loss), rel=1e-6)
    assert difference(captured[0], expected) < 1e-6
    assert mean_loss(samples, trainer.logprobs(samples))[0] == pytest.approx(report.loss, rel=1e-12)
    assert (report.micro_batches == 1) == (max_tokens == 4096)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "train.jsonl")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    train_sft(folder, dataset)
    return folder


def curve(folder: Path) -> list[tuple[int, float]]:
    with sqlite3.connect(folder / "run.db") as db:
        return db.execute("SELECT step, json_extract(metrics, '$.loss') FROM steps ORDER BY step").fetchall()


def evaluations(folder: Path) -> list[tuple[int, float]]:
    with sqlite3.connect(folder / "run.db") as db:
        return db.execute("SELECT step, json_extract(metrics, '$.loss') FROM evaluations ORDER BY step").fetchall()


def assert_same_run(expected: Path, actual: Path) -> None:
    assert curve(actual) == curve(expected)
    assert evaluations(actual) == evaluations(expected)
    for file in BITS:
        first, second = (folder / "checkpoints" / "step_6" / file for folder in (expected, actual))
        assert first.read_bytes() == second.read_bytes(), file


def test_the_loss_falls_and_is_evaluated_on_held_out_rows(tmp_path: Path, dataset: Path) -> None:
    watcher = train_sft(tmp_path / "run", dataset, steps=30, evaluation__every=15, trainer__optimizer__lr=3e-3)
    assert list(watcher.losses) == [0, 15, 30]
    assert watcher.losses[30] < watcher.losses[15] < watcher.losses[0] - 1
    assert watcher.steps[30]["loss"] < watcher.steps[1]["loss"] - 1
    assert watcher.steps[1]["loss"] == pytest.approx(watcher.losses[0], rel=0.2)


def test_the_records_hold_the_log_prob_of_every_trained_token_and_nothing_else(uninterrupted: Path) -> None:
    for step, loss in curve(uninterrupted):
        path = step_path(uninterrupted / "rollouts", step)
        table = pq.read_table(path).to_pylist()
        logprobs = [value for row in table for value in row["logprobs"] if value is not None]
        assert -np.mean(logprobs) == pytest.approx(loss, rel=1e-5)
        assert all([v is not None for v in row["logprobs"]] == row["trainable"] for row in table)
        assert all(row["sampler_logprobs"] is None and row["versions"] is None for row in table)
        assert [len(sample) for sample in trained_samples(read_step(path))] == [len(row["token_ids"]) for row in table]


@pytest.mark.parametrize("stop", [1, 3, 4])
def test_a_stopped_run_resumes_with_the_same_curve_and_weights(
    uninterrupted: Path, dataset: Path, tmp_path: Path, stop: int
) -> None:
    folder = tmp_path / "run"
    assert list(train_sft(folder, dataset, stop_after=stop).steps) == list(range(1, stop + 1))
    assert list(resume_sft(folder).steps) == list(range(stop + 1, 7))
    assert_same_run(uninterrupted, folder)


def test_steps_after_the_last_checkpoint_are_trained_again_from_their_records(
    uninterrupted: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(uninterrupted, folder)
    shutil.rmtree(folder / "checkpoints" / "step_6")
    watcher = resume_sft(folder)
    assert [text.split()[1] for text in watcher.notices] == ["4", "5", "6"]
    assert_same_run(uninterrupted, folder)


@pytest.mark.process
def test_a_run_killed_at_any_moment_resumes_with_the_same_curve(
    uninterrupted: Path, dataset: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "keel.cli", "sft"]
    arguments = [*command, "--run", str(folder), *sft_overrides(dataset)]
    for kills in itertools.count():
        process = subprocess.Popen(arguments, cwd=ROOT, env=one_thread())
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            # the first process is killed after a step and before a checkpoint, the second after the checkpoint
            if kills < 2 and (folder / "run.db").exists() and len(curve(folder)) >= (2, 4)[kills]:
                process.kill()
                break
            time.sleep(0.01)
        process.wait(timeout=60)
        if process.returncode == 0:
            break
        assert process.returncode == -9
        arguments = [*command, "--resume", str(folder)]
    assert_same_run(uninterrupted, folder)


def one_thread() -> dict[str, str]:
    import os

    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def test_a_run_does_not_resume_on_changed_data(tmp_path: Path) -> None:
    dataset = write_rows(tmp_path / "train.jsonl")
    train_sft(tmp_path / "run", dataset, stop_after=2)
    dataset.write_text(dataset.read_text().replace("say", "yell"))
    with pytest.raises(KeelError, match=r"train.jsonl has changed since .*run was started"):
        resume_sft(tmp_path / "run")


def test_a_row_that_is_too_long_is_named_before_the_start_and_leaves_no_steps(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "completion": "c" * (300 if n == 7 else 3)} for n in range(20)]
    dataset = write_rows(tmp_path / "train.jsonl", rows)
    changes: dict[str, Any] = {"sft__max_sequence_tokens": 100, "sft__dataset__eval_fraction": 0}
    with pytest.raises(ConfigError, match=r"1 of the first 20 conversations .*\n  .*train\.jsonl:8: longer than sft"):
        train_sft(tmp_path / "run", dataset, **changes)
    assert not curve(tmp_path / "run")
    watcher = train_sft(
        tmp_path / "allowed", dataset, sft__dataset__max_invalid_fraction=0.1, sft__epochs=1, steps=None, **changes
    )
    assert [metrics["dropped"] for metrics in watcher.steps.values()].count(1.0) == 1
    watcher = train_sft(tmp_path / "truncated", dataset, sft__on_overlength="truncate", **changes)
    assert not any(metrics["dropped"] for metrics in watcher.steps.values())


@pytest.mark.process
def test_two_ranks_train_as_one(uninterrupted: Path, dataset: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "keel.cli", "sft", "--run", str(tmp_path / "run")]
    subprocess.run(
        [*command, *sft_overrides(dataset, trainer__ranks=2)], cwd=ROOT, env=one_thread(), check=True, timeout=240
    )
    for (step, loss), (_, expected) in zip(curve(tmp_path / "run"), curve(uninterrupted), strict=True):
        assert loss == pytest.approx(expected, rel=1e-4), step
    for (step, loss), (_, expected) in zip(evaluations(tmp_path / "run"), evaluations(uninterrupted), strict=True):
        assert loss == pytest.approx(expected, rel=1e-4), step
