"""Two small charts as inline SVG: lines over steps and grouped bars. No script, no font, nothing fetched.

Text takes the colour of the page, so that both light and dark are legible; every mark has its numbers as a tooltip.
Names are escaped here. A long series is averaged down to what a screen can show.
"""

import html
import math
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 64, 8, 8, 28
MAX_POINTS = 320
"""Of a line, at most."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56b4e9", "#8a5cd6", "#7f7f7f")
"""Told apart by the colour-blind too; a ninth line is the first colour, dashed."""

Point = tuple[float, float]
BandPoint = tuple[float, float, float]
"""A place, and the lowest and highest value there."""


def format_number(value: float) -> str:
    """Four digits that matter."""
    return "-" if not math.isfinite(value) else f"{value:.4g}"


def legend(names: Sequence[str]) -> str:
    """What the colours mean, for all charts of a page."""
    items = (
        f'<span class="key"><svg width="24" height="10" aria-hidden="true"><line x1="0" y1="5" x2="24" y2="5"'
        f" {_stroke(place)}/></svg>{html.escape(name)}</span>"
        for place, name in enumerate(names)
    )
    return f'<p class="legend">{"".join(items)}</p>'


def line_chart(
    label: str, series: Mapping[str, Sequence[Point]], bands: Mapping[str, Sequence[BandPoint]] | None = None
) -> str:
    """Curves over steps. A value that is not finite leaves a gap. Under a curve of the same name lies its band."""
    bands = bands or {}
    thinned = {name: _downsample(points) for name, points in series.items()}
    every = [point for points in thinned.values() for point in points if math.isfinite(point[1])]
    if not every:
        return '<p class="none">nothing to draw</p>'
    left, right = min(x for x, _ in every), max(x for x, _ in every)
    edges = [edge for band in bands.values() for _, *edges in band for edge in edges if math.isfinite(edge)]
    low, high = _value_range([*(y for _, y in every), *edges])

    def place(point: Point) -> str:
        across = (point[0] - left) / (right - left) if right > left else 0.5
        return f"{LEFT + across * (WIDTH - LEFT - RIGHT):.1f},{_y_position(point[1], low, high):.1f}"

    parts = [_y_axis(low, high), _text_element(LEFT, HEIGHT - 8, format_number(left), "start")]
    if right > left:
        parts.append(_text_element(WIDTH - RIGHT, HEIGHT - 8, format_number(right), "end"))
    for order, name in enumerate(thinned):
        for lower, upper in _band_edges(bands.get(name, ())):
            drawn = " ".join(place(point) for point in (*lower, *reversed(upper)))
            parts.append(f'<polygon points="{drawn}" fill="{COLOURS[order % len(COLOURS)]}" fill-opacity="0.15"/>')
    for order, (name, points) in enumerate(thinned.items()):
        for run in _finite_runs(points):
            drawn = " ".join(place(point) for point in run)
            tip = f"<title>{html.escape(name)}</title>"
            if len(run) == 1:
                x, y = drawn.split(",")
                parts.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{COLOURS[order % len(COLOURS)]}">{tip}</circle>')
            else:
                parts.append(f'<polyline points="{drawn}" fill="none" {_stroke(order)}>{tip}</polyline>')
    return _figure(label, parts)


def bar_chart(label: str, groups: Sequence[str], series: Mapping[str, Sequence[float]]) -> str:
    """For each group one bar of each series, side by side."""
    values = [value for row in series.values() for value in row if math.isfinite(value)]
    if not values:
        return '<p class="none">nothing to draw</p>'
    low, high = _value_range([0.0, *values])
    room = (WIDTH - LEFT - RIGHT) / max(len(groups), 1)
    thick = room * 0.8 / max(len(series), 1)
    ground = _y_position(0.0, low, high)
    parts = [_y_axis(low, high)]
    every = max(1, math.ceil(len(groups) / 12))  # labels that would lie on each other are left out
    for place, group in enumerate(groups):
        start = LEFT + place * room
        if place % every == 0:
            parts.append(_text_element(start + room / 2, HEIGHT - 8, group, "middle"))
        for order, (name, row) in enumerate(series.items()):
            if math.isfinite(row[place]):
                top = _y_position(row[place], low, high)
                tip = html.escape(f"{name}, {group}: {format_number(row[place])}")
                parts.append(
                    f'<rect x="{start + room * 0.1 + order * thick:.1f}" y="{min(top, ground):.1f}"'
                    f' width="{max(thick - 1, 0.5):.1f}" height="{abs(ground - top):.1f}"'
                    f' fill="{COLOURS[order % len(COLOURS)]}"><title>{tip}</title></rect>'
                )
    return _figure(label, parts)


def _downsample(points: Sequence[Point]) -> list[Point]:
    """Means of neighbours, where there are too many to see."""
    if len(points) <= MAX_POINTS:
        return list(points)
    size, thinned = len(points) / MAX_POINTS, []
    for place in range(MAX_POINTS):
        part = points[int(place * size) : int((place + 1) * size)]
        thinned.append((math.fsum(x for x, _ in part) / len(part), math.fsum(y for _, y in part) / len(part)))
    return thinned


def _band_edges(band: Sequence[BandPoint]) -> list[tuple[list[Point], list[Point]]]:
    """The lower and the upper edge of a band, for each stretch without a gap."""
    lower = _finite_runs(_downsample([(x, bottom) for x, bottom, _ in band]))
    upper = _finite_runs(_downsample([(x, top) for x, _, top in band]))
    return list(zip(lower, upper, strict=True))


def _finite_runs(points: Sequence[Point]) -> list[list[Point]]:
    runs: list[list[Point]] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _value_range(values: Sequence[float]) -> Point:
    low, high = min(values), max(values)
    if high == low:
        return (low, low + 1.0) if low >= 0 else (low - 1.0, high)
    return low, high


def _y_position(value: float, low: float, high: float) -> float:
    return TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM)


def _y_axis(low: float, high: float) -> str:
    parts = []
    for share in (0.0, 0.5, 1.0):
        value = low + share * (high - low)
        y = _y_position(value, low, high)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>')
        parts.append(_text_element(LEFT - 6, y + 4, format_number(value), "end"))
    return "".join(parts)


def _text_element(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _stroke(series_index: int) -> str:
    dash = f' stroke-dasharray="{2 + 3 * (series_index // len(COLOURS))} 3"' if series_index >= len(COLOURS) else ""
    return f'stroke="{COLOURS[series_index % len(COLOURS)]}" stroke-width="2"{dash}'


def _figure(label: str, parts: Sequence[str]) -> str:
    name = html.escape(label)
    return (
        f'<figure><figcaption>{name}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}">'
        f"{''.join(parts)}</svg></figure>"
    )
