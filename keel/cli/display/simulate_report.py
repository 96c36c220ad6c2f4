"""What `keel simulate` prints: a prediction in a dozen lines, a sweep as a table, or either as JSON."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from keel.config.simulate import SimulateSettings

if TYPE_CHECKING:
    from keel.cli.inspect.simulate import Case
    from keel.tools.simulate.bottleneck import Change
    from keel.tools.simulate.calibrate import Observed
    from keel.tools.simulate.prediction import Prediction

WIDTH = 120


def as_text(
    assumed: SimulateSettings,
    origins: Mapping[str, str],
    found: "Prediction",
    bottleneck: str,
    tried: "Sequence[Change] | None",
    observed: "Observed | None",
) -> str:
    """For people."""
    lines = [
        f"simulated: {found.steps} steps, {found.hours:,.2f} h of virtual time, {found.engines:,} engines,"
        f" {found.ranks:,} trainer ranks; numbers of the last {found.counted} steps",
        _line("speed", f"{found.steps_per_hour:,.1f} steps/hour, {found.step_seconds:,.2f} s a step; tokens/s:"
              f" {found.sampled_tokens_per_second:,.0f} sampled, {found.trained_tokens_per_second:,.0f} trained"),
        _line("engines", _engines(found)),
        _line("trainer", f"computes {_percent(found.trainer_busy)}, waits for rollouts {_percent(found.waiting)},"
              f" for weights {_percent(found.publishing)}, saves {_percent(found.saving)}"),
        _line("staleness", f"{found.staleness:.2f} versions in the mean; by age: {_shares(found.staleness_shares)}"),
        _line("refused", f"{_percent(found.refused_share, 1)} of the rollouts{_reasons(found.refused)}"),
        _line("wasted", f"{_percent(found.wasted_share, 1)} of the tokens{_reasons(found.wasted)};"
              f" {_percent(found.cut, 1)} of the trained rollouts are cut at their longest"),
        _line("bottleneck", bottleneck),
    ]  # fmt: skip
    lines += _changes(tried)
    lines += _origins(assumed, origins)
    if observed is not None:
        lines.append(
            _line("the run", f"{observed.step_seconds:,.2f} s a step, staleness {observed.staleness:.2f}, refused"
                  f" {_percent(observed.refused, 1)}, over {observed.steps} steps")
        )  # fmt: skip
    return "\n".join(lines) + "\n"


def as_json(
    assumed: SimulateSettings,
    found: "Prediction",
    bottleneck: str,
    tried: "Sequence[Change] | None",
    observed: "Observed | None",
) -> str:
    """For machines; a change that was not tried is null."""
    told = {
        "prediction": found.as_json(),
        "bottleneck": bottleneck,
        "changes": None if tried is None else [one.as_json() for one in tried],
        "assumed": assumed.model_dump(),
        "observed": None if observed is None else vars(observed),
    }
    return json.dumps(told, indent=2) + "\n"


COLUMNS: "tuple[tuple[str, Callable[[Prediction], str]], ...]" = (
    ("steps/hour", lambda found: f"{found.steps_per_hour:,.1f}"),
    ("s/step", lambda found: f"{found.step_seconds:,.2f}"),
    ("tok/s", lambda found: f"{found.trained_tokens_per_second:,.0f}"),
    ("engines busy", lambda found: _percent(found.engine_busy)),
    ("full speed", lambda found: _percent(found.engine_fill)),
    ("trainer busy", lambda found: _percent(found.trainer_busy)),
    ("stale", lambda found: f"{found.staleness:.2f}"),
    ("refused", lambda found: _percent(found.refused_share, 1)),
    ("wasted", lambda found: _percent(found.wasted_share, 1)),
)


def sweep_table(rows: "Sequence[tuple[Case, Prediction, str]]") -> str:
    """One line for each combination; the bottleneck by its first words."""
    swept = list(rows[0][0].values)
    head = [*swept, *(title for title, _ in COLUMNS), "bottleneck"]
    body = [
        [*map(str, case.values.values()), *(show(found) for _, show in COLUMNS), words.split(":")[0]]
        for case, found, words in rows
    ]
    widths = [max(len(line[place]) for line in [head, *body]) for place in range(len(head))]
    lines = []
    for line in [head, *body]:
        cells = [text.rjust(width) for text, width in zip(line[:-1], widths[:-1], strict=True)]
        lines.append("  ".join([*cells, line[-1]]).rstrip())
    return "\n".join(lines) + "\n"


def sweep_json(rows: "Sequence[tuple[Case, Prediction, str]]") -> str:
    told = [{"values": case.values, **found.as_json(), "bottleneck": words} for case, found, words in rows]
    return json.dumps(told, indent=2) + "\n"


def _engines(found: "Prediction") -> str:
    down = f", down {_percent(found.engine_down, 1)}" if found.engine_down else ""
    return (
        f"busy {_percent(found.engine_busy)} of the time, at {_percent(found.engine_fill)} of their full speed{down};"
        f" {found.in_flight:,.0f} rollouts in flight"
    )


def _changes(tried: "Sequence[Change] | None") -> list[str]:
    if tried is None:
        return [_line("to change", "not simulated for a run this large; ask for it with --what-if")]
    if not tried:
        return [_line("to change", "nothing that was tried brings 5 %")]
    return [
        _line("to change" if not number else "", f"{one.words}: {one.then.steps_per_hour:,.1f} steps/hour"
              f" ({100 * one.gain:+.0f} %), staleness {one.then.staleness:.2f}")
        for number, one in enumerate(tried)
    ]  # fmt: skip


def _origins(assumed: SimulateSettings, origins: Mapping[str, str]) -> list[str]:
    """Every assumption that is not a default, by where it is from; lengths in short."""
    lines = []
    for origin in ("measured", "file", "given"):
        told = [f"{name} {_value(assumed, name)}" for name in origins if origins[name] == origin]
        if told:
            lines += _wrapped(origin, told)
    rest = [name for name in type(assumed).model_fields if name not in origins and _value(assumed, name) != "none"]
    return [*lines, *_wrapped("assumed", [f"{name} {_value(assumed, name)}" for name in rest])]


def _value(assumed: SimulateSettings, name: str) -> str:
    value: Any = getattr(assumed, name)
    if name == "length":
        if value.kind == "empirical":
            return f"of {len(value.values):,} rollouts, mean {sum(value.values) / len(value.values):,.1f}"
        told = [value.kind, *(f"{one:g}" for one in (value.mean, value.spread) if one is not None)]
        return ":".join(told)
    if value is None:
        return "none"
    return f"{value:,.4g}" if isinstance(value, float) and value < 1000 else f"{value:,.0f}"


def _wrapped(title: str, parts: Sequence[str]) -> list[str]:
    lines: list[str] = []
    row = ""
    for part in parts:
        if row and len(row) + len(part) + 2 > WIDTH - 12:
            lines.append(_line("" if lines else title, row + ","))
            row = part
        else:
            row = f"{row}, {part}" if row else part
    return [*lines, _line("" if lines else title, row)] if row else lines


def _line(title: str, text: str) -> str:
    return f"{title:<12}{text}"


def _shares(shares: Mapping[int, float]) -> str:
    told = [f"{age}: {_percent(share)}" for age, share in shares.items() if share >= 0.005]
    return ", ".join(told) or "none trained"


def _reasons(shares: Mapping[str, float]) -> str:
    told = ", ".join(f"{reason} {_percent(share, 1)}" for reason, share in shares.items() if share >= 0.0005)
    return f" ({told})" if told else ""


def _percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"
