"""A text plot of kept and dropped tokens over (p, q): sampler probability to the right, policy probability upwards.

The marks come from `keel.objectives.scalar_gates`, which needs no tensors. The plot shows decisions about a single
token; if an objective drops no tokens, decides over the whole step or compares several pairs of policies, a sentence
says so instead.
"""

from collections.abc import Sequence

from rich.text import Text

from keel.objectives import Composition, Gate
from keel.objectives.scalar_gates import first_dropped_side

COLUMNS, ROWS = 32, 16
"""Powers of two, so that no cell lies on a decimal bound such as 0.2, where rounding would make the edge ragged."""
MIN_DECADE = -8
"""Lowest decade of logarithmic axes."""
MARKS = {None: (".", "dim"), "low": ("-", "bold blue"), "high": ("+", "bold red")}
POLICY_LABELS = {"policy": "policy", "sampler": "sampler", "proximal": "proximal policy"}


def draw_dropped_region(composition: Composition) -> Text:
    """Return the plot with its caption, or a sentence if there is nothing to plot."""
    gates = [gate for gate in composition.gates if gate.scope != "step"]
    if not composition.gates:
        return Text("No plot: the objective drops no tokens.")
    if not gates:
        return Text("No plot: the objective decides over the whole step, not per token.")
    if len({gate.between for gate in gates}) > 1:
        return Text("No plot: the gates compare different pairs of policies.")
    signs = (1.0, -1.0) if any(gate.when != "always" for gate in gates) else (0.0,)
    log = False
    panels = [_grid(gates, sign, log) for sign in signs]
    if not _any_dropped(panels):
        log = True
        panels = [_grid(gates, sign, log) for sign in signs]
    numerator, denominator = (POLICY_LABELS[policy] for policy in gates[0].between.split("/"))
    titles = ["A > 0", "A < 0"] if len(signs) == 2 else ["every A"]
    framed = [
        _with_axes(panel, title, numerator, denominator, log) for panel, title in zip(panels, titles, strict=True)
    ]
    text = Text()
    for lines in zip(*framed, strict=True):
        joined = Text("   ").join(lines)
        joined.rstrip()
        text.append_text(joined).append("\n")
    return text.append_text(_caption(composition.gates, panels, numerator, denominator))


def _any_dropped(panels: Sequence[list[Text]]) -> bool:
    return any(mark in line.plain for panel in panels for line in panel for mark in "+-")


def _cell_center(index: int, count: int, log: bool) -> float:
    """Return the probability at the center of a cell."""
    fraction = (index + 0.5) / count
    return float(10 ** (MIN_DECADE * (1 - fraction))) if log else fraction


def _grid(gates: Sequence[Gate], advantage: float, log: bool) -> list[Text]:
    """Return one line of marks per policy probability, the largest first."""
    lines = []
    for row in reversed(range(ROWS)):
        line = Text()
        for column in range(COLUMNS):
            p, q = _cell_center(row, ROWS, log), _cell_center(column, COLUMNS, log)
            line.append(*MARKS[first_dropped_side(gates, p, q, advantage)])
        lines.append(line)
    return lines


def _with_axes(panel: list[Text], title: str, numerator: str, denominator: str, log: bool) -> list[Text]:
    """Return a panel with its axes; all lines have the same length."""
    ticks = (f"1e{MIN_DECADE}", f"1e{MIN_DECADE // 2}", "1") if log else ("0.0", "0.5", "1.0")
    labels = {0: ticks[2], ROWS // 2: ticks[1], ROWS - 1: ticks[0]}
    lines = [Text(f"{title}, {numerator} p upwards", style="bold")]
    lines += [Text(f"{labels.get(row, ''):>5} |").append_text(line) for row, line in enumerate(panel)]
    lines.append(Text(f"{'':5} +{'=' * COLUMNS}"))
    half = COLUMNS // 2
    lines.append(Text(f"{'':7}{ticks[0]:<{half}}{ticks[1]:<{half - len(ticks[2])}}{ticks[2]}"))
    lines.append(Text(f"{'':7}{denominator + ' q':^{COLUMNS}}"))
    for line in lines:
        line.pad_right(COLUMNS + 7 - len(line))
    return lines


def _caption(gates: Sequence[Gate], panels: Sequence[list[Text]], numerator: str, denominator: str) -> Text:
    marks = [
        (None, "kept"),
        ("low", f"dropped, p too far below q ({numerator} below {denominator})"),
        ("high", "dropped, p too far above q"),
    ]
    text = Text()
    for side, meaning in marks:
        text.append(*MARKS[side]).append(f" {meaning}   ")
    text.rstrip()
    notes = []
    if any(gate.scope == "sequence" for gate in gates):
        notes.append("A sequence gate decides for the whole sequence; the plot shows a sequence of one token.")
    if any(gate.scope == "step" for gate in gates):
        notes.append("Gates that decide over the whole step are not shown.")
    if all(gate.when != "always" for gate in gates):
        notes.append("Tokens with A = 0 are always kept.")
    if not _any_dropped(panels):
        notes.append("No plotted point is dropped.")
    return text.append("".join(f"\n{note}" for note in notes))
