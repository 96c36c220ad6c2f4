"""The table [sft]: cross-entropy by default, and an error for every setting that has no effect."""

from pathlib import Path

import pytest

from keel.config import load_settings
from keel.config.toml_writer import toml_lines
from keel.errors import ConfigError

DATASET = ("--sft.dataset=rows.jsonl",)


def test_the_objective_is_cross_entropy_and_survives_being_written_and_read(tmp_path: Path) -> None:
    loaded = load_settings(None, [*DATASET, "--sft.epochs=2", "--steps=7"])
    assert loaded.settings.objective.name == "cross_entropy"
    assert loaded.settings.sft is not None and loaded.settings.sft.dataset is not None
    file = tmp_path / "config.toml"
    file.write_text("".join(f"{line}{comment}\n" for line, comment in toml_lines(loaded)))
    assert load_settings(file).settings.sft == loaded.settings.sft


def test_parameters_without_a_name_belong_to_cross_entropy() -> None:
    assert load_settings(None, [*DATASET, "--objective.reduction=sequences"]).settings.objective.name == "cross_entropy"


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["--objective.name=icepop"], r'objective.name = "icepop" cannot be trained with the table \[sft\]'),
        (["--objective.reference_kl_coef=0.1"], r'objective.name = "cross_entropy" cannot be trained'),
        (["--scheduler.group_size=4"], r"the table \[scheduler\] has no effect with the table \[sft\]"),
        (["--trainer.optimizer_steps=2"], r"trainer.optimizer_steps = 2 has no effect .* lower sft.rows_per_step"),
        (["--sft.max_sequence_tokens=9999"], r"sft.max_sequence_tokens = 9999 must not be above trainer.max_tokens"),
        (["--sft.environment=x"], r"sft needs a data set, .* and not both"),
        (["--sft.dataset.answer=x"], r'sft.dataset.answer = "x" has no effect'),
        (["--sft.dataset.few_shot=2"], r"sft.dataset.few_shot = 2 has no effect"),
    ],
)
def test_a_setting_without_effect_is_an_error(overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_settings(None, ["--sft.dataset.path=rows.jsonl", *overrides])


def test_an_unknown_environment_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r'sft.environment = "x" is not a table of this recipe'):
        load_settings(None, ["--sft.environment=x"])


def test_the_schedule_is_checked_against_steps_but_not_before_epochs_are_counted() -> None:
    schedule = ["--trainer.optimizer.lr_schedule=cosine", "--trainer.optimizer.warmup_steps=150"]
    load_settings(None, [*DATASET, "--sft.epochs=2", *schedule])
    with pytest.raises(ConfigError, match="warmup_steps = 150 must be below"):
        load_settings(None, [*DATASET, "--sft.epochs=2", "--steps=100", *schedule])
