"""Render a sweep as one HTML file that needs no other file and no network: curves and the tables of the terminal.

Built from the parts of `keel.tools.compare.html`, with the same guarantees.
"""

import html
import math
from collections.abc import Sequence

from keel.tools.compare.chart_data import Chart, has_values, line_chart
from keel.tools.compare.html import chart_figures, format_percent, html_document, html_table
from keel.tools.sweep.results import CURVES, SeedStatistics, SweepResults, TrialResult, VariantResult

MEASURE_HEADERS = ("train reward", "eval reward", "95 %", "mismatch", "masked low", "masked high", "tokens", "seconds")
"""Column headers of the measures, in the terminal as well."""
MEASURE_NOTES = (
    "train reward: mean of the last fifth of the steps",
    "eval reward: on held-out tasks after the last step; 95 %: its interval over tasks",
    "mismatch: mean KL between sampler and policy",
    "masked low, masked high: share of trainable tokens that a gate dropped, by side",
    "tokens: trained on; seconds: all steps",
)
"""Explanations of the columns."""


def render_results(results: SweepResults) -> str:
    """Return the HTML file."""
    seeds = results.seeds
    band = f" The band spans the lowest and the highest of the {seeds} seeds." if seeds > 1 else ""
    charts = [chart for chart in _charts(results.variants) if has_values(chart)]
    parts = [
        f"<h1>keel: {html.escape(results.recipe)}, {len(results.variants)} variants, {seeds} seed"
        f"{'s' if seeds > 1 else ''}</h1>",
        f'<p class="note">One line per variant: the mean over its seeds, by step.{band}</p>',
        chart_figures(charts),
        "<h2>Variants</h2>",
        html_table(("variant", "runs", *MEASURE_HEADERS), (_variant_row(variant) for variant in results.variants)),
        f'<p class="note">Mean over finished runs ± standard deviation over seeds. {"; ".join(MEASURE_NOTES)}.</p>',
        "<h2>Runs</h2>",
        html_table(
            ("run", "seed", "status", "steps", *MEASURE_HEADERS), (_trial_row(trial) for trial in results.trials)
        ),
        *(
            f"<p><b>{html.escape(trial.name)}</b>: {html.escape(trial.error)}</p>"
            for trial in results.trials
            if trial.error
        ),
    ]
    return html_document(f"keel: {results.recipe}", parts, charts)


def format_measure(name: str, value: float) -> str:
    """Format one of MEASURES for a table."""
    if not math.isfinite(value):
        return "-"
    if name.startswith("dropped"):
        return format_percent(value)
    return {"mismatch": f"{value:.1e}", "tokens": f"{value:,.0f}", "seconds": f"{value:.1f}"}.get(name, f"{value:.3f}")


def format_statistics(name: str, statistics: SeedStatistics, separator: str) -> str:
    """Format a mean and its standard deviation over seeds."""
    deviation = f"{separator}± {format_measure(name, statistics.std)}" if math.isfinite(statistics.std) else ""
    return format_measure(name, statistics.mean) + deviation


def format_interval(bounds: tuple[float, float]) -> str:
    """Format a 95 % interval."""
    return f"{bounds[0]:.3f} - {bounds[1]:.3f}" if all(map(math.isfinite, bounds)) else "-"


def variant_cells(variant: VariantResult, separator: str = " ") -> list[str]:
    """Return the cells of MEASURE_HEADERS. `separator` stands between a mean and its standard deviation."""
    names = ("training", "evaluation", "mismatch", "dropped_low", "dropped_high", "tokens", "seconds")
    cells = [format_statistics(name, variant.over_seeds(name), separator) for name in names]
    return [*cells[:2], format_interval(variant.interval), *cells[2:]]


def _charts(variants: Sequence[VariantResult]) -> list[Chart]:
    charts = []
    for name in (*CURVES, "evaluation"):
        curves = {variant.name: variant.curve(name) for variant in variants}
        series = {variant: points for variant, (points, _) in curves.items()}
        charts.append(line_chart(f"{name}, by step", series, {variant: band for variant, (_, band) in curves.items()}))
    return charts


def _variant_row(variant: VariantResult) -> list[str]:
    return [variant.name, f"{len(variant.finished)} of {len(variant.trials)}", *variant_cells(variant)]


def _trial_row(trial: TrialResult) -> list[str]:
    cells = {name: format_measure(name, value) for name, value in trial.measures.items()}
    first = [cells.pop("training"), cells.pop("evaluation"), format_interval(trial.interval)]
    return [trial.name, str(trial.seed), trial.status, f"{trial.steps:,}", *first, *cells.values()]
