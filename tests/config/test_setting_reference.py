"""The description of settings comes from the code and covers all of them."""

import pytest

from keel.config import load_settings
from keel.config.setting_reference import describe_tables, find_settings
from keel.errors import ConfigError


def names(query: str) -> list[str]:
    return [setting.name for table in find_settings(query) for setting in table.settings]


def test_every_setting_of_a_run_is_described() -> None:
    described = {setting.name: setting for table in describe_tables() for setting in table.settings}
    overrides = ["--environments.NAME.name=arithmetic", "--model.lora.rank=8", "--launch.engines=1"]
    missing = [name for name, _, _ in load_settings(overrides=overrides).rows() if name not in described]
    # tables that are not set by default
    assert set(missing) == {"pool", "evaluation.sampling", "references", "teacher", "sft"} | {
        "environments.NAME.sampling",
        "environments.NAME.dataset",
    }
    assert all(setting.type and setting.default and setting.description for setting in described.values())


def test_a_setting_has_its_default_type_and_docstring() -> None:
    (table,) = find_settings("scheduler.on_stale")
    (setting,) = table.settings
    assert (setting.name, setting.type, setting.default) == ("scheduler.on_stale", '"drop" or "resample"', '"resample"')
    assert setting.description.startswith("What happens to a group that is too stale")
    assert table.description == "How groups are sampled and batches are cut."


@pytest.mark.parametrize(
    ("query", "selected"),
    [
        ("lr", ["trainer.optimizer.lr"]),
        ("checkpoints", ["checkpoints.every", "checkpoints.keep_last", "checkpoints.keep_every"]),
        ("environments.sums.weight", ["environments.NAME.weight"]),
        ("objective.gates.0.low", ["objective.gates.N.low"]),
        ("optimizer.lr", ["trainer.optimizer.lr"]),
    ],
)
def test_a_name_selects_a_setting_a_table_or_the_end_of_a_name(query: str, selected: list[str]) -> None:
    assert names(query) == selected


def test_a_parameter_of_presets_has_the_default_of_each() -> None:
    (table,) = find_settings("objective.eps_high")
    assert "0.28 (dapo)" in table.settings[0].default
    (table,) = find_settings("objective.reference_kl_coef")
    assert table.settings[0].default == "0.0"


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("scheduler.gruop_size", "scheduler.gruop_size is not a setting; did you mean scheduler.group_size?"),
        ("max_tokns", "max_tokns is not a setting; did you mean sampling.max_tokens?"),
        ("num_generations", "num_generations is not a setting; Keel's name is scheduler.group_size"),
        ("scheduler.groups", "scheduler.groups was renamed to scheduler.groups_per_step"),
        ("zzz", "zzz is not a setting; `keel config --explain` lists all settings"),
    ],
)
def test_an_unknown_name_is_an_error_with_the_right_name(query: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_settings(query)
    assert str(caught.value) == message
