"""`keel compare`: which tokens each objective drops, how far objectives agree, and reading runs and files."""

import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import keel
from keel.cli import main
from keel.errors import KeelError
from keel.objectives import PRESETS
from keel.tools.compare import Recording, parse_candidates, parse_steps
from keel.tools.compare.schema import COLUMNS
from tests.support.paths import ROOT
from tests.support.recorded_rows import compare, random_rows, row, write_json, write_parquet, write_run

PAGE = ROOT / "docs" / "compare.md"


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """Two sequences with prompts: ratios 0.1, 1, 10 with A = 1, and 1, 1 with A = -2."""
    rows = [row([0.1, 1.0, 10.0], 1.0, prompt=2), row([1.0, 1.0], -2.0, prompt=1)]
    return write_json(tmp_path / "tokens.jsonl", rows)


def cells(report: Any, kind: str, objective: int = 0) -> dict[str, tuple[int, int]]:
    shares = report.objectives[objective].splits[kind]
    return {share.label: (share.tokens, share.dropped) for share in shares}


# closed form


def test_icepop_drops_ratios_outside_its_band_and_reports_the_side(tokens: Path) -> None:
    report = compare(tokens, "icepop")
    (summary,) = report.objectives
    assert (summary.tokens, summary.kept, summary.dropped) == (5, 3, 2)
    assert [tuple(gate) for gate in summary.gates] == [("gate 0 (ratio) low", 1, 1), ("gate 0 (ratio) high", 1, 1)]
    assert (summary.sequences, summary.sequences_hit, summary.sequences_dropped) == (2, 1, 0)
    assert summary.loss == pytest.approx((-1.0 + 2.0 + 2.0) / 5)
    assert summary.gradient_norm == pytest.approx(math.sqrt(1 + 4 + 4) / 5)
    assert summary.dropped_advantage == pytest.approx(2 / 7)


def test_dropped_tokens_are_split_by_position_sign_and_text(tokens: Path) -> None:
    report = compare(tokens, "icepop")
    assert cells(report, "position") == {"1": (2, 1), "2-3": (3, 1)}
    assert cells(report, "advantage") == {"positive": (3, 2), "negative": (2, 0)}
    assert cells(report, "staleness") == {"0": (5, 2)}
    texts = {tuple(text) for text in report.objectives[0].texts}
    assert texts == {('"p2"', 2, 1, 1), ('"p4"', 1, 1, 1)}


def test_staleness_counts_from_the_version_being_trained(tmp_path: Path) -> None:
    rows = [row([10.0, 1.0], 1.0, version=7, versions=[5, 7]), row([10.0], 1.0, version=7, versions=[4])]
    assert cells(compare(write_json(tmp_path / "t.jsonl", rows), "icepop"), "staleness") == {
        "0": (1, 0),
        "2": (1, 1),
        "3": (1, 1),
    }


def test_effective_sizes_match_their_closed_form(tmp_path: Path) -> None:
    path = write_json(tmp_path / "t.jsonl", [row([1.0, 3.0, 10.0], 1.0)])
    (summary,) = compare(path, "icepop").objectives
    assert summary.effective_sample_size == pytest.approx((1 + 3) ** 2 / (3 * (1 + 9)), rel=1e-5)
    assert summary.effective_gradient_tokens == pytest.approx((1 + 3) ** 2 / (3 * (1 + 9)), rel=1e-5)


def test_a_sequence_gate_drops_complete_sequences(tmp_path: Path) -> None:
    rows = [row([0.5, 0.5], -1.0), row([1.0, 1.0, 1.0], -1.0), row([0.5], 1.0)]
    (summary,) = compare(write_json(tmp_path / "t.jsonl", rows), "opsm").objectives
    assert (summary.dropped, summary.sequences_dropped, summary.sequences_hit) == (2, 1, 1)


def test_the_cosine_of_an_objective_with_itself_is_one_and_with_its_negation_minus_one(tmp_path: Path) -> None:
    path = write_json(tmp_path / "t.jsonl", random_rows(3))
    report = compare(path, "icepop,icepop(ratio_low=0.2),icepop(adv_tau=-1)")
    assert report.cosine[0] == pytest.approx([1.0, 1.0, -1.0], abs=1e-12)


def test_the_cosine_is_that_of_the_gradient_vectors(tmp_path: Path) -> None:
    """With ratios 1 and 10 and A = 1 icepop trains the first token only, the wide band both: 1 / sqrt(1 + 100)."""
    path = write_json(tmp_path / "t.jsonl", [row([1.0, 10.0], 1.0)])
    report = compare(path, "icepop,icepop(ratio_high=20)")
    assert report.cosine[0][1] == pytest.approx(1 / math.sqrt(101), rel=1e-5)


def test_overlap_is_the_share_of_dropped_tokens_in_common(tmp_path: Path) -> None:
    path = write_json(tmp_path / "t.jsonl", [row([10.0, 6.0, 3.0, 1.0], 1.0)])
    report = compare(path, "icepop,icepop(ratio_high=8),icepop(ratio_high=2),reinforce")
    assert report.overlap[0][:3] == [1.0, 0.5, 1.0]
    assert report.overlap[1][:3] == [1.0, 1.0, 1.0]
    assert report.overlap[2][:3] == pytest.approx([2 / 3, 1 / 3, 1.0])
    assert report.jaccard[0][1] == 0.5
    assert all(math.isnan(share) for share in report.overlap[3])


def test_terms_sum_to_the_loss(tokens: Path) -> None:
    (summary,) = compare(tokens, "ipo_kl(kl_tau=0.5)").objectives
    assert summary.terms.keys() == {"policy", "log_ratio_squared policy/sampler"}
    assert summary.loss == pytest.approx(sum(summary.terms.values()))


# the same as a direct call


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in ("on_policy_distillation",)])
def test_counts_and_losses_match_a_direct_call(tmp_path: Path, name: str) -> None:
    rows = random_rows(1, seed=3)
    flat = [(row, index) for row in rows for index, trains in enumerate(row["trainable"]) if trains]
    logprobs = torch.tensor([row["logprobs"][index] for row, index in flat])
    batch = keel.TokenBatch(
        logprobs=logprobs,
        sampler_logprobs=torch.tensor([row["sampler_logprobs"][index] for row, index in flat]),
        proximal_logprobs=logprobs,
        advantages=torch.tensor([row["advantage"] for row, _ in flat]),
        trainable=torch.ones(len(flat), dtype=torch.bool),
        sequence=torch.tensor([rows.index(row) for row, _ in flat]),
        version=torch.tensor([row["versions"][index] for row, index in flat]),
        trainer_version=1,
    )
    objective = keel.objective(name)
    result = objective(batch)
    (summary,) = compare(write_json(tmp_path / "t.jsonl", rows), name, proximal=True).objectives
    reasons = Counter(objective.reasons[code] for code in result.reasons.tolist())
    assert summary.kept == reasons.pop("trained") == result.kept_tokens
    assert {gate.reason: gate.tokens for gate in summary.gates} == dict(reasons)
    assert summary.loss == pytest.approx(float(result.loss), rel=1e-6)
    assert summary.gradient_norm == pytest.approx(float(result.gradient.norm()), rel=1e-6)


def test_steps_are_evaluated_separately_and_add_up(tmp_path: Path) -> None:
    rows = random_rows(3)
    path = write_json(tmp_path / "t.jsonl", rows)
    whole = compare(path, "icepop,m2po")
    parts = [compare(path, "icepop,m2po", steps=parse_steps(str(step))) for step in (1, 2, 3)]
    for index in range(2):
        assert whole.objectives[index].dropped == sum(part.objectives[index].dropped for part in parts)
        assert whole.objectives[index].loss == pytest.approx(sum(part.objectives[index].loss for part in parts) / 3)
    assert [point.step for point in whole.by_step] == [1, 1, 2, 2, 3, 3]


# files


def test_a_run_folder_a_parquet_file_and_json_lines_give_the_same_report(tmp_path: Path) -> None:
    rows = random_rows(3)
    run = write_run(tmp_path / "run", rows)
    parquet = write_parquet(tmp_path / "t.parquet", rows)
    lines_file = write_json(tmp_path / "t.jsonl", rows)
    reports = [compare(path, "icepop,opsm,dppo_kl,m2po").as_json() for path in (run, parquet, lines_file)]
    assert reports[0]["skipped"] == {"not trained on": 3}
    for report in reports:
        del report["source"], report["skipped"]
    assert reports[0] == reports[1] == reports[2]
    assert reports[0]["objectives"][0]["dropped"] > 0


def test_columns_of_compatible_types_give_the_same_result(tmp_path: Path) -> None:
    rows = random_rows(1)
    floats = {"logprobs": pa.large_list(pa.float64()), "sampler_logprobs": pa.list_(pa.float64())}
    others = write_parquet(tmp_path / "a.parquet", rows, **floats, token_ids=pa.list_(pa.int32()))
    masks = [{**row, "trainable": [int(flag) for flag in row["trainable"]]} for row in rows]
    per_token = [{**row, "advantage": [row["advantage"]] * len(row["trainable"])} for row in masks]
    expected = compare(others, "icepop").objectives
    assert compare(write_json(tmp_path / "a.jsonl", per_token), "icepop").objectives == expected


def test_a_file_without_a_step_column_is_one_step(tmp_path: Path) -> None:
    rows = [{name: value for name, value in row.items() if name != "step"} for row in random_rows(2)]
    assert compare(write_json(tmp_path / "t.jsonl", rows), "icepop").steps == [1]


@pytest.mark.parametrize("name", [column.name for column in COLUMNS.values() if column.required])
@pytest.mark.parametrize("form", ["parquet", "json"])
def test_a_missing_column_is_named_with_its_meaning(tmp_path: Path, name: str, form: str) -> None:
    rows = [{key: value for key, value in row.items() if key != name} for row in random_rows(1)]
    path = tmp_path / "t"
    path = write_json(path, rows) if form == "json" else write_parquet(path, rows)
    with pytest.raises(KeelError) as caught:
        compare(path, "icepop")
    assert f"has no column {name}: {COLUMNS[name].meaning}" in str(caught.value)
    assert "it has step" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": [-1.0]}, "logprobs has 1 values, but trainable has 2"),
        ({"logprobs": [-1.0, None]}, "logprobs is nan at a trainable token; it must be finite"),
        ({"advantage": None}, "advantage is nan at a trainable token"),
        ({"logprobs": "high"}, "logprobs cannot be read"),
        ({"step": "one"}, "step = 'one' must be an integer"),
        ({"trainable": True}, "column trainable has type bool; it must hold a list for each sequence"),
        ({"sampler_logprobs": None}, "sampler_logprobs is missing, although other rows have it"),
    ],
)
def test_an_invalid_value_is_reported_with_its_column(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(KeelError) as caught:
        compare(write_json(tmp_path / "t.jsonl", [row([1.0, 1.0], 1.0) | change]), "icepop")
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[1]", '"x"', "\udcff".encode("utf-8", "surrogateescape")])
def test_a_line_that_is_not_an_object_is_named(tmp_path: Path, text: str | bytes) -> None:
    path = write_json(tmp_path / "t.jsonl", [row([1.0], 1.0)])
    path.write_bytes(path.read_bytes() + (text.encode() if isinstance(text, str) else text))
    with pytest.raises(KeelError, match=r"line 2 is not (valid|a) JSON"):
        compare(path, "icepop")


def test_rows_of_a_step_must_be_consecutive(tmp_path: Path) -> None:
    rows = [row([1.0], 1.0, step=step) for step in (1, 2, 1)]
    with pytest.raises(KeelError, match="rows of step 1 are not consecutive; sort the file by step"):
        compare(write_json(tmp_path / "t.jsonl", rows), "icepop")


def test_a_damaged_parquet_file_and_an_empty_folder_are_errors(tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and nothing")
    for path, message in ((tmp_path / "bad.parquet", "cannot be read"), (tmp_path, "contains no recorded steps")):
        with pytest.raises(KeelError, match=message):
            compare(path, "icepop")
    with pytest.raises(KeelError, match="does not exist"):
        Recording(tmp_path / "nothing")


def test_steps_are_read_one_at_a_time(tmp_path: Path) -> None:
    """The first step is yielded before the invalid last line is read."""
    path = write_json(tmp_path / "t.jsonl", [row([1.0], 1.0, step=step) for step in (1, 2, 3)])
    path.write_text(path.read_text() + "broken\n")
    steps = Recording(path).steps()
    assert next(steps).number == 1
    with pytest.raises(KeelError, match="line 4"):
        next(steps)


@pytest.mark.parametrize(
    ("text", "expected"), [("1-2", [1, 2]), ("2", [2]), ("3-", [3, 4]), ("1, 4", [1, 4]), ("1-1,2-9", [1, 2, 3, 4])]
)
def test_steps_can_be_selected(tmp_path: Path, text: str, expected: list[int]) -> None:
    run = write_run(tmp_path / "run", random_rows(4))
    assert compare(run, "icepop", steps=parse_steps(text)).steps == expected
    assert Recording(run, parse_steps(text)).step_numbers() == expected


@pytest.mark.parametrize("text", ["", "a", "3-1", "-2", "1,,2"])
def test_invalid_step_ranges_are_errors(text: str) -> None:
    with pytest.raises(KeelError, match="--steps"):
        parse_steps(text)


# objectives


def test_an_objective_without_its_inputs_is_excluded_and_the_others_continue(tokens: Path) -> None:
    names = "tis,icepop,on_policy_distillation,icepop(kl_penalty_coef=0.1)"
    report = compare(tokens, names)
    assert report.names == ["icepop"]
    for name, column in (
        ("tis", "proximal_logprobs"),
        ("on_policy_distillation", "teacher_logprobs"),
        ("icepop(kl_penalty_coef=0.1)", "reference_logprobs"),
    ):
        assert report.failures[name].startswith(f"step 1: needs {column} ({COLUMNS[column].meaning})")
    assert "--proximal policy" in report.failures["tis"]
    assert compare(tokens, names, proximal=True).names == ["tis", "icepop"]


def test_recorded_reference_and_teacher_logprobs_are_used(tmp_path: Path) -> None:
    more = {"reference_logprobs": [-1.0, -2.0], "teacher_logprobs": [-3.0, -1.0]}
    path = write_json(tmp_path / "t.jsonl", [row([1.0, 1.0], 1.0, **more)])
    assert compare(path, "on_policy_distillation,icepop(reference_kl_coef=0.1)").failures == {}


def test_an_objective_that_fails_on_a_later_step_is_excluded_from_the_report(tmp_path: Path) -> None:
    unusable = row([1.0, 1.0], 1.0, step=2, sampler_logprobs=[None, -10 * math.log(2)])
    path = write_json(tmp_path / "t.jsonl", [row([1.0], 1.0), unusable])
    report = compare(path, "icepop,icepop(max_invalid_logprob_fraction=1),cross_entropy")
    assert report.names == ["icepop(max_invalid_logprob_fraction=1)", "cross_entropy"]
    assert report.failures["icepop"].startswith("step 2: batch.sampler_logprobs is NaN or infinite on 1 of 2")
    assert (report.objectives[0].invalid_logprobs, report.objectives[0].kept) == (1, 2)
    assert len(report.cosine) == 2
    assert {point.objective for point in report.by_step} == set(report.names)


def test_a_comparison_fails_if_no_objective_can_be_evaluated(tokens: Path) -> None:
    with pytest.raises(KeelError, match="tis cannot be evaluated: step 1: needs proximal_logprobs"):
        compare(tokens, "tis,mis")


def test_objectives_can_have_parameters_or_be_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[objective]\ngates = [{statistic = "ratio", high = 2.0}]\n')
    gates = '[{statistic="ratio", high=3}]'
    text = f"icepop(ratio_low=0.1, ratio_high=8),grpo(anchor=sampler), {path}, ipo_kl(gates={gates})"
    candidates = parse_candidates(text)
    assert [candidate.name.split("(")[0] for candidate in candidates] == ["icepop", "grpo", str(path), "ipo_kl"]
    assert [gate.high for gate in candidates[0].objective.composition.gates] == [8.0]
    assert [gate.high for gate in candidates[2].objective.composition.gates] == [2.0]
    assert [gate.high for gate in candidates[3].objective.composition.gates] == [5.0, 3.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("icepp", '"icepp" is not an objective; did you mean icepop?'),
        ("icepop,icepop", "lists icepop twice"),
        ("icepop(ratio_low=0.1", "unbalanced brackets"),
        ("icepop)", "unbalanced brackets"),
        ("icepop(0.1)", "'0.1' is not a parameter; write name=value"),
        ("icepop(ratio_low=1,ratio_low=2)", "ratio_low is given twice"),
        ("icepop(ratio_lw=1)", "icepop(ratio_lw=1): objective.ratio_lw is not a setting; did you mean ratio_low?"),
        ("icepop(ratio_low=0.1)x", "must end with a closing parenthesis"),
        (" , ", "is empty"),
        ("nothing.toml", "nothing.toml does not exist"),
    ],
)
def test_invalid_objectives_are_errors(text: str, message: str) -> None:
    with pytest.raises(KeelError) as caught:
        parse_candidates(text)
    assert message in str(caught.value)


# output


def test_the_parquet_file_has_every_number_of_every_step(tmp_path: Path, capsys: Any) -> None:
    path, target = write_json(tmp_path / "t.jsonl", random_rows(3)), tmp_path / "out.parquet"
    assert main(["compare", str(path), "--objectives", "icepop,opsm", "--parquet", str(target), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    table_rows = pq.read_table(target).to_pylist()
    for summary in printed["objectives"]:
        mine = [line for line in table_rows if line["objective"] == summary["objective"]]
        total = {name: sum(line["value"] for line in mine if line["measure"] == name) for name in ("dropped", "tokens")}
        assert total == {"dropped": summary["dropped"], "tokens": summary["tokens"]}
        by_text = sum(line["value"] for line in mine if line["measure"] == "dropped_by_text")
        assert by_text == summary["dropped"]
    assert {line["step"] for line in table_rows} == {1, 2, 3}


def test_a_failed_comparison_keeps_an_existing_file(tmp_path: Path, capsys: Any) -> None:
    path, target = tmp_path / "t.jsonl", tmp_path / "out.parquet"
    target.write_text("older")
    write_json(path, [row([1.0], 1.0)]).write_text(path.read_text() + "broken\n")
    assert main(["compare", str(path), "--parquet", str(target)]) == 2
    assert "line 2 is not valid JSON" in capsys.readouterr().err
    assert target.read_text() == "older"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out.parquet", "t.jsonl"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--texts", "-1"], "--texts -1 must not be negative"),
        (["--model-steps", "2"], "--model-steps 2 has no effect without --model"),
        (["--model", "tiny", "--model-steps", "0"], "--model-steps 0 must be at least 1"),
        (["--steps", "9"], "has none of the selected steps"),
    ],
)
def test_invalid_flags_are_errors(tokens: Path, capsys: Any, args: list[str], message: str) -> None:
    assert main(["compare", str(tokens), *args]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.process
def test_comparing_does_not_import_transformers() -> None:
    modules = "keel.tools.compare, keel.tools.compare.html, keel.tools.compare.long_table"
    code = f"import sys, {modules}; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_documentation_lists_every_column() -> None:
    text = PAGE.read_text()
    for column in COLUMNS.values():
        assert f"| `{column.name}` |" in text
        assert column.meaning in text
