"""Format the output of `keel simulate`: a prediction in a dozen lines, a sweep as a table, or either as JSON."""

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
"""Columns at which lists of assumptions are wrapped."""


def format_prediction(
    assumptions: SimulateSettings,
    origins: Mapping[str, str],
    prediction: "Prediction",
    bottleneck: str,
    changes: "Sequence[ProposedChange] | None",
    measured: "MeasuredRun | None",
) -> str:
    """Return a prediction as text."""
    lines = [
        f"simulated: {prediction.steps} steps, {prediction.hours:,.2f} h of virtual time, {prediction.engines:,}"
        f" engines, {prediction.ranks:,} trainer ranks; averages over the last {prediction.counted_steps} steps",
        _labelled_line("speed", _format_speed(prediction)),
        _labelled_line("engines", _format_engines(prediction)),
        _labelled_line("trainer", _format_trainer(prediction)),
        _labelled_line(
            "staleness",
            f"{prediction.staleness:.2f} versions on average;"
            f" by staleness: {_format_staleness(prediction.staleness_shares)}",
        ),
        _labelled_line(
            "dropped",
            f"{_format_percent(prediction.dropped_share, 1)} of rollouts{_format_reasons(prediction.dropped)}",
        ),
        _labelled_line(
            "wasted",
            f"{_format_percent(prediction.wasted_share, 1)} of sampled tokens{_format_reasons(prediction.wasted)};"
            f" {_format_percent(prediction.truncated, 1)} of trained rollouts truncated",
        ),
        _labelled_line("bottleneck", bottleneck),
    ]
    lines += _change_lines(changes)
    lines += _assumption_lines(assumptions, origins)
    if measured is not None:
        lines.append(
            _labelled_line(
                "real run",
                f"{measured.step_seconds:,.2f} s per step, staleness {measured.staleness:.2f},"
                f" dropped {_format_percent(measured.dropped_share, 1)}, over {measured.steps} steps",
            )
        )
    return "\n".join(lines) + "\n"


def prediction_json(
    assumptions: SimulateSettings,
    prediction: "Prediction",
    bottleneck: str,
    changes: "Sequence[ProposedChange] | None",
    measured: "MeasuredRun | None",
) -> str:
    """Return a prediction as JSON; `changes` is null if no changes were simulated."""
    payload = {
        "prediction": prediction.as_json(),
        "bottleneck": bottleneck,
        "changes": None if changes is None else [change.as_json() for change in changes],
        "assumptions": assumptions.model_dump(),
        "measured": None if measured is None else vars(measured),
    }
    return json.dumps(payload, indent=2) + "\n"


COLUMNS: "tuple[tuple[str, Callable[[Prediction], str]], ...]" = (
    ("steps/hour", lambda prediction: f"{prediction.steps_per_hour:,.1f}"),
    ("s/step", lambda prediction: f"{prediction.step_seconds:,.2f}"),
    ("tok/s", lambda prediction: f"{prediction.trained_tokens_per_second:,.0f}"),
    ("engines busy", lambda prediction: _format_percent(prediction.engine_busy)),
    ("full speed", lambda prediction: _format_percent(prediction.engine_fill)),
    ("trainer busy", lambda prediction: _format_percent(prediction.trainer_busy)),
    ("staleness", lambda prediction: f"{prediction.staleness:.2f}"),
    ("dropped", lambda prediction: _format_percent(prediction.dropped_share, 1)),
    ("wasted", lambda prediction: _format_percent(prediction.wasted_share, 1)),
)


def sweep_table(rows: "Sequence[tuple[SimulationCase, Prediction, str]]", origins: Mapping[str, str]) -> str:
    """Return one line per combination, with the short form of its bottleneck, and the assumptions they share."""
    swept = list(rows[0][0].swept_values)
    head = [*swept, *(title for title, _ in COLUMNS), "bottleneck"]
    body = [
        [*map(str, case.swept_values.values()), *(show(prediction) for _, show in COLUMNS), bottleneck.split(":")[0]]
        for case, prediction, bottleneck in rows
    ]
    widths = [max(len(line[column]) for line in [head, *body]) for column in range(len(head))]
    lines = []
    for line in [head, *body]:
        cells = [text.rjust(width) for text, width in zip(line[:-1], widths[:-1], strict=True)]
        lines.append("  ".join([*cells, line[-1]]).rstrip())
    lines += ["", *_assumption_lines(rows[0][0].assumptions, origins, leave_out=swept)]
    return "\n".join(lines) + "\n"


def sweep_json(rows: "Sequence[tuple[SimulationCase, Prediction, str]]") -> str:
    """Return one object per combination as JSON."""
    payload = [
        {"values": case.swept_values, **prediction.as_json(), "bottleneck": bottleneck}
        for case, prediction, bottleneck in rows
    ]
    return json.dumps(payload, indent=2) + "\n"


def _format_speed(prediction: "Prediction") -> str:
    return (
        f"{prediction.steps_per_hour:,.1f} steps/hour, {prediction.step_seconds:,.2f} s per step; tokens/s:"
        f" {prediction.sampled_tokens_per_second:,.0f} sampled, {prediction.trained_tokens_per_second:,.0f} trained"
    )


def _format_engines(prediction: "Prediction") -> str:
    down = f", down {_format_percent(prediction.engine_down, 1)}" if prediction.engine_down else ""
    return (
        f"busy {_format_percent(prediction.engine_busy)} of the time, at {_format_percent(prediction.engine_fill)}"
        f" of full speed{down}; {prediction.in_flight:,.0f} rollouts in flight"
    )


def _format_trainer(prediction: "Prediction") -> str:
    return (
        f"computes {_format_percent(prediction.trainer_busy)}, waits for rollouts"
        f" {_format_percent(prediction.waiting)}, waits for weights {_format_percent(prediction.publishing)},"
        f" saves {_format_percent(prediction.saving)}"
    )


def _change_lines(changes: "Sequence[ProposedChange] | None") -> list[str]:
    if changes is None:
        return [_labelled_line("to change", "not simulated for a run this large; use --what-if")]
    if not changes:
        return [_labelled_line("to change", "no simulated change gains 5 %")]
    return [
        _labelled_line(
            "to change" if not number else "",
            f"{change.description}: {change.prediction.steps_per_hour:,.1f} steps/hour ({100 * change.gain:+.0f} %),"
            f" staleness {change.prediction.staleness:.2f}",
        )
        for number, change in enumerate(changes)
    ]


def _assumption_lines(
    assumptions: SimulateSettings, origins: Mapping[str, str], leave_out: Sequence[str] = ()
) -> list[str]:
    """Return all assumptions except those left out, grouped by origin, the defaults last."""
    lines = []
    for origin in ("measured", "file", "flags"):
        names = [name for name in origins if origins[name] == origin and name not in leave_out]
        lines += _wrap_lines(origin, [f"{name} {_format_assumption(assumptions, name)}" for name in names])
    defaults = [
        name
        for name in type(assumptions).model_fields
        if name not in origins and name not in leave_out and _format_assumption(assumptions, name) != "none"
    ]
    return [*lines, *_wrap_lines("defaults", [f"{name} {_format_assumption(assumptions, name)}" for name in defaults])]


def _format_assumption(assumptions: SimulateSettings, name: str) -> str:
    value: Any = getattr(assumptions, name)
    if name == "length":
        if value.kind == "empirical":
            return f"of {len(value.values):,} rollouts, mean {sum(value.values) / len(value.values):,.1f}"
        return ":".join([value.kind, *(f"{number:g}" for number in (value.mean, value.sigma) if number is not None)])
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
    parts = [f"{staleness}: {_format_percent(share)}" for staleness, share in shares.items() if share >= 0.005]
    return ", ".join(parts) or "no tokens trained"


def _format_reasons(shares: Mapping[str, float]) -> str:
    text = ", ".join(f"{reason} {_format_percent(share, 1)}" for reason, share in shares.items() if share >= 0.0005)
    return f" ({text})" if text else ""


def _format_percent(fraction: float, digits: int = 0) -> str:
    return f"{100 * fraction:.{digits}f} %"
