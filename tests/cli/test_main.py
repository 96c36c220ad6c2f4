"""The commands: their output and errors, and that documentation and output agree with the code."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import keel
from keel.cli import COMMAND_FLAGS, build_parser, main
from keel.cli.display.objectives_markdown import render_markdown
from keel.cli.display.objectives_prose import ADVANTAGES, METRICS
from keel.cli.display.plot import COLUMNS, ROWS, draw_dropped_region
from keel.config import LoadedSettings, load_settings
from keel.config.run import AdvantageEstimator
from keel.objectives import PRESETS, resolve_objective
from keel.objectives.describe import describe_preset
from keel.objectives.scalar_gates import first_dropped_side
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "objectives.md"


class Ran:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("COLUMNS", raising=False)

    def run(*argv: str) -> Ran:
        try:
            code = main(list(argv))
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return run


def process(*argv: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, check=False)


# the command itself


def test_version_is_that_of_the_package(run: Any) -> None:
    assert run("--version").out == run("-V").out == f"keel {keel.__version__}\n"


COMMANDS = re.findall(r"^    ([a-z]+)(?:  |$)", build_parser().format_help(), re.MULTILINE)


def test_every_command_is_listed_in_the_help() -> None:
    assert set(COMMAND_FLAGS) < set(COMMANDS) and COMMANDS[0] == "train"


@pytest.mark.parametrize("argv", [["--help"], *([command, "--help"] for command in COMMANDS)])
def test_help_shows_examples(run: Any, argv: list[str]) -> None:
    ran = run(*argv)
    assert ran.code == 0
    assert "examples:\n  keel " in ran.out


@pytest.mark.parametrize("argv", [[], ["nothing"], ["--nothing"]])
def test_an_unknown_command_exits_with_2_and_the_usage(run: Any, argv: list[str]) -> None:
    ran = run(*argv)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("usage: keel")


def test_no_command_prints_the_help_and_a_misspelled_one_a_suggestion(run: Any) -> None:
    assert "examples:\n  keel train " in run().err
    assert run("tran").err.endswith("keel: error: tran is not a command; did you mean train?\n")


def test_ctrl_c_is_exit_code_130_without_a_traceback(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("keel.cli.inspect.config.load_settings", interrupt)
    ran = run("config")
    assert (ran.code, ran.out, ran.err) == (130, "", "keel: interrupted\n")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["objectives", "icepp"], 'keel: "icepp" is not an objective; did you mean icepop?\n'),
        (
            ["objectives", "icepop", "--ratio_low", "9"],
            "keel: objective.ratio_low = 9.0 must be below objective.ratio_high = 5.0\n",
        ),
        (["objectives", "icepop", "--eps", "1"], None),
        (
            ["objectives", "--eps", "1"],
            "keel: --eps is a parameter of an objective; write keel objectives NAME --eps VALUE\n",
        ),
        (["objectives", "icepop", "--markdown"], None),
        (["config", "no-such-file.toml"], "keel: no-such-file.toml does not exist\n"),
        (["config", "--objectiv.name", "opsm"], "keel: objectiv is not a setting; did you mean objective?\n"),
        (["config", "--objective.name"], "keel: --objective.name needs a value\n"),
    ],
)
def test_invalid_arguments_are_one_line_and_exit_code_2(run: Any, argv: list[str], message: str | None) -> None:
    ran = run(*argv)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == message if message else re.fullmatch(r"keel: .+\n", ran.err)


def test_several_errors_are_several_lines(run: Any) -> None:
    ran = run("objectives", "icepop", "--ratio_low", "-1", "--adv_tau", "x")
    assert [line[:6] for line in ran.err.splitlines()] == ["keel: ", "keel: "]


@pytest.mark.process
@pytest.mark.parametrize("argv", [["objectives"], ["objectives", "opsm"], ["objectives", "--markdown"], ["config"]])
def test_reading_settings_does_not_import_torch(argv: list[str]) -> None:
    code = f"import sys; from keel.cli import main; code = main({argv}); sys.exit(code or 9 * ('torch' in sys.modules))"
    completed = process("-c", code)
    assert (completed.returncode, completed.stderr) == (0, "")


@pytest.mark.process
def test_a_closed_pipe_prints_no_traceback() -> None:
    command = [sys.executable, "-m", "keel.cli", "objectives", "--markdown"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        assert running.stderr.read() == ""
    assert running.returncode == 1


# keel objectives


def cells(text: str) -> str:
    """A printed table with its folds undone: letters only."""
    return re.sub(r"\s+", "", text)


@pytest.mark.parametrize("columns", [None, "100", "200"])
def test_the_table_shows_every_recipe_within_its_width(
    run: Any, monkeypatch: pytest.MonkeyPatch, columns: str | None
) -> None:
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    out = run("objectives").out
    assert max(map(len, out.splitlines())) <= int(columns or 120)
    assert re.findall(r"^(\w+) +(?:sampler|proximal|interpolated|none) ", out, re.MULTILINE) == list(PRESETS)
    assert "\x1b" not in out
    assert "…" not in out


def test_the_table_cuts_nothing_off(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "700")
    out = cells(run("objectives").out)
    for recipe in PRESETS.values():
        words = describe_preset(recipe)
        assert cells("".join((recipe.name, words.anchor, words.dropped[0], words.divisor))) in out or words.optional
        assert cells(recipe.source) in out


def test_a_terminal_gets_colour(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert "\x1b[" in run("objectives", "icepop").out


def test_json_lists_every_recipe_with_its_declarations(run: Any) -> None:
    listed = json.loads(run("objectives", "--json").out)
    assert [entry["name"] for entry in listed] == list(PRESETS)
    dppo = next(entry for entry in listed if entry["name"] == "dppo_kl")
    assert dppo["anchor"] == "sampler"
    assert dppo["dropped"] == ["token, when A > 0 and p - q > mask_high", "token, when A < 0 and p - q < -mask_low"]
    assert dppo["dropped_from"] == "the policy term, but not from kl_tau * d^2"
    assert dppo["parameters"]["kl_tau"] == {
        "value": 1e-3,
        "default": 1e-3,
        "meaning": "factor on d^2, the squared log-ratio against the sampler",
        "own": True,
    }


def test_json_of_one_recipe_takes_its_parameters_in_any_order(run: Any) -> None:
    first = run("objectives", "icepop", "--ratio_high", "8", "--json").out
    assert first == run("objectives", "--ratio_high=8", "--json", "icepop").out
    assert first == run("objectives", "--json", "--ratio_high", "8", "icepop").out
    assert json.loads(first)["parameters"]["ratio_high"]["value"] == 8


@pytest.mark.parametrize("name", PRESETS)
def test_one_recipe_is_explained_in_full(run: Any, name: str) -> None:
    out = run("objectives", name).out
    recipe, words = PRESETS[name], describe_preset(PRESETS[name])
    joined = cells(out)
    assert cells(f"{name}: {recipe.title} source: {recipe.source}") in joined
    for text in (words.formula, *words.dropped, *words.optional, words.divisor, recipe.note):
        assert cells(text) in joined
    for parameter in (*recipe.own_parameters, "adv_tau", "reference_kl_coef"):
        assert re.search(rf"^  {parameter} +\S", out, re.MULTILINE)
    assert "\x1b" not in out


def test_a_changed_parameter_is_shown_beside_its_default(run: Any) -> None:
    out = run("objectives", "icepop", "--ratio_high", "8", "--rollout_min_ratio", "0.1").out
    assert re.search(r"ratio_high +8 \(default 5\)", out)
    assert "whole sequence when any r < rollout_min_ratio\n" in out


# the plot


def drawn(name: str, **parameters: Any) -> str:
    return draw_dropped_region(resolve_objective({"name": name, **parameters})[2]).plain


def panels(text: str) -> list[list[str]]:
    """Return the marks of each panel, top row first."""
    rows = [re.findall(rf"\|([.+-]{{{COLUMNS}}})", line) for line in text.splitlines()]
    return [list(panel) for panel in zip(*(row for row in rows if row), strict=True)]


@pytest.mark.parametrize("name", ["icepop", "dppo_tv", "dppo_kl", "opsm", "ipo", "kpop", "dppo_binary_kl", "mis"])
def test_the_plot_marks_the_tokens_that_the_objective_drops(name: str) -> None:
    gates = resolve_objective({"name": name})[2].gates
    shown = panels(drawn(name))
    signs = (1.0, -1.0) if any(gate.when != "always" for gate in gates) else (0.5,)
    assert len(shown) == len(signs)
    for panel, sign in zip(shown, signs, strict=True):
        assert len(panel) == ROWS
        for row, line in enumerate(reversed(panel)):
            for column, mark in enumerate(line):
                p, q = (row + 0.5) / ROWS, (column + 0.5) / COLUMNS
                assert mark == {None: ".", "low": "-", "high": "+"}[first_dropped_side(gates, p, q, sign)]
    assert {"+", "-", "."} & set("".join(map("".join, shown))) > {"."}


def test_the_plot_of_a_ratio_band_is_a_wedge() -> None:
    (panel,) = panels(drawn("icepop"))
    assert panel[0] == "++++++" + "." * 26  # p = 31/32: r > 5 while q < 0.194
    assert panel[-1] == "....." + "-" * 27  # p = 1/32: r < 0.2 from q > 0.156 on
    assert panel[ROWS // 2] == "+++" + "." * 29


def test_two_panels_are_titled_by_the_sign_and_axes_carry_numbers() -> None:
    lines = drawn("dppo_kl").splitlines()
    assert re.fullmatch(r"A > 0, policy p upwards +A < 0, policy p upwards *", lines[0])
    assert lines[1].count("1.0 |") == 2
    assert lines[ROWS // 2 + 1].count("0.5 |") == 2
    assert lines[ROWS + 2].split() == ["0.0", "0.5", "1.0"] * 2
    assert lines[ROWS + 3].split() == ["sampler", "q"] * 2
    assert "Tokens with A = 0 are always kept." in lines


def test_an_objective_that_drops_only_rare_tokens_gets_logarithmic_axes() -> None:
    text = drawn("veto")
    assert "1e-8" in text
    assert "-" in "".join(panels(text)[0])


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("grpo", "No plot: the objective drops no tokens."),
        ("m2po", "No plot: the objective decides over the whole step, not per token."),
    ],
)
def test_without_anything_to_plot_there_is_a_sentence(run: Any, name: str, sentence: str) -> None:
    assert drawn(name) == sentence
    assert f"kept and dropped\n  {sentence}\n" in run("objectives", name).out


def test_gates_between_different_policies_are_not_plotted() -> None:
    text = drawn("icepop", gates=[{"statistic": "ratio", "between": "proximal/sampler", "high": 2.0}])
    assert text == "No plot: the gates compare different pairs of policies."


def test_the_caption_names_what_the_plot_leaves_out() -> None:
    text = drawn("icepop", rollout_min_ratio=0.01, gates=[{"statistic": "second_moment", "high": 0.1}])
    assert "Gates that decide over the whole step are not shown." in text
    assert "the plot shows a sequence of one token" in text


# keel config

FILES = {
    "recipe": '[objective]\nname = "ipo_kl"\nkl_tau = 0.5\n',
    "unread default": '[objective]\nname = "dr_grpo"\nreduction = "tokens"\n',
    "extended": '[objective]\nname = "icepop"\nroles = [1, 2]\ngates = [{statistic = "binary_kl", high = 0.1}]\n',
    "composition": """
[objective]
gates = [{statistic = "ratio", low = 0.2}, {statistic = "sequence_kl", high = 1e-5, when = "negative_advantage"}]
weights = [{level = "sequence", high = 2}]
policy = {surrogate = "clip", eps = 0.2, dual_clip = 3}
penalties = [{estimator = "k1", coef = 0.1, ratio_correction = true}]
reduction = {over = "constant", length = 100}
[advantages]
name = "moving_baseline"
decay = 0.9
""",
    "empty": "",
} | {f"all defaults of {name}": f'[objective]\nname = "{name}"\n' for name in PRESETS}


def comparable(loaded: LoadedSettings) -> tuple[Any, ...]:
    settings = loaded.settings
    return settings.objective.name, settings.objective.composition, settings.advantages, settings.objective.parameters


@pytest.mark.parametrize("text", FILES.values(), ids=FILES)
def test_printed_settings_can_be_loaded_and_give_the_same_settings(run: Any, tmp_path: Path, text: str) -> None:
    file, again = tmp_path / "run.toml", tmp_path / "again.toml"
    file.write_text(text)
    ran = run("config", str(file), "--objective.adv_tau", "0.5") if "entropy" not in text else run("config", str(file))
    assert ran.code == 0
    again.write_text(ran.out)
    overrides = [] if "entropy" in text else ["--objective.adv_tau", "0.5"]
    assert comparable(load_settings(again)) == comparable(load_settings(file, overrides))
    assert run("config", str(again)).code == 0


def test_each_line_has_the_origin_of_its_value(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text('[objective]\nname = "ipo_kl"\nratio_low = 0.3\n')
    lines = run("config", "run.toml", "--objective.kl_tau", "0.1").out.splitlines()
    start = lines.index("[objective]")
    assert lines[start + 1] == 'name = "ipo_kl"  # run.toml'
    assert "kl_tau = 0.1  # command line" in lines
    assert "ratio_low = 0.3  # run.toml" in lines
    assert "ratio_high = 5.0  # default" in lines
    assert "# roles is not given  # default" in lines
    assert all(not line or line.startswith("[") or "  # " in line for line in lines)


def test_a_file_name_with_a_newline_does_not_break_the_toml(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "odd\nname = 1.toml"
    file.write_text('[objective]\nname = "icepop"\n')
    assert tomllib.loads(run("config", str(file)).out)["objective"]["name"] == "icepop"


def test_long_lines_are_not_wrapped(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    out = run("config", "--objective.name", "decoupled_ppo_loglinear").out
    assert 'name = "decoupled_ppo_loglinear"  # command line\n' in out


def test_json_settings_have_values_and_origins(run: Any) -> None:
    rows = json.loads(run("config", "--json", "--objective.name", "icepop", "--objective.ratio_high", "8").out)
    assert rows["objective.ratio_high"] == {"value": 8.0, "origin": "command line"}
    assert rows["objective.rollout_min_ratio"] == {"value": None, "origin": "default"}


def test_explain_prints_default_type_and_meaning(run: Any) -> None:
    assert run("config", "--explain", "scheduler.group_size").out == (
        "[scheduler]\nHow groups are sampled and batches are cut.\n"
        "scheduler.group_size\n    integer; default: 8\n"
        "    Rollouts in a group, where an environment does not set its own.\n"
    )
    assert json.loads(run("config", "--json", "--explain=checkpoints.keep_last").out) == [
        {
            "name": "checkpoints.keep_last",
            "type": "integer",
            "default": "2",
            "description": "Number of newest checkpoints that are kept.",
        }
    ]


def test_explain_without_a_name_prints_every_setting(run: Any) -> None:
    out = run("config", "--explain").out
    assert out.startswith("steps\n    integer; default: 100\n    Number of batches to train on.\n")
    assert (
        "\n[trainer.optimizer]\nAdamW" in out and "\nlaunch.engine.extra_args\n    list of string; default: []\n" in out
    )
    assert max(map(len, out.splitlines())) <= 120


def test_explain_with_a_file_or_an_override_is_an_error(run: Any) -> None:
    for argv in (["larger_number", "--explain", "lr"], ["--explain", "lr", "--steps", "3"]):
        ran = run("config", *argv)
        assert (ran.code, ran.out) == (2, "")
        assert ran.err.startswith("keel: --explain takes the name of a setting or of a table and nothing else; remove ")


# docs/objectives.md


def test_the_page_is_current(run: Any) -> None:
    assert PAGE.read_text() == run("objectives", "--markdown").out, "run make docs"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", render_markdown(), re.MULTILINE | re.DOTALL)


def test_every_toml_example_of_the_page_loads(tmp_path: Path) -> None:
    file = tmp_path / "example.toml"
    names = []
    for text in blocks("toml"):
        file.write_text(text)
        objective = load_settings(file).settings.objective
        names.append(objective.name)
        if len(names) > 2:
            assert objective.name is not None
            assert objective.parameters == PRESETS[objective.name].resolve({})[0]
    assert names == ["ipo_kl", None, *PRESETS]


def test_the_two_toml_examples_are_the_same_rule(tmp_path: Path) -> None:
    file = tmp_path / "example.toml"
    compositions = []
    for text in blocks("toml")[:2]:
        file.write_text(text)
        compositions.append(load_settings(file).settings.objective.composition)
    assert compositions[0] == compositions[1]


def test_the_python_example_of_the_page_does_what_it_says() -> None:
    (text,) = blocks("python")
    names: dict[str, Any] = {}
    exec(text, names)
    assert names["kept"] == [True, True, False, False]
    assert names["drop_reasons"][2:] == ["gate 1 (sequence_kl, sequence) low", "gate 0 (ratio) low"]
    assert names["batch"].logprobs.grad[2:].tolist() == [0.0, 0.0]


def test_the_page_names_every_metric_and_no_other() -> None:
    batch = keel.TokenBatch(
        logprobs=torch.tensor([-1.0, -2.0]),
        sampler_logprobs=torch.tensor([-1.1, -1.0]),
        advantages=torch.tensor([1.0, -1.0]),
        trainable=torch.tensor([True, True]),
        sequence=torch.tensor([0, 1]),
        reference_logprobs=torch.tensor([-1.0, -1.0]),
    )
    assert set(keel.objective("opsm")(batch).metrics) == set(METRICS)


def test_the_page_names_every_estimator_and_no_other() -> None:
    assert set(ADVANTAGES) == set(get_args(AdvantageEstimator))


def test_the_page_has_a_section_and_a_row_for_each_recipe() -> None:
    text = render_markdown()
    assert re.findall(r"^### (\w+)$", text, re.MULTILINE) == list(PRESETS)
    assert re.findall(r"^\| \[`(\w+)`\]\(#\1\)", text, re.MULTILINE) == list(PRESETS)


def test_every_row_of_a_table_on_the_page_has_the_cells_of_its_head() -> None:
    width = 0
    for line in render_markdown().splitlines():
        cells_here = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("| ") else 0
        assert not (width and cells_here) or cells_here == width, line
        width = cells_here
    assert "| symbol | definition | meaning |" in render_markdown()


def test_the_page_is_the_same_every_time() -> None:
    outputs = set()
    for seed in ("1", "2"):
        code = "from keel.cli.display.objectives_markdown import render_markdown as page; import sys; print(page())"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        )
        outputs.add(done.stdout)
    assert len(outputs) == 1
