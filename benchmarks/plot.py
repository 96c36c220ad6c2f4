"""Small line charts as SVG, so that a benchmark can draw its own picture without a plotting library."""

from dataclasses import dataclass
from html import escape
from pathlib import Path

WIDTH, HEIGHT, LEFT, TOP, GAP = 300, 200, 56, 34, 34
COLOURS = ("#b3541e", "#1f6f8b", "#5b7f3a", "#7a4b8a")


@dataclass(frozen=True)
class Line:
    """One side of a comparison."""

    name: str
    xs: list[float]
    ys: list[float]


@dataclass(frozen=True)
class Panel:
    """Lines over one quantity; both axes start at zero."""

    across: str
    up: str
    lines: list[Line]


def write_svg(path: Path, rows: list[list[Panel]]) -> None:
    """Panels in rows, each with its own axes."""
    wide, high = LEFT + WIDTH + GAP, TOP + HEIGHT + GAP + 18
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide * max(map(len, rows))} {high * len(rows)}"'
        ' font-family="sans-serif" font-size="12" fill="#333">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for down, row in enumerate(rows):
        for along, panel in enumerate(row):
            parts.append(f'<g transform="translate({along * wide + LEFT},{down * high + TOP})">{_panel(panel)}</g>')
    temporary = path.with_suffix(".svg.new")
    temporary.write_text("\n".join([*parts, "</svg>\n"]))
    temporary.replace(path)


def _panel(panel: Panel) -> str:
    most_x = max(max(line.xs) for line in panel.lines)
    most_y = max(max(line.ys) for line in panel.lines) * 1.05
    parts = [
        f'<path d="M0 0V{HEIGHT}H{WIDTH}" fill="none" stroke="#999"/>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT + 34}" text-anchor="middle">{escape(panel.across)}</text>',
        f'<text x="-40" y="-12">{escape(panel.up)}</text>',
    ]
    parts += [
        f'<text x="{x / most_x * WIDTH:.1f}" y="{HEIGHT + 16}" text-anchor="middle">{x:g}</text>'
        for x in panel.lines[0].xs
    ]
    for share in (0.25, 0.5, 0.75, 1.0):
        y = HEIGHT * (1 - share)
        parts.append(f'<path d="M0 {y:.1f}H{WIDTH}" stroke="#eee"/>')
        parts.append(f'<text x="-6" y="{y + 4:.1f}" text-anchor="end">{most_y * share:.3g}</text>')
    for place, line in enumerate(panel.lines):
        colour = COLOURS[place % len(COLOURS)]
        spots = [(x / most_x * WIDTH, HEIGHT * (1 - y / most_y)) for x, y in zip(line.xs, line.ys, strict=True)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in spots]
        parts.append(
            f'<text x="{WIDTH - 4}" y="{14 + 15 * place}" text-anchor="end" fill="{colour}">{line.name}</text>'
        )
    return "".join(parts)
