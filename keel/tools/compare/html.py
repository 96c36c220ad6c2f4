"""Render a comparison as one HTML file that needs no other file and no network.

Text from models, names and paths are escaped; the Content-Security-Policy of the page allows only its own script and
style sheet, so that a token that looks like markup is shown as text. Charts are drawn by the lens's chart code, which
is inlined. The page supports light and dark mode and narrow screens; without JavaScript its tables remain.
"""

import html
import math
from collections.abc import Callable, Iterable, Sequence

from keel.tools.compare.chart_data import Chart, bar_chart, has_values, line_chart
from keel.tools.compare.evaluate import StepPoint
from keel.tools.compare.report import SPLIT_KINDS, ComparisonReport, ObjectiveSummary
from keel.tools.lens.offline_page import inline_assets

OVERVIEW_HEADERS = (
    *("objective", "dropped", "advantage mass", "seqs dropped", "seqs hit", "clipped", "ESS"),
    *("loss", "grad norm", "eff. tokens"),
)
"""Column headers of the overview table, in the terminal as well."""
OVERVIEW_NOTES = (
    "dropped: share of trainable tokens that a gate dropped",
    "advantage mass: share of the sum of |advantage| on dropped tokens",
    "seqs dropped: sequences without a token that trains",
    "seqs hit: sequences with a dropped token",
    "clipped: share of trainable tokens whose gradient is clipped to zero",
    "ESS: effective sample size, as a share of trainable tokens",
    "loss, grad norm: loss and norm of its gradient by log-prob, mean over steps",
    "eff. tokens: effective number of tokens behind the gradient, as a share",
)
"""Explanations of the columns."""
_SCRIPT_MODULES = ("dom", "charts", "static_report")


def render_report(report: ComparisonReport) -> str:
    """Return the HTML file."""
    charts = [chart for chart in _charts(report) if has_values(chart)]
    parts = [
        _header(report),
        "<h2>Overview</h2>",
        html_table(OVERVIEW_HEADERS, (overview_cells(row.objective, row) for row in report.objectives)),
        f'<p class="note">{html.escape("; ".join(OVERVIEW_NOTES))}.</p>',
        chart_figures(charts),
        "<h2>Cosine of the gradients by log-prob</h2>",
        _matrix(report.names, report.cosine),
        "<h2>Overlap</h2>",
        "<p class=\"note\">Of the tokens that the row's objective drops, the share that the column's also drops.</p>",
        _matrix(report.names, report.overlap),
        _weight_gradients(report),
        *(_objective_details(row) for row in report.objectives),
    ]
    return html_document("keel compare", parts, charts)


def html_document(title: str, parts: Iterable[str], charts: Sequence[Chart]) -> str:
    """Return a self-contained page from parts that are HTML already, and the charts of its figures."""
    shell = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>{html.escape(title)}</title></head>\n"
        f'<body class="report">{"".join(parts)}\n'
        "<noscript><p>Charts need JavaScript. The page loads nothing from the network.</p></noscript>\n</body></html>\n"
    )
    return inline_assets(shell, _SCRIPT_MODULES, ("static_report.css",), "keel-charts", {"charts": list(charts)})


def chart_figures(charts: Sequence[Chart]) -> str:
    """Return one figure for each chart, which `static_report.js` fills by its id."""
    figures = (
        f'<figure id="chart-{index}"><figcaption>{html.escape(chart["title"])}</figcaption>'
        '<div class="legend"></div><div class="plot"></div></figure>'
        for index, chart in enumerate(charts)
    )
    return f'<div class="charts">{"".join(figures)}</div>'


def format_number(value: float) -> str:
    """Format a number with four significant digits."""
    return "-" if not math.isfinite(value) else f"{value:.4g}"


def format_percent(fraction: float) -> str:
    """Format a share as a percentage."""
    return "-" if not math.isfinite(fraction) else f"{100 * fraction:.2f} %"


def overview_cells(name: str, row: ObjectiveSummary) -> list[str]:
    """Return the cells of OVERVIEW_HEADERS."""
    return [
        name,
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
    """Return a table; cells are escaped here."""
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in columns)
    body = []
    for row in rows:
        kind = ' class="text"' if text_first else ""
        cells = f"<td{kind}>{html.escape(row[0])}</td>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row[1:])
        body.append(f"<tr>{cells}</tr>")
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def _header(report: ComparisonReport) -> str:
    lines = [
        f"{len(report.steps):,} steps ({report.steps[0]} to {report.steps[-1]}), {report.sequences:,} sequences,"
        f" {report.tokens:,} trainable tokens"
    ]
    lines += [f"skipped: {count:,} sequences {reason}" for reason, count in report.skipped.items()]
    lines += [f"{name} was not evaluated: {reason}" for name, reason in report.failures.items()]
    return f"<h1>keel compare: {html.escape(report.source)}</h1>" + "".join(
        f"<p>{html.escape(line)}</p>" for line in lines
    )


def _matrix(names: Sequence[str], matrix: Sequence[Sequence[float]]) -> str:
    """Return numbers with a background that is stronger for larger ones, blue above zero and orange below."""
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in ("", *names))
    rows = []
    for name, row in zip(names, matrix, strict=True):
        cells = []
        for value in row:
            known = math.isfinite(value)
            level = round(10 * min(abs(value), 1)) if known else 0
            background = f' class="{"positive" if value >= 0 else "negative"}-{level}"' if level else ""
            cells.append(f"<td{background}>{f'{value:.3f}' if known else '-'}</td>")
        rows.append(f'<tr><th scope="row">{html.escape(name)}</th>{"".join(cells)}</tr>')
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _charts(report: ComparisonReport) -> list[Chart]:
    by_name = {name: [point for point in report.by_step if point.objective == name] for name in report.names}
    curves: dict[str, Callable[[StepPoint], float]] = {
        "share dropped, by step": lambda point: point.dropped / point.tokens if point.tokens else math.nan,
        "loss, by step": lambda point: point.loss,
        "gradient norm by log-prob, by step": lambda point: point.gradient_norm,
        f"cosine with {report.names[0]}, by step": lambda point: point.cosine,
    }
    charts = [
        line_chart(title, {name: [(float(p.step), value(p)) for p in points] for name, points in by_name.items()})
        for title, value in curves.items()
    ]
    for kind in SPLIT_KINDS:
        labels = [count.label for count in report.objectives[0].splits.get(kind, [])]
        if labels:
            shares = {
                row.objective: [
                    count.dropped / count.tokens if count.tokens else math.nan for count in row.splits[kind]
                ]
                for row in report.objectives
            }
            charts.append(bar_chart(f"share dropped, by {kind}", labels, shares))
    return charts


def _weight_gradients(report: ComparisonReport) -> str:
    weights = report.weights
    if weights is None:
        return ""
    steps = ", ".join(map(str, weights.steps))
    summary = (
        f"{weights.model}, {weights.parameters:,} weights, steps {steps}; its log-probs differ from the recorded ones"
        f" by {format_number(weights.logprob_difference)} on average"
    )
    norms = [[name, format_number(norm)] for name, norm in zip(report.names, weights.gradient_norm, strict=True)]
    return (
        f"<h2>Gradients by weight</h2><p>{html.escape(summary)}</p>"
        f"{html_table(('objective', 'grad norm'), norms)}<h3>Cosine</h3>{_matrix(report.names, weights.cosine)}"
    )


def _objective_details(row: ObjectiveSummary) -> str:
    """Return the loss terms, gates and token texts of one objective."""
    terms = html_table(("term", "loss"), [[name, format_number(value)] for name, value in row.terms.items()])
    gates = html_table(
        ("gate", "tokens", "sequences"),
        [[gate.reason, f"{gate.tokens:,}", f"{gate.sequences:,}"] for gate in row.gates],
    )
    texts = html_table(
        ("token", "occurrences", "dropped", "dropped with A > 0", "share"),
        [
            [
                text.text,
                f"{text.tokens:,}",
                f"{text.dropped:,}",
                f"{text.dropped_positive:,}",
                format_percent(text.dropped / text.tokens),
            ]
            for text in row.texts
        ],
        text_first=True,
    )
    parts = [f"<h2>{html.escape(row.objective)}</h2>", terms]
    if row.gates:
        parts += ["<h3>Dropped by gate</h3>", gates]
    else:
        parts.append('<p class="none">No token was dropped.</p>')
    if row.texts:
        parts += ["<h3>Most dropped tokens</h3>", texts]
    return "".join(parts)
