"""`keel simulate`: what a run will be like on so many engines, before any of them is rented.

Every assumption is a flag of its own; `--from RUN` measures them. Nothing is computed but time, and nothing is written.
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
"""Simulations of one sweep."""
PROGRESS_SECONDS = 10.0
"""Seconds between two words about how far it is, where there is no terminal."""


@dataclass(frozen=True)
class SimulationCase:
    """One simulation to run."""

    swept_values: dict[str, Any]
    """Of what is swept over."""
    settings: RunSettings
    assumptions: SimulateSettings


def add(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "simulate",
        help="predict throughput, staleness and waste of a run on so many engines",
        description="Run the real scheduler on a virtual clock, with engines and a trainer that only take their time,"
        " and predict\nsteps/hour, tokens/s, utilisation, staleness, waste and the bottleneck. --from RUN measures"
        " speeds, lengths and\nfailures in a run that was made; anything else is assumed, by the flags below. The same"
        " words give the same numbers.",
        epilog="examples:\n  keel simulate recipes/gpu_pool.toml --engines 16 --tokens-per-second 3000\n"
        "  keel simulate recipes/gpu_pool.toml --sweep engines=4,8,16 --sweep scheduler.max_off_policy_steps=1,4\n"
        "  keel simulate --from runs/larger_number --engines 2",
        usage="keel simulate [-h] [--from RUN] [--assume FILE] [--sweep NAME=VALUE,VALUE ...] [--what-if] [--json]\n"
        "                     [--engines N] [--tokens-per-second X] [...] [RECIPE] [--a.b VALUE ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="a TOML file; not given: that of RUN")
    parser.add_argument("--from", dest="run_folder", metavar="RUN", type=Path, help="measure the assumptions in a run")
    parser.add_argument("--assume", metavar="FILE", type=Path, help="a TOML file with assumptions, named as the flags")
    parser.add_argument(
        "--sweep", dest="sweeps", metavar="NAME=V,V", action="append", help="values of an assumption or of a setting"
    )
    parser.add_argument("--what-if", action="store_true", help="simulate what to change for large clusters too")
    parser.add_argument("--json", action="store_true", help="for machines")
    group = parser.add_argument_group("assumptions", "override FILE, which overrides what RUN says")
    for name, field in SimulateSettings.model_fields.items():
        told = " ".join((field.description or "").split()).replace("%", "%%")
        default = "" if field.default is None or name == "length" else f" [{field.default}]"
        group.add_argument(ASSUMPTION_FLAGS[name], dest=f"own_{name}", metavar="X", help=told + default)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Resolve everything, then simulate and show."""
    from keel.cli.display import simulate_report as show
    from keel.tools.simulate.bottleneck import MAX_WHAT_IF_ROLLOUTS, describe_bottleneck, propose_changes
    from keel.tools.simulate.prediction import predict

    if args.recipe is None and args.run_folder is None:
        raise ConfigError("give a RECIPE, or --from RUN; keel simulate recipes/gpu_pool.toml is one to begin with")
    origins, table, observed, own_recipe = _assumptions(args)
    cases = _build_cases(args, args.recipe or own_recipe, table)
    found: list[tuple[SimulationCase, Prediction, str]] = []
    for number, case in enumerate(cases, start=1):
        with _report_progress(f"{number}/{len(cases)} " if len(cases) > 1 else "") as watch:
            prediction = predict(case.settings, case.assumptions, watch)
        found.append((case, prediction, describe_bottleneck(prediction, case.settings, case.assumptions)))
    if args.sweeps:
        write_stdout(show.sweep_json(found) if args.json else show.sweep_table(found))
        return 0
    case, prediction, words = found[0]
    tried = None
    if args.what_if or prediction.rollouts <= MAX_WHAT_IF_ROLLOUTS:
        with _report_progress("what if ") as watch:
            watch(0, 1)
            tried = propose_changes(prediction, case.settings, case.assumptions)
    if args.json:
        write_stdout(show.prediction_json(case.assumptions, prediction, words, tried, observed))
    else:
        write_stdout(show.format_prediction(case.assumptions, origins, prediction, words, tried, observed))
    return 0


def _assumptions(args: argparse.Namespace) -> "tuple[dict[str, str], dict[str, Any], MeasuredRun | None, Path | None]":
    """Where each assumption is from, its value, what the run was like, and the run's own settings."""
    origins: dict[str, str] = {}
    table: dict[str, Any] = {}
    observed, recipe = None, None
    if args.run_folder is not None:
        from keel.tools.simulate.calibrate import measure_run

        _, table, observed = measure_run(args.run_folder)
        origins = dict.fromkeys(table, "measured")
        recipe = args.run_folder / "config.toml"
    if args.assume is not None:
        given = _read_assumptions(args.assume)
        table |= given
        origins |= dict.fromkeys(given, "file")
    for name in ASSUMPTION_FLAGS:
        text = getattr(args, f"own_{name}")
        if text is not None:
            table[name] = _parse_value(name, text)
            origins[name] = "given"
    return origins, table, observed, recipe


def _read_assumptions(path: Path) -> dict[str, Any]:
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--assume {path} cannot be read: {error}") from None
    for name in found:
        if name not in ASSUMPTION_FLAGS:
            raise ConfigError(f"--assume {path}: {name} is no assumption; {suggest_name(name, ASSUMPTION_FLAGS)}")
    return found


def _parse_value(name: str, text: str) -> Any:
    return parse_overrides([f"--{name}={text}"])[0][1]


def _build_cases(
    args: argparse.Namespace, recipe: Path | str | None, base_assumptions: Mapping[str, Any]
) -> list[SimulationCase]:
    """Every combination of what is swept over; all are checked before the first is simulated."""
    axes = [_parse_axis(text) for text in args.sweeps or ()]
    names = [name for name, _ in axes]
    if len(set(names)) < len(names):
        raise ConfigError(f"--sweep {names[0]} is given twice; write all its values with commas between them")
    chosen = list(itertools.product(*(values for _, values in axes)))
    if len(chosen) > MAX_SIMULATIONS:
        raise ConfigError(
            f"--sweep gives {len(chosen):,} simulations, and there are at most {MAX_SIMULATIONS}; leave some out"
        )
    cases = []
    for texts in chosen:
        own, words = dict(base_assumptions), list(args.overrides)
        for name, text in zip(names, texts, strict=True):
            if name in ASSUMPTION_FLAGS:
                own[name] = _parse_value(name, text)
            else:
                words.append(f"--{name}={text}")
        loaded = load_settings(recipe, words)
        try:
            assumed = SimulateSettings.model_validate(own)
        except ValidationError as error:
            raise to_config_error(error) from None
        cases.append(SimulationCase(dict(zip(names, texts, strict=True)), loaded.settings, assumed))
    return cases


def _parse_axis(text: str) -> tuple[str, list[str]]:
    name, equals, rest = text.partition("=")
    name, values = name.strip().removeprefix("--"), [value.strip() for value in rest.split(",")]
    name = name if "." in name else name.replace("-", "_")
    if not (name and equals and all(values)):
        raise ConfigError(f"--sweep {text}: write name=value,value")
    if name not in ASSUMPTION_FLAGS and "." not in name and name not in RunSettings.model_fields:
        known = suggest_name(name, [*ASSUMPTION_FLAGS, *RunSettings.model_fields])
        raise ConfigError(f"--sweep {text}: {name} is no assumption and no setting; {known}")
    return name, values


@contextmanager
def _report_progress(label: str) -> "Iterator[ProgressCallback]":
    """Say on standard error how far a simulation is, if it takes long."""
    screen = Console(file=sys.stderr, markup=False, highlight=False)
    if screen.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("step {task.completed}/{task.total}"))
        with Progress(*columns, console=screen, transient=True) as progress:
            task = progress.add_task(f"{label}simulating", total=None)
            yield lambda step, of: progress.update(task, completed=step, total=of)
        return
    said = time.monotonic()

    def tell(step: int, of: int) -> None:
        nonlocal said
        if time.monotonic() - said >= PROGRESS_SECONDS:
            said = time.monotonic()
            sys.stderr.write(f"{label}simulating: step {step}/{of}\n")

    yield tell
