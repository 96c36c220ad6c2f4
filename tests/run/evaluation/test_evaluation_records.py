"""Completions of evaluations are stored: every episode of every evaluation, once, complete or not at all."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from keel.config import EpisodeLimits, Sampling
from keel.errors import StorageError
from keel.rollout.environments.environment import EpisodeResult, Task
from keel.rollout.rendering.renderer import Renderer
from keel.run.evaluation.evaluate import EvaluationResult, evaluate
from keel.run.evaluation.evaluation_records import read_evaluation, write_episodes, write_evaluation
from keel.run.ledger import Ledger
from tests.support.scripted_engine import END, ScriptedEngine
from tests.support.tiny_runs import Watcher, resume, train


class Sums:
    """Two turns: a question and a confirmation; task 2 fails."""

    name = "sums"

    def tasks(self, split: str) -> list[Task]:
        return [Task(f"{split}/{n}", {"question": f"{n} + 1", "answer": n + 1}) for n in range(3)]

    async def episode(self, task: Task, client: Any) -> EpisodeResult:
        messages = [{"role": "user", "content": task.data["question"]}]
        first = await client.chat(messages)
        if task.id == "eval/2":
            raise RuntimeError("no judge")
        reply = await client.chat([*messages, first.message, {"role": "user", "content": "sure?"}])
        correct = float(reply.text == str(task.data["answer"]))
        return EpisodeResult(correct, {"exact": correct}, {"tokens": len(reply.generation.token_ids)})


def evaluate_sums(samples: int = 1, answer: str = f"1{END}", environment: Any = None) -> EvaluationResult:
    engine = ScriptedEngine(answer=lambda _: answer)
    return asyncio.run(
        evaluate(
            engine,
            Renderer(engine.tokenizer),
            environment or Sums(),
            num_tasks=3,
            samples_per_task=samples,
            sampling=Sampling(max_tokens=8),
            limits=EpisodeLimits(),
            seed=0,
        )
    )


def test_a_row_holds_prompt_completion_tokens_reward_answer_and_error(tmp_path: Path) -> None:
    result = evaluate_sums(samples=2)
    rows = read_evaluation(write_evaluation(tmp_path, 7, "mine", result.episodes))
    assert [(row["task_id"], row["sample"]) for row in rows] == [(f"eval/{n}", k) for n in range(3) for k in (0, 1)]
    first = rows[0]
    assert [message["content"] for message in json.loads(first["prompt"])] == ["0 + 1", "1", "sure?"]
    assert (first["step"], first["environment"], first["completion"], first["answer"]) == (7, "mine", "1", "1")
    assert (first["reward"], first["passed"], first["turns"], first["completion_tokens"]) == (1.0, True, 2, 4)
    assert len(first["token_ids"]) == len(first["sampler_logprobs"]) == 2
    assert first["reward_components"] == {"exact": 1.0}
    assert first["environment_metrics"] == {"tokens": 2.0}
    assert (first["finish_reason"], first["error"]) == ("stop", None)
    assert (rows[2]["reward"], rows[2]["passed"]) == (0.0, False)
    failed = rows[4]
    assert failed["error"].startswith("RuntimeError: no judge")
    assert (failed["error_kind"], failed["reward"], failed["completion"]) == ("exception", 0.0, "1")


def test_an_episode_without_a_request_has_no_prompt(tmp_path: Path) -> None:
    class Broken(Sums):
        async def episode(self, task: Task, client: Any) -> EpisodeResult:
            if task.id == "eval/0":
                raise RuntimeError("no task")
            return await super().episode(task, client)

    rows = read_evaluation(write_evaluation(tmp_path, 0, "sums", evaluate_sums(environment=Broken()).episodes))
    assert (rows[0]["prompt"], rows[0]["completion"], rows[0]["finish_reason"]) == (None, None, None)


def test_a_repeated_evaluation_replaces_its_rows_and_keeps_those_of_other_environments(tmp_path: Path) -> None:
    for name, answer in (("a", "1"), ("b", "1"), ("a", "2")):
        path = write_evaluation(tmp_path, 3, name, evaluate_sums(answer=answer + END).episodes)
    rows = [(row["environment"], row["completion"]) for row in read_evaluation(path)]
    assert sorted(rows) == [("a", "2")] * 3 + [("b", "1")] * 3


def test_a_damaged_file_is_replaced_and_does_not_stop_a_run(tmp_path: Path) -> None:
    (tmp_path / "step_000003.parquet").write_bytes(b"PAR1 damaged")
    with pytest.raises(StorageError, match=r"step_000003\.parquet cannot be read"):
        read_evaluation(tmp_path / "step_000003.parquet")
    path = write_evaluation(tmp_path, 3, "sums", evaluate_sums().episodes)
    assert len(read_evaluation(path)) == 3


def test_text_that_is_not_unicode_is_stored_with_replacement_characters(tmp_path: Path) -> None:
    episode = evaluate_sums().episodes[0]
    assert episode.exchange is not None
    object.__setattr__(episode.exchange, "completion", "a\ud800b")
    write_episodes(tmp_path / "out.parquet", None, {"sums": [episode]})
    (row,) = read_evaluation(tmp_path / "out.parquet")
    assert (row["completion"], row["step"]) == ("a?b", None)


# ---------------------------------------------------------------------------------------------------------------------
# runs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Watcher]:
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    return folder, train(folder, steps=2, evaluation__every=1, environments__count_letters__options__shots=0)


def test_every_evaluation_of_a_run_writes_one_file(run: tuple[Path, Watcher]) -> None:
    folder, watcher = run
    assert sorted(path.name for path in (folder / "evaluations").iterdir()) == [
        f"step_{step:06d}.parquet" for step in (0, 1, 2)
    ]
    for step, evaluation in watcher.evaluations.items():
        rows = read_evaluation(folder / f"evaluations/step_{step:06d}.parquet")
        assert [row["environment"] for row in rows] == ["larger_number"] * 4 + ["count_letters"] * 4
        rewards = [row["reward"] for row in rows if row["environment"] == evaluation.environment]
        assert sum(rewards) / 4 == evaluation.reward
        assert all(row["answer"].isdecimal() and row["step"] == step for row in rows)


def test_an_evaluation_interrupted_before_its_commit_is_repeated_and_replaces_its_file(
    run: tuple[Path, Watcher],
) -> None:
    folder, _ = run
    path = folder / "evaluations/step_000002.parquet"
    before = read_evaluation(path)
    # a kill between the file and the commit of the second environment
    ledger = Ledger(folder / "run.db")
    ledger._db.execute("DELETE FROM evaluations WHERE step = 2 AND environment = 'count_letters'")
    ledger._db.commit()
    ledger.close()
    assert {step: each.environment for step, each in resume(folder).evaluations.items()} == {2: "count_letters"}
    after = read_evaluation(path)
    timeless = [[{k: v for k, v in row.items() if k != "seconds"} for row in rows] for rows in (before, after)]
    assert timeless[0] == timeless[1]
