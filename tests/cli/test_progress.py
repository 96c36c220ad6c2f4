"""The display of a run: the same numbers in a terminal, a log and JSON; nothing a model writes acts on a terminal."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from keel.cli.display.progress import (
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
from keel.run.evaluate import EvaluationResult
from keel.run.monitor.callbacks import CallbackList, NullCallback

NUMBERS = {
    "reward": 0.3125,
    "loss": -0.01234,
    "is_masked_low": 0.001,
    "is_masked_high": 0.0325,
    "mismatch_kl": 1.23e-4,
    "staleness": 0.5,
    "tokens_per_second": 1234.4,
    "seconds": 8.26,
}
SHOWN = ["0.312", "-0.0123", "0.10", "3.25", "1.2e-04", "0.50", "1,234", "8.3"]
HOSTILE = "\x1b[2J[bold red]x[/]\r\x07\u202eevil\nsecond"


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def evaluation(**changes):
    given = {
        "environment": "larger_number",
        "reward": 0.71,
        "low": 0.59,
        "high": 0.81,
        "tasks": 64,
        "samples": 4,
        "passes": {1: 0.71, 4: 0.9},
        "failed": 0,
        "seconds": 3.0,
    }
    return EvaluationResult(**given | changes)


def lines(clock=None, width=200):
    out = io.StringIO()
    console = Console(file=out, width=width, markup=False, highlight=False, emoji=False)
    return RunLog(console, clock or Clock()), out


def screen(clock=None, width=100, height=30):
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=True, width=width, height=height, markup=False, highlight=False, emoji=False
    )
    return RunScreen(console, clock or Clock()), out


def drawn(shown, width=100, height=30):
    """What the table, the bar and the waiting line look like now."""
    console = Console(file=io.StringIO(), width=width, height=height, markup=False, highlight=False)
    with console.capture() as captured:
        console.print(shown._draw())
    return captured.get()


def play(observer):
    observer.waiting("loading tiny")
    observer.started("demo", Path("runs/demo"), 3, 0)
    observer.evaluated(0, evaluation())
    observer.waiting("sampling: 3 groups ready, 5 more needed")
    observer.step(1, NUMBERS)
    observer.notice("Ctrl-C: finishing step 2")
    observer.step(2, {})
    observer.ended("learned a lot\nin runs/demo")


# ---------------------------------------------------------------------------------------------------------------------
# numbers


def test_every_number_is_shown_in_its_column_and_a_missing_one_as_a_dash():
    assert [column.format_cell(NUMBERS) for column in COLUMNS] == SHOWN
    assert [column.format_cell({}) for column in COLUMNS] == ["-"] * len(COLUMNS)
    assert [column.format_cell(dict.fromkeys(NUMBERS, float("nan"))) for column in COLUMNS] == ["-"] * len(COLUMNS)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.4, "0s"), (59.4, "59s"), (59.6, "1m00s"), (200, "3m20s"), (3600, "1h00m"), (7512, "2h05m")],
)
def test_durations_are_short(seconds, shown):
    assert format_duration(seconds) == shown


def test_time_left_is_that_of_the_last_steps_and_runs_down():
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


def test_an_evaluation_before_the_first_step_is_not_taken_for_its_length():
    clock = Clock()
    log, out = lines(clock)
    log.started("demo", Path("runs/demo"), 3, 0)
    clock.now = 50
    log.evaluated(0, evaluation())
    clock.now = 52
    log.step(1, NUMBERS)
    assert out.getvalue().rstrip().endswith("left 4s")


# ---------------------------------------------------------------------------------------------------------------------
# a log


def test_lines_of_steps_are_aligned():
    log, out = lines()
    log.started("demo", Path("runs/demo"), 100, 0)
    log.step(1, NUMBERS)
    log.step(100, {"reward": 1.0})
    first, last = out.getvalue().splitlines()[1:]
    assert first.startswith("step   1/100  reward  0.312  loss  -0.0123  low %   0.10  high %   3.25")
    assert last.startswith("step 100/100  reward  1.000  loss        -  low %      -  high %      -")
    assert first.index("left") == last.index("left")


def test_a_log_says_everything_that_happened_and_no_escape_codes():
    log, out = lines()
    play(log)
    text = out.getvalue()
    assert "\x1b" not in text
    assert [line.split("  ")[0] for line in text.splitlines()] == [
        "demo: 3 steps, in runs/demo",
        "evaluated before training: larger_number reward 0.710 (0.590 - 0.810), pass@4 0.900, 64 x 4",
        "step 1/3",
        "Ctrl-C: finishing step 2",
        "step 2/3",
        "learned a lot",
        "in runs/demo",
    ]


def test_a_run_that_goes_on_says_from_where():
    log, out = lines()
    log.started("demo", Path("runs/demo"), 30, 12)
    assert out.getvalue() == "demo: goes on after step 12 of 30, in runs/demo\n"


def test_waiting_is_told_to_a_log_only_after_a_silence():
    clock = Clock()
    log, out = lines(clock)
    for second in range(int(3 * QUIET_SECONDS)):
        clock.now = float(second)
        log.waiting(f"training for {second} s")
    assert out.getvalue().splitlines() == ["training for 30 s", "training for 60 s"]


def test_failed_episodes_are_in_the_line_of_an_evaluation():
    log, out = lines()
    log.evaluated(10, evaluation(failed=2, error="eval/1: KeyError: 'word'"))
    assert "2 failed (first: eval/1: KeyError: 'word')" in out.getvalue()
    assert out.getvalue().startswith("evaluated after step 10:")


# ---------------------------------------------------------------------------------------------------------------------
# JSON


def test_json_is_one_object_a_line_with_every_number():
    said = []
    play(RunJsonLog(said.append, Clock()))
    events = [json.loads(line) for line in said]
    assert all(line.count("\n") == 1 and line.endswith("\n") for line in said)
    assert [event["event"] for event in events] == [
        "waiting",
        "started",
        "evaluated",
        "step",
        "notice",
        "step",
        "ended",
    ]
    assert events[3] == {"event": "step", "step": 1, "numbers": NUMBERS}
    assert events[2]["numbers"]["pass@4"] == 0.9
    assert events[6]["summary"] == "learned a lot\nin runs/demo"


def test_json_writes_null_for_what_is_not_finite():
    said = []
    RunJsonLog(said.append, Clock()).step(1, {"loss": float("nan"), "reward": float("inf"), "lr": 1e-5})
    # NaN is no JSON: a strict reader must get through
    assert json.loads(said[0], parse_constant=pytest.fail)["numbers"] == {"loss": None, "reward": None, "lr": 1e-5}


# ---------------------------------------------------------------------------------------------------------------------
# a terminal


def test_the_table_holds_the_last_ten_steps_and_the_bar_the_time_left():
    clock = Clock()
    shown, _ = screen(clock)
    shown.started("demo", Path("runs/demo"), 100, 0)
    for step in range(1, 16):
        clock.now += 10
        shown.step(step, NUMBERS)
    shown.close()
    text = drawn(shown).splitlines()
    assert " ".join(text[0].split()) == "step reward loss low % high % mismatch stale tok/s seconds"
    assert [int(line.split()[0]) for line in text[1:11]] == list(range(6, 16))
    assert text[1].split()[1:] == SHOWN
    assert text[11].startswith("step 15/100")
    assert "about 14m10s left" in text[11]


def test_the_table_fits_eighty_columns_and_a_low_window():
    shown, _ = screen()
    shown.started("demo", Path("runs/demo"), 10_000, 0)
    for step in range(1, 16):
        shown.step(9000 + step, NUMBERS)
    shown.close()
    text = drawn(shown, width=80)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    low, _ = screen(height=8)
    for step in range(1, 16):
        low.step(step, NUMBERS)
    low.close()
    assert [line.split()[0] for line in drawn(low).splitlines()[1:4]] == ["13", "14", "15"]


def test_a_terminal_is_left_with_its_cursor_and_the_summary_below_the_table():
    shown, out = screen()
    with shown:
        play(shown)
    text = out.getvalue()
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") > -1
    assert text.index("step 2/3") < text.index("learned a lot")
    assert "Ctrl-C: finishing step 2" in text


def test_the_cursor_is_there_while_the_run_goes_on():
    shown, out = screen()
    shown.waiting("loading tiny")
    text = out.getvalue()
    shown.close()
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l")


def test_a_run_that_failed_leaves_the_terminal_without_a_summary():
    shown, out = screen()
    shown.waiting("training")
    shown.ended("")
    assert shown._live.is_started is False
    assert "\x1b[?25h" in out.getvalue()


# ---------------------------------------------------------------------------------------------------------------------
# text that nobody vouches for


def test_characters_that_act_are_written_out():
    assert escape_unprintable(HOSTILE) == r"\x1b[2J[bold red]x[/]\r\x07\u202eevil\nsecond"
    assert escape_unprintable("größer als 数 \U0001f600") == "größer als 数 \U0001f600"


@pytest.mark.parametrize("make", [lines, screen])
def test_no_text_of_a_model_acts_on_a_terminal(make):
    observer, out = make()
    observer.started(HOSTILE, Path("runs") / "x\x1b]0;y", 3, 0)
    observer.waiting(HOSTILE)
    observer.step(1, NUMBERS)
    observer.evaluated(1, evaluation(environment=HOSTILE, failed=1, error=HOSTILE))
    observer.notice(HOSTILE)
    observer.ended(HOSTILE)
    text = out.getvalue()
    assert "\x07" not in text
    assert "\u202e" not in text
    assert "\x1b[2J" not in text
    assert "\x1b]" not in text
    # markup is text
    assert "[bold red]x[/]" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


# ---------------------------------------------------------------------------------------------------------------------
# which, and how many


def test_away_from_a_terminal_there_are_lines(capsys):
    assert isinstance(make_run_display(), RunLog)
    with make_run_display(json=True) as observer:
        play(observer)
    assert len(capsys.readouterr().out.splitlines()) == 7


def test_several_tell_each_and_silent_says_nothing(capsys):
    said, (log, out) = [], lines()
    play(CallbackList(NullCallback(), RunJsonLog(said.append, Clock()), log))
    assert len(said) == 7
    assert "learned a lot" in out.getvalue()
    assert capsys.readouterr().out == ""
