"""Trials: the same short run with other settings, side by side. One small set of real runs serves most claims."""

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

from keel.cli import main
from keel.errors import ConfigError, KeelError
from keel.tools.lens.run_reader import RunCatalog
from keel.tools.sweep import SweepPlan, SweepRunner, Trial, TrialOutcome, Variant
from keel.tools.sweep.html import render_results
from keel.tools.sweep.results import MEASURES, SweepResults, read_results
from keel.tools.sweep.variants import variants_from_objectives, variants_from_settings
from tests.support.run_world import tiny

RECIPE = tiny(
    steps=3,
    model__sft_warmup_steps=100,
    scheduler__max_off_policy_steps=0,
    trainer__optimizer__lr=3e-3,
    checkpoints={},
    evaluation={"when": "start_and_end", "num_tasks": 4},
)
NAMES = ["name=icepop-seed0", "name=icepop-seed1", "name=reinforce-seed0", "name=reinforce-seed1"]


class Watch:
    """Remembers what it was told, and may do something at a step."""

    def __init__(self, at_step: Any = None) -> None:
        self.events: list[tuple[str, str]] = []
        self.at_step = at_step

    def skipped(self, trial: Trial) -> None:
        self.events.append(("skipped", trial.name))

    def started(self, trial: Trial, start_step: int) -> None:
        self.events.append((f"began after {start_step}", trial.name))

    def step(self, trial: Trial, step: int, metrics: Mapping[str, float]) -> None:
        if self.at_step is not None:
            self.at_step(trial, step)

    def notice(self, trial: Trial, text: str) -> None:
        pass

    def ended(self, trial: Trial, outcome: TrialOutcome) -> None:
        self.events.append((outcome.status, trial.name))


def recipe(folder: Path, text: str = RECIPE) -> Path:
    path = folder / "tiny.toml"
    path.write_text(text)
    return path


def refused(*words: str) -> str:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        assert main(list(words)) == 2
    return said.getvalue()


def rows(run: Path, query: str) -> list[Any]:
    with contextlib.closing(sqlite3.connect(run / "run.db")) as db:
        return db.execute(query).fetchall()


class World:
    """Two objectives and two seeds, stopped in the middle of the second trial and gone on with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "trials"
        variants = variants_from_settings(["objective.name=icepop,reinforce"])
        self.plan = SweepPlan.create(self.folder, recipe(folder), [], variants, seeds=2)
        self.first = Watch(lambda trial, step: self.session.stop() if trial.name == NAMES[1] else None)
        self.session = SweepRunner(self.plan, self.first)
        self.outcomes = self.session.run()
        self.stopped = read_results(self.plan, self.outcomes)
        self.before = [rows(self.folder / name, "SELECT step, time FROM steps") for name in NAMES[:2]]
        (folder / "tiny.toml").unlink()  # a plan has all it needs
        out, self.progress = io.StringIO(), io.StringIO()
        files = ["--html", str(folder / "report.html"), "--parquet", str(folder / "numbers.parquet")]
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(self.progress):
            self.code = main(["sweep", "--resume", str(self.folder), "--json", *files])
        self.told = json.loads(out.getvalue())
        self.results: SweepResults = read_results(SweepPlan.read(self.folder))
        self.html = (folder / "report.html").read_text()
        self.table = pq.read_table(folder / "numbers.parquet").to_pylist()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("trials"))


# -- what runs --------------------------------------------------------------------------------------------------------


def test_every_variant_and_seed_is_an_ordinary_run_that_the_lens_opens(world: World) -> None:
    assert [trial.name for trial in world.plan.trials] == NAMES
    runs = {run.name: run.summary() for run in RunCatalog(world.folder).list_runs()}
    assert sorted(runs) == sorted(NAMES)
    assert {facts["status"] for facts in runs.values()} == {"finished"}
    assert [runs[name]["objective"] for name in NAMES] == ["icepop"] * 2 + ["reinforce"] * 2
    assert {facts["step"] for facts in runs.values()} == {3}


def test_equal_seeds_give_equal_tasks_and_an_equal_first_step(world: World) -> None:
    def start(name: str) -> list[Any]:
        columns = ["group", "member", "token_ids"]
        table = pq.read_table(world.folder / name / "rollouts" / "step_000001.parquet", columns=columns)
        return sorted(tuple(map(str, row.values())) for row in table.to_pylist())

    query = 'SELECT DISTINCT "group", task_id FROM rollouts'
    tasks = {name: dict(rows(world.folder / name, query)) for name in NAMES}
    for seed in (0, 1):
        one, other = (f"name={name}-seed{seed}" for name in ("icepop", "reinforce"))
        both = tasks[one].keys() & tasks[other].keys()
        assert len(both) >= 12
        assert all(tasks[one][group] == tasks[other][group] for group in both)
        assert start(one) == start(other)
    assert start(NAMES[0]) != start(NAMES[1])


def test_what_was_stopped_goes_on_and_what_was_finished_does_not_run_again(world: World) -> None:
    assert world.first.events[-2:] == [("began after 0", NAMES[1]), ("stopped", NAMES[1])]
    assert world.outcomes == {NAMES[0]: TrialOutcome("finished"), NAMES[1]: TrialOutcome("stopped")}
    assert [trial.status for trial in world.stopped.trials] == ["finished", "stopped", "waiting", "waiting"]
    said = world.progress.getvalue()
    assert f"1/4 {NAMES[0]}: already finished" in said
    assert f"2/4 {NAMES[1]}: resumed after step 1 of 3" in said
    now = [rows(world.folder / name, "SELECT step, time FROM steps") for name in NAMES[:2]]
    assert now[0] == world.before[0]
    assert len(world.before[1]) == 1
    assert now[1][:1] == world.before[1]
    assert world.code == 0


def test_a_trial_that_fails_is_data_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, missing = recipe(tmp_path), str(tmp_path / "missing")
    monkeypatch.chdir(tmp_path)
    words = ["--set", f'model.name="{missing}",tiny', "--steps", "1", "--model.sft_warmup_steps", "1"]
    assert main(["sweep", str(path), *words, "--evaluation.when", "never"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "failed: " in said
    assert "resume with: keel sweep --resume runs/tiny-sweep" in said
    failed, fine = read_results(SweepPlan.read(tmp_path / "runs" / "tiny-sweep")).trials
    assert (failed.status, failed.steps, fine.status, fine.steps) == ("failed", 0, "finished", 1)
    assert missing in failed.error
    assert failed.error in render_results(read_results(SweepPlan.read(tmp_path / "runs" / "tiny-sweep")))
    assert math.isnan(fine.measures["evaluation"])


def test_a_killed_process_is_a_failed_trial_that_can_be_gone_on_with(tmp_path: Path) -> None:
    def kill(trial: Trial, step: int) -> None:
        for child in multiprocessing.active_children():
            if child.name == trial.name == "steps=12-seed0" and step == 1:
                child.kill()

    words, variants = ["--evaluation.when=never"], variants_from_settings(["steps=12,1"])
    plan = SweepPlan.create(tmp_path / "trials", recipe(tmp_path), words, variants, seeds=1)
    outcomes = SweepRunner(plan, Watch(kill), parallel=2).run()
    killed, fine = (outcomes[trial.name] for trial in plan.trials)
    assert killed.status == "failed"
    assert "SIGKILL" in killed.error
    assert fine == TrialOutcome("finished")
    again = Watch()
    assert SweepRunner(plan, again).run()[plan.trials[0].name] == TrialOutcome("finished")
    assert again.events[0] == ("skipped", plan.trials[1].name)
    event, name = again.events[1]
    assert name == plan.trials[0].name
    assert int(event.removeprefix("began after ")) >= 1


# -- the numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_numbers_of_a_run_are_those_in_its_ledger_and_its_records(world: World, name: str) -> None:
    found = next(trial for trial in world.results.trials if trial.name == name)
    steps = [json.loads(text) for (text,) in rows(world.folder / name, "SELECT numbers FROM steps ORDER BY step")]
    ((last,),) = rows(world.folder / name, "SELECT numbers FROM evaluations WHERE step = 3")
    kept = [
        reason or "trained"
        for step in (1, 2, 3)
        for row in pq.read_table(world.folder / name / "rollouts" / f"step_00000{step}.parquet").to_pylist()
        for logprob, reason in zip(row["logprobs"] or [], row["drop_reason"] or [], strict=True)
        if logprob is not None
    ]
    assert kept
    assert found.measures["training"] == steps[-1]["reward"]  # a fifth of three steps is one
    assert found.measures["evaluation"] == json.loads(last)["reward"]
    assert found.interval == (json.loads(last)["low"], json.loads(last)["high"])
    assert found.measures["tokens"] == pytest.approx(kept.count("trained"))
    shares = found.measures["dropped_low"] + found.measures["dropped_high"]
    assert shares == pytest.approx(1 - kept.count("trained") / len(kept))
    weighted = [(one["trainable_tokens"], one["mismatch_kl"]) for one in steps if "trainable_tokens" in one]
    expected = sum(count * value for count, value in weighted) / sum(count for count, _ in weighted)
    assert found.measures["mismatch"] == pytest.approx(expected)
    assert found.measures["seconds"] == pytest.approx(sum(one["seconds"] for one in steps))


def test_the_table_shows_mean_and_deviation_over_seeds(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["sweep", "--resume", str(world.folder)]) == 0
    said = capsys.readouterr().out
    for variant, told in zip(world.results.variants, world.told["variants"], strict=True):
        for name in MEASURES:
            values = [trial.measures[name] for trial in variant.trials]
            spread = told["measures"][name]
            assert spread["mean"] == pytest.approx(statistics.fmean(values))
            assert spread["std"] == pytest.approx(statistics.stdev(values))
            assert spread["values"] == values
        training = variant.over_seeds("training")
        line = next(line for line in said.splitlines() if line.startswith(f"{variant.name} "))
        assert f" {training.mean:.3f} " in line
        assert f"± {training.std:.3f}" in said
        lows = [trial.interval[0] for trial in variant.trials]
        assert variant.interval[0] == pytest.approx(statistics.fmean(lows))


def test_only_finished_runs_are_averaged(world: World) -> None:
    half = world.stopped.variants[0]
    assert len(half.finished) == 1
    assert half.over_seeds("training").values == [half.trials[0].measures["training"]]
    assert math.isnan(half.over_seeds("training").std)
    assert math.isnan(world.stopped.variants[1].over_seeds("training").mean)


def test_the_parquet_file_has_every_number_of_every_run(world: World) -> None:
    for trial in world.results.trials:
        mine = [row for row in world.table if row["run"] == trial.name]
        assert {(row["variant"], row["seed"]) for row in mine} == {(trial.variant, trial.seed)}
        rewards = {
            row["step"]: row["value"] for row in mine if (row["measure"], row["environment"]) == ("reward", None)
        }
        assert rewards == trial.curve("reward")
        evaluated = {row["step"] for row in mine if row["environment"] == "larger_number"}
        assert evaluated == {0, 3}
        assert len(mine) == sum(len(row.metrics) for row in trial.step_rows) + sum(
            len(one[2]) for one in trial.evaluation_rows
        )


def test_the_html_file_has_a_line_and_a_band_for_each_variant_and_loads_nothing(world: World) -> None:
    (text,) = re.findall(r'id="keel-charts">(.*?)</script>', world.html, re.DOTALL)
    charts = {chart["title"]: chart["series"] for chart in json.loads(text)["charts"]}
    titles = ("reward", "mismatch", "masked low", "masked high", "evaluation")
    assert list(charts) == [f"{title}, by step" for title in titles]
    reward = charts["reward, by step"]
    assert [series["label"] for series in reward] == [variant.name for variant in world.results.variants]
    for series, variant in zip(reward, world.results.variants, strict=True):
        points, band = variant.curve("reward")
        assert list(zip(series["step"], series["values"], strict=True)) == points
        assert list(zip(series["step"], series["low"], series["high"], strict=True)) == band
    assert world.html.count("<script") == 2
    shell = re.sub(r"<script>.*?</script>", "", world.html, flags=re.DOTALL)
    assert "http://" not in shell
    assert "https://" not in shell


def test_names_in_the_html_file_are_escaped(world: World) -> None:
    plan = SweepPlan(world.folder, "<b>", (Trial("x", "<script>alert(1)", 0, ()),))
    text = render_results(read_results(plan))
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text


def test_a_band_goes_from_the_lowest_to_the_highest_seed(world: World) -> None:
    one = world.results.variants[0]
    points, band = one.curve("reward")
    for (step, mean), (at, low, high) in zip(points, band, strict=True):
        values = sorted(trial.curve("reward")[int(step)] for trial in one.trials)
        assert at == step
        assert [low, high] == values
        assert mean == pytest.approx(statistics.fmean(values))


# -- what is asked for ------------------------------------------------------------------------------------------------


def test_several_sets_give_their_product_in_order() -> None:
    found = variants_from_settings(["a.lr=1e-5,1e-4", "b.stop=[1, 2],x"])
    assert [variant.name for variant in found] == [
        "lr=1e-5, stop=[1, 2]",
        "lr=1e-5, stop=x",
        "lr=1e-4, stop=[1, 2]",
        "lr=1e-4, stop=x",
    ]
    assert found[2] == Variant("lr=1e-4, stop=[1, 2]", ("--a.lr=1e-4", "--b.stop=[1, 2]"))
    assert [one.name for one in variants_from_settings(["a.x=1", "b.x=2"])] == ["a.x=1, b.x=2"]


def test_objectives_take_the_place_of_the_recipes_own(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('[[objective.gates]]\nstatistic = "ratio"\nhigh = 2.0\n')
    text = RECIPE + 'objective = { name = "dapo", eps = 0.1 }\n'
    variants = variants_from_objectives(f"ipo_kl(kl_tau=0.5),{mine}")
    plan = SweepPlan.create(tmp_path / "trials", recipe(tmp_path, text), ["--seed=7"], variants, seeds=2)
    settings = [plan.load_trial_settings(trial).settings for trial in plan.trials]
    assert [one.seed for one in settings] == [7, 8, 7, 8]
    assert settings[0].objective.table == {"name": "ipo_kl", "kl_tau": 0.5}
    assert settings[2].objective.composition.gates[0].high == 2.0
    assert plan.trials[0].name == "ipo_kl_kl_tau=0.5-seed7"


def test_a_recipe_that_is_edited_meanwhile_changes_nothing(tmp_path: Path) -> None:
    path = recipe(tmp_path)
    plan = SweepPlan.create(tmp_path / "trials", path, [], variants_from_settings(["steps=1,2"]), seeds=1)
    path.write_text(RECIPE.replace("0.003", "0.009"))
    assert plan.load_trial_settings(plan.trials[0]).settings.trainer.optimizer.lr == 3e-3
    assert SweepPlan.read(tmp_path / "trials") == plan


@pytest.mark.parametrize(
    ("words", "said"),
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
def test_bad_settings_are_refused_before_anything_is_made(tmp_path: Path, words: list[str], said: str) -> None:
    assert said in refused("sweep", str(recipe(tmp_path)), "--run", str(tmp_path / "trials"), *words)
    assert not (tmp_path / "trials").exists()


@pytest.mark.parametrize(
    ("words", "said"),
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
def test_flags_that_cannot_act_are_refused(tmp_path: Path, words: list[str], said: str) -> None:
    path = recipe(tmp_path)
    SweepPlan.create(tmp_path / "trials", path, [], variants_from_settings(["steps=1"]), seeds=1)
    places = {"trials": tmp_path / "trials", "tmp": tmp_path, "recipe": path}
    assert said in refused(*(word.format(**places) if "{" in word else word for word in words))


def test_at_once_and_damaged_plans_are_checked(tmp_path: Path) -> None:
    plan = SweepPlan.create(tmp_path / "trials", recipe(tmp_path), [], variants_from_settings(["steps=1"]), seeds=1)
    with pytest.raises(ConfigError, match="--parallel 0 must be at least 1"):
        SweepRunner(plan, Watch(), parallel=0)
    (tmp_path / "trials" / "trials.json").write_text('{"format": 99}')
    with pytest.raises(KeelError, match="format 2"):
        SweepPlan.read(tmp_path / "trials")
