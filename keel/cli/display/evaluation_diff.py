"""`keel eval RUN --diff A B`: the tasks that two stored evaluations of a run solved differently, as text.

Completions are text of a model: control and direction characters are printed as escapes, on one line each.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.text import Text

from keel.cli.display.console import console, write_stdout
from keel.run.monitor.progress import escape_unprintable
from keel.tools.evaluation_diff import TaskChange, compare_steps

MAX_CHARACTERS = 200
"""Characters of a completion that are printed."""


def show_flips(run: Path, first: int, second: int, *, as_json: bool) -> None:
    """Print the tasks whose pass rate changed between the evaluations after two steps."""
    changes = compare_steps(run, first, second)
    if as_json:
        flips = [{**asdict(change), "changed": change.changed} for change in changes if change.changed]
        write_stdout(json.dumps({"tasks": len(changes), "steps": [first, second], "flips": flips}, indent=2) + "\n")
        return
    screen = console()
    for environment in dict.fromkeys(change.environment for change in changes):
        for line in flip_lines([each for each in changes if each.environment == environment], first, second):
            screen.print(Text(escape_unprintable(line)), soft_wrap=True)


def flip_lines(changes: Sequence[TaskChange], first: int, second: int) -> Iterator[str]:
    """Yield the lines about the tasks of one environment."""
    gained, lost = ([change for change in changes if change.changed == sign] for sign in (1, -1))
    yield (
        f"{changes[0].environment}: {len(changes)} tasks; after step {second} {len(gained)} are solved more often than"
        f" after step {first}, {len(lost)} less often, {len(changes) - len(gained) - len(lost)} as often"
    )
    width = len(f"step {max(first, second)}")
    for mark, flips in (("+", gained), ("-", lost)):
        for change in flips:
            before, after = change.pass_rates
            answer = "" if change.answer is None else f", answer {shorten(change.answer)}"
            yield f"{mark} {change.task_id}: {before:.3g} -> {after:.3g}{answer}"
            for step, rows in ((first, change.before), (second, change.after)):
                # a completion that explains the change: passed where the task is solved more often, failed where less
                should_pass = (step == second) == (mark == "+")
                shown = next((row for row in rows if row["passed"] == should_pass), rows[0])
                text = f"error: {shown['error']}" if shown["error"] else shorten(shown["completion"] or "")
                yield f"    {f'step {step}':{width}}  {text}"


def shorten(text: str) -> str:
    """Return the start of a text as a Python literal, which has neither line breaks nor control characters."""
    return repr(text if len(text) <= MAX_CHARACTERS else text[:MAX_CHARACTERS] + "...")
