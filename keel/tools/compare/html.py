"""A comparison as one HTML file that needs nothing else: no script, no style sheet, no request.

Every word that is not written here is escaped, and the page forbids scripts and requests by its own policy as well, so
that a token that looks like markup is shown and nothing more. It is legible in light and dark and on a narrow screen.
"""

import html
import math
from collections.abc import Callable, Iterable, Sequence

from keel.tools.compare.evaluate import StepPoint
from keel.tools.compare.report import SPLIT_KINDS, ComparisonReport, ObjectiveSummary
from keel.tools.compare.svg import bar_chart, format_number, legend, line_chart

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --dim: #888; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem } h3 { font-size: 1rem; margin: 1rem 0 .2rem }
.wide { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { border-bottom: 1px solid var(--line); padding: .2rem .6rem; text-align: right; white-space: nowrap }
th:first-child, td:first-child { text-align: left } td.text { font-family: ui-monospace, monospace; white-space: pre }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(26rem, 1fr)); gap: 1rem }
figure { margin: 0 } figcaption { font-weight: 600 } svg text { fill: currentColor; font-size: 13px }
.grid { stroke: var(--line) } .key { margin-right: 1.2rem; white-space: nowrap } .key svg { margin-right: .3rem }
.none, .note { color: var(--dim) }
"""
_CONTENT_SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

_DROP_COLUMNS = ("objective", "dropped", "of advantage", "sequences", "touched", "clipped", "sample size")
_LOSS_COLUMNS = ("loss", "gradient norm", "gradient on")


def render_report(report: ComparisonReport) -> str:
    """The whole file."""
    parts = [
        _header(report),
        legend(report.names),
        "<h2>What each keeps</h2>",
        html_table((*_DROP_COLUMNS, *_LOSS_COLUMNS), (_objective_cells(row) for row in report.objectives)),
        '<p class="note">Dropped: share of the trainable tokens that a gate refused, and of the size of all advantage.'
        " Sequences: those of which nothing trains. Touched: those with a dropped token. Sample size: effective, as a"
        " share of the tokens. Loss and gradient norm: mean over steps, by log-prob. Gradient on: share of the tokens"
        " it in effect rests on.</p>",
        _charts(report),
        "<h2>Cosine of the gradients by log-prob</h2>",
        _matrix(report.names, report.cosine),
        "<h2>Overlap</h2>",
        '<p class="note">Of the tokens that the row drops, the share that the column drops too.</p>',
        _matrix(report.names, report.overlap),
        _weight_gradients(report),
        *(_objective_details(row) for row in report.objectives),
    ]
    return html_document("keel compare", parts)


def html_document(title: str, parts: Iterable[str]) -> str:
    """A page that needs nothing else, from parts that are HTML already."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_CONTENT_SECURITY_POLICY}">'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
        f"<body>{''.join(parts)}</body></html>\n"
    )


def format_percent(fraction: float) -> str:
    """A share for people."""
    return "-" if not math.isfinite(fraction) else f"{100 * fraction:.2f} %"


def _header(report: ComparisonReport) -> str:
    said = [
        f"{len(report.steps):,} steps ({report.steps[0]} to {report.steps[-1]}), {report.sequences:,} sequences,"
        f" {report.tokens:,} trainable tokens"
    ]
    said += [f"left out: {count:,} sequences {why}" for why, count in report.skipped.items()]
    said += [f"{name} was refused: {why}" for name, why in report.failures.items()]
    return f"<h1>keel compare: {html.escape(report.source)}</h1>" + "".join(
        f"<p>{html.escape(line)}</p>" for line in said
    )


def _objective_cells(row: ObjectiveSummary) -> list[str]:
    return [
        row.objective,
        format_percent(row.dropped_share),
        format_percent(row.dropped_advantage),
        f"{row.sequences_dropped:,} of {row.sequences:,}",
        f"{row.sequences_hit:,}",
        format_percent(row.clipped_share),
        format_percent(row.effective_sample_size),
        format_number(row.loss),
        format_number(row.gradient_norm),
        format_percent(row.effective_gradient_tokens),
    ]


def html_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, text_first: bool = False) -> str:
    """Rows of cells, which are escaped here."""
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in columns)
    body = []
    for row in rows:
        kind = ' class="text"' if text_first else ""
        cells = f"<td{kind}>{html.escape(row[0])}</td>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row[1:])
        body.append(f"<tr>{cells}</tr>")
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def _matrix(names: Sequence[str], matrix: Sequence[Sequence[float]]) -> str:
    """Numbers on a ground that is the stronger the larger they are, blue above zero and orange below."""
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in ("", *names))
    rows = []
    for name, row in zip(names, matrix, strict=True):
        cells = []
        for value in row:
            known = math.isfinite(value)
            colour = "0,114,178" if value >= 0 else "213,94,0"
            ground = f' style="background:rgba({colour},{0.45 * min(abs(value), 1):.2f})"' if known else ""
            cells.append(f"<td{ground}>{f'{value:.3f}' if known else '-'}</td>")
        rows.append(f'<tr><th scope="row">{html.escape(name)}</th>{"".join(cells)}</tr>')
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _charts(report: ComparisonReport) -> str:
    by_name = {name: [moment for moment in report.by_step if moment.objective == name] for name in report.names}
    curves: dict[str, Callable[[StepPoint], float]] = {
        "share dropped, by step": lambda m: m.dropped / m.tokens if m.tokens else math.nan,
        "loss, by step": lambda m: m.loss,
        "gradient norm by log-prob, by step": lambda m: m.gradient_norm,
        f"cosine with {report.names[0]}, by step": lambda m: m.cosine,
    }
    drawn = [
        line_chart(label, {name: [(float(m.step), value(m)) for m in moments] for name, moments in by_name.items()})
        for label, value in curves.items()
    ]
    for kind in SPLIT_KINDS:
        groups = [share.label for share in report.objectives[0].splits.get(kind, [])]
        if groups:
            series = {
                row.objective: [
                    share.dropped / share.tokens if share.tokens else math.nan for share in row.splits[kind]
                ]
                for row in report.objectives
            }
            drawn.append(bar_chart(f"share dropped, by {kind}", groups, series))
    return f'<div class="charts">{"".join(drawn)}</div>'


def _weight_gradients(report: ComparisonReport) -> str:
    found = report.weights
    if found is None:
        return ""
    steps = ", ".join(map(str, found.steps))
    said = (
        f"{found.model}, {found.parameters:,} weights, steps {steps}; its log-probs differ from the recorded ones by"
        f" {format_number(found.logprob_difference)} in the mean"
    )
    norms = [[name, format_number(norm)] for name, norm in zip(report.names, found.gradient_norm, strict=True)]
    return (
        f"<h2>Gradients by weight</h2><p>{html.escape(said)}</p>"
        f"{html_table(('objective', 'gradient norm'), norms)}<h3>Cosine</h3>{_matrix(report.names, found.cosine)}"
    )


def _objective_details(row: ObjectiveSummary) -> str:
    """Terms, gates and texts of one objective."""
    terms = html_table(("term", "loss"), [[name, format_number(value)] for name, value in row.terms.items()])
    gates = html_table(
        ("gate", "tokens", "sequences"),
        [[gate.reason, f"{gate.tokens:,}", f"{gate.sequences:,}"] for gate in row.gates],
    )
    words = html_table(
        ("token", "occurs", "dropped", "with A > 0", "share"),
        [
            [
                word.text,
                f"{word.tokens:,}",
                f"{word.dropped:,}",
                f"{word.dropped_positive:,}",
                format_percent(word.dropped / word.tokens),
            ]
            for word in row.texts
        ],
        text_first=True,
    )
    parts = [f"<h2>{html.escape(row.objective)}</h2>", terms]
    if row.gates:
        parts += ["<h3>Dropped by gate</h3>", gates]
    else:
        parts.append('<p class="none">No token was dropped.</p>')
    if row.texts:
        parts += ["<h3>Most dropped tokens</h3>", words]
    return "".join(parts)
