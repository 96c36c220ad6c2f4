"""`keel simulate`: predict the throughput, staleness and waste of a run before renting any machine.

Every assumption is a separate flag; `--from RUN` measures them from a real run. Nothing is written.
"""

import argparse
import itertools
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from keel.cli.display.console import write_stdout
from keel.common.settings import suggest_name, to_config_error
from keel.config.load import load_settings, parse_overrides
from keel.config.run import RunSettings
from keel.config.simulate import SimulateSettings
from keel.errors import ConfigError

if TYPE_CHECKING:
    from keel.tools.simulate.calibrate import MeasuredRun
    from keel.tools.simulate.prediction import Prediction
    from keel.tools.simulate.simulated_run import ProgressCallback

ASSUMPTION_FLAGS = {name: f"--{name.replace('_', '-')}" for name in SimulateSettings.model_fields}
FLAGS = ("--from", "--assume", "--sweep", "--what-if", "--json", *ASSUMPTION_FLAGS.values())
MAX_SIMULATIONS = 200
"""Most simulations of one sweep."""
PROGRESS_SECONDS = 10.0
"""Seconds between progress lines when standard error is not a terminal."""


@dataclass(frozen=True)
class SimulationCase:
    """One simulation to run."""

    swept_values: dict[str, Any]
    """Values of the swept assumptions and settings."""
    settings: RunSettings
    assumptions: SimulateSettings


def add(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "simulate",
        help="predict throughput, staleness and waste of a run",
        description="Run the real scheduler on a virtual clock, with engines and a trainer modelled by their speed, and"
        " predict\nsteps/hour, tokens/s, utilisation, staleness, waste and the bottleneck. --from RUN measures speeds,"
        " lengths and\nfailures from a real run; everything else is an assumption, set by the flags below. The same"
        " arguments\nalways give the same numbers.",
        epilog="examples:\n  keel simulate gpu_pool --engines 16 --tokens-per-second 3000\n"
        "  keel simulate gpu_pool --sweep engines=4,8,16 --sweep scheduler.max_off_policy_steps=1,4\n"
        "  keel simulate --from runs/larger_number --engines 2",
        usage="keel simulate [-h] [--from RUN] [--assume FILE] [--sweep NAME=VALUE,VALUE ...] [--what-if] [--json]\n"
        "                     [--engines N] [--tokens-per-second X] [...] [RECIPE] [--a.b VALUE ...]",
    )
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="a TOML file (default: the settings of RUN)")
    parser.add_argument(
        "--from", dest="run_folder", metavar="RUN", type=Path, help="measure the assumptions from a run"
    )
    parser.add_argument("--assume", metavar="FILE", type=Path, help="a TOML file of assumptions, e.g. engines = 8")
    parser.add_argument(
        "--sweep",
        dest="sweeps",
        metavar="NAME=V,V",
        action="append",
        help="simulate several values of an assumption or a setting; may be repeated",
    )
    parser.add_argument("--what-if", action="store_true", help="simulate proposed changes even if the run is large")
    parser.add_argument("--json", action="store_true", help="print JSON")
    group = parser.add_argument_group("assumptions", "Flags override --assume FILE, which overrides --from RUN.")
    for name, field in SimulateSettings.model_fields.items():
        description = " ".join((field.description or "").split()).replace("%", "%%")
        default = "" if field.default is None or name == "length" else f" [{field.default}]"
        group.add_argument(ASSUMPTION_FLAGS[name], dest=f"own_{name}", metavar="X", help=description + default)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check all settings and assumptions, simulate, and print the result."""
    from keel.cli.display import simulate_report
    from keel.tools.simulate.bottleneck import MAX_WHAT_IF_ROLLOUTS, describe_bottleneck, propose_changes
    from keel.tools.simulate.prediction import predict

    if args.recipe is None and args.run_folder is None:
        raise ConfigError("pass a RECIPE or --from RUN, for example: keel simulate gpu_pool")
    origins, table, measured, run_recipe = _assumptions(args)
    cases = _build_cases(args, args.recipe or run_recipe, table)
    results: list[tuple[SimulationCase, Prediction, str]] = []
    for number, case in enumerate(cases, start=1):
        with _report_progress(f"{number}/{len(cases)} " if len(cases) > 1 else "") as on_progress:
            prediction = predict(case.settings, case.assumptions, on_progress)
        results.append((case, prediction, describe_bottleneck(prediction, case.settings, case.assumptions)))
    if args.sweeps:
        write_stdout(
            simulate_report.sweep_json(results) if args.json else simulate_report.sweep_table(results, origins)
        )
        return 0
    case, prediction, bottleneck = results[0]
    changes = None
    if args.what_if or prediction.rollouts <= MAX_WHAT_IF_ROLLOUTS:
        with _report_progress("what if ") as on_progress:
            on_progress(0, 1)
            changes = propose_changes(prediction, case.settings, case.assumptions)
    if args.json:
        text = simulate_report.prediction_json(case.assumptions, prediction, bottleneck, changes, measured)
    else:
        text = simulate_report.format_prediction(case.assumptions, origins, prediction, bottleneck, changes, measured)
    write_stdout(text)
    return 0


def _assumptions(args: argparse.Namespace) -> "tuple[dict[str, str], dict[str, Any], MeasuredRun | None, Path | None]":
    """Return the origin and the value of each assumption, the measured results of the run, and the run's config."""
    origins: dict[str, str] = {}
    table: dict[str, Any] = {}
    measured, recipe = None, None
    if args.run_folder is not None:
        from keel.tools.simulate.calibrate import measure_run

        _, table, measured = measure_run(args.run_folder)
        origins = dict.fromkeys(table, "measured")
        recipe = args.run_folder / "config.toml"
    if args.assume is not None:
        from_file = _read_assumptions(args.assume)
        table |= from_file
        origins |= dict.fromkeys(from_file, "file")
    for name in ASSUMPTION_FLAGS:
        text = getattr(args, f"own_{name}")
        if text is not None:
            table[name] = _parse_value(name, text)
            origins[name] = "flags"
    return origins, table, measured, recipe


def _read_assumptions(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--assume {path} cannot be read: {error}") from None
    for name in table:
        if name not in ASSUMPTION_FLAGS:
            raise ConfigError(f"--assume {path}: {name} is not an assumption; {suggest_name(name, ASSUMPTION_FLAGS)}")
    return table


def _parse_value(name: str, text: str) -> Any:
    return parse_overrides([f"--{name}={text}"])[0][1]


def _build_cases(
    args: argparse.Namespace, recipe: Path | str | None, base_assumptions: Mapping[str, Any]
) -> list[SimulationCase]:
    """Return every combination of the swept values; all are checked before the first is simulated."""
    axes = [_parse_axis(text) for text in args.sweeps or ()]
    names = [name for name, _ in axes]
    if len(set(names)) < len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"--sweep {repeated} is given twice; write all its values in one list, separated by commas")
    combinations = list(itertools.product(*(values for _, values in axes)))
    if len(combinations) > MAX_SIMULATIONS:
        raise ConfigError(
            f"--sweep gives {len(combinations):,} simulations, the limit is {MAX_SIMULATIONS}; sweep fewer values"
        )
    cases = []
    for texts in combinations:
        table, overrides = dict(base_assumptions), list(args.overrides)
        for name, text in zip(names, texts, strict=True):
            if name in ASSUMPTION_FLAGS:
                table[name] = _parse_value(name, text)
            else:
                overrides.append(f"--{name}={text}")
        loaded = load_settings(recipe, overrides)
        try:
            assumptions = SimulateSettings.model_validate(table)
        except ValidationError as error:
            raise to_config_error(error) from None
        cases.append(SimulationCase(dict(zip(names, texts, strict=True)), loaded.settings, assumptions))
    return cases


def _parse_axis(text: str) -> tuple[str, list[str]]:
    name, equals, rest = text.partition("=")
    name, values = name.strip().removeprefix("--"), [value.strip() for value in rest.split(",")]
    name = name if "." in name else name.replace("-", "_")
    if not (name and equals and all(values)):
        raise ConfigError(f"--sweep {text}: write name=value,value")
    if name not in ASSUMPTION_FLAGS and "." not in name and name not in RunSettings.model_fields:
        suggestion = suggest_name(name, [*ASSUMPTION_FLAGS, *RunSettings.model_fields])
        raise ConfigError(f"--sweep {text}: {name} is neither an assumption nor a setting; {suggestion}")
    return name, values


@contextmanager
def _report_progress(label: str) -> "Iterator[ProgressCallback]":
    """Report the progress of a long simulation on standard error."""
    screen = Console(file=sys.stderr, markup=False, highlight=False)
    if screen.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("step {task.completed}/{task.total}"))
        with Progress(*columns, console=screen, transient=True) as progress:
            task = progress.add_task(f"{label}simulating", total=None)
            yield lambda step, of: progress.update(task, completed=step, total=of)
        return
    last_line_time = time.monotonic()

    def write_progress(step: int, of: int) -> None:
        nonlocal last_line_time
        if time.monotonic() - last_line_time >= PROGRESS_SECONDS:
            last_line_time = time.monotonic()
            sys.stderr.write(f"{label}simulating: step {step}/{of}\n")

    yield write_progress
