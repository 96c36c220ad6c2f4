"""A run from its settings to its folder: what is written down adds up, and what a synchronous run gives is exact."""

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


def fates(folder: Path) -> list[tuple[Any, ...]]:
    with sqlite3.connect(folder / "run.db") as db:
        return db.execute('SELECT "group", member, attempt, outcome, reason, step, tokens FROM rollouts').fetchall()


def table(folder: Path, step: int) -> list[dict[str, Any]]:
    return pq.read_table(folder / "rollouts" / f"step_{step:06d}.parquet").to_pylist()


def timeless(folder: Path, step: int) -> list[dict[str, Any]]:
    """A step's rows without when they were made."""
    return [{k: v for k, v in row.items() if k not in ("seconds", "ended_at")} for row in table(folder, step)]


def weights(folder: Path, step: int) -> bytes:
    return (folder / "checkpoints" / f"step_{step}" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Watcher]:
    folder = tmp_path_factory.mktemp("runs") / "one"
    return folder, train(folder)


def test_every_rollout_has_one_fate_and_the_files_agree_with_the_ledger(run: tuple[Path, Watcher]) -> None:
    folder, _ = run
    found = fates(folder)
    assert len({row[:3] for row in found}) == len(found)
    in_files = {
        (row["group"], row["member"], row["attempt"]): (row["outcome"], row["reason"], row["step"])
        for step in range(1, 7)
        for row in table(folder, step)
    }
    # what was under way when the run ended is in the ledger only
    assert in_files == {row[:3]: row[3:6] for row in found if row[4] != "run_ended"}
    assert Counter(row[5] for row in found if row[3] == "trained" or row[4] == "zero_variance") == dict.fromkeys(
        range(1, 7), 16
    )


def test_a_steps_file_says_of_every_token_what_became_of_it(run: tuple[Path, Watcher]) -> None:
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


def test_the_sampler_and_the_trainer_agree_on_fresh_tokens(run: tuple[Path, Watcher]) -> None:
    folder, _ = run
    differences = [
        abs(mine - theirs)
        for step in range(1, 7)
        for row in table(folder, step)
        # an answer that new weights reached half-way goes on with the keys of the old ones
        if row["outcome"] == "trained" and set(row["versions"]) <= {-1, row["version"]}
        for mine, theirs, version in zip(row["logprobs"], row["sampler_logprobs"], row["versions"], strict=True)
        if version == row["version"]
    ]
    assert differences and max(differences) < 1e-4


def test_new_weights_reach_the_engine(run: tuple[Path, Watcher]) -> None:
    folder, watcher = run
    versions = {version for step in range(1, 7) for row in table(folder, step) for version in row["versions"]}
    assert len(versions - {-1}) > 3
    assert all(numbers.get("staleness_max", 0) <= 1 for numbers in watcher.steps.values())


def test_the_folder_says_what_was_run(run: tuple[Path, Watcher]) -> None:
    folder, watcher = run
    assert not settings_diff(load_settings(folder / "config.toml"), loaded(folder))
    said = json.loads((folder / "run.json").read_text())
    assert said["versions"]["keel-rl"] == keel.__version__
    assert set(watcher.evaluations) == {0, 3, 6}
    metrics = pq.read_table(folder / "metrics.parquet").to_pylist()
    assert [row["reward"] for row in metrics] == [watcher.steps[step]["reward"] for step in range(1, 7)]
    opened = RunFolder.open(folder)
    text = summarize_run(opened)
    assert opened.ledger.get_meta("status") == "finished"
    opened.close()
    assert "evaluation larger_number on 4 unseen tasks" in text and f"folder     {folder}" in text


def test_the_folder_says_what_the_run_is_doing_while_it_does_it(tmp_path: Path) -> None:
    live, seen = tmp_path / "run" / "live.json", []
    written = LiveStatus.write

    async def say(self: LiveStatus, doing: str, engine: Any) -> None:
        await written(self, doing, engine)
        if live.exists():
            seen.append(json.loads(live.read_text()))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LiveStatus, "write", say)
        train(tmp_path / "run", steps=2, evaluation__when="never")
    assert any(one["doing"].startswith("sampling: ") and one["engines"].startswith("version 0") for one in seen)
    assert not live.exists()


def test_a_finished_run_has_nothing_to_go_on_with(run: tuple[Path, Watcher]) -> None:
    folder, _ = run
    before = fates(folder)
    assert resume(folder).steps == {}
    assert fates(folder) == before


@pytest.mark.parametrize("lora", [False, True])
def test_two_synchronous_runs_are_equal_bit_for_bit(tmp_path: Path, lora: bool) -> None:
    changes: dict[str, Any] = {"scheduler__max_off_policy_steps": 0, "steps": 3}
    if lora:
        changes["model__lora__rank"] = 4
    for name in ("a", "b"):
        train(tmp_path / name, **changes)
    files = ["adapter_model.safetensors"] if lora else ["model.safetensors"]
    for file in (*files, "training/optimizer.safetensors"):
        one, other = (tmp_path / name / "checkpoints" / "step_3" / file for name in ("a", "b"))
        assert one.read_bytes() == other.read_bytes()
    assert timeless(tmp_path / "a", 3) == timeless(tmp_path / "b", 3)
    train(tmp_path / "c", **changes, seed=1)
    assert timeless(tmp_path / "a", 1) != timeless(tmp_path / "c", 1)


def test_lora_reaches_the_engine_and_a_step_reference_acts(tmp_path: Path) -> None:
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
    assert all(row["version"] == max(row["versions"]) for row in rows), "all were sampled from the newest adapter"
    fresh = [
        abs(mine - theirs)
        for row in rows
        for mine, theirs, version in zip(row["logprobs"], row["sampler_logprobs"], row["versions"], strict=True)
        if version == row["version"]
    ]
    assert max(fresh) < 1e-3
    drifts = [abs(numbers["kl_ref/first"]) for numbers in watcher.steps.values() if "kl_ref/first" in numbers]
    assert drifts[0] == pytest.approx(0, abs=1e-5) and drifts[-1] > 1e-3


def test_two_environments_share_a_run_by_their_weights(tmp_path: Path) -> None:
    watcher = train(
        tmp_path / "run",
        steps=3,
        environments__count_letters__options__shots=0,
        environments__count_letters__weight=3.0,
        evaluation__when="never",
        scheduler__max_off_policy_steps=0,
        advantages__zero_variance_groups="train",
    )
    groups = Counter(row[0].split("#")[0] for row in fates(tmp_path / "run"))
    assert groups["count_letters"] == 3 * groups["larger_number"]
    assert {"reward/larger_number", "reward/count_letters"} <= watcher.steps[1].keys()
    assert not watcher.evaluations


def test_steps_that_train_nothing_end_the_run_with_their_reason(tmp_path: Path) -> None:
    with pytest.raises(KeelError, match=r"2 steps in a row trained nothing.*zero_variance 16"):
        train(
            tmp_path / "run", scheduler__max_empty_steps=2, environments__larger_number__name="tests.run.test_loop:Flat"
        )
    with Ledger_open(tmp_path / "run") as ledger:
        assert ledger.get_meta("status") == "failed"
        assert ledger.last_step == 2


class Ledger_open:
    def __init__(self, folder: Path) -> None:
        self.ledger = Ledger(folder / "run.db")

    def __enter__(self) -> Ledger:
        return self.ledger

    def __exit__(self, *_: object) -> None:
        self.ledger.close()


def test_a_sample_whose_gradient_is_not_finite_is_refused_and_the_rest_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from keel.errors import StepRefused
    from keel.training import Trainer

    whole = Trainer.step

    def step(self: Trainer, samples: Any, *given: Any, **named: Any) -> Any:
        bad = [number for number, sample in enumerate(samples) if sample.name.split("/")[1] == "2"]
        if bad and self.steps == 1:
            raise StepRefused("the gradient is not finite", bad)
        return whole(self, samples, *given, **named)

    monkeypatch.setattr(Trainer, "step", step)
    watcher = train(tmp_path / "run", steps=3, evaluation__when="never")
    refused = {(row[1], row[5]) for row in fates(tmp_path / "run") if row[4] == "non_finite_gradient"}
    assert {member for member, _ in refused} == {2} and len({step for _, step in refused}) == 1
    assert len(watcher.notices) == 1 and "samples are refused: the gradient is not finite" in watcher.notices[0]
    ((_, step_of),) = {(2, number) for _, number in refused}
    assert any(row[3] == "trained" and row[5] == step_of for row in fates(tmp_path / "run"))


class Flat:
    """Pays every answer the same."""

    name = "flat"

    def __init__(self, **_: Any) -> None:
        pass

    def tasks(self, split: str) -> list[Any]:
        from keel.rollout.environments.environment import Task

        return [Task(f"flat/{split}/{number}", {}) for number in range(9)]

    async def episode(self, task: Any, client: Any) -> float:
        await client.chat([{"role": "user", "content": "Which is larger, 1 or 2?"}])
        return 1.0


def test_the_learning_run_learns_and_shuffled_advantages_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The asynchronous path as a whole: reward rises, and it is the advantages that make it."""
    from keel.run import scoring

    chosen = {"steps": 25, "scheduler__groups_per_step": 8, "scheduler__group_size": 8, "evaluation__when": "never"}

    def last(watcher: Watcher) -> float:
        return sum(watcher.steps[step]["reward"] for step in range(21, 26)) / 5

    learned = train(tmp_path / "learns", **chosen)
    assert learned.steps[1]["reward"] < 0.65
    assert last(learned) > 0.8

    right, chance = scoring._advantages, torch.Generator().manual_seed(0)

    def shuffled(*given: Any) -> list[list[float]]:
        return [
            [values[place] for place in torch.randperm(len(values), generator=chance).tolist()]
            for values in right(*given)
        ]

    monkeypatch.setattr(scoring, "_advantages", shuffled)
    assert last(train(tmp_path / "shuffled", **chosen)) < 0.75


@pytest.mark.parametrize("kind", ["process"])
def test_the_same_loop_with_an_engine_in_a_process_of_its_own(tmp_path: Path, kind: str) -> None:
    watcher = train(tmp_path / "run", steps=3, engine__kind=kind, evaluation__when="start_and_end")
    assert list(watcher.steps) == [1, 2, 3]
    rows = [row for step in (1, 2, 3) for row in table(tmp_path / "run", step) if row["outcome"] == "trained"]
    assert {version for row in rows for version in row["versions"]} - {-1, 0}, "weights were published"
    left = list((tmp_path / "run" / "weights").glob("version_*"))
    assert 1 <= len(left) <= 2


# -- what is refused --------------------------------------------------------------------------------------------------


def test_a_run_is_not_written_over_and_not_by_two(tmp_path: Path) -> None:
    first = RunFolder.create(tmp_path / "run", loaded(tmp_path / "run"))
    with pytest.raises(KeelError, match=r"is being written by process \d+"):
        RunFolder.open(tmp_path / "run")
    first.close()
    with pytest.raises(ConfigError, match="holds a run; go on with it by --resume"):
        RunFolder.create(tmp_path / "run", loaded(tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"holds no run: there is no run\.db"):
        RunFolder.open(tmp_path)
    assert unused_path(tmp_path, "run").name == "run-2"


def test_changed_settings_are_shown_and_have_to_be_allowed(tmp_path: Path) -> None:
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
def test_settings_that_cannot_act_together_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.toml").write_text(text + "\n" + RECIPE)
    with pytest.raises(ConfigError, match=message):
        load_settings(tmp_path / "a.toml")


def test_a_second_fate_cannot_be_written(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "run.db", create=True)
    outcome = RolloutOutcome("a#1", 0, 0, "a", "t", "trained", None, None, 1.0, 3)
    ledger.write_step(1, version=1, stepped=True, metrics={}, outcomes=[outcome], state={})
    with pytest.raises(KeelError, match="second fate"):
        ledger.write_step(2, version=2, stepped=True, metrics={}, outcomes=[outcome], state={"x": 1})
    assert ledger.last_step == 1 and ledger.state() == {}
    ledger.close()


def test_an_objective_that_asks_a_teacher_needs_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="reads a teacher and none is configured"):
        train(tmp_path / "run", objective__teacher_tau=0.1)


def test_a_run_without_an_environment_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("steps = 1\n")
    folder = RunFolder.create(tmp_path / "run", load_settings(tmp_path / "a.toml"))
    from keel.run.loop import TrainingRun

    with pytest.raises(ConfigError, match="environments is empty"):
        TrainingRun(folder)
    folder.close()
