"""`keel eval` on data sets, run checkpoints and endpoints; stored completions; flips between two evaluations."""

import json
from pathlib import Path
from typing import Any

import pytest

from keel.cli import main
from keel.inference.server.app import build_app
from keel.run.evaluation.evaluation_records import SCHEMA, read_evaluation, write_evaluation
from tests.run.evaluation.test_evaluate import make_run_folder
from tests.run.evaluation.test_evaluation_records import evaluate_sums
from tests.support.engine_fakes import serving
from tests.support.scripted_engine import END, ScriptedEngine

ROWS = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(20)]


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    code = main(["eval", *map(str, arguments)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


DATASET = ("--dataset", "test.jsonl", "--reward", "number")


@pytest.mark.process
def test_a_model_is_evaluated_on_all_rows_of_a_data_set(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, *DATASET, "--model", "tiny", "--max-tokens", 4, "--samples", 2, "--output", "out.parquet", "--json"
    )
    assert code == 0
    (result,) = json.loads(out)["evaluations"]
    assert (result["environment"], result["tasks"], result["samples"]) == ("dataset", 20, 2)
    assert {"pass@1", "pass@2", "pass@2/low", "pass@2/high", "low", "high"} <= result.keys()
    rows = read_evaluation(Path("out.parquet"))
    assert [row["answer"] for row in rows] == [row["answer"] for row in ROWS for _ in range(2)]
    assert rows[0].keys() == set(SCHEMA.names)
    assert sum(row["reward"] for row in rows) / 40 == pytest.approx(result["reward"])


@pytest.mark.process
def test_settings_of_the_data_set_can_be_given_as_in_training(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--environments.dataset.dataset.few_shot", 2, "--environments.dataset.dataset.eval_fraction", 0.5)
    code, _, _ = run(capsys, "tiny", *DATASET, *options, "--max-tokens", 2, "--json", "--output", "out.parquet")
    assert code == 0
    prompts = [json.loads(row["prompt"]) for row in read_evaluation(Path("out.parquet"))]
    assert 2 < len(prompts) < 16
    assert all(len(prompt) == 5 for prompt in prompts)


@pytest.mark.process
def test_a_checkpoint_of_a_run_is_evaluated_on_another_data_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run_folder(tmp_path)
    code, out, _ = run(capsys, folder, "--step", 1, *DATASET, "--tasks", 3, "--output", "out.parquet", "--json")
    report = json.loads(out)
    assert (code, report["step"], len(report["evaluations"])) == (0, 1, 1)
    assert {row["step"] for row in read_evaluation(Path("out.parquet"))} == {1}


@pytest.mark.process
def test_an_endpoint_that_returns_text_only_is_evaluated(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(prompt: str) -> str:
        number = int(prompt.rpartition("What is ")[2].split()[0])
        return f"{number + 1 if number % 2 else 0}{END}"

    engine = ScriptedEngine(answer=answer)
    monkeypatch.setenv("MY_KEY", "secret")
    endpoint = ("--model", "policy", "--api-key-env", "MY_KEY", "--output", "out.parquet")
    with serving(build_app(engine, engine.tokenizer, model="policy", api_key="secret")) as url:
        code, out, _ = run(capsys, *DATASET, "--url", url, *endpoint)
        assert code == 0
        assert out.startswith(f"policy at {url}/v1\n")
        assert "20 x 1   0.500" in out
    rows = read_evaluation(Path("out.parquet"))
    assert [row["passed"] for row in rows] == [bool(n % 2) for n in range(20)]
    assert (rows[1]["completion"], rows[1]["token_ids"], rows[1]["completion_tokens"]) == ("2", [], 2)


@pytest.mark.process
def test_a_packaged_evaluation_and_an_environment_are_named_next_to_the_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed: pip install reasoning-gym")
    for name in ("gsm_symbolic", "count_letters"):
        code, out, _ = run(capsys, name, "--model", "tiny", "--tasks", 2, "--max-tokens", 4, "--json")
        report = json.loads(out)
        assert (code, report["model"]) == (0, "tiny")
        assert [(each["environment"], each["tasks"]) for each in report["evaluations"]] == [(name, 2)]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "pass the folder of a run, a model or an evaluation"),
        (("tiny", "--dataset", "test.jsonl"), "--dataset FILE and --reward NAME need each other"),
        (("tiny", *DATASET, "--output", "out.csv"), "--output out.csv must be a .parquet file"),
        (("tiny", *DATASET, "--output", "no/out.parquet"), "there is no folder no"),
        (("tiny", *DATASET, "--api-key-env", "MY_KEY"), "--api-key-env MY_KEY has no effect without --url"),
        ((*DATASET, "--url", "http://h:1", "--api-key-env", "NO_SUCH"), "NO_SUCH: the environment variable is not set"),
        (("larger_number", *DATASET, "--model", "tiny"), "larger_number and --dataset both name the tasks"),
        (("gsm_symbolic",), "gsm_symbolic is an evaluation, not a model; pass --model NAME or --url URL"),
        (("tiny", "--diff", "0", "2"), "--diff compares evaluations of a run; tiny is not one"),
        (DATASET, "pass the folder of a run, a model, or --url"),
    ],
)
def test_contradictions_are_errors_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], problem: str
) -> None:
    code, _, error = run(capsys, *arguments)
    assert code == 2
    assert problem in error


# ---------------------------------------------------------------------------------------------------------------------
# --diff


def write_steps(folder: Path) -> None:
    (folder / "evaluations").mkdir(parents=True)
    (folder / "config.toml").write_text("")
    for step, answer in ((0, "1"), (4, "2")):
        write_evaluation(folder / "evaluations", step, "sums", evaluate_sums(answer=answer + END).episodes)


def test_flips_between_two_evaluations_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_steps(tmp_path / "run")
    code, out, _ = run(capsys, tmp_path / "run", "--diff", 0, 4)
    assert code == 0
    assert out.splitlines() == [
        "sums: 3 tasks; after step 4 1 are solved more often than after step 0, 1 less often, 1 as often",
        "+ eval/1: 0 -> 1, answer '2'",
        "    step 0  '1'",
        "    step 4  '2'",
        "- eval/0: 1 -> 0, answer '1'",
        "    step 0  '1'",
        "    step 4  '2'",
    ]
    report = json.loads(run(capsys, tmp_path / "run", "--diff", 0, 4, "--json")[1])
    assert [(flip["task_id"], flip["changed"]) for flip in report["flips"]] == [("eval/0", -1), ("eval/1", 1)]
    code, _, error = run(capsys, tmp_path / "run", "--diff", 0, 3)
    assert code == 2
    assert "has no evaluation after step 3; evaluations that are stored: 0, 4" in error


def test_control_characters_of_completions_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_steps(tmp_path / "run")
    hostile = evaluate_sums(answer=f"2{END}").episodes
    assert hostile[1].exchange is not None
    object.__setattr__(hostile[1].exchange, "completion", "\x1b[31mred\n\u202egnp.exe")
    write_evaluation(tmp_path / "run" / "evaluations", 4, "sums", hostile)
    out = run(capsys, tmp_path / "run", "--diff", 0, 4)[1]
    assert r"'\x1b[31mred\n\u202egnp.exe'" in out
    assert "\x1b" not in out and "\u202e" not in out
