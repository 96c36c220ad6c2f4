"""Small line charts as SVG, without a plotting library."""

from dataclasses import dataclass
from html import escape
from pathlib import Path

WIDTH, HEIGHT, LEFT, TOP, GAP = 300, 200, 56, 34, 34
COLOURS = ("#b3541e", "#1f6f8b", "#5b7f3a", "#7a4b8a")


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    name: str
    xs: list[float]
    ys: list[float]


@dataclass(frozen=True)
class Panel:
    """Lines with common axes, which start at zero."""

    x_label: str
    y_label: str
    lines: list[Line]


def write_svg(path: Path, rows: list[list[Panel]]) -> None:
    """Write a grid of panels, each with its own axes."""
    cell_width, cell_height = LEFT + WIDTH + GAP, TOP + HEIGHT + GAP + 18
    width, height = cell_width * max(map(len, rows)), cell_height * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        ' font-family="sans-serif" font-size="12" fill="#333">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for row_index, row in enumerate(rows):
        for column, panel in enumerate(row):
            x, y = column * cell_width + LEFT, row_index * cell_height + TOP
            parts.append(f'<g transform="translate({x},{y})">{_panel(panel)}</g>')
    temporary = path.with_suffix(".svg.new")
    temporary.write_text("\n".join([*parts, "</svg>\n"]))
    temporary.replace(path)


def _panel(panel: Panel) -> str:
    max_x = max(max(line.xs) for line in panel.lines)
    max_y = max(max(line.ys) for line in panel.lines) * 1.05
    parts = [
        f'<path d="M0 0V{HEIGHT}H{WIDTH}" fill="none" stroke="#999"/>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT + 34}" text-anchor="middle">{escape(panel.x_label)}</text>',
        f'<text x="-40" y="-12">{escape(panel.y_label)}</text>',
    ]
    parts += [
        f'<text x="{x / max_x * WIDTH:.1f}" y="{HEIGHT + 16}" text-anchor="middle">{x:g}</text>'
        for x in panel.lines[0].xs
    ]
    for fraction in (0.25, 0.5, 0.75, 1.0):
        y = HEIGHT * (1 - fraction)
        parts.append(f'<path d="M0 {y:.1f}H{WIDTH}" stroke="#eee"/>')
        parts.append(f'<text x="-6" y="{y + 4:.1f}" text-anchor="end">{max_y * fraction:.3g}</text>')
    for index, line in enumerate(panel.lines):
        colour = COLOURS[index % len(COLOURS)]
        points = [(x / max_x * WIDTH, HEIGHT * (1 - y / max_y)) for x, y in zip(line.xs, line.ys, strict=True)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        parts.append(
            f'<text x="{WIDTH - 4}" y="{14 + 15 * index}" text-anchor="end" fill="{colour}">{line.name}</text>'
        )
    return "".join(parts)
