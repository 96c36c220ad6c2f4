"""Sweeps: short runs with different settings. Most tests share one small sweep of real runs."""

import contextlib
import io
import json
import math
import multiprocessing
import re
import sqlite3
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from keel.cli import main
from keel.cli.display.sweep_display import SweepDisplay
from keel.errors import ConfigError, KeelError
from keel.tools.lens.run_reader import RunCatalog
from keel.tools.sweep import SweepPlan, SweepRunner, Trial, TrialOutcome, Variant
from keel.tools.sweep.html import render_results
from keel.tools.sweep.results import MEASURES, SweepResults, read_results
from keel.tools.sweep.variants import variants_from_objectives, variants_from_settings
from tests.support.tiny_runs import tiny

RECIPE = tiny(
    steps=3,
    model__sft_warmup_steps=100,
    scheduler__max_off_policy_steps=0,
    trainer__optimizer__lr=3e-3,
    checkpoints={},
    evaluation={"when": "start_and_end", "num_tasks": 4},
)
NAMES = ["name=icepop-seed0", "name=icepop-seed1", "name=reinforce-seed0", "name=reinforce-seed1"]


class RecordingCallback:
    """Records events, and may call a function at each step."""

    def __init__(self, on_step: Any = None) -> None:
        self.events: list[tuple[str, str]] = []
        self.on_step = on_step

    def skipped(self, trial: Trial) -> None:
        self.events.append(("skipped", trial.name))

    def started(self, trial: Trial, start_step: int) -> None:
        self.events.append((f"started after {start_step}", trial.name))

    def step(self, trial: Trial, step: int, metrics: Mapping[str, float]) -> None:
        if self.on_step is not None:
            self.on_step(trial, step)

    def notice(self, trial: Trial, text: str) -> None:
        pass

    def ended(self, trial: Trial, outcome: TrialOutcome) -> None:
        self.events.append((outcome.status, trial.name))


def recipe(folder: Path, text: str = RECIPE) -> Path:
    path = folder / "tiny.toml"
    path.write_text(text)
    return path


def error_message(*args: str) -> str:
    """Run a command that must fail with exit code 2, and return what it prints."""
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        assert main(list(args)) == 2
    return stderr.getvalue()


def rows(run: Path, query: str) -> list[Any]:
    with contextlib.closing(sqlite3.connect(run / "run.db")) as db:
        return db.execute(query).fetchall()


class FinishedSweep:
    """Two objectives and two seeds, stopped during the second trial and resumed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "trials"
        variants = variants_from_settings(["objective.name=icepop,reinforce"])
        self.plan = SweepPlan.create(self.folder, recipe(folder), [], variants, seeds=2)
        self.first = RecordingCallback(lambda trial, step: self.runner.stop() if trial.name == NAMES[1] else None)
        self.runner = SweepRunner(self.plan, self.first)
        self.outcomes = self.runner.run()
        self.stopped = read_results(self.plan, self.outcomes)
        self.before = [rows(self.folder / name, "SELECT step, time FROM steps") for name in NAMES[:2]]
        (folder / "tiny.toml").unlink()  # resuming needs only the plan
        out, self.progress = io.StringIO(), io.StringIO()
        files = ["--html", str(folder / "report.html"), "--parquet", str(folder / "numbers.parquet")]
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(self.progress):
            self.code = main(["sweep", "--resume", str(self.folder), "--json", *files])
        self.json_results = json.loads(out.getvalue())
        self.results: SweepResults = read_results(SweepPlan.read(self.folder))
        self.html = (folder / "report.html").read_text()
        self.table = pq.read_table(folder / "numbers.parquet").to_pylist()


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> FinishedSweep:
    return FinishedSweep(tmp_path_factory.mktemp("trials"))


# -- running trials ---------------------------------------------------------------------------------------------------


@pytest.mark.process
def test_every_trial_is_an_ordinary_run_that_the_lens_can_read(sweep: FinishedSweep) -> None:
    assert [trial.name for trial in sweep.plan.trials] == NAMES
    runs = {run.name: run.summary() for run in RunCatalog(sweep.folder).list_runs()}
    assert sorted(runs) == sorted(NAMES)
    assert {facts["status"] for facts in runs.values()} == {"finished"}
    assert [runs[name]["objective"] for name in NAMES] == ["icepop"] * 2 + ["reinforce"] * 2
    assert {facts["step"] for facts in runs.values()} == {3}


@pytest.mark.process
def test_trials_with_the_same_seed_have_the_same_tasks_and_first_step(sweep: FinishedSweep) -> None:
    def first_step(name: str) -> list[Any]:
        columns = ["group", "member", "token_ids"]
        table = pq.read_table(sweep.folder / name / "rollouts" / "step_000001.parquet", columns=columns)
        return sorted(tuple(map(str, row.values())) for row in table.to_pylist())

    query = 'SELECT DISTINCT "group", task_id FROM rollouts'
    tasks = {name: dict(rows(sweep.folder / name, query)) for name in NAMES}
    for seed in (0, 1):
        icepop, reinforce = (f"name={name}-seed{seed}" for name in ("icepop", "reinforce"))
        both = tasks[icepop].keys() & tasks[reinforce].keys()
        assert len(both) >= 12
        assert all(tasks[icepop][group] == tasks[reinforce][group] for group in both)
        assert first_step(icepop) == first_step(reinforce)
    assert first_step(NAMES[0]) != first_step(NAMES[1])


@pytest.mark.process
def test_a_stopped_trial_is_resumed_and_a_finished_one_is_not_run_again(sweep: FinishedSweep) -> None:
    assert sweep.first.events[-2:] == [("started after 0", NAMES[1]), ("stopped", NAMES[1])]
    assert sweep.outcomes == {NAMES[0]: TrialOutcome("finished"), NAMES[1]: TrialOutcome("stopped")}
    assert [trial.status for trial in sweep.stopped.trials] == ["finished", "stopped", "waiting", "waiting"]
    progress = sweep.progress.getvalue()
    assert f"1/4 {NAMES[0]}: already finished" in progress
    assert f"2/4 {NAMES[1]}: resumed after step 1 of 3" in progress
    steps = [rows(sweep.folder / name, "SELECT step, time FROM steps") for name in NAMES[:2]]
    assert steps[0] == sweep.before[0]
    assert len(sweep.before[1]) == 1
    assert steps[1][:1] == sweep.before[1]
    assert sweep.code == 0


@pytest.mark.process
def test_a_failed_trial_is_reported_and_the_others_continue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, missing = recipe(tmp_path), str(tmp_path / "missing")
    monkeypatch.chdir(tmp_path)
    args = ["--set", f'model.name="{missing}",tiny', "--steps", "1", "--model.sft_warmup_steps", "1"]
    assert main(["sweep", str(path), *args, "--evaluation.when", "never"]) == 1
    output = " ".join(capsys.readouterr().out.split())
    assert "failed: " in output
    assert "resume with: keel sweep --resume runs/tiny-sweep" in output
    failed, fine = read_results(SweepPlan.read(tmp_path / "runs" / "tiny-sweep")).trials
    assert (failed.status, failed.steps, fine.status, fine.steps) == ("failed", 0, "finished", 1)
    assert missing in failed.error
    assert failed.error in render_results(read_results(SweepPlan.read(tmp_path / "runs" / "tiny-sweep")))
    assert math.isnan(fine.measures["evaluation"])


@pytest.mark.process
def test_a_trial_whose_rollouts_all_failed_is_a_failed_trial(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recipe(tmp_path)
    monkeypatch.chdir(tmp_path)
    args = ["--set", "environments.larger_number.name=tests.run.test_scoring:Broken,tests.run.test_scoring:Parts"]
    args += ["--steps", "1", "--evaluation.when", "never", "--scheduler.max_error_reschedule_attempts", "0"]
    assert main(["sweep", str(path), *args]) == 1
    assert "failed: no optimizer step was taken: " in " ".join(capsys.readouterr().out.split())
    failed, fine = read_results(SweepPlan.read(tmp_path / "runs" / "tiny-sweep")).trials
    assert (failed.status, fine.status) == ("failed", "finished")


@pytest.mark.faults
def test_a_killed_process_is_a_failed_trial_that_can_be_resumed(tmp_path: Path) -> None:
    def kill(trial: Trial, step: int) -> None:
        for child in multiprocessing.active_children():
            if child.name == trial.name == "steps=12-seed0" and step == 1:
                child.kill()

    overrides, variants = ["--evaluation.when=never"], variants_from_settings(["steps=12,1"])
    plan = SweepPlan.create(tmp_path / "trials", recipe(tmp_path), overrides, variants, seeds=1)
    outcomes = SweepRunner(plan, RecordingCallback(kill), parallel=2).run()
    killed, fine = (outcomes[trial.name] for trial in plan.trials)
    assert killed.status == "failed"
    assert "SIGKILL" in killed.error
    assert fine == TrialOutcome("finished")
    resumed = RecordingCallback()
    assert SweepRunner(plan, resumed).run()[plan.trials[0].name] == TrialOutcome("finished")
    assert resumed.events[0] == ("skipped", plan.trials[1].name)
    event, name = resumed.events[1]
    assert name == plan.trials[0].name
    assert int(event.removeprefix("started after ")) >= 1


# -- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize("name", NAMES)
def test_the_measures_of_a_run_match_its_ledger_and_records(sweep: FinishedSweep, name: str) -> None:
    result = next(trial for trial in sweep.results.trials if trial.name == name)
    steps = [json.loads(text) for (text,) in rows(sweep.folder / name, "SELECT metrics FROM steps ORDER BY step")]
    ((last,),) = rows(sweep.folder / name, "SELECT metrics FROM evaluations WHERE step = 3")
    outcomes = [
        reason or "trained"
        for step in (1, 2, 3)
        for row in pq.read_table(sweep.folder / name / "rollouts" / f"step_00000{step}.parquet").to_pylist()
        for logprob, reason in zip(row["logprobs"] or [], row["drop_reason"] or [], strict=True)
        if logprob is not None
    ]
    assert outcomes
    assert result.measures["training"] == steps[-1]["reward"]  # a fifth of three steps is one
    assert result.measures["evaluation"] == json.loads(last)["reward"]
    assert result.interval == (json.loads(last)["low"], json.loads(last)["high"])
    assert result.measures["tokens"] == pytest.approx(outcomes.count("trained"))
    shares = result.measures["dropped_low"] + result.measures["dropped_high"]
    assert shares == pytest.approx(1 - outcomes.count("trained") / len(outcomes))
    weighted = [(step["trainable_tokens"], step["mismatch_kl"]) for step in steps if "trainable_tokens" in step]
    expected = sum(count * value for count, value in weighted) / sum(count for count, _ in weighted)
    assert result.measures["mismatch"] == pytest.approx(expected)
    assert result.measures["seconds"] == pytest.approx(sum(step["seconds"] for step in steps))


@pytest.mark.process
def test_the_table_shows_mean_and_standard_deviation_over_seeds(
    sweep: FinishedSweep, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["sweep", "--resume", str(sweep.folder)]) == 0
    output = capsys.readouterr().out
    for variant, json_variant in zip(sweep.results.variants, sweep.json_results["variants"], strict=True):
        for name in MEASURES:
            values = [trial.measures[name] for trial in variant.trials]
            spread = json_variant["measures"][name]
            assert spread["mean"] == pytest.approx(statistics.fmean(values))
            assert spread["std"] == pytest.approx(statistics.stdev(values))
            assert spread["values"] == values
        training = variant.over_seeds("training")
        line = next(line for line in output.splitlines() if line.startswith(f"{variant.name} "))
        assert f" {training.mean:.3f} " in line
        assert f"± {training.std:.3f}" in output
        lows = [trial.interval[0] for trial in variant.trials]
        assert variant.interval[0] == pytest.approx(statistics.fmean(lows))


@pytest.mark.process
def test_only_finished_runs_are_averaged(sweep: FinishedSweep) -> None:
    unfinished = sweep.stopped.variants[0]
    assert len(unfinished.finished) == 1
    assert unfinished.over_seeds("training").values == [unfinished.trials[0].measures["training"]]
    assert math.isnan(unfinished.over_seeds("training").std)
    assert math.isnan(sweep.stopped.variants[1].over_seeds("training").mean)


@pytest.mark.process
def test_the_parquet_file_has_every_metric_of_every_run(sweep: FinishedSweep) -> None:
    for trial in sweep.results.trials:
        trial_rows = [row for row in sweep.table if row["run"] == trial.name]
        assert {(row["variant"], row["seed"]) for row in trial_rows} == {(trial.variant, trial.seed)}
        rewards = {
            row["step"]: row["value"] for row in trial_rows if (row["measure"], row["environment"]) == ("reward", None)
        }
        assert rewards == trial.curve("reward")
        evaluated = {row["step"] for row in trial_rows if row["environment"] == "larger_number"}
        assert evaluated == {0, 3}
        assert len(trial_rows) == sum(len(row.metrics) for row in trial.step_rows) + sum(
            len(metrics) for _, _, metrics in trial.evaluation_rows
        )


@pytest.mark.process
def test_the_html_file_has_a_line_and_a_band_for_each_variant_and_loads_nothing(sweep: FinishedSweep) -> None:
    (text,) = re.findall(r'id="keel-charts">(.*?)</script>', sweep.html, re.DOTALL)
    charts = {chart["title"]: chart["series"] for chart in json.loads(text)["charts"]}
    titles = ("reward", "mismatch", "masked low", "masked high", "evaluation")
    assert list(charts) == [f"{title}, by step" for title in titles]
    reward = charts["reward, by step"]
    assert [series["label"] for series in reward] == [variant.name for variant in sweep.results.variants]
    for series, variant in zip(reward, sweep.results.variants, strict=True):
        points, band = variant.curve("reward")
        assert list(zip(series["step"], series["values"], strict=True)) == points
        assert list(zip(series["step"], series["low"], series["high"], strict=True)) == band
    assert sweep.html.count("<script") == 2
    shell = re.sub(r"<script>.*?</script>", "", sweep.html, flags=re.DOTALL)
    assert "http://" not in shell
    assert "https://" not in shell


@pytest.mark.process
def test_names_in_the_html_file_are_escaped(sweep: FinishedSweep) -> None:
    plan = SweepPlan(sweep.folder, "<b>", (Trial("x", "<script>alert(1)", 0, ()),))
    text = render_results(read_results(plan))
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text


@pytest.mark.process
def test_a_band_spans_the_lowest_and_highest_seed(sweep: FinishedSweep) -> None:
    variant = sweep.results.variants[0]
    points, band = variant.curve("reward")
    for (step, mean), (band_step, low, high) in zip(points, band, strict=True):
        values = sorted(trial.curve("reward")[int(step)] for trial in variant.trials)
        assert band_step == step
        assert [low, high] == values
        assert mean == pytest.approx(statistics.fmean(values))


# -- arguments and plans ---------------------------------------------------------------------------------------------


def test_several_set_flags_give_all_combinations_in_order() -> None:
    variants = variants_from_settings(["a.lr=1e-5,1e-4", "b.stop=[1, 2],x"])
    assert [variant.name for variant in variants] == [
        "lr=1e-5, stop=[1, 2]",
        "lr=1e-5, stop=x",
        "lr=1e-4, stop=[1, 2]",
        "lr=1e-4, stop=x",
    ]
    assert variants[2] == Variant("lr=1e-4, stop=[1, 2]", ("--a.lr=1e-4", "--b.stop=[1, 2]"))
    assert [variant.name for variant in variants_from_settings(["a.x=1", "b.x=2"])] == ["a.x=1, b.x=2"]


def test_objectives_replace_the_objective_of_the_recipe(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('[[objective.gates]]\nstatistic = "ratio"\nhigh = 2.0\n')
    text = RECIPE + 'objective = { name = "dapo", eps = 0.1 }\n'
    variants = variants_from_objectives(f"ipo_kl(kl_tau=0.5),{mine}")
    plan = SweepPlan.create(tmp_path / "trials", recipe(tmp_path, text), ["--seed=7"], variants, seeds=2)
    settings = [plan.load_trial_settings(trial).settings for trial in plan.trials]
    assert [each.seed for each in settings] == [7, 8, 7, 8]
    assert settings[0].objective.table == {"name": "ipo_kl", "kl_tau": 0.5}
    assert settings[2].objective.composition.gates[0].high == 2.0
    assert plan.trials[0].name == "ipo_kl_kl_tau=0.5-seed7"


def test_editing_the_recipe_later_has_no_effect(tmp_path: Path) -> None:
    path = recipe(tmp_path)
    plan = SweepPlan.create(tmp_path / "trials", path, [], variants_from_settings(["steps=1,2"]), seeds=1)
    path.write_text(RECIPE.replace("0.003", "0.009"))
    assert plan.load_trial_settings(plan.trials[0]).settings.trainer.optimizer.lr == 3e-3
    assert SweepPlan.read(tmp_path / "trials") == plan


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--set", "objective.kl_penalty_coef=0.1,-1"], "objective.kl_penalty_coef = -1"),
        (["--set", "objective.kl_penalty=1"], "did you mean"),
        (["--set", "objective.kl_penalty_coef=0.1,1e-1"], "the same settings"),
        (["--set", "steps=1,1"], "lists 1 twice"),
        (["--set", "steps=1", "--set", "steps=2"], "given twice"),
        (["--set", "seed=1,2"], "use --seeds 2"),
        (["--set", "steps"], "write name.of.setting=value"),
        (["--set", "steps=1,"], "write name.of.setting=value"),
        (["--set", "sampling.stop=[1"], "unbalanced brackets"),
        (["--set", "steps=1", "--seeds", "0"], "--seeds 0"),
        (["--set", "steps=1", "--environments.larger_number.name", "largest"], "largest"),
        (["--set", "sampling.top_k=0,5"], "top_k=5: sampling.top_k = 5"),
        (["--set", "steps=1", "--engine.kind", "pool", "--pool.servers", '["http://127.0.0.1:1"]'], "pool"),
        ([], "--set"),
    ],
)
def test_invalid_settings_are_errors_before_any_folder_is_created(
    tmp_path: Path, args: list[str], message: str
) -> None:
    assert message in error_message("sweep", str(recipe(tmp_path)), "--run", str(tmp_path / "trials"), *args)
    assert not (tmp_path / "trials").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["sweep", "--resume", "{trials}", "--set", "steps=1"], "--set has no effect with --resume"),
        (["sweep", "--resume", "{trials}", "--steps", "1"], "--steps=1 has no effect with --resume"),
        (["sweep", "--resume", "{tmp}"], "contains no trials"),
        (["sweep", "{recipe}", "--set", "steps=1", "--run", "{trials}"], "use --resume"),
        (["compare", "--live", "--resume", "{trials}", "--objectives", "icepop"], "has no effect with --resume"),
        (["compare", "--live", "{recipe}", "--texts", "3"], "--texts has no effect with --live"),
        (["compare", "--live"], "needs a RECIPE"),
        (["compare", "--live", "{recipe}", "--objectives", "icepopp"], "did you mean icepop"),
        (["compare", "{trials}", "--seeds", "2"], "--seeds 2 has no effect without --live"),
        (["compare", "{trials}", "--model.name", "tiny"], "unrecognized arguments"),
    ],
)
def test_flags_without_effect_are_errors(tmp_path: Path, args: list[str], message: str) -> None:
    path = recipe(tmp_path)
    SweepPlan.create(tmp_path / "trials", path, [], variants_from_settings(["steps=1"]), seeds=1)
    paths = {"trials": tmp_path / "trials", "tmp": tmp_path, "recipe": path}
    assert message in error_message(*(arg.format(**paths) if "{" in arg else arg for arg in args))


def test_invalid_parallel_and_damaged_plans_are_errors(tmp_path: Path) -> None:
    plan = SweepPlan.create(tmp_path / "trials", recipe(tmp_path), [], variants_from_settings(["steps=1"]), seeds=1)
    with pytest.raises(ConfigError, match="--parallel 0 must be at least 1"):
        SweepRunner(plan, RecordingCallback(), parallel=0)
    (tmp_path / "trials" / "trials.json").write_text('{"format": 99}')
    with pytest.raises(KeelError, match="format 2"):
        SweepPlan.read(tmp_path / "trials")


def test_progress_in_a_terminal_shows_each_running_trial(tmp_path: Path) -> None:
    plan = SweepPlan.create(tmp_path / "trials", recipe(tmp_path), [], variants_from_settings(["steps=3"]), seeds=1)
    (trial,) = plan.trials
    out = io.StringIO()
    with SweepDisplay(Console(file=out, force_terminal=True, width=120), plan) as display:
        display.started(trial, 1)
        display._progress.refresh()
        display.step(trial, 2, {"reward": 0.5})
        display._progress.refresh()
        display.ended(trial, TrialOutcome("finished"))
    text = out.getvalue()
    assert "1/1 steps=3-seed0: resumed after step 1 of 3" in text
    assert "step 2/3, reward 0.500" in text
    assert "1/1 steps=3-seed0: finished in" in text
