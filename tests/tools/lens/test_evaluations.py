"""The evaluations view: tasks by evaluations, flips, completions with their rewards, and differences between steps."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keel.errors import KeelError
from keel.rollout.policy_client import Exchange
from keel.rollout.rollout import Rollout
from keel.run.evaluation.evaluation_records import EvaluatedEpisode, write_evaluation
from keel.run.ledger import Ledger
from keel.tools.lens.queries import Lens
from keel.tools.lens.report import write_report
from keel.tools.lens.run_reader import UnknownRun
from keel.tools.lens.server import build_app
from tests.support.engine_fakes import serving
from tests.support.lens_browser import Browser, browser, missing
from tests.support.lens_runs import make_run
from tests.tools.lens.test_browser import show, texts

needs_browser = pytest.mark.skipif(bool(missing()), reason=missing() or "there is a browser")

SCRIPT = "<img src=x onerror=\"document.title='owned'\">"
COMPLETIONS = {
    # task: completion and reward after steps 0, 2 and 4
    "sums/1": [("I think it is 7", 0.0), ("I think it is 8", 1.0), ("It is 8", 1.0)],
    "sums/2": [("right", 1.0), ("wrong", 0.0), ("right", 1.0)],
    f"sums/3 {SCRIPT}": [(f"a{SCRIPT}\u202eb", 0.0), (f"c{SCRIPT}\u202eb", 0.0), ("\x1b[31m", 0.0)],
}


def make_episode(task: str, completion: str, reward: float, sample: int = 0, error: str | None = None) -> Any:
    rollout = Rollout(
        environment="sums",
        task_id=task,
        group="g",
        reward=reward,
        reward_components={"correct": reward, "format": 0.5},
        counts={"sampled_tokens": 4},
        error=error,
    )
    exchange = Exchange(({"role": "user", "content": f"3 + 5? {SCRIPT}"},), completion, "stop")
    return EvaluatedEpisode(rollout, sample, exchange, "8")


def write_evaluations(run: Path) -> None:
    ledger = Ledger(run / "run.db")
    for index, step in enumerate((0, 2, 4)):
        episodes = [make_episode(task, *values[index]) for task, values in COMPLETIONS.items()]
        write_evaluation(run / "evaluations", step, "sums", episodes)
        twice = [
            make_episode("other/1", "x", float(n <= index), n, "RuntimeError: no" if n > 1 else None) for n in range(3)
        ]
        write_evaluation(run / "evaluations", step, "twice", twice)
        for environment in ("sums", "twice"):
            ledger.write_evaluation(step, environment, {"reward": 0.5})
    # a file whose evaluation was never committed does not count
    write_evaluation(run / "evaluations", 6, "sums", [make_episode("sums/1", "8", 1.0)])
    ledger.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    write_evaluations(make_run(root / "first", steps=2))
    make_run(root / "without", steps=2, seed=1)
    return root


@pytest.fixture
def lens(world: Path) -> Iterator[Lens]:
    lens = Lens(world)
    yield lens
    lens.close()


def test_the_grid_has_the_committed_evaluations_and_most_flips_first(lens: Lens) -> None:
    grid = lens.query("evaluations", {"run": "first"})
    assert (grid["environments"], grid["environment"], grid["steps"]) == (["sums", "twice"], "sums", [0, 2, 4])
    assert [(task["task_id"][:6], task["flips"]) for task in grid["tasks"]] == [
        ("sums/2", 2),
        ("sums/1", 1),
        ("sums/3", 0),
    ]
    assert [cell["passed"] for cell in grid["tasks"][1]["cells"]] == [0, 1, 1]
    by_reward = lens.query("evaluations", {"run": "first", "order": "reward"})
    assert [task["task_id"][:6] for task in by_reward["tasks"]] == ["sums/3", "sums/1", "sums/2"]


def test_a_cell_counts_episodes_passes_and_errors(lens: Lens) -> None:
    (task,) = lens.query("evaluations", {"run": "first", "environment": "twice"})["tasks"]
    assert task["cells"][1] == {"episodes": 3, "passed": 2, "reward": pytest.approx(2 / 3), "errors": 1}


def test_the_episodes_of_a_task_have_text_rewards_and_answer(lens: Lens) -> None:
    params = {"run": "first", "step": "2", "environment": "sums", "task": "sums/1"}
    (episode,) = lens.query("evaluated", params)["episodes"]
    assert (episode["completion"], episode["reward"], episode["answer"]) == ("I think it is 8", 1.0, "8")
    assert episode["reward_components"] == {"correct": 1.0, "format": 0.5}
    assert lens.query("evaluated", params | {"task": "sums/9"}) == {"episodes": []}
    with pytest.raises(UnknownRun, match="step 3 of run first has no stored evaluation"):
        lens.query("evaluated", params | {"step": "3"})
    with pytest.raises(KeelError, match="environment = 'none' has no stored evaluation"):
        lens.query("evaluations", {"run": "first", "environment": "none"})


def test_a_run_without_stored_evaluations_has_an_empty_grid(lens: Lens) -> None:
    assert lens.query("evaluations", {"run": "without"})["tasks"] == []


# ---------------------------------------------------------------------------------------------------------------------
# the page


@pytest.fixture(scope="module")
def address(world: Path) -> Iterator[str]:
    with serving(build_app(world)) as url:
        yield f"{url}/"


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as window:
        yield window


@pytest.mark.browser
@needs_browser
def test_the_page_shows_flips_completions_and_differences(window: Browser, address: str) -> None:
    show(window, address, "run=first", "evaluations")
    assert texts(window, ".grid thead th") == ["task", "0", "2", "4"]
    assert texts(window, ".grid tbody tr:nth-child(1) .cell") == ["✓", "✗", "✓"]
    assert window.run("return document.querySelectorAll('.cell.flip').length") == 3
    window.run("document.querySelector('.grid tbody tr:nth-child(2) td:nth-child(4) .cell').click()")
    window.wait("return document.querySelector('.difference') !== null")
    facts = window.run("return document.querySelector('.about').innerText")
    assert "correct 1, format 0.5" in facts and "reference answer 8" in facts
    assert texts(window, ".text:not(.difference) .own div") == ["It is 8"]
    assert "Difference from step 2" in window.run("return document.querySelector('.episode h2').innerText")
    assert texts(window, ".difference del") == ["I think it"]
    assert texts(window, ".difference ins") == ["It"]
    window.run(
        "const s = [...document.querySelectorAll('.episode select')].at(-1); s.value = '0';"
        "s.dispatchEvent(new Event('change'))"
    )
    window.wait("return document.querySelector('.episode h2').innerText.includes('from step 0')")
    assert texts(window, ".difference del") == ["I think it", "7"]
    assert window.log() == []


@pytest.mark.browser
@needs_browser
def test_text_of_a_model_is_shown_as_text(window: Browser, address: str) -> None:
    show(window, address, "run=first", "evaluations")
    window.run("document.querySelector('.grid tbody tr:nth-child(3) td:nth-child(3) .cell').click()")
    window.wait("return document.querySelector('.difference') !== null")
    shown = window.run("return document.querySelector('.episode').innerText")
    assert shown.count("<img src=x onerror=") >= 4
    assert shown.count("U+202E") == 2
    assert window.run("return document.querySelectorAll('main img').length") == 0
    assert window.run("return document.title") == "keel lens"
    assert window.log() == []


@pytest.mark.browser
@needs_browser
def test_a_run_without_evaluations_says_so_and_a_report_has_the_grid(
    window: Browser, address: str, world: Path, tmp_path: Path
) -> None:
    show(window, address, "run=without", "evaluations")
    assert "This run has no stored evaluations." in window.text()
    write_report(world / "first", tmp_path / "report.html", 5_000_000)
    window.open("about:blank")
    window.open((tmp_path / "report.html").as_uri() + "#view=evaluations")
    window.wait("return document.querySelectorAll('.cell').length === 9")
