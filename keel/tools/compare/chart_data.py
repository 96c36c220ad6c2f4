"""Chart data for HTML reports: curves over steps and grouped bars as JSON that `static_report.js` of the lens draws.

Values that are not finite become null, which interrupts a curve. A long curve is averaged down to MAX_POINTS points.
Labels are plain text; the page inserts them as text nodes only.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

MAX_POINTS = 320
"""Maximum number of points of a curve."""

Point = tuple[float, float]
"""Step and value."""
BandPoint = tuple[float, float, float]
"""Step, lowest and highest value."""
Chart = dict[str, Any]


def line_chart(
    title: str, series: Mapping[str, Sequence[Point]], bands: Mapping[str, Sequence[BandPoint]] | None = None
) -> Chart:
    """Return curves over steps. A band shades the range around the curve of the same name, at the same steps."""
    bands = bands or {}
    return {"kind": "lines", "title": title, "series": [_curve(name, series[name], bands.get(name)) for name in series]}


def bar_chart(title: str, categories: Sequence[str], series: Mapping[str, Sequence[float]]) -> Chart:
    """Return one bar per series for each category."""
    bars = [{"label": name, "values": _finite_or_none(values)} for name, values in series.items()]
    return {"kind": "bars", "title": title, "categories": list(categories), "series": bars}


def has_values(chart: Chart) -> bool:
    """Return whether a chart has anything to draw."""
    return any(value is not None for series in chart["series"] for value in series["values"])


def _curve(name: str, points: Sequence[Point], band: Sequence[BandPoint] | None) -> dict[str, Any]:
    chunks = _chunks(len(points))
    curve = {
        "label": name,
        "step": [_mean([step for step, _ in points[chunk]]) for chunk in chunks],
        "values": _finite_or_none([_mean([value for _, value in points[chunk]]) for chunk in chunks]),
    }
    if band:
        for key, column in (("low", 1), ("high", 2)):
            curve[key] = _finite_or_none([_mean([edge[column] for edge in band[chunk]]) for chunk in chunks])
    return curve


def _chunks(count: int) -> list[slice]:
    """Return at most MAX_POINTS slices of nearly equal size that cover all points."""
    size = max(count / MAX_POINTS, 1.0)
    return [slice(int(index * size), int((index + 1) * size)) for index in range(min(count, MAX_POINTS))]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if all(map(math.isfinite, values)) else math.nan


def _finite_or_none(values: Sequence[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]
