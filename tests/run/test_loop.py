"""A run from settings to folder: its records are consistent, and a synchronous run is reproducible bit for bit."""

import json
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

import keel
from keel.config import load_settings
from keel.errors import ConfigError, KeelError
from keel.run.folder import RunFolder, settings_diff, unused_path
from keel.run.ledger import Ledger, RolloutOutcome
from keel.run.live_status import LiveStatus
from keel.run.summary import summarize_run
from tests.support.tiny_runs import RECIPE, Watcher, loaded, resume, train


def outcomes(folder: Path) -> list[tuple[Any, ...]]:
    with sqlite3.connect(folder / "run.db") as db:
        return db.execute('SELECT "group", member, attempt, outcome, reason, step, tokens FROM rollouts').fetchall()


def table(folder: Path, step: int) -> list[dict[str, Any]]:
    return pq.read_table(folder / "rollouts" / f"step_{step:06d}.parquet").to_pylist()


def without_times(folder: Path, step: int) -> list[dict[str, Any]]:
    """Return the rows of a step without durations and timestamps."""
    return [{k: v for k, v in row.items() if k not in ("seconds", "ended_at")} for row in table(folder, step)]


def weights(folder: Path, step: int) -> bytes:
    return (folder / "checkpoints" / f"step_{step}" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Watcher]:
    folder = tmp_path_factory.mktemp("runs") / "one"
    return folder, train(folder)


@pytest.mark.model
def test_the_learning_rate_decays_over_the_length_of_the_run(tmp_path: Path) -> None:
    schedule = {"trainer__optimizer__lr_schedule": "linear", "trainer__optimizer__lr": 1e-3}
    watcher = train(tmp_path / "run", steps=4, evaluation__when="never", **schedule)
    rates = [metrics["lr"] for metrics in watcher.steps.values()]
    assert rates == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])


def test_every_rollout_has_one_outcome_and_the_files_agree_with_the_ledger(run: tuple[Path, Watcher]) -> None:
    folder, watcher = run
    recorded = outcomes(folder)
    assert len({row[:3] for row in recorded}) == len(recorded)
    in_files = {
        (row["group"], row["member"], row["attempt"]): (row["outcome"], row["reason"], row["step"])
        for step in range(1, 7)
        for row in table(folder, step)
    }
    # rollouts in flight when the run ended are only in the ledger
    assert in_files == {row[:3]: row[3:6] for row in recorded if row[4] != "run_ended"}
    assert Counter(row[5] for row in recorded if row[3] == "trained" or row[4] == "zero_variance") == {
        step: 16 + 4 * metrics["refilled_groups"] for step, metrics in watcher.steps.items()
    }


def test_the_file_of_a_step_records_the_outcome_of_every_token(run: tuple[Path, Watcher]) -> None:
    folder, watcher = run
    for step in range(1, 7):
        for row in table(folder, step):
            size = len(row["token_ids"])
            lists = ("token_text", "trainable", "versions", "sampler_logprobs")
            assert all(len(row[name]) == size for name in lists)
            assert all(
                (version >= 0) == trains for version, trains in zip(row["versions"], row["trainable"], strict=True)
            )
            if row["outcome"] == "trained":
                known = [value is not None for value in row["logprobs"]]
                assert known == row["trainable"]
                dropped = [reason is not None for reason in row["drop_reason"]]
                assert all(trains for trains, drops in zip(row["trainable"], dropped, strict=True) if drops)
                assert max(row["versions"]) <= row["version"]
        trained = [logprob for row in table(folder, step) for logprob in row["logprobs"] or () if logprob is not None]
        assert len(trained) == watcher.steps[step].get("trainable_tokens", 0)


def test_the_sampler_and_the_trainer_agree_on_tokens_of_the_current_version(run: tuple[Path, Watcher]) -> None:
    folder, _ = run
    differences = [
        abs(mine - theirs)
        for step in range(1, 7)
        for row in table(folder, step)
        # a completion in flight during an update keeps the KV cache of the old weights
        if row["outcome"] == "trained" and set(row["versions"]) <= {-1, row["version"]}
        for mine, theirs, version in zip(row["logprobs"], row["sampler_logprobs"], row["versions"], strict=True)
        if version == row["version"]
    ]
    assert differences and max(differences) < 1e-4


def test_new_weights_reach_the_engine(run: tuple[Path, Watcher]) -> None:
    folder, watcher = run
    versions = {version for step in range(1, 7) for row in table(folder, step) for version in row["versions"]}
    assert len(versions - {-1}) > 3
    assert all(metrics.get("staleness_max", 0) <= 1 for metrics in watcher.steps.values())


def test_the_folder_records_settings_versions_metrics_and_evaluations(run: tuple[Path, Watcher]) -> None:
    folder, watcher = run
    assert not settings_diff(load_settings(folder / "config.toml"), loaded(folder))
    provenance = json.loads((folder / "run.json").read_text())
    assert provenance["versions"]["keel-rl"] == keel.__version__
    assert set(watcher.evaluations) == {0, 3, 6}
    metrics = pq.read_table(folder / "metrics.parquet").to_pylist()
    assert [row["reward"] for row in metrics] == [watcher.steps[step]["reward"] for step in range(1, 7)]
    opened = RunFolder.open(folder)
    text = summarize_run(opened)
    assert opened.ledger.get_meta("status") == "finished"
    opened.close()
    assert "evaluation larger_number on 4 held-out tasks" in text and f"folder     {folder}" in text


def test_live_json_shows_the_current_activity_while_the_run_lasts(tmp_path: Path) -> None:
    live, seen = tmp_path / "run" / "live.json", []
    write = LiveStatus.write

    async def write_and_read(self: LiveStatus, activity: str, engine: Any) -> None:
        await write(self, activity, engine)
        if live.exists():
            seen.append(json.loads(live.read_text()))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LiveStatus, "write", write_and_read)
        train(tmp_path / "run", steps=2, evaluation__when="never")
    assert any(
        status["doing"].startswith("sampling: ") and status["engines"].startswith("version 0") for status in seen
    )
    assert not live.exists()


def test_resuming_a_finished_run_does_nothing(run: tuple[Path, Watcher]) -> None:
    folder, _ = run
    before = outcomes(folder)
    assert resume(folder).steps == {}
    assert outcomes(folder) == before


@pytest.mark.parametrize("lora", [False, True])
def test_two_synchronous_runs_are_bit_identical(tmp_path: Path, lora: bool) -> None:
    changes: dict[str, Any] = {"scheduler__max_off_policy_steps": 0, "steps": 3}
    if lora:
        changes["model__lora__rank"] = 4
    for name in ("a", "b"):
        train(tmp_path / name, **changes)
    files = ["adapter_model.safetensors"] if lora else ["model.safetensors"]
    for file in (*files, "training/optimizer.safetensors"):
        first, second = (tmp_path / name / "checkpoints" / "step_3" / file for name in ("a", "b"))
        assert first.read_bytes() == second.read_bytes()
    assert without_times(tmp_path / "a", 3) == without_times(tmp_path / "b", 3)
    train(tmp_path / "c", **changes, seed=1)
    assert without_times(tmp_path / "a", 1) != without_times(tmp_path / "c", 1)


def test_lora_reaches_the_engine_and_a_step_reference_has_an_effect(tmp_path: Path) -> None:
    watcher = train(
        tmp_path / "run",
        steps=4,
        scheduler__max_off_policy_steps=0,
        model__lora__rank=4,
        objective__kl_penalty_coef=0.5,
        references__first__source="step:0",
        trainer__optimizer__lr=0.01,
    )
    rows = [row for step in range(1, 5) for row in table(tmp_path / "run", step) if row["outcome"] == "trained"]
    assert all(row["version"] == max(row["versions"]) for row in rows), "every sample is from the newest adapter"
    differences = [
        abs(mine - theirs)
        for row in rows
        for mine, theirs, version in zip(row["logprobs"], row["sampler_logprobs"], row["versions"], strict=True)
        if version == row["version"]
    ]
    assert max(differences) < 1e-3
    kl = [abs(metrics["kl_ref/first"]) for metrics in watcher.steps.values() if "kl_ref/first" in metrics]
    assert kl[0] == pytest.approx(0, abs=1e-5) and kl[-1] > 1e-3


def test_two_environments_share_a_run_in_proportion_to_their_weights(tmp_path: Path) -> None:
    watcher = train(
        tmp_path / "run",
        steps=3,
        environments__count_letters__options__shots=0,
        environments__count_letters__weight=3.0,
        evaluation__when="never",
        scheduler__max_off_policy_steps=0,
        advantages__zero_variance_groups="train",
    )
    groups = Counter(row[0].split("#")[0] for row in outcomes(tmp_path / "run"))
    assert groups["count_letters"] == 3 * groups["larger_number"]
    assert {"reward/larger_number", "reward/count_letters"} <= watcher.steps[1].keys()
    assert not watcher.evaluations


@pytest.mark.model
def test_environments_with_groups_of_different_sizes_train_together_and_resume(tmp_path: Path) -> None:
    settings = {
        "steps": 3,
        "environments__count_letters__options__shots": 0,
        "environments__count_letters__group_size": 6,
        "environments__larger_number__group_size": 2,
        "evaluation__when": "never",
        "scheduler__max_off_policy_steps": 0,
        "advantages__zero_variance_groups": "train",
    }
    watcher = train(tmp_path / "run", **settings)
    train(tmp_path / "stopped", stop_after=1, **settings)
    resume(tmp_path / "stopped")
    rows = [row[:3] for row in outcomes(tmp_path / "run")]
    assert sorted(rows) == sorted(row[:3] for row in outcomes(tmp_path / "stopped"))
    sizes = Counter(group for group, _, _ in rows)
    assert {(group.split("#")[0], size) for group, size in sizes.items()} == {
        ("count_letters", 6),
        ("larger_number", 2),
    }
    assert [metrics["rollouts"] for metrics in watcher.steps.values()] == [16.0] * 3


def test_steps_that_train_nothing_end_the_run_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(KeelError, match=r"2 steps in a row trained nothing.*zero_variance 16"):
        train(
            tmp_path / "run",
            scheduler__max_empty_steps=2,
            scheduler__refill=False,
            environments__larger_number__name="tests.run.test_loop:Flat",
        )
    with open_ledger(tmp_path / "run") as ledger:
        assert ledger.get_meta("status") == "failed"
        assert ledger.last_step == 2


@pytest.mark.model
def test_the_mean_reward_includes_groups_that_others_replaced(tmp_path: Path) -> None:
    watcher = train(
        tmp_path / "run",
        steps=2,
        scheduler__max_refill_factor=2.0,
        environments__larger_number__name="tests.run.test_loop:Mixed",
        evaluation__when="never",
    )
    for metrics in watcher.steps.values():
        assert metrics["refilled_groups"] > 0
        assert metrics["groups"] == 4 and metrics["zero_variance_groups"] == metrics["refilled_groups"]
    rows = outcomes(tmp_path / "run")
    assert {row[0] for row in rows if "zero_variance" in row}
    assert watcher.steps[1]["reward"] > 0.5, "the replaced groups have a reward of 1, the others of 0.5 on average"


class open_ledger:
    def __init__(self, folder: Path) -> None:
        self.ledger = Ledger(folder / "run.db")

    def __enter__(self) -> Ledger:
        return self.ledger

    def __exit__(self, *_: object) -> None:
        self.ledger.close()


def test_a_sample_with_a_non_finite_gradient_is_dropped_and_the_rest_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from keel.errors import StepSkippedError
    from keel.training import Trainer

    original = Trainer.step

    def step(self: Trainer, samples: Any, *args: Any, **kwargs: Any) -> Any:
        bad = [index for index, sample in enumerate(samples) if sample.name.split("/")[1] == "2"]
        if bad and self.steps == 1:
            raise StepSkippedError("the gradient is not finite", bad)
        return original(self, samples, *args, **kwargs)

    monkeypatch.setattr(Trainer, "step", step)
    watcher = train(tmp_path / "run", steps=3, evaluation__when="never")
    dropped = {(row[1], row[5]) for row in outcomes(tmp_path / "run") if row[4] == "non_finite_gradient"}
    assert {member for member, _ in dropped} == {2} and len({step for _, step in dropped}) == 1
    assert len(watcher.notices) == 1 and "samples are dropped: the gradient is not finite" in watcher.notices[0]
    (dropped_step,) = {step for _, step in dropped}
    assert any(row[3] == "trained" and row[5] == dropped_step for row in outcomes(tmp_path / "run"))


class Mixed:
    """Gives equal rewards in every second task, and both rewards in the others."""

    name = "mixed"

    def __init__(self, **_: Any) -> None:
        self.episodes: Counter[str] = Counter()

    def tasks(self, split: str) -> list[Any]:
        from keel.rollout.environments.environment import Task

        return [Task(f"mixed/{split}/{index}", {"equal": index % 2}) for index in range(10)]

    async def episode(self, task: Any, client: Any) -> float:
        await client.chat([{"role": "user", "content": "Which is larger, 1 or 2?"}])
        self.episodes[task.id] += 1
        return 1.0 if task.data["equal"] else float(self.episodes[task.id] % 2)


class Flat:
    """Gives every completion the same reward."""

    name = "flat"

    def __init__(self, **_: Any) -> None:
        pass

    def tasks(self, split: str) -> list[Any]:
        from keel.rollout.environments.environment import Task

        return [Task(f"flat/{split}/{index}", {}) for index in range(9)]

    async def episode(self, task: Any, client: Any) -> float:
        await client.chat([{"role": "user", "content": "Which is larger, 1 or 2?"}])
        return 1.0


def test_the_reward_rises_with_real_advantages_and_not_with_shuffled_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The asynchronous path end to end: the reward rises, and it is the advantages that cause it."""
    from keel.run import scoring

    settings = {"steps": 25, "scheduler__groups_per_step": 8, "scheduler__group_size": 8, "evaluation__when": "never"}

    def last_reward(watcher: Watcher) -> float:
        return sum(watcher.steps[step]["reward"] for step in range(21, 26)) / 5

    learned = train(tmp_path / "learns", **settings)
    assert learned.steps[1]["reward"] < 0.65
    assert last_reward(learned) > 0.8

    original, generator = scoring._advantages, torch.Generator().manual_seed(0)

    def shuffled(*args: Any) -> list[list[float]]:
        return [
            [values[index] for index in torch.randperm(len(values), generator=generator).tolist()]
            for values in original(*args)
        ]

    monkeypatch.setattr(scoring, "_advantages", shuffled)
    assert last_reward(train(tmp_path / "shuffled", **settings)) < 0.75


@pytest.mark.process
@pytest.mark.parametrize("kind", ["process"])
def test_the_same_loop_works_with_an_engine_in_a_separate_process(tmp_path: Path, kind: str) -> None:
    watcher = train(tmp_path / "run", steps=3, engine__kind=kind, evaluation__when="start_and_end")
    assert list(watcher.steps) == [1, 2, 3]
    rows = [row for step in (1, 2, 3) for row in table(tmp_path / "run", step) if row["outcome"] == "trained"]
    assert {version for row in rows for version in row["versions"]} - {-1, 0}, "weights were published"
    published = list((tmp_path / "run" / "weights").glob("version_*"))
    assert 1 <= len(published) <= 2


# -- errors -----------------------------------------------------------------------------------------------------------


def test_a_run_is_neither_overwritten_nor_written_by_two_processes(tmp_path: Path) -> None:
    first = RunFolder.create(tmp_path / "run", loaded(tmp_path / "run"))
    with pytest.raises(KeelError, match=r"is being written by process \d+"):
        RunFolder.open(tmp_path / "run")
    first.close()
    with pytest.raises(ConfigError, match="already holds a run; resume it with --resume"):
        RunFolder.create(tmp_path / "run", loaded(tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"does not hold a run: it has no run\.db"):
        RunFolder.open(tmp_path)
    assert unused_path(tmp_path, "run").name == "run-2"


def test_changed_settings_are_listed_and_have_to_be_allowed(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", loaded(tmp_path / "run")).close()
    with pytest.raises(ConfigError, match=r"- steps = 6\n  \+ steps = 9\n.*--allow-changes"):
        RunFolder.open(tmp_path / "run", overrides=["--steps", "9"])
    opened = RunFolder.open(tmp_path / "run", overrides=["--steps", "9"], allow_changes=True)
    assert opened.settings.steps == 9
    opened.close()
    again = RunFolder.open(tmp_path / "run")
    assert again.settings.steps == 9
    again.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('engine.kind = "pool"', "engine.*pool"),
        ("publish.every = 4", "publish.every = 4"),
        (
            "trainer.max_tokens_per_micro_batch = 100",
            r"larger_number\.limits\.max_sequence_tokens = 4096 .*max_tokens_per_micro_batch = 100",
        ),
        ('references.a.source = "base"', "references"),
        ('teacher.name = "tiny"', "teacher"),
        ('engine.kind = "vllm"\nengine.int8 = true', "int8"),
        ('engine.kind = "vllm"\nengine.native_kernels = "off"', 'native_kernels = "off" has no effect'),
    ],
)
def test_settings_that_contradict_each_other_are_errors(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.toml").write_text(text + "\n" + RECIPE)
    with pytest.raises(ConfigError, match=message):
        load_settings(tmp_path / "a.toml")


def test_a_second_outcome_cannot_be_written(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "run.db", create=True)
    outcome = RolloutOutcome("a#1", 0, 0, "a", "t", "trained", None, None, 1.0, 3)
    ledger.write_step(1, version=1, stepped=True, metrics={}, outcomes=[outcome], state={})
    with pytest.raises(KeelError, match="second outcome"):
        ledger.write_step(2, version=2, stepped=True, metrics={}, outcomes=[outcome], state={"x": 1})
    assert ledger.last_step == 1 and ledger.state() == {}
    ledger.close()


def test_an_objective_that_uses_a_teacher_needs_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="reads a teacher and none is configured"):
        train(tmp_path / "run", objective__teacher_tau=0.1)


def test_a_run_without_an_environment_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("steps = 1\n")
    folder = RunFolder.create(tmp_path / "run", load_settings(tmp_path / "a.toml"))
    from keel.run.loop import TrainingRun

    with pytest.raises(ConfigError, match="environments is empty"):
        TrainingRun(folder)
    folder.close()
