"""What `keel simulate` prints: a prediction in a dozen lines, a sweep as a table, or either as JSON."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from keel.config.simulate import SimulateSettings

if TYPE_CHECKING:
    from keel.cli.inspect.simulate import SimulationCase
    from keel.tools.simulate.bottleneck import ProposedChange
    from keel.tools.simulate.calibrate import MeasuredRun
    from keel.tools.simulate.prediction import Prediction

WIDTH = 120


def format_prediction(
    assumptions: SimulateSettings,
    origins: Mapping[str, str],
    prediction: "Prediction",
    bottleneck: str,
    changes: "Sequence[ProposedChange] | None",
    measured: "MeasuredRun | None",
) -> str:
    """For people."""
    lines = [
        f"simulated: {prediction.steps} steps, {prediction.hours:,.2f} h of virtual time, {prediction.engines:,} engines,"
        f" {prediction.ranks:,} trainer ranks; numbers of the last {prediction.counted_steps} steps",
        _labelled_line("speed", f"{prediction.steps_per_hour:,.1f} steps/hour, {prediction.step_seconds:,.2f} s a step; tokens/s:"
              f" {prediction.sampled_tokens_per_second:,.0f} sampled, {prediction.trained_tokens_per_second:,.0f} trained"),
        _labelled_line("engines", _format_engines(prediction)),
        _labelled_line("trainer", f"computes {_format_percent(prediction.trainer_busy)}, waits for rollouts {_format_percent(prediction.waiting)},"
              f" for weights {_format_percent(prediction.publishing)}, saves {_format_percent(prediction.saving)}"),
        _labelled_line("staleness", f"{prediction.staleness:.2f} versions in the mean; by age: {_format_staleness(prediction.staleness_shares)}"),
        _labelled_line("dropped", f"{_format_percent(prediction.dropped_share, 1)} of the rollouts{_format_reasons(prediction.dropped)}"),
        _labelled_line("wasted", f"{_format_percent(prediction.wasted_share, 1)} of the tokens{_format_reasons(prediction.wasted)};"
              f" {_format_percent(prediction.truncated, 1)} of the trained rollouts are cut at their longest"),
        _labelled_line("bottleneck", bottleneck),
    ]  # fmt: skip
    lines += _change_lines(changes)
    lines += _assumption_lines(assumptions, origins)
    if measured is not None:
        lines.append(
            _labelled_line("the run", f"{measured.step_seconds:,.2f} s a step, staleness {measured.staleness:.2f}, refused"
                  f" {_format_percent(measured.dropped_share, 1)}, over {measured.steps} steps")
        )  # fmt: skip
    return "\n".join(lines) + "\n"


def prediction_json(
    assumptions: SimulateSettings,
    prediction: "Prediction",
    bottleneck: str,
    changes: "Sequence[ProposedChange] | None",
    measured: "MeasuredRun | None",
) -> str:
    """For machines; a change that was not tried is null."""
    told = {
        "prediction": prediction.as_json(),
        "bottleneck": bottleneck,
        "changes": None if changes is None else [one.as_json() for one in changes],
        "assumed": assumptions.model_dump(),
        "observed": None if measured is None else vars(measured),
    }
    return json.dumps(told, indent=2) + "\n"


COLUMNS: "tuple[tuple[str, Callable[[Prediction], str]], ...]" = (
    ("steps/hour", lambda found: f"{found.steps_per_hour:,.1f}"),
    ("s/step", lambda found: f"{found.step_seconds:,.2f}"),
    ("tok/s", lambda found: f"{found.trained_tokens_per_second:,.0f}"),
    ("engines busy", lambda found: _format_percent(found.engine_busy)),
    ("full speed", lambda found: _format_percent(found.engine_fill)),
    ("trainer busy", lambda found: _format_percent(found.trainer_busy)),
    ("stale", lambda found: f"{found.staleness:.2f}"),
    ("dropped", lambda found: _format_percent(found.dropped_share, 1)),
    ("wasted", lambda found: _format_percent(found.wasted_share, 1)),
)


def sweep_table(rows: "Sequence[tuple[SimulationCase, Prediction, str]]") -> str:
    """One line for each combination; the bottleneck by its first words."""
    swept = list(rows[0][0].swept_values)
    head = [*swept, *(title for title, _ in COLUMNS), "bottleneck"]
    body = [
        [*map(str, case.swept_values.values()), *(show(found) for _, show in COLUMNS), words.split(":")[0]]
        for case, found, words in rows
    ]
    widths = [max(len(line[place]) for line in [head, *body]) for place in range(len(head))]
    lines = []
    for line in [head, *body]:
        cells = [text.rjust(width) for text, width in zip(line[:-1], widths[:-1], strict=True)]
        lines.append("  ".join([*cells, line[-1]]).rstrip())
    return "\n".join(lines) + "\n"


def sweep_json(rows: "Sequence[tuple[SimulationCase, Prediction, str]]") -> str:
    told = [{"values": case.swept_values, **found.as_json(), "bottleneck": words} for case, found, words in rows]
    return json.dumps(told, indent=2) + "\n"


def _format_engines(prediction: "Prediction") -> str:
    down = f", down {_format_percent(prediction.engine_down, 1)}" if prediction.engine_down else ""
    return (
        f"busy {_format_percent(prediction.engine_busy)} of the time, at {_format_percent(prediction.engine_fill)} of their full speed{down};"
        f" {prediction.in_flight:,.0f} rollouts in flight"
    )


def _change_lines(changes: "Sequence[ProposedChange] | None") -> list[str]:
    if changes is None:
        return [_labelled_line("to change", "not simulated for a run this large; ask for it with --what-if")]
    if not changes:
        return [_labelled_line("to change", "nothing that was tried brings 5 %")]
    return [
        _labelled_line("to change" if not number else "", f"{one.description}: {one.prediction.steps_per_hour:,.1f} steps/hour"
              f" ({100 * one.gain:+.0f} %), staleness {one.prediction.staleness:.2f}")
        for number, one in enumerate(changes)
    ]  # fmt: skip


def _assumption_lines(assumptions: SimulateSettings, origins: Mapping[str, str]) -> list[str]:
    """Every assumption that is not a default, by where it is from; lengths in short."""
    lines = []
    for origin in ("measured", "file", "given"):
        told = [f"{name} {_format_assumption(assumptions, name)}" for name in origins if origins[name] == origin]
        if told:
            lines += _wrap_lines(origin, told)
    rest = [
        name
        for name in type(assumptions).model_fields
        if name not in origins and _format_assumption(assumptions, name) != "none"
    ]
    return [*lines, *_wrap_lines("assumed", [f"{name} {_format_assumption(assumptions, name)}" for name in rest])]


def _format_assumption(assumptions: SimulateSettings, name: str) -> str:
    value: Any = getattr(assumptions, name)
    if name == "length":
        if value.kind == "empirical":
            return f"of {len(value.values):,} rollouts, mean {sum(value.values) / len(value.values):,.1f}"
        told = [value.kind, *(f"{one:g}" for one in (value.mean, value.sigma) if one is not None)]
        return ":".join(told)
    if value is None:
        return "none"
    return f"{value:,.4g}" if isinstance(value, float) and value < 1000 else f"{value:,.0f}"


def _wrap_lines(title: str, parts: Sequence[str]) -> list[str]:
    lines: list[str] = []
    row = ""
    for part in parts:
        if row and len(row) + len(part) + 2 > WIDTH - 12:
            lines.append(_labelled_line("" if lines else title, row + ","))
            row = part
        else:
            row = f"{row}, {part}" if row else part
    return [*lines, _labelled_line("" if lines else title, row)] if row else lines


def _labelled_line(title: str, text: str) -> str:
    return f"{title:<12}{text}"


def _format_staleness(shares: Mapping[int, float]) -> str:
    told = [f"{age}: {_format_percent(share)}" for age, share in shares.items() if share >= 0.005]
    return ", ".join(told) or "none trained"


def _format_reasons(shares: Mapping[str, float]) -> str:
    told = ", ".join(f"{reason} {_format_percent(share, 1)}" for reason, share in shares.items() if share >= 0.0005)
    return f" ({told})" if told else ""


def _format_percent(fraction: float, digits: int = 0) -> str:
    return f"{100 * fraction:.{digits}f} %"
