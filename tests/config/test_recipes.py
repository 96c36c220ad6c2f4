"""Every recipe is valid, has tasks to train and to evaluate on, and does what its first line says it shows."""

import itertools
import re
import tomllib
from pathlib import Path

import pytest

import keel
from keel.config import RunSettings, load_settings
from keel.config.recipe_files import RECIPES_FOLDER
from keel.config.toml_writer import toml_lines
from keel.objectives import PRESETS
from keel.rollout.environments.registry import load_environment
from tests.support.paths import ROOT

FILES = sorted(RECIPES_FOLDER.glob("*.toml"))
ON_GPU = [file for file in FILES if file.stem.startswith("gpu_")]
ON_CPU = [file for file in FILES if file not in ON_GPU]
NAMED = ("icepop", "ipo_kl", "dppo_tv", "dppo_kl", "opsm")
"""The objectives that the project exists for."""


def settings(name: str) -> RunSettings:
    return load_settings(RECIPES_FOLDER / f"{name}.toml").settings


def named(files: list[Path]) -> list[str]:
    return [file.stem for file in files]


@pytest.mark.parametrize("name", named(FILES))
def test_a_recipe_is_valid_and_survives_being_written_down(name: str, tmp_path: Path) -> None:
    loaded = load_settings(RECIPES_FOLDER / f"{name}.toml")
    assert loaded.settings.environments
    written = tmp_path / "config.toml"
    written.write_text("\n".join(line + comment for line, comment in toml_lines(loaded)) + "\n")
    again = load_settings(written).settings
    assert again.model_copy(update={"objective": None}) == loaded.settings.model_copy(update={"objective": None})
    assert again.objective.composition == loaded.settings.objective.composition


@pytest.mark.parametrize("name", named(FILES))
def test_every_environment_of_a_recipe_loads_and_has_tasks_of_both_splits(name: str) -> None:
    run = settings(name)
    for table in run.environments.values():
        environment = load_environment(table)
        trained = {task.id for task in itertools.islice(environment.tasks("train"), 64)}
        evaluated = {task.id for task in itertools.islice(environment.tasks("eval"), 64)}
        assert len(trained) >= min(run.scheduler.groups_per_step, 8)
        assert evaluated
        assert not trained & evaluated


@pytest.mark.parametrize("name", named(FILES))
def test_the_objective_of_a_recipe_resolves(name: str) -> None:
    table = settings(name).objective.table
    assert keel.objective(table).composition == settings(name).objective.composition


@pytest.mark.parametrize("name", named(FILES))
def test_what_a_recipe_samples_can_be_trained_on_and_evaluated(name: str) -> None:
    run = settings(name)
    for table in run.environments.values():
        (table.sampling or run.sampling).check_trainable()
    drawn = run.evaluation.sampling or run.sampling
    assert drawn.temperature > 0 or run.evaluation.samples_per_task == 1


@pytest.mark.parametrize("name", named(FILES))
def test_a_recipe_can_ever_have_fresh_samples(name: str) -> None:
    """Weights that are published every n steps are up to n - 1 versions behind: a lower bound would refuse all."""
    run = settings(name)
    assert run.publish.every - 1 <= run.scheduler.max_off_policy_steps


@pytest.mark.parametrize("name", named(ON_CPU))
def test_recipes_for_a_cpu_need_no_hub_and_no_gpu(name: str) -> None:
    run = settings(name)
    assert {model.name for model in (run.model, run.teacher) if model is not None} <= {"smollm2-135m", "tiny"}
    assert run.engine.kind in ("local", "process")
    assert run.model.device in ("auto", "cpu")


@pytest.mark.parametrize("name", named(FILES))
def test_a_recipe_opens_with_what_it_is_for_and_how_to_run_it(name: str) -> None:
    text = (RECIPES_FOLDER / f"{name}.toml").read_text()
    opening = list(itertools.takewhile(lambda line: line.startswith("#"), text.splitlines()))
    assert f"# keel train {name}" in opening
    assert len(opening) > 1


def test_every_named_objective_has_a_recipe_of_its_own_that_differs_in_nothing_else() -> None:
    assert {file.stem for file in FILES if file.stem.startswith("objective_")} == {f"objective_{one}" for one in NAMED}
    first = settings(f"objective_{NAMED[0]}")
    for name in NAMED:
        run = settings(f"objective_{name}")
        assert run.objective.name == name
        # what is spelled out is the default: a reader sees the rule, a change of it is seen here
        assert run.objective.composition == PRESETS[name].resolve({})[1]
        for table in set(RunSettings.model_fields) - {"objective"}:
            assert getattr(run, table) == getattr(first, table), f"{name} differs in {table}"
    main = settings("larger_number")
    assert (first.model, first.environments) == (main.model, main.environments)


def test_the_lora_recipe_compares_with_a_step_of_its_own() -> None:
    run = settings("lora_kl")
    assert run.model.lora is not None
    assert run.objective.composition.kl_penalty_coef > 0
    assert [one.source for one in run.references.values()] == ["step:0"]


def test_distillation_trains_by_its_teacher_also_where_rewards_say_nothing() -> None:
    run = settings("distillation")
    composition = run.objective.composition
    assert (composition.adv_tau, composition.teacher_tau) == (0.0, 1.0)
    assert run.teacher is not None
    assert run.teacher != run.model
    assert run.advantages.zero_variance_groups == "train"


def test_the_tool_recipe_keeps_its_thinking_and_has_room_for_its_turns() -> None:
    run = settings("calculator")
    table = run.environments["calculator"]
    assert run.renderer.preserve_all_thinking
    assert table.limits.max_turns == table.options["calls"] + 1
    assert table.limits.max_turns * run.sampling.max_tokens < table.limits.max_sequence_tokens


def test_the_mismatched_recipes_are_mismatched_in_one_way_each() -> None:
    stale, rounded = settings("stale"), settings("bf16_mismatch")
    assert stale.publish.every > 1
    assert stale.engine.dtype == "auto"
    assert rounded.engine.dtype == "bfloat16"
    assert rounded.model.dtype == "float32"
    assert (rounded.publish.every, rounded.scheduler.max_off_policy_steps) == (1, 0)
    for run in (stale, rounded):
        assert [gate.statistic for gate in run.objective.composition.gates] == ["ratio"]


def test_the_gpu_recipes_sample_elsewhere() -> None:
    assert {settings(file.stem).engine.kind for file in ON_GPU} == {"vllm", "pool"}


def test_the_page_of_recipes_names_each_of_them_and_no_other() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    listed = re.findall(r"^\| `(\w+)\.toml` \|", page, re.MULTILINE)
    assert sorted(listed) == named(FILES)


def test_the_example_of_the_page_is_a_recipe() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    (example,) = re.findall(r"^```toml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    RunSettings.model_validate(tomllib.loads(example))
