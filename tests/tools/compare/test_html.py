"""The HTML reports of `keel compare` and `keel sweep`: their chart data, and the charts in a real browser."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from keel.tools.compare.chart_data import MAX_POINTS, bar_chart, has_values, line_chart
from keel.tools.compare.html import chart_figures, html_document, render_report
from tests.support.lens_browser import Browser, browser, missing
from tests.support.recorded_rows import compare, random_rows, write_json

needs_browser = pytest.mark.skipif(bool(missing()), reason=missing() or "there is a browser")


def test_a_value_that_is_not_finite_is_a_gap() -> None:
    (series,) = line_chart("x", {"a": [(1.0, 1.0), (2.0, math.nan), (3.0, 1.0), (4.0, math.inf)]})["series"]
    assert series["values"] == [1.0, None, 1.0, None]
    (bars,) = bar_chart("x", ["a", "b"], {"c": [math.nan, 2.0]})["series"]
    assert bars["values"] == [None, 2.0]


def test_a_long_series_is_averaged_to_a_bounded_number_of_points() -> None:
    points = [(float(step), float(step % 7)) for step in range(50_000)]
    band = [(step, value - 1, value + 1) for step, value in points]
    (series,) = line_chart("x", {"a": points}, {"a": band})["series"]
    assert {len(series[name]) for name in ("step", "values", "low", "high")} == {MAX_POINTS}
    assert series["step"][0] == pytest.approx(sum(range(156)) / 156)
    assert series["high"] == pytest.approx([value + 1 for value in series["values"]])


def test_a_gap_in_a_band_is_a_gap_in_both_of_its_edges() -> None:
    points = [(float(step), 1.0) for step in range(3)]
    band = [(0.0, 0.0, 2.0), (1.0, math.nan, math.nan), (2.0, 1.0, 1.0)]
    (series,) = line_chart("x", {"a": points}, {"a": band})["series"]
    assert (series["low"], series["high"]) == ([0.0, None, 1.0], [2.0, None, 1.0])
    assert "low" not in line_chart("x", {"a": points})["series"][0]


def test_a_chart_without_values_is_left_out() -> None:
    assert not has_values(bar_chart("x", ["a"], {"b": [math.nan]}))
    assert not has_values(line_chart("x", {"b": []}))
    assert has_values(line_chart("x", {"a": [], "b": [(1.0, 0.0)]}))


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as window:
        yield window


def open_page(window: Browser, path: Path, text: str) -> None:
    path.write_text(text)
    window.open("about:blank")
    window.open(path.as_uri())
    window.wait("return document.body.dataset.ready === 'report'")


@needs_browser
@pytest.mark.browser
def test_the_charts_of_a_comparison_are_drawn_from_the_file_alone(window: Browser, tmp_path: Path) -> None:
    report = compare(write_json(tmp_path / "t.jsonl", random_rows(4)), "icepop,dppo_tv,opsm")
    open_page(window, tmp_path / "report.html", render_report(report))
    assert window.run("return document.querySelectorAll('figure canvas').length") == 7
    captions = window.run("return [...document.querySelectorAll('figcaption')].map((e) => e.innerText)")
    assert captions[0] == "share dropped, by step"
    assert captions[-1] == "share dropped, by advantage"
    legend = window.run("return document.querySelector('#chart-1 .legend').innerText")
    assert [name in legend for name in ("icepop", "dppo_tv", "opsm")] == [True] * 3
    assert window.run("return performance.getEntriesByType('resource').length") == 0
    assert window.log() == []


@needs_browser
@pytest.mark.browser
def test_a_band_is_shaded_and_pointing_at_a_chart_shows_its_step_and_values(window: Browser, tmp_path: Path) -> None:
    points = [(float(step), float(step)) for step in range(11)]
    band = [(step, value - 5, value + 5) for step, value in points]
    charts = [line_chart("x", {"<b>a": points}, {"<b>a": band})]
    open_page(window, tmp_path / "page.html", html_document("t", [chart_figures(charts)], charts))
    opaque = window.run(
        "const c = document.querySelector('canvas');"
        "const data = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        "let count = 0; for (let i = 3; i < data.length; i += 4) if (data[i] > 20 && data[i] < 60) count += 1;"
        "return count / (data.length / 4)"
    )
    assert opaque > 0.1
    window.point(".u-over")
    legend = window.wait(
        "const e = document.querySelector('.legend'); return e.innerText.includes('step') && e.innerText"
    )
    assert "step 5" in legend
    assert "<b>a 5" in legend
    assert window.log() == []


@needs_browser
@pytest.mark.browser
def test_bars_are_drawn_and_pointing_at_them_shows_their_category(window: Browser, tmp_path: Path) -> None:
    charts = [bar_chart("x", ["one", "two", "three"], {"a": [1.0, 2.0, 3.0], "b": [3.0, math.nan, 1.0]})]
    open_page(window, tmp_path / "page.html", html_document("t", [chart_figures(charts)], charts))
    window.point(".u-over")
    legend = window.wait(
        "const e = document.querySelector('.legend'); return e.innerText.includes('two') && e.innerText"
    )
    assert "a 2" in legend
    assert "b \u2013" in legend
    assert window.log() == []
