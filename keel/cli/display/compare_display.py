"""Print the report of `keel compare` as tables in a terminal."""

import math
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from keel.tools.compare import ComparisonReport
from keel.tools.compare.html import OVERVIEW_HEADERS, OVERVIEW_NOTES, format_number, format_percent, overview_cells
from keel.tools.compare.report import ObjectiveSummary


def print_report(out: Console, report: ComparisonReport) -> None:
    """Print the report as tables. Markup in names and texts is not interpreted."""
    steps = f"{len(report.steps):,} step{'s' if len(report.steps) > 1 else ''}"
    groups = f"{report.groups:,} groups, " if report.groups else ""
    out.print(f"{report.source}: {steps}, {groups}{report.sequences:,} sequences, {report.tokens:,} trainable tokens")
    for reason, count in report.skipped.items():
        out.print(f"skipped: {count:,} sequences {reason}", style="dim")
    for name, reason in report.failures.items():
        out.print(Text(f"{name} was not evaluated: {reason}", "yellow"))
    names = [f"{number} {name}" for number, name in enumerate(report.names, start=1)]
    _print_section(out, "overview", _overview_table(out, names, report.objectives))
    for note in OVERVIEW_NOTES:
        out.print(note, style="dim")
    _print_section(out, "loss by term, mean over steps", _terms_table(report.objectives))
    if any(row.gates for row in report.objectives):
        _print_section(out, "dropped by gate", _gates_table(report.objectives))
        _print_section(out, "share dropped", _splits_table(report.objectives))
    if any(row.texts for row in report.objectives):
        _print_section(out, "most dropped tokens", _texts_table(report.objectives))
    _print_section(out, "cosine of the gradients by log-prob", _matrix_table(names, report.cosine))
    if any(row.dropped for row in report.objectives):
        title = "overlap: of the tokens that the row's objective drops, the share that the column's also drops"
        _print_section(out, title, _matrix_table(names, report.overlap))
    if report.weights is not None:
        weights = report.weights
        title = f"cosine of the gradients by weight, {weights.model}, steps {', '.join(map(str, weights.steps))}"
        _print_section(out, title, _matrix_table(names, weights.cosine))
        norms = ", ".join(
            f"{name} {format_number(norm)}" for name, norm in zip(names, weights.gradient_norm, strict=True)
        )
        out.print(Text(f"gradient norms: {norms}"))
        difference = format_number(weights.logprob_difference)
        out.print(f"{weights.parameters:,} weights; log-probs differ from the recorded ones by {difference} on average")


def _overview_table(out: Console, names: Sequence[str], rows: Sequence[ObjectiveSummary]) -> Table:
    """Return the overview with one row per objective, or with one column per objective if that is too wide."""
    cells = [overview_cells(name, row) for name, row in zip(names, rows, strict=True)]
    # headers of two words take two lines
    table = _make_table(*(header.replace(" ", "\n", 1) for header in OVERVIEW_HEADERS))
    for first, *rest in cells:
        table.add_row(Text(first), *rest)
    if out.measure(table, options=out.options.update_width(10_000)).maximum <= out.width:
        return table
    transposed = _make_table("", *(name.split()[0] for name in names))
    for index, header in enumerate(OVERVIEW_HEADERS[1:], start=1):
        transposed.add_row(header, *(row[index] for row in cells))
    for name in names:
        transposed.add_row(Text(name))
    return transposed


def _terms_table(rows: Sequence[ObjectiveSummary]) -> Table:
    kinds = list(dict.fromkeys(term for row in rows for term in row.terms))
    table = _make_table("objective", *kinds)
    for row in rows:
        table.add_row(
            Text(row.objective), *(format_number(row.terms[kind]) if kind in row.terms else "" for kind in kinds)
        )
    return table


def _gates_table(rows: Iterable[ObjectiveSummary]) -> Table:
    table = _make_table("objective", "tokens", "sequences", "gate")
    table.columns[-1].justify = "left"
    for row in rows:
        if row.invalid_logprobs:
            table.add_row(Text(row.objective), f"{row.invalid_logprobs:,}", "", "invalid sampler log-prob")
        for gate in row.gates:
            table.add_row(Text(row.objective), f"{gate.tokens:,}", f"{gate.sequences:,}", gate.reason)
    return table


def _splits_table(rows: Sequence[ObjectiveSummary]) -> Table:
    table = _make_table("tokens by", "", "tokens", *(str(number) for number in range(1, len(rows) + 1)))
    for kind, counts in rows[0].splits.items():
        for index, count in enumerate(counts):
            by_objective = (row.splits[kind][index] for row in rows)
            cells = [format_percent(each.dropped / each.tokens if each.tokens else math.nan) for each in by_objective]
            table.add_row(kind if index == 0 else "", count.label, f"{count.tokens:,}", *cells)
    return table


def _texts_table(rows: Iterable[ObjectiveSummary]) -> Table:
    table = _make_table("objective", "token", "dropped", "occurrences", "dropped with A > 0")
    table.columns[1].justify = "left"
    for row in rows:
        for index, text in enumerate(row.texts):
            counts = (f"{text.dropped:,}", f"{text.tokens:,}", f"{text.dropped_positive:,}")
            table.add_row(Text(row.objective if index == 0 else ""), Text(text.text), *counts)
    return table


def _matrix_table(names: Sequence[str], matrix: Sequence[Sequence[float]]) -> Table:
    table = _make_table("", *(name.split()[0] for name in names))
    for name, row in zip(names, matrix, strict=True):
        table.add_row(Text(name), *(f"{value:.3f}" if math.isfinite(value) else "-" for value in row))
    return table


def _make_table(*headers: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    for index, header in enumerate(headers):
        table.add_column(header, justify="left" if index == 0 else "right", overflow="fold")
    return table


def _print_section(out: Console, title: str, table: Table) -> None:
    out.print()
    out.print(title, style="bold cyan")
    out.print(table)
