"""Settings: where values come from, which values are invalid and what the errors say."""

from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

import keel
from keel.common import renamed_settings as renamed
from keel.config import RunSettings, load_settings
from keel.config.load import parse_overrides
from keel.errors import ConfigError, KeelError
from keel.objectives import PRESETS, Composition, ObjectiveSettings, resolve_objective
from keel.objectives.preset import COMMON_NAMES, PRESET_PARAMETERS
from keel.rollout.episode_runner import build_environments

ROOT = Path(keel.__file__).parent


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    return tmp_path / "run.toml"


def refused(path: Path | None = None, *overrides: str) -> str:
    """The message of the refusal."""
    with pytest.raises(ConfigError) as caught:
        load_settings(path, overrides)
    return str(caught.value)


def refused_table(**table: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_objective(table)
    return str(caught.value)


# where values come from


def test_defaults_are_below_the_file_and_the_file_below_the_command_line(toml: Path) -> None:
    toml.write_text('[objective]\nname = "ipo_kl"\nkl_tau = 0.5\nratio_low = 0.3\n')
    parameters = load_settings(toml, ["--objective.kl_tau", "0.25"]).settings.objective.parameters
    assert (parameters["ratio_high"], parameters["ratio_low"], parameters["kl_tau"]) == (5.0, 0.3, 0.25)


def test_without_a_file_there_are_defaults_and_overrides() -> None:
    assert load_settings().settings.objective.name == "icepop"
    assert load_settings(overrides=["--advantages.name=leave_one_out"]).settings.advantages.name == "leave_one_out"


def test_the_last_of_two_overrides_counts() -> None:
    loaded = load_settings(overrides=["--objective.name", "opsm", "--objective.eps", "0.1", "--objective.eps=0.3"])
    assert loaded.settings.objective.composition.policy.eps == 0.3


def test_rows_say_where_each_value_came_from(toml: Path) -> None:
    toml.write_text('[objective]\nname = "ipo_kl"\nratio_low = 0.3\n[advantages]\nname = "constant"\n')
    rows = {path: (value, origin) for path, value, origin in load_settings(toml, ["--objective.kl_tau", "0.1"]).rows()}
    assert rows["objective.name"] == ("ipo_kl", str(toml))
    assert rows["objective.ratio_low"] == (0.3, str(toml))
    assert rows["objective.ratio_high"] == (5.0, "default")
    assert rows["objective.kl_tau"] == (0.1, "command line")
    assert rows["advantages.name"] == ("constant", str(toml))
    assert rows["advantages.baseline"] == (None, "default")


def test_rows_tell_given_and_default_fields_of_one_gate_apart(toml: Path) -> None:
    toml.write_text('[objective]\ngates = [{statistic = "ratio", low = 0.2, high = 5.0}]\n')
    rows = {path: origin for path, _, origin in load_settings(toml, ["--objective.gates.0.low", "0.1"]).rows()}
    assert rows["objective.gates.0.low"] == "command line"
    assert rows["objective.gates.0.high"] == str(toml)
    assert rows["objective.gates.0.scope"] == "default"


def test_a_table_given_on_the_command_line_replaces_the_origins_of_the_file(toml: Path) -> None:
    toml.write_text('[objective]\ngates = [{statistic = "ratio", low = 0.2, high = 5.0}]\n')
    loaded = load_settings(toml, ["--objective.gates", '[{statistic = "binary_kl", high = 0.1}]'])
    rows = {path: (value, origin) for path, value, origin in loaded.rows()}
    assert rows["objective.gates.0.statistic"] == ("binary_kl", "command line")
    assert rows["objective.gates.0.when"] == ("always", "default")
    assert rows["objective.gates.0.low"] == (None, "default")


def test_a_number_in_an_override_steps_into_a_list(toml: Path) -> None:
    toml.write_text('[objective]\ngates = [{statistic = "ratio", low = 0.2}, {statistic = "binary_kl", high = 0.1}]\n')
    gates = load_settings(toml, ["--objective.gates.1.high", "0.7"]).settings.objective.composition.gates
    assert (gates[0].low, gates[1].high) == (0.2, 0.7)


@pytest.mark.parametrize("position", ["2", "-1", "first", "²"])
def test_a_position_outside_the_list_is_refused(toml: Path, position: str) -> None:
    toml.write_text('[objective]\ngates = [{statistic = "ratio", low = 0.2}, {statistic = "binary_kl", high = 0.1}]\n')
    message = refused(toml, f"--objective.gates.{position}.high", "1")
    assert message == f"--objective.gates.{position}.high: {position} is not a position in a list of 2"


def test_stepping_into_a_value_is_refused(toml: Path) -> None:
    toml.write_text('[objective]\nname = "icepop"\n')
    assert (
        refused(toml, "--objective.name.x", "1")
        == "--objective.name.x: objective.name = 'icepop' has no settings inside it"
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("0.5", 0.5), ("-1e-3", -1e-3), ("true", True), ("[1, 2]", [1, 2]), ('"5"', "5")),
        *(("proximal", "proximal"), ("a = b", "a = b"), ("", "")),
    ],
)
def test_an_override_is_read_as_toml_and_else_as_a_string(text: str, value: Any) -> None:
    assert parse_overrides(["--a.b", text]) == [("a.b", value)]
    assert parse_overrides([f"--a.b={text}"]) == [("a.b", value)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["objective.eps", "1"], "'objective.eps' is not an override; write --name.of.setting value"),
        (["--"], "'--' is not an override; write --name.of.setting value"),
        (["--objective.eps"], "--objective.eps needs a value"),
    ],
)
def test_words_that_are_no_override_are_refused(words: list[str], message: str) -> None:
    assert refused(None, *words) == message


# what is refused


def test_a_missing_file_is_named(toml: Path) -> None:
    assert refused(toml) == f"{toml} does not exist"


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    assert refused(tmp_path).startswith(f"{tmp_path} cannot be read: ")


def test_bad_toml_is_named_with_its_place(toml: Path) -> None:
    toml.write_text("[objective\n")
    message = refused(toml)
    assert message.startswith(f"{toml} is not valid TOML: ")
    assert "line 1" in message


def test_a_file_that_is_no_text_is_refused(toml: Path) -> None:
    toml.write_bytes(b"\xff\xfe\x00")
    assert refused(toml).startswith(f"{toml} cannot be read: ")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--objectiv.name=opsm", "objectiv is not a setting; did you mean objective?"),
        ("--objective.ratio_hgh=5", "objective.ratio_hgh is not a setting; did you mean ratio_high?"),
        ("--objective.name=icepp", 'objective.name = "icepp" is not a recipe; did you mean icepop?'),
        ("--advantages.nme=constant", "advantages.nme is not a setting; did you mean name?"),
    ],
)
def test_an_unknown_name_suggests_the_nearest(override: str, message: str) -> None:
    named = [] if "name" in override.split("=")[0] else ["--objective.name", "icepop"]
    assert refused(None, *named, override) == message


def test_a_name_near_to_nothing_lists_the_known_ones() -> None:
    message = refused(None, "--advantages.zzzzzz=1")
    assert message == "advantages.zzzzzz is not a setting; known names: baseline, decay, name, zero_variance_groups"


def test_the_old_name_of_a_setting_is_refused_with_its_new_name(toml: Path) -> None:
    message = "advantages.no_signal was renamed to advantages.zero_variance_groups"
    assert refused(None, "--advantages.no_signal=train") == message
    toml.write_text('[advantages]\nno_signal = "train"\n')
    assert refused(toml) == message


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
def test_renamed_keys_and_values_name_the_old_and_the_new(override: str, message: str) -> None:
    assert refused(None, override) == message


@pytest.mark.usefixtures("renames")
def test_a_renamed_key_that_is_still_a_setting_loads() -> None:
    assert load_settings(overrides=["--publish.transport=folder"]).settings.publish.transport == "folder"


def setting_exists(name: str) -> bool:
    """Whether the settings of a run have this name; `*` is any key of a mapping or position in a list."""
    models: list[Any] = [RunSettings]
    for part in name.split("."):
        if part != "*":
            models = [model.model_fields[part].annotation for model in models if part in model.model_fields]
        models = [inner for model in models for inner in nested_models(model)] or models
        if not models:
            return False
    return True


def nested_models(annotation: Any) -> list[Any]:
    """The settings classes inside an annotation such as `list[Gate]` or `PoolSettings | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation, *([Composition] if annotation is ObjectiveSettings else [])]
    return [inner for argument in get_args(annotation) for inner in nested_models(argument)]


@pytest.mark.parametrize(("old", "new"), renamed.RENAMED_KEYS.items())
def test_a_renamed_key_is_gone_and_its_new_name_exists(old: str, new: str) -> None:
    assert not setting_exists(old)
    assert setting_exists(new)
    if not old.startswith(("objective.gates", "objective.weights", "objective.penalties", "objective.reduction")):
        old, new = old.replace("*", "x"), new.replace("*", "x")
        assert f"{old} was renamed to {new}" in refused(None, f"--{old}=1")


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
    assert f"objective.{old} was renamed to objective.{new}" in refused(None, f"--objective={{{table}}}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--engine.kind=pool"], 'engine.kind = "pool" needs a table [pool] with its servers'),
        (
            ["--pool.urls=['http://a']"],
            'the table [pool] has no effect with engine.kind = "local"; set engine.kind = "pool"',
        ),
        (
            ["--publish.every=4"],
            "publish.every = 4 makes samples older than scheduler.max_off_policy_steps = 2 versions, which no"
            " batch may hold",
        ),
        (
            ["--trainer.max_tokens_per_micro_batch=100", "--environments.my-sums.name=arithmetic"],
            "environments.my-sums.limits.max_sequence_tokens = 4096 must not be above trainer.max_tokens_per_micro_batch = 100: a longer sample"
            " fits no micro-batch",
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
            'publish.path = "/shared" has no effect: the engine takes a copy in this process; set publish.transport ='
            ' "folder"',
        ),
        (
            ["--environments=[{name = 'arithmetic'}]"],
            "environments is a list; write a table [environments.NAME] for each, not [[environments]]",
        ),
    ],
)
def test_settings_of_several_tables_are_refused_under_their_full_names(overrides: list[str], message: str) -> None:
    assert refused(None, *overrides) == message


def test_sampling_of_an_environment_is_refused_under_its_full_name() -> None:
    for name in ("sampling", "environments.arithmetic.sampling"):
        settings = load_settings(overrides=["--environments.arithmetic.weight=1", f"--{name}.top_p=0.5"]).settings
        with pytest.raises(ConfigError, match=rf"^{name.replace('.', '[.]')}\.top_p = 0\.5 "):
            build_environments(settings)


def test_an_unknown_key_inside_a_part_is_refused_too() -> None:
    message = refused_table(gates=[{"statistic": "ratio", "lo": 0.2}])
    assert message == "objective.gates.0.lo is not a setting; did you mean low?"


def test_a_recipes_parameter_without_its_name_says_whose_it_is() -> None:
    message = refused_table(ratio_low=0.1)
    assert message.startswith("objective.ratio_low is a parameter of a recipe: give objective.name too (icepop, ipo_kl")


@pytest.mark.parametrize("name", ["icepop", "ipo_kl", "mis", "cispo"])
def test_low_above_high_names_both_parameters(name: str) -> None:
    message = refused_table(name=name, ratio_low=6.0, ratio_high=5.0)
    assert message == "objective.ratio_low = 6.0 must be below objective.ratio_high = 5.0"


def test_low_above_high_in_an_added_gate_is_named_by_its_own_position() -> None:
    message = refused_table(name="icepop", gates=[{"statistic": "ratio", "low": 3.0, "high": 1.0}])
    assert message == "objective.gates.0.low = 3.0 must be below objective.gates.0.high = 1.0"


def test_every_problem_is_reported_not_only_the_first() -> None:
    message = refused_table(name="icepop", ratio_low=-1, kl_penalty_coef=-2)
    assert {line.split(" = ")[0] for line in message.splitlines()} == {
        "objective.ratio_low",
        "objective.kl_penalty_coef",
    }


@pytest.mark.parametrize("value", ["nan", "inf", '"x"', "[1]"])
def test_a_value_of_the_wrong_kind_is_named(value: str) -> None:
    assert refused(None, "--objective.name=icepop", f"--objective.ratio_high={value}").startswith(
        "objective.ratio_high = "
    )


GATE: dict[str, Any] = {"statistic": "ratio", "low": 0.5}
CLIP: dict[str, Any] = {"surrogate": "clip", "eps": 0.2}
ENTROPY: dict[str, Any] = {"surrogate": "cross_entropy", "anchor": "none"}
GAMMA = {"k_positive": 1, "rate_positive": 1, "k_negative": 1, "rate_negative": 1}
K3 = {"estimator": "k3", "coef": 0.1}

CANNOT_ACT: list[tuple[dict[str, Any], str]] = [
    ({"gates": [{"statistic": "ratio"}]}, 'objective.gates.0.statistic = "ratio": a gate needs a low or a high bound'),
    ({"gates": [{"statistic": "ratio", "low": -0.1}]}, "low = -0.1 must not be negative: it bounds a ratio"),
    ({"gates": [{"statistic": "ratio", "high": 0.0}]}, "high = 0.0 must be positive: it bounds a ratio"),
    (
        {"gates": [{"statistic": "binary_kl", "high": 1, "level": "geometric", "scope": "sequence"}]},
        'level = "geometric" cannot act: it belongs to statistic = "ratio"',
    ),
    (
        {"gates": [{"statistic": "binary_kl", "low": 0.1, "high": 1}]},
        "low = 0.1 cannot act: the statistic is a distance and has only a high bound",
    ),
    ({"gates": [{"statistic": "second_moment", "high": -1}]}, "high = -1.0 must not be negative: it bounds a distance"),
    (
        {"gates": [{"statistic": "sequence_kl", "high": 1, "scope": "token"}]},
        'scope = "token": this statistic belongs to the sequence and decides for it',
    ),
    (
        {"gates": [{"statistic": "second_moment", "high": 1, "when": "positive_advantage"}]},
        'when = "positive_advantage": a gate over the step applies to every advantage',
    ),
    ({"weights": [{"low": 2.0, "high": 1.0}]}, "weights.0.low = 2.0 must be below objective.weights.0.high = 1.0"),
    ({"weights": [{"kernel": "gamma"}]}, 'kernel = "gamma" needs k_positive'),
    ({"weights": [GAMMA]}, 'kernel = "ratio" has no k_positive'),
    *(
        ({"policy": {field: 1.5}}, f'policy.{field} = 1.5 cannot act: it belongs to surrogate = "{owner}"')
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
    ({"policy": {"token_clip": 0.4}}, 'token_clip = 0.4 cannot act: it belongs to level = "sequence"'),
    ({"penalties": [{"estimator": "k1", "coef": 1.0}]}, 'estimator = "k1" cannot go with'),
    (
        {"penalties": [{"estimator": "log_ratio_squared", "coef": 1, "ratio_correction": True}]},
        "ratio_correction = true cannot act: it belongs to k1, k2 and k3",
    ),
    ({"penalties": [{"estimator": "k3"}]}, "objective.penalties.0.coef is missing"),
    ({"reduction": {"over": "constant"}}, 'reduction.over = "constant" needs length'),
    ({"reduction": {"length": 5}}, 'reduction.length = 5.0 cannot act: it belongs to over = "constant"'),
    ({"kl_penalty_source": "sampled"}, 'kl_penalty_source = "sampled" cannot act while kl_penalty_coef = 0'),
    ({"policy": ENTROPY, "teacher_tau": 1.0}, "teacher_tau = 1.0 cannot act: cross_entropy has no advantage"),
    ({"policy": ENTROPY, "kl_penalty_coef": 1.0}, "kl_penalty_coef = 1.0 cannot act: cross_entropy has no advantage"),
    ({"policy": ENTROPY, "adv_tau": 2.0}, "adv_tau = 2.0 cannot act: cross_entropy has no advantage"),
    ({"policy": ENTROPY, "weights": [{}]}, "weights = 1: cross_entropy takes no weights"),
    ({"policy": ENTROPY, "reduction": {"denominator": "kept"}}, "cannot act: nothing here drops a token"),
    (
        {"policy": CLIP | {"level": "sequence"}, "weights": [{}]},
        "a sequence-level policy term takes no token-level weights",
    ),
    ({"proximal": "interpolated"}, 'proximal = "interpolated" cannot act: nothing here uses the proximal policy'),
    (
        {"name": "icepop", "reference_kl_estimator": "k2"},
        'reference_kl_estimator = "k2" cannot act while reference_kl_coef = 0',
    ),
    (
        {"name": "icepop", "reference_kl_correction": True},
        "reference_kl_correction = true cannot act while reference_kl_coef = 0",
    ),
    ({"name": "icepop", "length": 5}, 'length = 5.0 cannot act: it belongs to reduction = "constant"'),
    ({"name": "dr_grpo", "reduction": "tokens", "length": 5}, 'cannot act: it belongs to reduction = "constant"'),
    ({"name": "icepop", "reduction": "constant"}, "needs length"),
    (
        {"name": "icepop", "reference_kl_coef": 0.1, "reference_kl_estimator": "k1"},
        'objective.reference_kl_estimator = "k1" cannot go with objective.reference_kl_correction = false',
    ),
    ({"name": "icepop", "gates": {"statistic": "ratio"}}, "must be a list of tables"),
]


@pytest.mark.parametrize(("table", "message"), CANNOT_ACT, ids=lambda case: case if isinstance(case, str) else "")
def test_an_option_that_cannot_act_is_an_error(table: dict[str, Any], message: str) -> None:
    text = refused_table(**table)
    assert message in text
    assert text.startswith(("objective.", "denominator"))


@pytest.mark.parametrize(("name", "field"), [("group_mean", "decay"), ("moving_baseline", "baseline")])
def test_an_estimators_option_belongs_to_it(name: str, field: str) -> None:
    message = refused(None, f"--advantages.name={name}", f"--advantages.{field}=0.5")
    assert message.startswith(f"advantages.{field} = 0.5 cannot act: it belongs to name = ")


def test_an_added_gate_lets_a_recipes_option_act() -> None:
    added = [{"statistic": "ratio", "between": "proximal/sampler", "high": 2.0}]
    assert "nothing here uses the proximal policy" in refused_table(name="icepop", proximal="interpolated")
    _, _, composition = resolve_objective({"name": "icepop", "proximal": "interpolated", "gates": added})
    assert [gate.between for gate in composition.gates] == ["policy/sampler", "proximal/sampler"]


def test_what_is_added_to_a_recipe_comes_after_its_own_parts() -> None:
    table = {"name": "dppo_kl", "gates": [GATE], "weights": [{"high": 2.0}], "penalties": [K3]}
    _, _, composition = resolve_objective(table)
    assert [gate.statistic for gate in composition.gates] == [
        "probability_difference",
        "probability_difference",
        "ratio",
    ]
    assert [penalty.estimator for penalty in composition.penalties] == ["log_ratio_squared", "k3"]
    assert composition.weights[0].high == 2.0


def test_settings_cannot_be_changed_after_the_check() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Composition().adv_tau = 2.0


@pytest.mark.parametrize("name", PRESETS)
def test_every_recipe_resolves_and_says_what_its_parameters_mean(name: str) -> None:
    recipe = PRESETS[name]
    parameters, composition = recipe.resolve({})
    assert set(recipe.parameters) <= PRESET_PARAMETERS.keys() | set(COMMON_NAMES)
    assert parameters.keys() == set(recipe.own_parameters) | set(COMMON_NAMES)
    assert Composition.model_validate(composition.model_dump()) == composition
    again, _ = recipe.resolve(parameters)
    assert again == parameters


def test_every_setting_has_a_description() -> None:
    undescribed = [name for name, field in RunSettings.model_fields.items() if not field.description]
    parts = [Composition, *(field for field in _part_models())]
    undescribed += [
        f"{part.__name__}.{name}" for part in parts for name, f in part.model_fields.items() if not f.description
    ]
    structure = {f"Composition.{name}" for name in ("gates", "weights", "policy", "penalties", "reduction")}
    assert set(undescribed) <= structure


def _part_models() -> list[Any]:
    return [keel.Gate, keel.ImportanceWeight, keel.PolicyTerm, keel.Penalty, keel.Reduction]


# rooms


def test_every_error_is_a_keel_error_and_a_value_error() -> None:
    assert issubclass(ConfigError, KeelError)
    assert issubclass(KeelError, ValueError)
