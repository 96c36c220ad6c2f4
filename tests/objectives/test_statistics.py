"""Every gate statistic is one table entry: its three forms agree, and every consumer reads the entry."""

import ast
import dataclasses
import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import duckdb
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from torch import Tensor

import keel
from keel.cli.display.objectives_markdown import render_markdown
from keel.cli.display.plot import draw_dropped_region
from keel.errors import ConfigError
from keel.objectives import Composition, Gate, resolve_objective
from keel.objectives.describe import describe
from keel.objectives.notation import RATIO_NOTATIONS
from keel.objectives.scalar_gates import dropped_side
from keel.objectives.statistics import (
    STATISTICS,
    GateStatistic,
    LensHistogram,
    bernoulli_kl,
    binary_kl,
    gate_statistic,
    statistic_names,
)
from keel.signal.audit import audit
from keel.tools.lens.queries import Lens
from keel.tools.lens.trust_region_bands import statistics_of
from tests.support.lens_runs import make_run

PACKAGE = Path(keel.__file__).parent
ENTRIES = list(STATISTICS.values())
ENTRY = pytest.mark.parametrize("statistic", ENTRIES, ids=lambda statistic: statistic.label)
SCOPED = [(entry, scope) for entry in ENTRIES for scope in entry.scopes]

probabilities = st.floats(1e-4, 1 - 1e-4)
sequences = st.lists(st.tuples(probabilities, probabilities), min_size=1, max_size=6)
"""For each token of a sequence, its probabilities under policy and sampler."""


def log_probs(points: list[tuple[float, float]]) -> tuple[Tensor, Tensor]:
    p, q = torch.tensor(points, dtype=torch.float64).log().unbind(1)
    return p, q


def batch_of(points: list[tuple[float, float]], sequence: list[int]) -> keel.TokenBatch:
    policy, sampler = log_probs(points)
    return keel.TokenBatch(
        logprobs=policy.requires_grad_(),
        sampler_logprobs=sampler,
        advantages=torch.ones(len(points), dtype=torch.float64),
        trainable=torch.ones(len(points), dtype=torch.bool),
        sequence=torch.tensor(sequence),
    )


def value_by_tensor(statistic: GateStatistic, points: list[tuple[float, float]]) -> list[float]:
    """Return the values of the tokens, or the value of their sequence."""
    policy, sampler = log_probs(points)
    values = statistic.tensor(policy - sampler, policy, sampler)
    if statistic.sequence is None:
        return [float(value) for value in values]
    return [float(statistic.sequence(values.sum()[None], torch.tensor([len(points)])))]


def value_by_sql(statistic: GateStatistic, points: list[tuple[float, float]]) -> list[float]:
    policy, sampler = log_probs(points)
    tokens = "SELECT unnest(?::DOUBLE[]) AS l, unnest(?::DOUBLE[]) AS b"
    rows = tokens
    if statistic.sequence is not None:
        rows = (
            f"SELECT sum(l - b) AS d, count(*) AS n, list(l) AS logprobs, list(b) AS sampler_logprobs FROM ({tokens})"
        )
    query = f"SELECT {statistic.histogram.sql} FROM ({rows})"
    with duckdb.connect() as connection:
        return [value for (value,) in connection.execute(query, [policy.tolist(), sampler.tolist()]).fetchall()]


def value_by_scalar(statistic: GateStatistic, points: list[tuple[float, float]]) -> list[float]:
    values = [statistic.scalar(p, q) for p, q in points]
    return [math.log(value) for value in values] if statistic.in_log_space else values


def near(values: list[float]) -> Any:
    # 1 - exp(l) loses precision near 1, which only the tensor form avoids with expm1
    return pytest.approx(values, rel=1e-9, abs=1e-11)


# Every entry


@ENTRY
def test_an_entry_is_complete(statistic: GateStatistic) -> None:
    assert STATISTICS[statistic.name, statistic.level] is statistic
    assert gate_statistic(statistic.name, statistic.level) is statistic
    assert statistic.histogram.title
    assert statistic.histogram.scale > 0
    for pair in RATIO_NOTATIONS.values():
        for formula in (statistic.formula, statistic.magnitude_formula or "|x|"):
            assert "{" not in formula.format(**pair._asdict())
    default = Gate.model_validate({"statistic": statistic.name, "level": statistic.level, "high": 0.5})
    assert default.scope == statistic.scopes[0]
    assert default.spec is statistic


def test_histogram_names_are_unique() -> None:
    assert max(Counter(entry.histogram.name for entry in ENTRIES).values()) == 1


@given(points=sequences)
@ENTRY
def test_tensor_and_sql_agree(statistic: GateStatistic, points: list[tuple[float, float]]) -> None:
    assert value_by_sql(statistic, points) == near(value_by_tensor(statistic, points))


@given(p=probabilities, q=probabilities)
@ENTRY
def test_scalar_tensor_and_sql_agree_on_a_single_token(statistic: GateStatistic, p: float, q: float) -> None:
    expected = value_by_scalar(statistic, [(p, q)])
    assert value_by_tensor(statistic, [(p, q)]) == near(expected)
    assert value_by_sql(statistic, [(p, q)]) == near(expected)


@given(p=probabilities, q=probabilities, factor=st.floats(1.01, 1.5))
@ENTRY
def test_a_statistic_changes_in_its_stated_direction(
    statistic: GateStatistic, p: float, q: float, factor: float
) -> None:
    """A higher probability under the policy raises a rising, lowers a falling and changes a distance accordingly."""
    higher = min(p * factor, 1 - 1e-5)
    change = statistic.scalar(higher, q) - statistic.scalar(p, q)
    if statistic.direction == "rising":
        assert change >= 0
    elif statistic.direction == "falling":
        assert change <= 0
    else:
        assert statistic.scalar(p, q) >= 0
        assert statistic.scalar(p, p) == pytest.approx(0, abs=1e-12)
        assert change >= 0 or p < q


@given(points=st.lists(st.tuples(probabilities, probabilities), min_size=2, max_size=8), data=st.data())
@pytest.mark.parametrize(("statistic", "scope"), SCOPED, ids=lambda part: getattr(part, "label", part))
def test_gates_drop_the_tokens_whose_scalar_value_is_outside_the_bounds(
    statistic: GateStatistic, scope: str, points: list[tuple[float, float]], data: st.DataObject
) -> None:
    """Sequences have one token, and bounds lie halfway between two values, so that rounding does not matter."""
    values = sorted({round(statistic.scalar(p, q), 6) for p, q in points})
    between = [(a + b) / 2 for a, b in itertools.pairwise(values) if b - a > 1e-4]
    bounds = {"high": data.draw(st.sampled_from(between))} if between else {"high": values[-1] + 1}
    if between and statistic.direction != "distance" and data.draw(st.booleans()):
        bounds["low"] = data.draw(st.sampled_from([bound for bound in between if bound <= bounds["high"]]))
    gate = Gate.model_validate({"statistic": statistic.name, "level": statistic.level, "scope": scope, **bounds})
    objective = keel.objective(Composition(gates=[gate]))
    result = objective(batch_of(points, list(range(len(points)))))
    if scope == "step":
        kept = sorted(statistic.scalar(p, q) for (p, q), keep in zip(points, result.keep, strict=True) if keep)
        dropped = [statistic.scalar(p, q) for (p, q), keep in zip(points, result.keep, strict=True) if not keep]
        assert sum(kept) <= bounds["high"] * len(kept) * (1 + 1e-9)
        assert all(value > largest for value in dropped for largest in kept[-1:])
        return
    for (p, q), code in zip(points, result.reasons.tolist(), strict=True):
        side = dropped_side(gate, p, q, 1.0)
        reason = objective.reasons[code]
        assert reason == "trained" if side is None else reason.endswith(f") {side}")


def test_binary_kl_is_the_divergence_from_its_first_to_its_second_argument() -> None:
    start, end = torch.tensor([0.5, 1.0]).double().log(), torch.tensor([0.25, 0.5]).double().log()
    expected = [bernoulli_kl(0.5, 0.25), math.log(2)]
    assert binary_kl(start, end).tolist() == pytest.approx(expected)
    assert expected[0] == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75))


# Contradictory entries, and names that are not in the table


RATIO = gate_statistic("ratio")


@pytest.mark.parametrize(
    ("entry", "changes", "message"),
    [
        (RATIO, {"scopes": ()}, "scopes must not be empty"),
        (RATIO, {"scopes": ("step",)}, 'the scope "step" needs a distance'),
        (RATIO, {"direction": "distance"}, "a distance cannot be in log space"),
        (gate_statistic("sequence_kl"), {"scopes": ("token",)}, 'has only the scope "sequence"'),
    ],
)
def test_a_contradictory_entry_cannot_be_created(entry: GateStatistic, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"gate statistic '{entry.label}': .*{message}"):
        dataclasses.replace(entry, **changes)


def test_an_incomplete_entry_cannot_be_created() -> None:
    fields = {field.name: getattr(RATIO, field.name) for field in dataclasses.fields(RATIO)}
    for name in ("scopes", "direction", "tensor", "scalar", "formula", "histogram"):
        with pytest.raises(TypeError, match=name):
            GateStatistic(**{key: value for key, value in fields.items() if key != name})


def test_an_unknown_statistic_is_an_error_everywhere() -> None:
    with pytest.raises(
        ConfigError, match='statistic = "ratios" at level = "token" is not a gate statistic; known: ratio, pro'
    ):
        gate_statistic("ratios")
    with pytest.raises(ConfigError, match=r'gates\.0\.statistic = "ratios": input should be'):
        resolve_objective({"gates": [{"statistic": "ratios", "high": 1.0}]})
    unvalidated = Gate.model_construct(statistic="ratios", high=1.0)
    composition = Composition.model_construct(gates=[unvalidated])
    for use in (
        lambda: dropped_side(unvalidated, 0.5, 0.5, 1.0),
        lambda: describe(composition),
        lambda: statistics_of(composition),
        lambda: keel.objective(composition)(batch_of([(0.5, 0.5)], [0])),
    ):
        with pytest.raises(ConfigError, match="is not a gate statistic"):
            use()


@pytest.mark.parametrize("value", ["ratios", 3, None, ["ratio"], {"statistic": "ratio"}, True])
def test_an_invalid_statistic_has_the_error_of_a_literal(value: Any) -> None:
    class Model(BaseModel):
        statistic: Literal[statistic_names()]  # type: ignore[valid-type]

    with pytest.raises(ValidationError) as expected:
        Model.model_validate({"statistic": value})
    with pytest.raises(ValidationError) as actual:
        Gate.model_validate({"statistic": value, "high": 1.0})
    assert actual.value.errors(include_url=False) == expected.value.errors(include_url=False)


def test_json_schema_lists_the_names() -> None:
    assert Gate.model_json_schema()["properties"]["statistic"]["enum"] == list(statistic_names())


def names_in(node: ast.AST) -> set[str]:
    constants = {
        part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)
    }
    return constants & set(statistic_names())


def decides_by_name(node: ast.AST) -> bool:
    """Return whether code compares or matches the name of a statistic, or has several of them as dictionary keys.

    "ratio" is also a kernel and a histogram of the lens, so it counts only together with a field `statistic`.
    """
    if isinstance(node, ast.Compare):
        about_statistic = any(getattr(part, "attr", getattr(part, "id", "")) == "statistic" for part in ast.walk(node))
        return bool(names_in(node) - (set() if about_statistic else {"ratio"}))
    if isinstance(node, ast.Dict):
        return len(set().union(*(names_in(key) for key in node.keys if key is not None))) > 2
    return isinstance(node, ast.MatchValue) and bool(names_in(node))


def test_only_the_table_depends_on_the_names_of_statistics() -> None:
    table = PACKAGE / "objectives" / "statistics.py"
    nodes = [
        (path, node)
        for path in PACKAGE.rglob("*.py")
        if path != table
        for node in ast.walk(ast.parse(path.read_text()))
    ]
    assert [f"{path}:{getattr(node, 'lineno', 0)}" for path, node in nodes if decides_by_name(node)] == []


@pytest.mark.parametrize(
    ("code", "decides"),
    [
        ('gate.statistic == "ratio"', True),
        ('gate.statistic in ("binary_kl", "second_moment")', True),
        ('{"ratio": 1, "binary_kl": 2, "sequence_kl": 3}[gate.statistic]', True),
        ('match gate.statistic:\n    case "sequence_kl": pass', True),
        ('weight.kernel == "ratio"', False),
        ('{"statistic": "sequence_kl", "high": 1e-4}', False),
    ],
)
def test_code_that_depends_on_a_name_is_found(code: str, decides: bool) -> None:
    assert any(decides_by_name(node) for node in ast.walk(ast.parse(code))) == decides


# A new statistic is one entry


def _absolute_ratio_change(log_ratio: Tensor, over: Tensor, under: Tensor) -> Tensor:
    return log_ratio.expm1().abs_()


RATIO_CHANGE = GateStatistic(
    name="ratio_change",
    scopes=("token", "sequence", "step"),
    direction="distance",
    tensor=_absolute_ratio_change,
    scalar=lambda p, q: abs(p / q - 1),
    formula="abs({ratio} - 1)",
    histogram=LensHistogram(name="ratio_change", title="ratio change", sql="abs(exp(l - b) - 1)", scale=0.1),
)
MEAN_BINARY_KL = GateStatistic(
    name="mean_binary_kl",
    scopes=("sequence",),
    direction="distance",
    tensor=lambda log_ratio, over, under: binary_kl(under, over),
    sequence=lambda total, tokens: total / tokens,
    scalar=lambda p, q: bernoulli_kl(q, p),
    formula="mean(KLb({under}, {over}))",
    histogram=LensHistogram(
        name="mean_binary_kl",
        title="mean binary KL of a sample",
        sql="list_avg(list_transform(list_zip(logprobs, sampler_logprobs), lambda x: exp(x[2]) * (x[2] - x[1])"
        " + (1 - exp(x[2])) * (ln(1 - exp(x[2])) - ln(1 - exp(x[1])))))",
        scale=0.01,
    ),
)


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    for entry in (RATIO_CHANGE, MEAN_BINARY_KL):
        monkeypatch.setitem(STATISTICS, (entry.name, entry.level), entry)


POINTS = [(0.5, 0.5), (0.7, 0.5), (0.3, 0.5), (0.55, 0.5)]
"""Ratio changes: 0, 0.4, 0.4, 0.1."""


def reasons(table: dict[str, Any], sequence: list[int]) -> list[str]:
    objective = keel.objective({"gates": [table]})
    return [objective.reasons[code] for code in objective(batch_of(POINTS, sequence)).reasons.tolist()]


@pytest.mark.parametrize("entry", [RATIO_CHANGE, MEAN_BINARY_KL], ids=lambda entry: entry.name)
def test_a_statistic_outside_the_table_is_unknown(entry: GateStatistic) -> None:
    with pytest.raises(ConfigError, match=f'gates.0.statistic = "{entry.name}": input should be'):
        resolve_objective({"gates": [{"statistic": entry.name, "high": 0.2}]})


@pytest.mark.usefixtures("added")
class TestAddedEntry:
    """Only the table was changed."""

    @pytest.mark.parametrize("entry", [RATIO_CHANGE, MEAN_BINARY_KL], ids=lambda entry: entry.name)
    def test_gates_on_it_are_validated(self, entry: GateStatistic) -> None:
        assert f"`{entry.name}`" in render_markdown()
        with pytest.raises(ConfigError, match="the statistic is a distance and has only a high bound"):
            resolve_objective({"gates": [{"statistic": entry.name, "low": 0.1, "high": 0.2}]})
        with pytest.raises(ConfigError, match='level = "geometric" has no effect: it belongs to statistic = "ratio"'):
            resolve_objective({"gates": [{"statistic": entry.name, "high": 0.2, "level": "geometric"}]})

    def test_gates_use_it_for_tokens(self) -> None:
        name = "gate 0 (ratio_change)"
        gate = {"statistic": "ratio_change", "high": 0.2}
        assert reasons(gate, [0, 0, 0, 0]) == ["trained", f"{name} high", f"{name} low", "trained"]

    def test_gates_use_it_for_sequences(self) -> None:
        name = "gate 0 (ratio_change, sequence)"
        gate = {"statistic": "ratio_change", "high": 0.2, "scope": "sequence"}
        assert reasons(gate, [0, 0, 1, 2]) == [f"{name} high", f"{name} high", f"{name} low", "trained"]

    def test_gates_use_it_over_the_step(self) -> None:
        name = "gate 0 (ratio_change, step)"
        gate = {"statistic": "ratio_change", "high": 0.06, "scope": "step"}
        assert reasons(gate, [0, 1, 2, 3]) == ["trained", f"{name} high", f"{name} low", "trained"]

    def test_gates_use_it_as_a_mean_over_sequences(self) -> None:
        """KLb(0.5, p) is 0, 0.0872, 0.0872 and 0.0050: the sequences' means are 0.0436 and 0.0461."""
        name = "gate 0 (mean_binary_kl, sequence)"
        gate = {"statistic": "mean_binary_kl", "high": 0.045}
        assert reasons(gate, [0, 0, 1, 1]) == ["trained", "trained", f"{name} low", f"{name} low"]
        assert reasons(gate | {"high": 0.04}, [0, 0, 1, 1])[0] == f"{name} high"

    def test_descriptions_use_it(self) -> None:
        gates = [
            {"statistic": "ratio_change", "high": 0.2},
            {"statistic": "ratio_change", "high": 0.2, "scope": "sequence", "between": "proximal/sampler"},
            {"statistic": "mean_binary_kl", "high": 0.1, "when": "negative_advantage"},
        ]
        text = describe(Composition.model_validate({"gates": gates}))
        assert text.dropped == (
            "token when abs(r - 1) > 0.2",
            "whole sequence when any abs(w - 1) > 0.2",
            "whole sequence when mean(A) < 0 and mean(KLb(q, p)) > 0.1",
        )
        assert {"r", "w", "KLb", "mean"} <= {symbol.name for symbol in text.legend}

    def test_plots_use_it(self) -> None:
        """A ratio change of at most 0.9 is the ratio band from 0.1 to 1.9."""
        change = Composition.model_validate({"gates": [{"statistic": "ratio_change", "high": 0.9}]})
        band = Composition.model_validate({"gates": [{"statistic": "ratio", "low": 0.1, "high": 1.9}]})
        assert draw_dropped_region(change).plain == draw_dropped_region(band).plain
        assert {"+", "-"} <= set(draw_dropped_region(change).plain)

    def test_the_audit_uses_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        composition = Composition.model_validate({"gates": [{"statistic": "ratio_change", "high": 0.5}]})
        assert audit(composition).passed
        wrong = dataclasses.replace(RATIO_CHANGE, scalar=lambda p, q: abs(p - q))
        monkeypatch.setitem(STATISTICS, ("ratio_change", "token"), wrong)
        assert not audit(composition).passed

    @pytest.mark.parametrize("entry", [RATIO_CHANGE, MEAN_BINARY_KL], ids=lambda entry: entry.name)
    def test_the_lens_shows_its_band_and_histogram(self, entry: GateStatistic, tmp_path: Path) -> None:
        gates = f'[{{statistic = "{entry.name}", high = 0.25}}]'
        make_run(tmp_path / "run", noise=0.4, objective="reinforce", overrides=("--objective.gates", gates))
        lens = Lens(tmp_path, read_seconds=60)
        try:
            region = lens.query("region", {"run": "run"})
        finally:
            lens.close()
        (drawn,) = (shown for shown in region["statistics"] if shown["name"] == entry.histogram.name)
        assert [(band["low"], band["high"]) for band in drawn["bands"]] == [(None, 0.25)]
        counted: Counter[int] = Counter()
        for series in region["series"]:
            if series["statistic"] == entry.histogram.name:
                for index, count in enumerate(series["counts"], start=series["start"]):
                    counted[index] += count
        expected: Counter[int] = Counter()
        for points in trained_sequences(tmp_path / "run"):
            for value in value_by_tensor(entry, points):
                expected[math.floor(math.asinh(value / drawn["scale"]) * region["bins"])] += 1
        assert +counted == +expected


def trained_sequences(run: Path) -> list[list[tuple[float, float]]]:
    """Return for each trained sequence the probabilities of its tokens under policy and sampler."""
    sequences_of_run = []
    for file in sorted((run / "rollouts").iterdir()):
        for row in pq.read_table(file).to_pylist():
            if row["outcome"] == "trained":
                pairs = zip(row["logprobs"], row["sampler_logprobs"], strict=True)
                points = [(math.exp(policy), math.exp(sampler)) for policy, sampler in pairs if policy is not None]
                sequences_of_run.append(points)
    return sequences_of_run
