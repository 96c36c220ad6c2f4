"""The display of a notebook publishes what changed, from the caller's thread, with all text escaped."""

from pathlib import Path

import pytest

from keel.api.notebook_display import NotebookDisplay, in_notebook

METRICS = {"reward": 0.25, "loss": -0.5, "reward_components/dataset/exact": 0.25}


@pytest.fixture
def published() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def display(published: list[tuple[str, str]]) -> NotebookDisplay:
    return NotebookDisplay(lambda page, text: published.append((page, text)), clock=lambda: 0.0)


def test_only_a_refresh_publishes_and_only_changes(display: NotebookDisplay, published: list[tuple[str, str]]) -> None:
    display.started("first", Path("runs/first"), 20, 0)
    display.step(1, METRICS)
    assert not published
    display.refresh()
    display.refresh()
    ((page, text),) = published
    assert '<progress value="1" max="20">' in page and "<td>0.250</td>" in page and "exact 0.25" in page
    assert text.splitlines()[0] == "first: 20 steps, in runs/first" and "0.250" in text and "step 1/20" in text


def test_text_of_a_model_or_a_reward_is_escaped(display: NotebookDisplay, published: list[tuple[str, str]]) -> None:
    display.started("first", Path("runs/first"), 20, 0)
    display.waiting("<script>alert(1)</script>\x1b[2J")
    display.rollouts_failed(1, "<img src=x>")
    display.notice("<b>\u202e")
    display.refresh()
    display.ended("summary <i>")
    display.refresh()
    for page, text in published:
        assert "<script" not in page and "<img" not in page and "<b>" not in page and "<i>" not in page
        assert "\x1b" not in page + text and "\u202e" not in page + text
    assert "summary &lt;i&gt;" in published[-1][0] and "<progress" not in published[-1][0]


def test_a_test_is_not_a_notebook() -> None:
    assert not in_notebook()
