"""The Python API writes a full run folder: the lens, the report and the comparison read it, and sinks receive it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import keel
from keel.cli import main
from keel.config import load_settings
from keel.errors import ConfigError, ModelError
from keel.run.ledger import Ledger
from keel.tools.compare.readers import Recording
from keel.tools.lens.queries import Lens
from keel.training import Checkpoints
from tests.support.api_helpers import agent, attempt, attempts, run, say

SINK = """
import json

class Sink:
    def __init__(self, folder, settings):
        self.file = (folder / "sink.jsonl").open("a")
    def step(self, step, metrics):
        self.file.write(json.dumps({"step": step, **metrics}) + "\\n")
    def evaluated(self, step, environment, metrics):
        pass
    def close(self):
        self.file.close()
"""


async def train_steps(path: Path, steps: int = 2, **settings: Any) -> None:
    """Train on a group of a named task, a group without signal and a trajectory that failed."""
    async with keel.LocalBackend(path=path, **settings) as backend:
        model = agent()
        await backend.register(model)
        for _ in range(steps):
            groups = [
                keel.TrajectoryGroup(
                    [await attempt(model, reward=float(index), turns=2) for index in range(3)],
                    environment="search",
                    task_id="task-7",
                ),
                keel.TrajectoryGroup(
                    [await attempt(model, reward=1.0) for _ in range(2)], exceptions=[ValueError("x")]
                ),
            ]
            groups[0].trajectories[0].metrics["found"] = 1.0
            await backend.train(model, groups, objective="dapo", learning_rate=1e-3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("api")
    run(train_steps(path))
    return path / "agent-1"


def test_the_lens_shows_status_settings_metrics_and_every_token(folder: Path) -> None:
    lens = Lens(folder.parent)
    try:
        (summary,) = lens.query("runs", {})["runs"]
        assert (summary["status"], summary["step"], summary["steps"], summary["version"]) == ("finished", 2, 2, 2)
        assert (summary["objective"], summary["model"], summary["problem"]) == ("dapo", "tiny", "")
        series = lens.query("series", {"run": "agent-1", "names": "reward,loss,rollouts,seconds"})
        assert json.dumps(series).count("null") == 0 and "reward" in json.dumps(series)
        assert lens.query("outcomes", {"run": "agent-1"})["outcomes"] == {
            "trained": 6,
            "zero_variance": 4,
            "exception": 2,
        }
        groups = lens.query("groups", {"run": "agent-1", "step": "2"})["groups"]
        shown = {(group["environment"], group["task_id"], group["trained"], group["rollouts"]) for group in groups}
        assert shown == {("search", "task-7", 3, 3), ("agent", "agent#3", 0, 3)}
        sample = lens.query(
            "sample", {"run": "agent-1", "step": "2", "group": "search#2", "member": "1", "attempt": "0", "sample": "0"}
        )
        assert "logprobs" in json.dumps(sample)
    finally:
        lens.close()


def test_the_comparison_and_the_report_read_it(folder: Path, tmp_path: Path) -> None:
    steps = list(Recording(folder).steps())
    assert [step.number for step in steps] == [1, 2]
    assert main(["compare", str(folder), "--objectives", "icepop,dppo_tv"]) == 0
    assert main(["report", str(folder), "--out", str(tmp_path / "report.html")]) == 0
    assert "task-7" in (tmp_path / "report.html").read_text()


def test_the_folder_holds_what_a_run_of_the_command_line_holds(folder: Path) -> None:
    for name in ("run.db", "run.json", "config.toml", "metrics.parquet", "rollouts/step_000002.parquet"):
        assert (folder / name).is_file(), name
    assert pq.read_table(folder / "metrics.parquet").column("step").to_pylist() == [1, 2]
    rows = pq.read_table(folder / "rollouts/step_000001.parquet").to_pylist()
    assert [dict(row["environment_metrics"]) for row in rows if row["task_id"] == "task-7"] == [{"found": 1.0}, {}, {}]
    assert [row["error"] for row in rows if row["reason"] == "exception"] == ["ValueError: x"]
    settings = load_settings(folder / "config.toml").settings
    assert settings.objective.name == "dapo" and settings.advantages.name == "group_mean"
    with pytest.raises(ConfigError, match="environments is empty"):
        keel.train(run=folder, resume=True, progress=False)


@pytest.mark.process
def test_a_folder_is_continued_with_other_settings_and_new_groups(tmp_path: Path) -> None:
    run(train_steps(tmp_path, 1))
    run(train_steps(tmp_path, 1, trainer={"optimizer": {"lr": 3e-4, "lr_schedule": "linear", "total_steps": 1}}))
    ledger = Ledger(tmp_path / "agent-1/run.db")
    ledger.check()
    assert [row.step for row in ledger.steps()] == [1, 2] and ledger.outcome_counts()["trained"] == 6
    ledger.close()
    assert load_settings(tmp_path / "agent-1/config.toml").settings.trainer.optimizer.total_steps == 1


@pytest.mark.process
def test_the_records_of_a_step_without_a_checkpoint_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def train() -> None:
        async with keel.LocalBackend(path=tmp_path) as backend:
            model = agent()
            await backend.register(model)
            groups = await attempts(model)
            with monkeypatch.context() as patch:
                patch.setattr(Checkpoints, "save", lambda *_args: (_ for _ in ()).throw(ModelError("disk full")))
                with pytest.raises(ModelError, match="disk full"):
                    await backend.train(model, groups)
            assert not list((tmp_path / "agent-1/rollouts").glob("*"))
            await backend.train(model, groups)

    run(train())
    run(train_steps(tmp_path, 1))
    (tmp_path / "agent-1/checkpoints/step_2/model.safetensors").write_bytes(b"damaged")
    with pytest.warns(UserWarning, match="step 2 is corrupt"):
        run(train_steps(tmp_path, 0))
    ledger = Ledger(tmp_path / "agent-1/run.db")
    ledger.check()
    assert [row.step for row in ledger.steps()] == [1]
    ledger.close()
    assert [path.name for path in (tmp_path / "agent-1/rollouts").iterdir()] == ["step_000001.parquet"]


def test_a_call_that_trains_nothing_is_recorded_but_is_no_step(tmp_path: Path) -> None:
    async def train() -> Any:
        async with keel.LocalBackend(path=tmp_path) as backend:
            model = agent()
            await backend.register(model)
            return await backend.train(model, [keel.TrajectoryGroup([await attempt(model, reward=1.0)])])

    assert run(train()).skip_reason
    ledger = Ledger(tmp_path / "agent-1/run.db")
    assert ledger.last_step == 0 and ledger.outcome_counts() == {"zero_variance": 1}
    ledger.close()


def test_a_registration_that_fails_leaves_no_run_behind(tmp_path: Path) -> None:
    async def register() -> None:
        async with keel.LocalBackend(path=tmp_path, renderer={"family": "no-such-family"}) as backend:
            await backend.register(agent())

    with pytest.raises(ConfigError, match="no-such-family"):
        run(register())
    assert not (tmp_path / "agent-1/run.db").exists() and not (tmp_path / "agent-1/checkpoints").exists()


def test_sinks_receive_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "api_sink.py").write_text(SINK)
    monkeypatch.syspath_prepend(str(tmp_path))
    run(train_steps(tmp_path, metrics={"custom_sink": "api_sink:Sink"}))
    lines = [json.loads(line) for line in (tmp_path / "agent-1/sink.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2] and all("reward" in line for line in lines)


DROPS_EARLIER_THINKING = """{%- set ns = namespace(last=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.reasoning_content and loop.index0 > ns.last -%}
{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- m.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


@pytest.mark.parametrize("preserve", [False, True])
def test_the_renderer_settings_decide_whether_earlier_thinking_is_in_the_prompt(tmp_path: Path, preserve: bool) -> None:
    tiny = keel.load_model(keel.ModelSettings(name="tiny"))
    shutil.copytree(tiny.source.folder, tmp_path / "base")
    (tmp_path / "base/chat_template.jinja").write_text(DROPS_EARLIER_THINKING)
    (tmp_path / "base/manifest.json").unlink(missing_ok=True)
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes", "reasoning_content": "deep thought"},
        {"role": "user", "content": "and?"},
    ]

    async def talk() -> str:
        async with keel.LocalBackend(path=tmp_path, renderer={"preserve_all_thinking": preserve}) as backend:
            model = keel.TrainableModel(name="agent-1", base=str(tmp_path / "base"), device="cpu")
            await backend.register(model)
            choice = (await say(model, messages)).choices[0]
            return str(tiny.tokenizer.decode(choice.prompt_token_ids))

    prompt = run(talk())
    assert "and?" in prompt and ("deep thought" in prompt) is preserve


def test_settings_that_are_no_settings_are_named() -> None:
    with pytest.raises(ConfigError, match=r"renderer\.preserve_everything is not a setting"):
        keel.LocalBackend(path="runs", renderer={"preserve_everything": True})
