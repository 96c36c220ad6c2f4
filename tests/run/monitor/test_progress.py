"""Displays of a run: the same metrics in a terminal, a log and JSON; text from a model cannot control the terminal."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from keel.run.evaluation.evaluate import EvaluationResult
from keel.run.monitor.callbacks import CallbackList, NullCallback
from keel.run.monitor.progress import (
    COLUMNS,
    QUIET_SECONDS,
    RunJsonLog,
    RunLog,
    RunScreen,
    StepPace,
    escape_unprintable,
    format_duration,
    make_run_display,
)

METRICS = {
    "reward": 0.3125,
    "loss": -0.01234,
    "is_masked_low": 0.001,
    "is_masked_high": 0.0325,
    "mismatch_kl": 1.23e-4,
    "staleness": 0.5,
    "tokens_per_second": 1234.4,
    "seconds": 8.26,
}
CELLS = ["0.312", "-0.0123", "0.10%", "3.25%", "1.2e-04", "0.50", "1,234", "8.3"]
HOSTILE = "\x1b[2J[bold red]x[/]\r\x07\u202eevil\nsecond"


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def evaluation(**changes):
    fields = {
        "environment": "larger_number",
        "reward": 0.71,
        "low": 0.59,
        "high": 0.81,
        "num_tasks": 64,
        "samples_per_task": 4,
        "pass_at_k": {1: 0.71, 4: 0.9},
        "failed_episodes": 0,
        "seconds": 3.0,
    }
    return EvaluationResult(**fields | changes)


def make_log(clock=None, width=200):
    out = io.StringIO()
    console = Console(file=out, width=width, markup=False, highlight=False, emoji=False)
    return RunLog(console, clock or Clock()), out


def make_screen(clock=None, width=100, height=30):
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=True, width=width, height=height, markup=False, highlight=False, emoji=False
    )
    return RunScreen(console, clock or Clock()), out


def drawn(screen, width=100, height=30):
    """Return the table, the bar and the status line as they are drawn now."""
    console = Console(file=io.StringIO(), width=width, height=height, markup=False, highlight=False)
    with console.capture() as captured:
        console.print(screen._draw())
    return captured.get()


def play(callback):
    """Send the events of a short run to a callback."""
    callback.waiting("loading tiny")
    callback.started("demo", Path("runs/demo"), 3, 0)
    callback.evaluated(0, evaluation())
    callback.waiting("sampling: 3 groups ready, 5 more needed")
    callback.step(1, METRICS)
    callback.notice("Ctrl-C: finishing step 2")
    callback.step(2, {})
    callback.ended("the summary\nin runs/demo")


# ---------------------------------------------------------------------------------------------------------------------
# metrics and durations


def test_every_metric_is_shown_in_its_column_and_a_missing_one_as_a_dash():
    assert [column.format_cell(METRICS) for column in COLUMNS] == CELLS
    assert [column.format_cell({}) for column in COLUMNS] == ["-"] * len(COLUMNS)
    assert [column.format_cell(dict.fromkeys(METRICS, float("nan"))) for column in COLUMNS] == ["-"] * len(COLUMNS)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.4, "59s"), (59.6, "1m00s"), (200, "3m20s"), (3600, "1h00m"), (7512, "2h05m")],
)
def test_durations_are_formatted(seconds, text):
    assert format_duration(seconds) == text


def test_the_time_left_is_estimated_from_the_last_steps_and_counts_down():
    clock = Clock()
    pace = StepPace(clock)
    pace.restart()
    assert pace.seconds_left(10) is None
    for _ in range(20):
        clock.now += 100
        pace.record_step()
    for _ in range(10):
        clock.now += 2
        pace.record_step()
    assert pace.seconds_left(5) == 10.0
    clock.now += 3
    assert pace.seconds_left(5) == 7.0
    clock.now += 100
    assert pace.seconds_left(5) == 0.0


def test_an_evaluation_before_the_first_step_does_not_count_as_part_of_it():
    clock = Clock()
    log, out = make_log(clock)
    log.started("demo", Path("runs/demo"), 3, 0)
    clock.now = 50
    log.evaluated(0, evaluation())
    clock.now = 52
    log.step(1, METRICS)
    assert out.getvalue().rstrip().endswith("left 4s")


# ---------------------------------------------------------------------------------------------------------------------
# log


def test_lines_of_steps_are_aligned():
    log, out = make_log()
    log.started("demo", Path("runs/demo"), 100, 0)
    log.step(1, METRICS)
    log.step(100, {"reward": 1.0})
    first, last = out.getvalue().splitlines()[1:]
    assert first.startswith("step   1/100  reward  0.312  loss  -0.0123  masked low  0.10%  masked high  3.25%")
    assert last.startswith("step 100/100  reward  1.000  loss        -  masked low      -  masked high      -")
    assert "  staleness  0.50  " in first
    assert first.index("left") == last.index("left")


def test_a_log_has_a_line_for_every_event_and_no_escape_codes():
    log, out = make_log()
    play(log)
    text = out.getvalue()
    assert "\x1b" not in text
    assert [line.split("  ")[0] for line in text.splitlines()] == [
        "demo: 3 steps, in runs/demo",
        "evaluated before training: larger_number reward 0.710 (0.590 - 0.810), pass@4 0.900, 64 tasks x 4 samples",
        "step 1/3",
        "Ctrl-C: finishing step 2",
        "step 2/3",
        "the summary",
        "in runs/demo",
    ]


def test_a_resumed_run_names_the_step_it_resumes_from():
    log, out = make_log()
    log.started("demo", Path("runs/demo"), 30, 12)
    assert out.getvalue() == "demo: resumes after step 12 of 30, in runs/demo\n"


def test_a_log_prints_the_status_only_after_a_quiet_time():
    clock = Clock()
    log, out = make_log(clock)
    for second in range(int(3 * QUIET_SECONDS)):
        clock.now = float(second)
        log.waiting(f"training for {second} s")
    assert out.getvalue().splitlines() == ["training for 30 s", "training for 60 s"]


def test_failed_episodes_are_shown_in_the_line_of_an_evaluation():
    log, out = make_log()
    log.evaluated(10, evaluation(failed_episodes=2, first_error="eval/1: KeyError: 'word'"))
    assert "2 failed (first: eval/1: KeyError: 'word')" in out.getvalue()
    assert out.getvalue().startswith("evaluated after step 10:")


def test_a_log_reports_failed_rollouts_immediately_and_then_at_most_every_quiet_time():
    clock = Clock()
    log, out = make_log(clock)
    for second in range(int(2 * QUIET_SECONDS)):
        clock.now = float(second)
        log.rollouts_failed(second + 1, f"KeyError: 'word'{HOSTILE} (mine.py:20)")
    first, second = out.getvalue().splitlines()
    assert first.startswith("1 rollout failed; the last error: KeyError: 'word'\\x1b") and first.endswith(
        "(mine.py:20)"
    )
    assert second.startswith("31 rollouts failed; the last error: KeyError")


# ---------------------------------------------------------------------------------------------------------------------
# JSON


def test_json_reports_failed_rollouts():
    lines = []
    log = RunJsonLog(lines.append, Clock())
    log.rollouts_failed(54, "KeyError: 'word' (mine.py:20)")
    log.rollouts_failed(55, "KeyError: 'word' (mine.py:20)")
    (event,) = map(json.loads, lines)
    assert event == {"event": "rollouts_failed", "count": 54, "last_error": "KeyError: 'word' (mine.py:20)"}


def test_json_is_one_object_per_line_with_every_metric():
    written = []
    play(RunJsonLog(written.append, Clock()))
    events = [json.loads(line) for line in written]
    assert all(line.count("\n") == 1 and line.endswith("\n") for line in written)
    assert [event["event"] for event in events] == [
        "waiting",
        "started",
        "evaluated",
        "step",
        "notice",
        "step",
        "ended",
    ]
    assert events[0]["status"] == "loading tiny" and events[1]["start_step"] == 0
    assert events[3] == {"event": "step", "step": 1, "metrics": METRICS}
    assert events[2]["metrics"]["pass@4"] == 0.9
    assert events[6]["summary"] == "the summary\nin runs/demo"


def test_json_has_null_for_numbers_that_are_not_finite():
    written = []
    RunJsonLog(written.append, Clock()).step(1, {"loss": float("nan"), "reward": float("inf"), "lr": 1e-5})
    # NaN is not valid JSON and would fail in a strict parser
    assert json.loads(written[0], parse_constant=pytest.fail)["metrics"] == {"loss": None, "reward": None, "lr": 1e-5}


# ---------------------------------------------------------------------------------------------------------------------
# terminal


def test_the_table_has_the_last_ten_steps_and_the_bar_the_time_left():
    clock = Clock()
    shown, _ = make_screen(clock)
    shown.started("demo", Path("runs/demo"), 100, 0)
    for step in range(1, 16):
        clock.now += 10
        shown.step(step, METRICS)
    shown.close()
    text = drawn(shown).splitlines()
    assert text[0].split() == ["masked", "masked"]
    assert text[1].split() == ["step", "reward", "loss", "low", "high", "mismatch", "staleness", "tok/s", "seconds"]
    assert [int(line.split()[0]) for line in text[2:12]] == list(range(6, 16))
    assert text[2].split()[1:] == CELLS
    assert text[12].startswith("step 15/100")
    assert "about 14m10s left" in text[12]


def test_the_table_fits_eighty_columns_and_a_small_window():
    shown, _ = make_screen()
    shown.started("demo", Path("runs/demo"), 10_000, 0)
    for step in range(1, 16):
        shown.step(9000 + step, METRICS)
    shown.close()
    text = drawn(shown, width=80)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    small, _ = make_screen(height=8)
    for step in range(1, 16):
        small.step(step, METRICS)
    small.close()
    assert [line.split()[0] for line in drawn(small).splitlines()[2:5]] == ["13", "14", "15"]


def test_the_terminal_shows_components_and_the_last_error_until_the_summary_has_them():
    shown, _ = make_screen(height=9)
    shown.started("demo", Path("runs/demo"), 100, 0)
    for step in range(1, 6):
        shown.step(step, METRICS | {"reward_components/sums/correct": 0.25, "reward_components/sums/style": 1e-3})
    shown.rollouts_failed(54, "KeyError: '\x1b[2J' (mine.py:20)")
    text = drawn(shown, height=9).splitlines()
    assert [line.split()[0] for line in text[2:4]] == ["4", "5"]  # the window is small: two lines are for the notes
    assert text[4] == "reward components: sums/correct 0.25, sums/style 0.001"
    assert text[5] == "54 rollouts failed; the last error: KeyError: '\\x1b[2J' (mine.py:20)"
    assert text[6].startswith("step 5/100")
    shown.ended("errors     54 rollouts failed")
    assert "54 rollouts failed" not in drawn(shown)


def test_the_bar_is_removed_at_the_end():
    shown, _ = make_screen()
    with shown:
        play(shown)
    assert "step 2/3" not in drawn(shown) and "left" not in drawn(shown)


def test_a_terminal_is_left_with_a_cursor_and_the_summary_below_the_table():
    shown, out = make_screen()
    with shown:
        play(shown)
    text = out.getvalue()
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") > -1
    assert text.index("mismatch") < text.index("the summary")
    assert "Ctrl-C: finishing step 2" in text


def test_the_cursor_is_visible_while_the_run_is_in_progress():
    shown, out = make_screen()
    shown.waiting("loading tiny")
    text = out.getvalue()
    shown.close()
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l")


def test_a_run_that_failed_leaves_the_terminal_without_a_summary():
    shown, out = make_screen()
    shown.waiting("training")
    shown.ended("")
    assert shown._live.is_started is False
    assert "\x1b[?25h" in out.getvalue()


# ---------------------------------------------------------------------------------------------------------------------
# untrusted text


def test_control_characters_are_escaped():
    assert escape_unprintable(HOSTILE) == r"\x1b[2J[bold red]x[/]\r\x07\u202eevil\nsecond"
    assert escape_unprintable("größer als 数 \U0001f600") == "größer als 数 \U0001f600"


@pytest.mark.parametrize("make", [make_log, make_screen])
def test_text_from_a_model_cannot_control_the_terminal(make):
    callback, out = make()
    callback.started(HOSTILE, Path("runs") / "x\x1b]0;y", 3, 0)
    callback.waiting(HOSTILE)
    callback.step(1, METRICS)
    callback.evaluated(1, evaluation(environment=HOSTILE, failed_episodes=1, first_error=HOSTILE))
    callback.notice(HOSTILE)
    callback.ended(HOSTILE)
    text = out.getvalue()
    assert "\x07" not in text
    assert "\u202e" not in text
    assert "\x1b[2J" not in text
    assert "\x1b]" not in text
    # markup is printed as text
    assert "[bold red]x[/]" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


# ---------------------------------------------------------------------------------------------------------------------
# choice of the display


def test_without_a_terminal_the_display_is_a_log(capsys):
    assert isinstance(make_run_display(), RunLog)
    with make_run_display(json=True) as callback:
        play(callback)
    assert len(capsys.readouterr().out.splitlines()) == 7


def test_a_callback_list_calls_each_callback_and_a_null_callback_prints_nothing(capsys):
    written, (log, out) = [], make_log()
    play(CallbackList(NullCallback(), RunJsonLog(written.append, Clock()), log))
    assert len(written) == 7
    assert "the summary" in out.getvalue()
    assert capsys.readouterr().out == ""
