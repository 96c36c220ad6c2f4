"""The trials as one HTML file that needs nothing else: curves side by side, and the tables of the terminal.

It is drawn by the parts that the offline comparison is drawn by: no script, no request, every foreign word escaped.
"""

import html
import math
from collections.abc import Sequence

from keel.tools.compare.html import format_percent, html_document, html_table
from keel.tools.compare.svg import format_number, legend, line_chart
from keel.tools.sweep.results import CURVES, SeedStatistics, SweepResults, TrialResult, VariantResult

MEASURE_HEADERS = ("training", "evaluation", "95 %", "mismatch", "low", "high", "tokens", "seconds")


def render_results(results: SweepResults) -> str:
    """The whole file."""
    seeds = results.seeds
    band = f" The band goes from the lowest to the highest of the {seeds} seeds." if seeds > 1 else ""
    parts = [
        f"<h1>keel: {html.escape(results.recipe)}, {len(results.variants)} variants, {seeds} seed"
        f"{'s' if seeds > 1 else ''}</h1>",
        legend([variant.name for variant in results.variants]),
        f'<p class="note">One line for each variant: the mean over its seeds, by step.{band}</p>',
        f'<div class="charts">{"".join(_charts(results.variants))}</div>',
        "<h2>Variants</h2>",
        html_table(("variant", "runs", *MEASURE_HEADERS), (_variant_row(variant) for variant in results.variants)),
        '<p class="note">Over finished runs, with the standard deviation over seeds. Training: mean reward of the last'
        " fifth of the steps. Evaluation: mean reward on held-out tasks; 95 %: its interval over tasks, which more"
        " seeds do not narrow. Mismatch: mean KL between sampler and policy. Low, high: share of the trainable tokens"
        " that a gate dropped. Tokens: that trained.</p>",
        "<h2>Runs</h2>",
        html_table(
            ("run", "seed", "status", "steps", *MEASURE_HEADERS), (_trial_row(trial) for trial in results.trials)
        ),
        *(f"<p><b>{html.escape(one.name)}</b>: {html.escape(one.error)}</p>" for one in results.trials if one.error),
    ]
    return html_document(f"keel: {results.recipe}", parts)


def format_measure(name: str, value: float) -> str:
    """A measure for people."""
    if not math.isfinite(value):
        return "-"
    if name.startswith("dropped"):
        return format_percent(value)
    return {"mismatch": f"{value:.1e}", "tokens": f"{value:,.0f}", "seconds": f"{value:.1f}"}.get(name, f"{value:.3f}")


def format_statistics(name: str, statistics: SeedStatistics, separator: str) -> str:
    """A mean, with what it varies by over seeds."""
    varies = f"{separator}± {format_measure(name, statistics.std)}" if math.isfinite(statistics.std) else ""
    return format_measure(name, statistics.mean) + varies


def format_interval(bounds: tuple[float, float]) -> str:
    """A 95 % interval."""
    return f"{bounds[0]:.3f} - {bounds[1]:.3f}" if all(map(math.isfinite, bounds)) else "-"


def variant_cells(variant: VariantResult, separator: str = " ") -> list[str]:
    """The measures of a variant, by HEADS. `between`: what stands between a mean and its spread."""
    names = ("training", "evaluation", "mismatch", "dropped_low", "dropped_high", "tokens", "seconds")
    found = [format_statistics(name, variant.over_seeds(name), separator) for name in names]
    return [*found[:2], format_interval(variant.interval), *found[2:]]


def _charts(variants: Sequence[VariantResult]) -> list[str]:
    drawn = []
    for name in (*CURVES, "evaluation"):
        curves = {variant.name: variant.curve(name) for variant in variants}
        series = {variant: points for variant, (points, _) in curves.items()}
        drawn.append(line_chart(f"{name}, by step", series, {variant: band for variant, (_, band) in curves.items()}))
    return drawn


def _variant_row(variant: VariantResult) -> list[str]:
    return [variant.name, f"{len(variant.finished)} of {len(variant.trials)}", *variant_cells(variant)]


def _trial_row(trial: TrialResult) -> list[str]:
    found = {name: format_measure(name, value) for name, value in trial.measures.items()}
    first = [found.pop("training"), found.pop("evaluation"), format_interval(trial.interval)]
    return [trial.name, format_number(trial.seed), trial.status, f"{trial.steps:,}", *first, *found.values()]
