"""Settings: where values come from, which values are invalid and what the errors say."""

from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

import keel
from keel.common import renamed_settings as renamed
from keel.config import RunSettings, load_settings
from keel.config.load import parse_overrides
from keel.config.simulate import SimulateSettings
from keel.errors import ConfigError, KeelError
from keel.objectives import PRESETS, Composition, ObjectiveSettings, resolve_objective
from keel.objectives.preset import COMMON_NAMES, PRESET_PARAMETERS
from keel.rollout.episode_runner import build_environments

ROOT = Path(keel.__file__).parent


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    return tmp_path / "run.toml"


def error_message(path: Path | None = None, *overrides: str) -> str:
    """Return the message of the error that loading raises."""
    with pytest.raises(ConfigError) as caught:
        load_settings(path, overrides)
    return str(caught.value)


def objective_error(**table: Any) -> str:
    """Return the message of the error that resolving an `[objective]` table raises."""
    with pytest.raises(ConfigError) as caught:
        resolve_objective(table)
    return str(caught.value)


# Origins of values


def test_the_file_overrides_defaults_and_the_command_line_overrides_the_file(toml: Path) -> None:
    toml.write_text('[objective]\nname = "ipo_kl"\nkl_tau = 0.5\nratio_low = 0.3\n')
    parameters = load_settings(toml, ["--objective.kl_tau", "0.25"]).settings.objective.parameters
    assert (parameters["ratio_high"], parameters["ratio_low"], parameters["kl_tau"]) == (5.0, 0.3, 0.25)


def test_settings_load_without_a_file() -> None:
    assert load_settings().settings.objective.name == "icepop"
    assert load_settings(overrides=["--advantages.name=leave_one_out"]).settings.advantages.name == "leave_one_out"


def test_the_last_of_two_overrides_wins() -> None:
    loaded = load_settings(overrides=["--objective.name", "opsm", "--objective.eps", "0.1", "--objective.eps=0.3"])
    assert loaded.settings.objective.composition.policy.eps == 0.3


def test_rows_name_the_origin_of_each_value(toml: Path) -> None:
    toml.write_text('[objective]\nname = "ipo_kl"\nratio_low = 0.3\n[advantages]\nname = "constant"\n')
    rows = {path: (value, origin) for path, value, origin in load_settings(toml, ["--objective.kl_tau", "0.1"]).rows()}
    assert rows["objective.name"] == ("ipo_kl", str(toml))
    assert rows["objective.ratio_low"] == (0.3, str(toml))
    assert rows["objective.ratio_high"] == (5.0, "default")
    assert rows["objective.kl_tau"] == (0.1, "command line")
    assert rows["advantages.name"] == ("constant", str(toml))
    assert rows["advantages.baseline"] == (None, "default")


def test_rows_name_the_origin_of_each_field_of_a_gate(toml: Path) -> None:
    toml.write_text('[objective]\ngates = [{statistic = "ratio", low = 0.2, high = 5.0}]\n')
    rows = {path: origin for path, _, origin in load_settings(toml, ["--objective.gates.0.low", "0.1"]).rows()}
    assert rows["objective.gates.0.low"] == "command line"
    assert rows["objective.gates.0.high"] == str(toml)
    assert rows["objective.gates.0.scope"] == "default"


def test_a_table_on_the_command_line_replaces_the_origins_of_the_file(toml: Path) -> None:
    toml.write_text('[objective]\ngates = [{statistic = "ratio", low = 0.2, high = 5.0}]\n')
    loaded = load_settings(toml, ["--objective.gates", '[{statistic = "binary_kl", high = 0.1}]'])
    rows = {path: (value, origin) for path, value, origin in loaded.rows()}
    assert rows["objective.gates.0.statistic"] == ("binary_kl", "command line")
    assert rows["objective.gates.0.when"] == ("always", "default")
    assert rows["objective.gates.0.low"] == (None, "default")


def test_a_number_in_an_override_is_a_list_index(toml: Path) -> None:
    toml.write_text('[objective]\ngates = [{statistic = "ratio", low = 0.2}, {statistic = "binary_kl", high = 0.1}]\n')
    gates = load_settings(toml, ["--objective.gates.1.high", "0.7"]).settings.objective.composition.gates
    assert (gates[0].low, gates[1].high) == (0.2, 0.7)


@pytest.mark.parametrize("index", ["2", "-1", "first", "²"])
def test_an_invalid_list_index_is_an_error(toml: Path, index: str) -> None:
    toml.write_text('[objective]\ngates = [{statistic = "ratio", low = 0.2}, {statistic = "binary_kl", high = 0.1}]\n')
    message = error_message(toml, f"--objective.gates.{index}.high", "1")
    assert message == f"--objective.gates.{index}.high: {index} is not an index into a list of 2"


def test_a_setting_inside_a_plain_value_is_an_error(toml: Path) -> None:
    toml.write_text('[objective]\nname = "icepop"\n')
    assert (
        error_message(toml, "--objective.name.x", "1") == "--objective.name.x: objective.name = 'icepop' is not a table"
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("0.5", 0.5), ("-1e-3", -1e-3), ("true", True), ("[1, 2]", [1, 2]), ('"5"', "5")),
        *(("proximal", "proximal"), ("a = b", "a = b"), ("", "")),
    ],
)
def test_an_override_is_parsed_as_toml_or_taken_as_a_string(text: str, value: Any) -> None:
    assert parse_overrides(["--a.b", text]) == [("a.b", value)]
    assert parse_overrides([f"--a.b={text}"]) == [("a.b", value)]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["objective.eps", "1"], "'objective.eps' is not an override; write --name.of.setting value"),
        (["--"], "'--' is not an override; write --name.of.setting value"),
        (["--objective.eps"], "--objective.eps needs a value"),
    ],
)
def test_invalid_override_syntax_is_an_error(argv: list[str], message: str) -> None:
    assert error_message(None, *argv) == message


# Invalid settings


def test_a_missing_file_is_an_error(toml: Path) -> None:
    assert error_message(toml) == f"{toml} does not exist"


def test_a_folder_instead_of_a_file_is_an_error(tmp_path: Path) -> None:
    assert error_message(tmp_path).startswith(f"{tmp_path} cannot be read: ")


def test_invalid_toml_is_an_error_with_a_line_number(toml: Path) -> None:
    toml.write_text("[objective\n")
    message = error_message(toml)
    assert message.startswith(f"{toml} is not valid TOML: ")
    assert "line 1" in message


def test_a_binary_file_is_an_error(toml: Path) -> None:
    toml.write_bytes(b"\xff\xfe\x00")
    assert error_message(toml).startswith(f"{toml} cannot be read: ")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--objectiv.name=opsm", "objectiv is not a setting; did you mean objective?"),
        ("--objective.ratio_hgh=5", "objective.ratio_hgh is not a setting; did you mean ratio_high?"),
        ("--objective.name=icepp", 'objective.name = "icepp" is not a preset; did you mean icepop?'),
        ("--advantages.nme=constant", "advantages.nme is not a setting; did you mean name?"),
    ],
)
def test_an_unknown_name_suggests_the_closest_name(override: str, message: str) -> None:
    named = [] if "name" in override.split("=")[0] else ["--objective.name", "icepop"]
    assert error_message(None, *named, override) == message


def test_an_unknown_name_without_a_close_match_lists_the_known_names() -> None:
    message = error_message(None, "--advantages.zzzzzz=1")
    assert message == "advantages.zzzzzz is not a setting; known names: baseline, decay, name, zero_variance_groups"


def test_the_old_name_of_a_setting_is_an_error_with_its_new_name(toml: Path) -> None:
    message = "advantages.no_signal was renamed to advantages.zero_variance_groups"
    assert error_message(None, "--advantages.no_signal=train") == message
    toml.write_text('[advantages]\nno_signal = "train"\n')
    assert error_message(toml) == message


@pytest.fixture
def renames(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {
        "environments.*.limits.time": "environments.*.limits.timeout",
        "environments.*.share": "scheduler.shares.*",
        "servers": "pool",
        "sampler.heat": "sampling.temperature",
        "sampler.longest": "sampling.max_tokens",
        "publish.how": "publish.transport",
        "scheduler.old": "scheduler.on_stale",
        "objective.low": "objective.ratio_low",
    }
    values = {
        "environments.*.limits.on_overlength": {"leave": "truncate"},
        "scheduler.on_stale": {"again": "resample"},
        "steps": {"few": 10},
    }
    monkeypatch.setattr(renamed, "RENAMED_KEYS", keys)
    monkeypatch.setattr(renamed, "RENAMED_VALUES", values)


@pytest.mark.usefixtures("renames")
@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "--environments.sums.limits.time=3",
            "environments.sums.limits.time was renamed to environments.sums.limits.timeout",
        ),
        ("--environments.sums.share=3", "environments.sums.share was renamed to scheduler.shares.sums"),
        ("--servers.urls=[]", "servers was renamed to pool"),
        (
            "--sampler={heat = 1.0, longest = 8}",
            "sampler.heat was renamed to sampling.temperature\nsampler.longest was renamed to sampling.max_tokens",
        ),
        ("--sampler.other=1", "sampler is not a setting; did you mean sampling?"),
        ('--scheduler.old="again"', 'scheduler.old = "again" was renamed to scheduler.on_stale = "resample"'),
        ('--scheduler.old="drop"', "scheduler.old was renamed to scheduler.on_stale"),
        ("--objective={name = 'icepop', low = 1}", "objective.low was renamed to objective.ratio_low"),
        (
            '--environments.sums.limits.on_overlength="leave"',
            'environments.sums.limits.on_overlength = "leave" was renamed;'
            ' write environments.sums.limits.on_overlength = "truncate"',
        ),
        ('--steps="few"', 'steps = "few" was renamed; write steps = 10'),
    ],
)
def test_an_error_about_a_renamed_setting_contains_old_and_new_name(override: str, message: str) -> None:
    assert error_message(None, override) == message


@pytest.mark.usefixtures("renames")
def test_a_renamed_key_that_is_still_a_setting_loads() -> None:
    assert load_settings(overrides=["--publish.transport=folder"]).settings.publish.transport == "folder"


def setting_exists(name: str) -> bool:
    """Return whether the settings of a run have this name; `*` is any key of a mapping or index of a list."""
    models: list[Any] = [RunSettings]
    for part in name.split("."):
        if part != "*":
            models = [model.model_fields[part].annotation for model in models if part in model.model_fields]
        models = [inner for model in models for inner in nested_models(model)] or models
        if not models:
            return False
    return True


def nested_models(annotation: Any) -> list[Any]:
    """Return the settings classes inside an annotation such as `list[Gate]` or `PoolSettings | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation, *([Composition] if annotation is ObjectiveSettings else [])]
    return [inner for argument in get_args(annotation) for inner in nested_models(argument)]


@pytest.mark.parametrize(("old", "new"), renamed.RENAMED_KEYS.items())
def test_a_renamed_key_no_longer_exists_and_its_new_name_does(old: str, new: str) -> None:
    assert not setting_exists(old)
    assert setting_exists(new)
    if not old.startswith(("objective.gates", "objective.weights", "objective.penalties", "objective.reduction")):
        old, new = old.replace("*", "x"), new.replace("*", "x")
        assert f"{old} was renamed to {new}" in error_message(None, f"--{old}=1")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--num_generations=8", "num_generations is not a setting; Keel's name is scheduler.group_size"),
        (
            "--objective.beta=0.04",
            "objective.beta is not a setting; Keel's name is objective.reference_kl_coef (a KL term in the loss)",
        ),
        (
            "--objective={name = 'grpo', epsilon = 0.2}",
            "objective.epsilon is not a setting; Keel's name is objective.eps (with a clipped preset such as"
            ' objective.name = "grpo")',
        ),
        ("--rollout.n=8", "rollout.n is not a setting; Keel's name is scheduler.group_size"),
        ("--n-samples-per-prompt=8", "n-samples-per-prompt is not a setting; Keel's name is scheduler.group_size"),
        ("--model.base_model=tiny", "model.base_model is not a setting; Keel's name is model.name"),
        (
            "--algorithm.kl_ctrl.kl_coef=0.1",
            "algorithm.kl_ctrl.kl_coef is not a setting; Keel's name is objective.kl_penalty_coef (a KL penalty in the"
            " advantages)",
        ),
        (
            "--actor={ppo_epochs = 2, optim = {lr = 1e-6}}",
            "actor.ppo_epochs is not a setting; Keel trains on every batch once; trainer.optimizer_steps divides a"
            " batch among several optimizer steps\n"
            "actor.optim.lr is not a setting; Keel's name is trainer.optimizer.lr",
        ),
        ("--eval.n=4", "eval.n is not a setting; Keel's name is evaluation.samples_per_task"),
    ],
)
def test_a_setting_of_another_system_is_answered_with_the_name_in_keel(override: str, message: str) -> None:
    assert error_message(None, override) == message


def test_all_unknown_settings_of_a_file_are_named_together(toml: Path) -> None:
    toml.write_text("learning_rate = 1e-6\nnum_generations = 8\nstpes = 3\n")
    assert error_message(toml).splitlines() == [
        "learning_rate is not a setting; Keel's name is trainer.optimizer.lr",
        "num_generations is not a setting; Keel's name is scheduler.group_size",
        "stpes is not a setting; did you mean steps?",
    ]


@pytest.mark.parametrize(("setting", "words"), [(setting, words) for setting, _, words in renamed.OTHER_SYSTEMS])
def test_the_words_of_other_systems_lead_to_settings_that_exist(setting: str, words: str) -> None:
    table, _, name = setting.rpartition(".")
    if table == "objective" and name != "name":
        assert name in {*PRESET_PARAMETERS, *COMMON_NAMES}
    else:
        assert not setting or setting_exists(setting.replace("NAME", "*"))
    for word in words.split():
        message = error_message(None, f"--unknown.{word}=1")
        assert message.startswith(f"unknown.{word} is not a setting; ")
        assert f"Keel's name is {setting}" in message if setting else "Keel's name" not in message


def test_a_word_of_other_systems_has_one_setting() -> None:
    words = [word for _, _, words in renamed.OTHER_SYSTEMS for word in words.split()]
    assert len(words) == len(set(words))
    assert not [word for word in words if setting_exists(word)]


@pytest.mark.parametrize(
    ("table", "old", "new"),
    [
        ('gates = [{on = "ratio", high = 2.0}]', "gates.0.on", "gates.0.statistic"),
        ('gates = [{statistic = "ratio", of = "policy/proximal", high = 2.0}]', "gates.0.of", "gates.0.between"),
        ('weights = [{of = "proximal/sampler"}]', "weights.0.of", "weights.0.between"),
        ('penalties = [{on = "k2", coef = 0.1}]', "penalties.0.on", "penalties.0.estimator"),
        ('gates = [], reduction = {divide_by = "kept"}', "reduction.divide_by", "reduction.denominator"),
    ],
)
def test_a_renamed_key_inside_a_composition_is_named(table: str, old: str, new: str) -> None:
    assert f"objective.{old} was renamed to objective.{new}" in error_message(None, f"--objective={{{table}}}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--engine.kind=pool"], 'engine.kind = "pool" needs a table [pool] that lists the servers'),
        (
            ["--pool.urls=['http://a']"],
            'the table [pool] has no effect with engine.kind = "local"; set engine.kind = "pool"',
        ),
        (
            ["--publish.every=4"],
            "publish.every = 4 makes samples older than scheduler.max_off_policy_steps = 2 versions, so no batch"
            " could be cut; lower the first or raise the second",
        ),
        (
            ["--scheduler.refill=true", "--advantages.zero_variance_groups=train"],
            'scheduler.refill = true has no effect with advantages.name = "group_mean" and'
            ' advantages.zero_variance_groups = "train": it replaces groups that are dropped because their rewards are'
            " all equal; remove it",
        ),
        (
            ["--scheduler.refill=true", "--advantages.name=constant"],
            'scheduler.refill = true has no effect with advantages.name = "constant" and'
            ' advantages.zero_variance_groups = "drop": it replaces groups that are dropped because their rewards are'
            " all equal; remove it",
        ),
        (
            ["--trainer.max_tokens_per_micro_batch=100", "--environments.my-sums.name=arithmetic"],
            "environments.my-sums.limits.max_sequence_tokens = 4096 must not be above"
            " trainer.max_tokens_per_micro_batch = 100: a longer sample fits into no micro-batch",
        ),
        (
            ["--references.first.source=base"],
            "references = ['first'] has no effect: the objective reads no reference",
        ),
        (["--teacher.name=tiny"], 'teacher.name = "tiny" has no effect: the objective reads no teacher'),
        (
            ["--publish.transport=adapter"],
            'publish.transport = "adapter" has no effect: without model.lora there is no adapter',
        ),
        (
            ["--publish.path=/shared"],
            'publish.path = "/shared" has no effect: weights are copied in memory; set publish.transport = "folder"',
        ),
        (
            ["--environments=[{name = 'arithmetic'}]"],
            "environments is a list; write one table [environments.NAME] per environment, not [[environments]]",
        ),
    ],
)
def test_errors_between_tables_use_full_setting_names(overrides: list[str], message: str) -> None:
    assert error_message(None, *overrides) == message


SCHEDULE = "--trainer.optimizer.lr_schedule=cosine"


@pytest.mark.parametrize(
    ("overrides", "length"),
    [
        ([], 100),
        (["--steps=30"], 30),
        (["--steps=30", "--trainer.optimizer_steps=4"], 120),
        # a batch of 8 groups takes at most 8 optimizer steps
        (["--steps=30", "--trainer.optimizer_steps=12"], 240),
        (["--steps=30", "--trainer.optimizer.total_steps=50"], 50),
    ],
)
def test_the_schedule_is_as_long_as_the_run_by_default(overrides: list[str], length: int) -> None:
    settings = load_settings(overrides=[SCHEDULE, *overrides]).settings
    assert settings.trainer_with_schedule.optimizer.total_steps == length


def test_a_constant_learning_rate_has_no_length() -> None:
    settings = load_settings().settings
    assert settings.trainer_with_schedule is settings.trainer


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["--steps=30", "--trainer.optimizer_steps=2", "--trainer.optimizer.total_steps=30"],
            "trainer.optimizer.total_steps = 30 ends the learning-rate schedule before the run: steps = 30 with"
            " trainer.optimizer_steps = 2 takes up to 60 optimizer steps; remove total_steps, which then follows the"
            " run, or set it to at least 60",
        ),
        (
            ["--steps=30", "--trainer.optimizer.warmup_steps=30"],
            "trainer.optimizer.warmup_steps = 30 must be below the length of the learning-rate schedule: steps = 30"
            " with trainer.optimizer_steps = 1 takes up to 30 optimizer steps",
        ),
    ],
)
def test_a_schedule_that_ends_before_the_run_is_an_error(overrides: list[str], message: str) -> None:
    assert error_message(None, SCHEDULE, *overrides) == message


def test_an_error_in_the_sampling_of_an_environment_uses_its_full_name() -> None:
    for name in ("sampling", "environments.arithmetic.sampling"):
        settings = load_settings(overrides=["--environments.arithmetic.weight=1", f"--{name}.top_p=0.5"]).settings
        with pytest.raises(ConfigError, match=rf"^{name.replace('.', '[.]')}\.top_p = 0\.5 "):
            build_environments(settings)


def test_an_unknown_key_inside_a_gate_is_an_error() -> None:
    message = objective_error(gates=[{"statistic": "ratio", "lo": 0.2}])
    assert message == "objective.gates.0.lo is not a setting; did you mean low?"


def test_a_parameter_without_a_preset_name_lists_its_presets() -> None:
    message = objective_error(ratio_low=0.1)
    assert message.startswith("objective.ratio_low is a parameter of a preset: set objective.name too (icepop, ipo_kl")


@pytest.mark.parametrize("name", ["icepop", "ipo_kl", "mis", "cispo"])
def test_low_above_high_names_both_parameters(name: str) -> None:
    message = objective_error(name=name, ratio_low=6.0, ratio_high=5.0)
    assert message == "objective.ratio_low = 6.0 must be below objective.ratio_high = 5.0"


def test_low_above_high_in_an_extra_gate_uses_the_index_of_the_user() -> None:
    message = objective_error(name="icepop", gates=[{"statistic": "ratio", "low": 3.0, "high": 1.0}])
    assert message == "objective.gates.0.low = 3.0 must be below objective.gates.0.high = 1.0"


def test_all_problems_are_reported() -> None:
    message = objective_error(name="icepop", ratio_low=-1, kl_penalty_coef=-2)
    assert {line.split(" = ")[0] for line in message.splitlines()} == {
        "objective.ratio_low",
        "objective.kl_penalty_coef",
    }


@pytest.mark.parametrize("value", ["nan", "inf", '"x"', "[1]"])
def test_a_value_of_the_wrong_type_is_an_error(value: str) -> None:
    assert error_message(None, "--objective.name=icepop", f"--objective.ratio_high={value}").startswith(
        "objective.ratio_high = "
    )


GATE: dict[str, Any] = {"statistic": "ratio", "low": 0.5}
CLIP: dict[str, Any] = {"surrogate": "clip", "eps": 0.2}
ENTROPY: dict[str, Any] = {"surrogate": "cross_entropy", "anchor": "none"}
GAMMA = {"k_positive": 1, "rate_positive": 1, "k_negative": 1, "rate_negative": 1}
K3 = {"estimator": "k3", "coef": 0.1}

INVALID_OBJECTIVES: list[tuple[dict[str, Any], str]] = [
    ({"gates": [{"statistic": "ratio"}]}, 'objective.gates.0.statistic = "ratio": a gate needs a low or a high bound'),
    ({"gates": [{"statistic": "ratio", "low": -0.1}]}, "low = -0.1 must not be negative: it bounds a ratio"),
    ({"gates": [{"statistic": "ratio", "high": 0.0}]}, "high = 0.0 must be positive: it bounds a ratio"),
    (
        {"gates": [{"statistic": "binary_kl", "high": 1, "level": "geometric", "scope": "sequence"}]},
        'level = "geometric" has no effect: it belongs to statistic = "ratio"',
    ),
    (
        {"gates": [{"statistic": "binary_kl", "low": 0.1, "high": 1}]},
        "low = 0.1 has no effect: the statistic is a distance and has only a high bound",
    ),
    ({"gates": [{"statistic": "second_moment", "high": -1}]}, "high = -1.0 must not be negative: it bounds a distance"),
    (
        {"gates": [{"statistic": "sequence_kl", "high": 1, "scope": "token"}]},
        'scope = "token" is not possible: this statistic needs scope = "sequence"',
    ),
    (
        {"gates": [{"statistic": "second_moment", "high": 1, "when": "positive_advantage"}]},
        'when = "positive_advantage" is not possible: a gate with scope = "step" ignores advantages',
    ),
    ({"weights": [{"low": 2.0, "high": 1.0}]}, "weights.0.low = 2.0 must be below objective.weights.0.high = 1.0"),
    ({"weights": [{"kernel": "gamma"}]}, 'kernel = "gamma" needs k_positive'),
    ({"weights": [GAMMA]}, 'kernel = "ratio" has no k_positive'),
    *(
        ({"policy": {field: 1.5}}, f'policy.{field} = 1.5 has no effect: it belongs to surrogate = "{owner}"')
        for field, owner in [
            *(("eps", "clip"), ("eps_high", "clip"), ("dual_clip", "clip")),
            *(("tau_positive", "soft"), ("tau_negative", "soft")),
        ]
    ),
    ({"policy": {"surrogate": "clip"}}, 'surrogate = "clip" needs eps'),
    ({"policy": {"surrogate": "soft", "tau_positive": 1}}, 'surrogate = "soft" needs tau_positive and tau_negative'),
    ({"policy": {"surrogate": "linear", "anchor": "none"}}, 'anchor = "none" does not fit'),
    ({"policy": {"surrogate": "log_prob"}}, 'anchor = "sampler" does not fit'),
    (
        {"policy": {"surrogate": "log_prob", "anchor": "none", "level": "sequence"}},
        'level = "sequence" needs a ratio, and objective.policy.surrogate = "log_prob" has none',
    ),
    ({"policy": {"token_clip": 0.4}}, 'token_clip = 0.4 has no effect: it belongs to level = "sequence"'),
    ({"penalties": [{"estimator": "k1", "coef": 1.0}]}, 'estimator = "k1" cannot be combined with'),
    (
        {"penalties": [{"estimator": "log_ratio_squared", "coef": 1, "ratio_correction": True}]},
        "ratio_correction = true has no effect: it belongs to k1, k2 and k3",
    ),
    ({"penalties": [{"estimator": "k3"}]}, "objective.penalties.0.coef is missing"),
    ({"reduction": {"over": "constant"}}, 'reduction.over = "constant" needs length'),
    ({"reduction": {"length": 5}}, 'reduction.length = 5.0 has no effect: it belongs to over = "constant"'),
    ({"kl_penalty_source": "sampled"}, 'kl_penalty_source = "sampled" has no effect with kl_penalty_coef = 0'),
    ({"policy": ENTROPY, "teacher_tau": 1.0}, "teacher_tau = 1.0 has no effect: cross_entropy has no advantage"),
    (
        {"policy": ENTROPY, "kl_penalty_coef": 1.0},
        "kl_penalty_coef = 1.0 has no effect: cross_entropy has no advantage",
    ),
    ({"policy": ENTROPY, "adv_tau": 2.0}, "adv_tau = 2.0 has no effect: cross_entropy has no advantage"),
    ({"policy": ENTROPY, "weights": [{}]}, "weights = 1 has no effect: cross_entropy takes no weights"),
    ({"policy": ENTROPY, "reduction": {"denominator": "kept"}}, "has no effect: no gate drops a token"),
    (
        {"policy": CLIP | {"level": "sequence"}, "weights": [{}]},
        "a sequence-level policy term takes no token-level weights",
    ),
    (
        {"proximal": "interpolated"},
        'proximal = "interpolated" has no effect: no part of the objective uses the proximal policy',
    ),
    (
        {"name": "icepop", "reference_kl_estimator": "k2"},
        'reference_kl_estimator = "k2" has no effect with reference_kl_coef = 0',
    ),
    (
        {"name": "icepop", "reference_kl_correction": True},
        "reference_kl_correction = true has no effect with reference_kl_coef = 0",
    ),
    ({"name": "icepop", "length": 5}, 'length = 5.0 has no effect: it belongs to reduction = "constant"'),
    ({"name": "dr_grpo", "reduction": "tokens", "length": 5}, 'has no effect: it belongs to reduction = "constant"'),
    ({"name": "icepop", "reduction": "constant"}, "needs length"),
    (
        {"name": "icepop", "reference_kl_coef": 0.1, "reference_kl_estimator": "k1"},
        'objective.reference_kl_estimator = "k1" cannot be combined with objective.reference_kl_correction = false',
    ),
    ({"name": "icepop", "gates": {"statistic": "ratio"}}, "must be a list of tables"),
]


@pytest.mark.parametrize(
    ("table", "message"), INVALID_OBJECTIVES, ids=lambda case: case if isinstance(case, str) else ""
)
def test_an_invalid_option_of_an_objective_is_an_error(table: dict[str, Any], message: str) -> None:
    text = objective_error(**table)
    assert message in text
    assert text.startswith(("objective.", "denominator"))


@pytest.mark.parametrize(("name", "field"), [("group_mean", "decay"), ("moving_baseline", "baseline")])
def test_an_option_of_another_advantage_estimator_is_an_error(name: str, field: str) -> None:
    message = error_message(None, f"--advantages.name={name}", f"--advantages.{field}=0.5")
    assert message.startswith(f"advantages.{field} = 0.5 has no effect: it belongs to name = ")


def test_an_extra_gate_gives_an_option_of_the_preset_an_effect() -> None:
    extra_gates = [{"statistic": "ratio", "between": "proximal/sampler", "high": 2.0}]
    assert "no part of the objective uses the proximal policy" in objective_error(
        name="icepop", proximal="interpolated"
    )
    _, _, composition = resolve_objective({"name": "icepop", "proximal": "interpolated", "gates": extra_gates})
    assert [gate.between for gate in composition.gates] == ["policy/sampler", "proximal/sampler"]


def test_extra_parts_come_after_those_of_the_preset() -> None:
    table = {"name": "dppo_kl", "gates": [GATE], "weights": [{"high": 2.0}], "penalties": [K3]}
    _, _, composition = resolve_objective(table)
    assert [gate.statistic for gate in composition.gates] == [
        "probability_difference",
        "probability_difference",
        "ratio",
    ]
    assert [penalty.estimator for penalty in composition.penalties] == ["log_ratio_squared", "k3"]
    assert composition.weights[0].high == 2.0


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Composition().adv_tau = 2.0


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_resolves_and_describes_its_parameters(name: str) -> None:
    preset = PRESETS[name]
    parameters, composition = preset.resolve({})
    assert set(preset.parameters) <= PRESET_PARAMETERS.keys() | set(COMMON_NAMES)
    assert parameters.keys() == set(preset.own_parameters) | set(COMMON_NAMES)
    assert Composition.model_validate(composition.model_dump()) == composition
    resolved_again, _ = preset.resolve(parameters)
    assert resolved_again == parameters


def test_every_setting_has_a_description() -> None:
    models = [RunSettings, Composition, SimulateSettings]
    for model in models:  # the list grows during the loop by the tables inside each table
        for field in model.model_fields.values():
            models += [inner for inner in nested_models(field.annotation) if inner not in models]
    assert [f"{m.__name__}.{name}" for m in models for name, f in m.model_fields.items() if not f.description] == []


# Errors


def test_every_error_is_a_keel_error_and_a_value_error() -> None:
    assert issubclass(ConfigError, KeelError)
    assert issubclass(KeelError, ValueError)


def test_min_group_size_is_checked_against_the_group_size_of_every_environment() -> None:
    overrides = ["--scheduler.min_group_size=3", "--environments.arithmetic.group_size=3"]
    load_settings(None, overrides)
    message = error_message(None, *overrides, "--environments.count_letters.group_size=2")
    assert "scheduler.min_group_size = 3 must not be above environments.count_letters.group_size = 2" in message


@pytest.mark.parametrize(
    ("curriculum", "message"),
    [
        (
            "band=[0.1,0.9]",
            'curriculum.band = [0.1, 0.9] has no effect with environments.arithmetic.curriculum.order = "',
        ),
        ("floor=0.2", 'curriculum.floor = 0.2 has no effect with environments.arithmetic.curriculum.order = "epoch"'),
        ("retest_after=3", "environments.arithmetic.curriculum.retest_after = 3 has no effect without retire_after"),
        ("order=hard", 'environments.arithmetic.curriculum.order = "hard": input should be'),
        ("smoothing=0", "environments.arithmetic.curriculum.smoothing = 0: input should be greater than 0"),
    ],
)
def test_settings_of_a_curriculum_that_have_no_effect_are_errors(curriculum: str, message: str) -> None:
    assert message in error_message(None, f"--environments.arithmetic.curriculum.{curriculum}")


def test_a_band_is_a_lower_and_a_higher_pass_rate_and_a_floor_is_above_zero() -> None:
    table = "--environments.arithmetic.curriculum"
    difficulty = f"{table}.order=difficulty"
    load_settings(None, [difficulty, f"{table}.band=[0,1]", f"{table}.floor=1", f"{table}.retire_after=2"])
    message = error_message(None, difficulty, f"{table}.band=[0.9,0.1]")
    assert "curriculum.band = [0.9, 0.1] must be a lower and a higher pass rate" in message
    assert "curriculum.floor = 0" in error_message(None, difficulty, f"{table}.floor=0")
    loaded = load_settings(None, [f"{table}=given"]).settings
    assert loaded.environments["arithmetic"].curriculum.order == "given"
