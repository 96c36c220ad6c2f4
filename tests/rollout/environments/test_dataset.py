"""An environment from a data set: formats, columns, splits, unusable rows, and reward functions in a real run."""

import asyncio
import csv
import json
import logging
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from keel.cli import main
from keel.config import load_settings
from keel.config.rollout import CurriculumSettings, EnvironmentSettings
from keel.errors import ConfigError, FatalEnvironmentError
from keel.rollout.environments.dataset import DatasetEnvironment
from keel.rollout.environments.dataset_rows import JsonLines
from keel.rollout.environments.environment import Environment, Task
from keel.rollout.environments.registry import load_environment
from keel.rollout.environments.rewards.scorer import CONSTANT_CALLS, RewardScorer
from keel.rollout.environments.rewards.workers import RewardError
from keel.rollout.episode_runner import build_environments
from keel.rollout.scheduler.task_sources import TaskSampler, TaskSource
from keel.run.ledger import Ledger

ROWS = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1), "level": n % 3} for n in range(200)]

REWARDS = """
def reward(completion, answer, **columns):
    return float(completion == answer)

def level(level):
    return level

def batch(prompts, completions, answer, **columns):
    assert isinstance(prompts, list) and isinstance(answer, list)
    return [float(len(text)) for text in completions]

async def later(completion):
    return 0.5

def abstains(completion):
    return None

def broken(completion):
    raise KeyError("no such key")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "dataset_rewards.py").write_text(REWARDS)
    write_lines(tmp_path / "train.jsonl", ROWS)
    return tmp_path


def write_lines(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def environment(rewards: Any = "exact", **dataset: Any) -> DatasetEnvironment:
    table = {"name": "sums", "dataset": {"path": "train.jsonl", **dataset}, "rewards": rewards}
    loaded = load_environment(EnvironmentSettings.model_validate(table))
    assert isinstance(loaded, DatasetEnvironment)
    return loaded


def prompts(tasks: Any) -> list[str]:
    return [task.data["prompt"] for task in tasks]


def score(rewards: Any, arguments: dict[str, Any], *, total: str = "sum", times: int = 1) -> Any:
    table = {"name": "x", "dataset": "train.jsonl", "rewards": rewards, "reward_total": total}
    settings = EnvironmentSettings.model_validate(table)
    scorer = RewardScorer(settings.rewards, settings.reward_total, settings.max_reward_failure_fraction)

    async def call() -> Any:
        try:
            return [await scorer.score(arguments) for _ in range(times)][-1]
        finally:
            await scorer.close()

    return asyncio.run(call())


# data sets


def test_every_format_gives_the_same_tasks(folder: Path) -> None:
    (folder / "train.json").write_text(json.dumps(ROWS))
    pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), folder / "train.parquet", row_group_size=64)
    with (folder / "train.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "answer", "level"])
        writer.writeheader()
        writer.writerows(ROWS)
    saved = folder / "saved"
    saved.mkdir()
    table = pa.Table.from_pylist(ROWS)
    with (
        pa.OSFile(str(saved / "data-00000-of-00001.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as out,
    ):
        out.write_table(table, max_chunksize=70)
    expected = environment()
    for path in ("train.json", "train.parquet", "train.csv", "saved"):
        other = environment(path=path)
        for split in ("train", "eval"):
            assert prompts(other.tasks(split)) == prompts(expected.tasks(split)), path
        assert other.tasks("train")[3].data["level"] == expected.tasks("train")[3].data["level"]


def test_train_and_eval_split_all_rows_by_prompt(folder: Path) -> None:
    write_lines(folder / "train.jsonl", ROWS + ROWS)
    loaded = environment(eval_fraction=0.3)
    train, held_out = prompts(loaded.tasks("train")), prompts(loaded.tasks("eval"))
    assert sorted(train + held_out) == sorted(2 * [row["prompt"] for row in ROWS])
    assert not set(train) & set(held_out)
    assert 0.2 < len(held_out) / len(train + held_out) < 0.4


def test_of_a_few_rows_one_prompt_is_held_out(folder: Path) -> None:
    rows = [{"prompt": f"Say {n}", "answer": str(n)} for n in (1, 2, 3, 3)]
    (folder / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = environment(path="few.jsonl")
    held_out, train = set(prompts(loaded.tasks("eval"))), set(prompts(loaded.tasks("train")))
    assert len(held_out) == 1 and len(train) == 2 and not held_out & train
    (folder / "one.jsonl").write_text(json.dumps(rows[0]) + "\n")
    assert len(environment(path="one.jsonl").tasks("train")) == 1


def test_a_data_set_for_evaluation_only_holds_out_every_row_and_cannot_train() -> None:
    loaded = environment(eval_fraction=1.0)
    assert (len(loaded.tasks("train")), len(loaded.tasks("eval"))) == (0, 200)
    overrides = [
        '--environments.a.dataset={path = "train.jsonl", eval_fraction = 1}',
        '--environments.a.rewards=["exact"]',
    ]
    with pytest.raises(ConfigError, match=r"environments\.a\.dataset\.eval_fraction = 1 leaves no row to train on"):
        build_environments(load_settings(None, overrides).settings)


def test_tasks_are_in_the_order_of_the_file_which_the_run_shuffles() -> None:
    tasks = environment(eval_fraction=0.0).tasks("train")
    assert prompts(tasks) == [row["prompt"] for row in ROWS]
    orders = [drawn_prompts(tasks, "epoch", seed) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2]) == sorted(prompts(tasks))
    assert orders[0] != prompts(tasks) == drawn_prompts(tasks, "given", 1)


def drawn_prompts(tasks: Sequence[Task], order: str, seed: int) -> list[str]:
    """Return the prompts of one epoch of a run."""
    sampler = TaskSampler([TaskSource("a", tasks, curriculum=CurriculumSettings(order=order), seed=seed)])
    drawn = [sampler.next_task() for _ in range(len(tasks))]
    return prompts([draw.task for draw in drawn if draw is not None])


def test_prompts_of_eval_path_are_left_out_of_training(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_lines(folder / "eval.jsonl", ROWS[:20])
    with caplog.at_level(logging.WARNING, logger="keel"):
        loaded = environment(eval_path="eval.jsonl")
    assert sorted(prompts(loaded.tasks("eval"))) == sorted(row["prompt"] for row in ROWS[:20])
    assert sorted(prompts(loaded.tasks("train"))) == sorted(row["prompt"] for row in ROWS[20:])
    assert "20 rows have a prompt of eval.jsonl and are not trained" in caplog.text


def test_ids_come_from_the_row_or_a_column(folder: Path) -> None:
    assert environment(eval_fraction=0.0).tasks("train")[2].id == "train.jsonl:2"
    write_lines(folder / "train.jsonl", [{**row, "key": f"k{n}"} for n, row in enumerate(ROWS)])
    assert environment(eval_fraction=0.0, id="key").tasks("train")[2].id == "k2"


def test_messages_have_system_few_shot_and_template() -> None:
    loaded = environment(system="Be brief.", few_shot=1, template="{{ prompt }} (level {{ level }})")
    messages = loaded._format.messages(ROWS[5])
    assert messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 0 + 1? (level 0)"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "What is 5 + 1? (level 2)"},
    ]
    assert ROWS[0]["prompt"] not in [*prompts(loaded.tasks("train")), *prompts(loaded.tasks("eval"))]


def test_a_prompt_may_be_a_list_of_messages(folder: Path) -> None:
    conversation = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    write_lines(folder / "train.jsonl", [{"prompt": conversation}])
    loaded = environment(rewards=["dataset_rewards:later"], eval_fraction=0.0)
    assert loaded._format.messages(loaded.tasks("train")[0].data) == conversation


@pytest.mark.parametrize(
    ("rows", "options", "problem"),
    [
        ([{"question": "?"}], {}, 'train.jsonl:2: no column "prompt"; it has question'),
        ([{"prompt": "  "}], {}, 'train.jsonl:2: the column "prompt" is empty'),
        ([{"prompt": 5}], {}, 'the column "prompt" is neither text nor a list of messages'),
        ([{"prompt": [{"role": "assistant", "content": "a"}]}], {}, "ends with a message of the assistant"),
        (["text"], {}, "train.jsonl:2: a str and not an object"),
        ([{"prompt": "p"}], {"answer": "solution"}, 'no column "solution"'),
        ([{"prompt": "p"}], {"template": "{{ missing }}"}, "cannot be rendered: 'missing' is undefined"),
    ],
)
def test_an_unusable_row_is_named_before_the_run_starts(
    rows: list[Any], options: dict[str, Any], problem: str, folder: Path
) -> None:
    good = {"prompt": "p", "answer": "a", "solution": "s", "missing": "m"}
    write_lines(folder / "train.jsonl", [good, *rows])
    with pytest.raises(ConfigError) as caught:
        environment(**options)
    assert "1 of 2 rows of train.jsonl cannot be used" in str(caught.value)
    assert problem in str(caught.value)
    environment(**options, max_invalid_fraction=0.5, eval_fraction=0.0)


def test_a_line_that_is_not_json_and_a_repeated_id_are_named(folder: Path) -> None:
    (folder / "train.jsonl").write_text('{"prompt": "a", "id": 1}\n\n{"prompt": \n{"prompt": "b", "id": 1}\n')
    with pytest.raises(ConfigError, match=r"2 of 3 rows(?s:.*)train.jsonl:3: not JSON(?s:.*)the id '1' is not unique"):
        environment(id="id")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere.jsonl", 'dataset.path = "nowhere.jsonl" does not exist'),
        ("dataset_rewards.py", "must end in .jsonl"),
        ("empty.jsonl", "has no rows"),
        ("object.json", "must hold a list of objects, not a dict"),
        ("cache", "a folder without Arrow files"),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error(path: str, message: str, folder: Path) -> None:
    (folder / "empty.jsonl").write_text("")
    (folder / "object.json").write_text("{}")
    (folder / "cache").mkdir(exist_ok=True)
    with pytest.raises(ConfigError, match=message):
        environment(path=path)


def test_rows_are_read_from_the_file_when_they_are_needed(folder: Path) -> None:
    rows = JsonLines(folder / "train.jsonl")
    assert (len(rows), rows[7], rows.place(7)) == (200, ROWS[7], f"{folder / 'train.jsonl'}:8")


# settings


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"dataset": "train.jsonl"}, "needs at least one reward function"),
        ({"rewards": ["exact"]}, "rewards has no effect without a dataset"),
        (
            {"dataset": "train.jsonl", "rewards": ["exact"], "options": {"a": 1}},
            "options have no effect with a dataset",
        ),
        ({"dataset": "train.jsonl", "rewards": [{"name": "exact", "clip": [1, 0]}]}, "must be a lower and a higher"),
        (
            {"dataset": "train.jsonl", "rewards": [{"name": "exact", "normalize": [1, 1]}]},
            "must be two different numbers",
        ),
        ({"dataset": "train.jsonl", "rewards": ["exakt"]}, '"exakt" is not a built-in reward; did you mean exact?'),
        ({"dataset": "train.jsonl", "rewards": ["regex"]}, "options = {} cannot be used: .*pattern"),
        ({"dataset": "train.jsonl", "rewards": ["nowhere:fn"]}, "cannot be imported: No module named 'nowhere'"),
        ({"dataset": "train.jsonl", "rewards": ["dataset_rewards:gone"]}, "cannot be imported"),
    ],
)
def test_wrong_settings_are_errors_before_a_run(table: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        load_environment(EnvironmentSettings.model_validate({"name": "sums", **table}))


def test_a_dataset_environment_is_an_environment() -> None:
    assert isinstance(environment(), Environment)


# rewards


def test_rewards_are_weighted_clipped_and_recorded_by_component() -> None:
    rewards = [
        "exact",
        {"name": "dataset_rewards:level", "weight": 0.5, "clip": [0, 1]},
        "dataset_rewards:later",
        "dataset_rewards:abstains",
    ]
    arguments = {"completion": "4", "prompt": "2 + 2", "answer": "4", "level": 3}
    result = score(rewards, arguments)
    assert dict(result.reward_components) == {"exact": 1.0, "level": 1.0, "later": 0.5}
    assert result.reward == 1.0 + 0.5 + 0.5
    assert score(rewards, arguments, total="mean").reward == pytest.approx(2.0 / 2.5)


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        ({"normalize": [0, 4]}, 0.75),
        ({"normalize": [4, 2]}, 0.5),
        ({"normalize": [0, 2]}, 1.5),
        ({"normalize": [0, 2], "clip": [0, 1]}, 1.0),
    ],
)
def test_a_reward_is_normalized_before_it_is_clipped_and_weighted(settings: dict[str, Any], value: float) -> None:
    result = score([{"name": "dataset_rewards:level", "weight": 2.0, **settings}], {"completion": "", "level": 3})
    assert (dict(result.reward_components), result.reward) == ({"level": value}, 2.0 * value)


def test_a_function_of_lists_is_called_with_lists() -> None:
    arguments = {"completion": "four", "prompt": "2 + 2", "answer": "4"}
    assert score(["dataset_rewards:batch"], arguments).reward == 4.0


def test_a_completion_without_any_reward_fails() -> None:
    with pytest.raises(RewardError, match="every reward function abstained: abstains"):
        score(["dataset_rewards:abstains"], {"completion": "a", "prompt": "p"})


def test_a_function_that_fails_too_often_stops_the_run_with_its_first_traceback() -> None:
    settings = EnvironmentSettings.model_validate(
        {"name": "x", "dataset": "train.jsonl", "rewards": ["dataset_rewards:broken"]}
    )
    scorer = RewardScorer(settings.rewards, "sum", 0.5)

    async def call() -> None:
        for _ in range(19):
            with pytest.raises(RewardError, match=r"KeyError: 'no such key' \(dataset_rewards.py:19\)"):
                await scorer.score({"completion": "a", "prompt": "p"})
        with pytest.raises(FatalEnvironmentError) as caught:
            await scorer.score({"completion": "a", "prompt": "p"})
        await scorer.close()
        assert "reward broken failed in 20 of 20 calls, more than max_reward_failure_fraction = 0.5" in str(
            caught.value
        )
        assert 'raise KeyError("no such key")' in str(caught.value)

    asyncio.run(call())


def test_a_reward_that_never_varies_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="keel"):
        score(["exact"], {"completion": "a", "prompt": "p", "answer": "b"}, times=CONSTANT_CALLS)
    assert f"reward exact gave 0 to each of the first {CONSTANT_CALLS} completions" in caplog.text


# runs


@pytest.mark.process
def test_a_file_and_a_function_are_enough_to_train_and_resume(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--dataset", "train.jsonl", "--reward", "dataset_rewards:batch", "--model", "tiny"]
    small = ["--scheduler.groups_per_step", "2", "--sampling.max_tokens", "6", "--evaluation.num_tasks", "3"]
    assert main(["train", *arguments, "--steps", "2", *small]) == 0
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    run = str(folder / "runs" / "train")
    assert main(["train", "--resume", run, "--steps", "3", "--allow-changes"]) == 0
    with closing(Ledger(folder / "runs" / "train" / "run.db")) as ledger:
        assert ledger.last_step == 3
    assert "held-out tasks" in capsys.readouterr().out


@pytest.mark.process
@pytest.mark.parametrize("evaluation", ["never", "start_and_end"])
def test_a_run_with_a_broken_reward_ends_with_its_traceback(
    evaluation: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--dataset", "train.jsonl", "--reward", "dataset_rewards:broken", "--model", "tiny", "--steps", "2"]
    assert main(["train", *arguments, "--evaluation.when", evaluation, "--evaluation.samples_per_task", "4"]) == 2
    error = capsys.readouterr().err
    assert "more than max_reward_failure_fraction = 0.5" in error
    assert "KeyError" in error


def test_dataset_and_reward_need_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--dataset", "train.jsonl"]) == 2
    assert "--dataset FILE and --reward NAME need each other" in capsys.readouterr().err
