"""`keel eval`: evaluate a checkpoint of a run, a model or an endpoint on held-out tasks, with 95 % intervals.

Runs and models are sampled in this process with the trained weights, whatever engine the run itself uses: its int8 or
dtype settings do not affect the result. Nothing is written to the run's folder.
"""

import argparse
import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from keel.cli.display.console import console, write_stdout
from keel.cli.run.evaluation_target import (
    EvaluationTarget,
    is_run,
    resolve_sampling,
    resolve_target,
    select_environments,
)
from keel.cli.run.train import add_dataset_arguments
from keel.config.recipe_files import evaluation_names
from keel.errors import ConfigError
from keel.rollout.rollout_metrics import ENVIRONMENT_METRICS, REWARD_COMPONENTS
from keel.run.monitor.progress import escape_unprintable, format_interval
from keel.run.start.module_folders import add_module_folders

if TYPE_CHECKING:
    from keel.config import EnvironmentSettings
    from keel.inference.pool.chat_endpoint import ChatEndpoint
    from keel.inference.protocol import Engine
    from keel.rollout.rendering.renderer import Renderer
    from keel.run.evaluation.evaluate import EvaluationResult

FLAGS = (
    *("--step", "--diff", "--model", "--url", "--api-key-env", "--environment", "--recipe", "--dataset", "--reward"),
    *("--tasks", "--samples", "--temperature", "--max-tokens", "--seed", "--output", "--json"),
)


def add(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "eval",
        help="evaluate a run or a model on held-out tasks",
        description="Run the held-out tasks of each environment and print mean reward and pass@k with 95 % intervals."
        "\n\nTARGET is the folder of a run (evaluated with its newest complete checkpoint, its environments and its"
        "\nsampling), or a model: a built-in name, a Hugging Face folder or a hub name, with --environment, --recipe,"
        "\nor --dataset and --reward. With --model or --url TARGET names the tasks: an evaluation of the package ("
        + ", ".join(evaluation_names())
        + "),\na recipe or an environment."
        "\n\nA completion passes with a reward of 1. A failed episode counts with reward 0.",
        epilog="examples:\n  keel eval runs/first\n  keel eval runs/first --step 20 --samples 8\n"
        "  keel eval runs/first --diff 0 20\n"
        "  keel eval smollm2-135m --environment larger_number --max-tokens 16\n"
        "  keel eval gsm_symbolic --model smollm2-135m\n"
        "  keel eval --dataset test.jsonl --reward number --model smollm2-135m --output completions.parquet\n"
        "  keel eval humaneval --url http://127.0.0.1:8000 --model policy --api-key-env MY_KEY",
        usage="keel eval [-h] [TARGET] [--step N | --diff A B] [--model NAME] [--url URL] [--api-key-env VARIABLE]"
        "\n                 [--environment NAME ... | --recipe FILE | --dataset FILE --reward NAME ...]"
        "\n                 [--tasks N] [--samples K] [--temperature T] [--max-tokens N] [--seed S] [--output FILE]"
        "\n                 [--json] [--a.b VALUE ...]",
    )
    parser.add_argument(
        "target", metavar="TARGET", nargs="?", help="the folder of a run, or a model; with --model or --url the tasks"
    )
    parser.add_argument("--step", type=int, metavar="N", help="for a run: checkpoint to evaluate (default: the newest)")
    parser.add_argument(
        "--diff",
        type=int,
        nargs=2,
        metavar=("A", "B"),
        help="for a run: print the tasks that its evaluations after steps A and B solved differently; samples nothing",
    )
    parser.add_argument(
        "--model", metavar="NAME", help="a model; with --url its name at the endpoint (default: the first)"
    )
    parser.add_argument("--url", help="an OpenAI-compatible endpoint that samples; it needs only chat completions")
    parser.add_argument(
        "--api-key-env", metavar="VARIABLE", help="environment variable with the key of --url (default: no key)"
    )
    parser.add_argument(
        "--environment",
        action="append",
        default=[],
        metavar="NAME",
        help="an environment of the run or recipe, or any by its name; may be repeated (default: all of the run or"
        " recipe)",
    )
    parser.add_argument("--recipe", metavar="FILE", help="for a model: take environments and sampling from this file")
    add_dataset_arguments(parser, "evaluate on all rows of this data set instead")
    parser.add_argument("--tasks", type=int, metavar="N", help="held-out tasks per environment (default: 64)")
    parser.add_argument("--samples", type=int, metavar="K", help="completions per task, for pass@k (default: 1)")
    parser.add_argument("--temperature", type=float, metavar="T", help="sampling temperature; 0: greedy")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of one completion")
    parser.add_argument("--seed", type=int, metavar="S", help="seed of sampling (default: that of the run, or 0)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write every completion to this .parquet file")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Evaluate and print the result."""
    for name in ("tasks", "samples", "max_tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least 1")
    _check_output(args.output)
    if args.target is None and args.dataset is None and not args.environment and args.recipe is None:
        raise ConfigError("pass the folder of a run, a model or an evaluation; for example: keel eval runs/first")
    add_module_folders(args.recipe, args.target)
    if args.diff is not None:
        if not is_run(args.target):
            raise ConfigError(f"--diff compares evaluations of a run; {args.target} is not one (it has no config.toml)")
        from keel.cli.display.evaluation_diff import show_flips

        show_flips(Path(args.target), *args.diff, as_json=args.json)
        return 0
    target = resolve_target(args)
    selected = select_environments(args.environment, target)
    results = asyncio.run(evaluate_environments(args, target, selected))
    if args.output is not None:
        from keel.run.evaluation.evaluation_records import write_episodes

        write_episodes(args.output, target.step, {result.environment: result.episodes for result in results})
    if args.json:
        evaluations = [{"environment": result.environment, **result.scalars()} for result in results]
        payload = {"model": target.weights, "step": target.step, "evaluations": evaluations}
        write_stdout(json.dumps(payload, indent=2) + "\n")
        return 0
    print_evaluations(target, results)
    return 0


def _check_output(path: Path | None) -> None:
    """Raise an error before anything is sampled if the completions could not be written."""
    if path is not None and path.suffix != ".parquet":
        raise ConfigError(f"--output {path} must be a .parquet file")
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"--output {path}: there is no folder {path.parent}; create it first")


async def open_policy(target: EvaluationTarget) -> "tuple[Engine | ChatEndpoint, Renderer | None]":
    """Return what samples: the endpoint, or an engine with the weights of the target and its renderer."""
    from keel.inference.protocol import WeightSource
    from keel.rollout.rendering.renderer import Renderer
    from keel.training.model.references import check_adapter_base

    if target.endpoint is not None:
        return target.endpoint, None
    model, engine = target.load()
    try:
        if target.settings.model.lora is not None and target.checkpoint is not None:
            check_adapter_base(target.checkpoint, model)
            await engine.load_weights(WeightSource.adapter(target.checkpoint), target.step or 0)
        return engine, Renderer(model.tokenizer, target.settings.renderer)
    except BaseException:
        await engine.close()
        raise


async def evaluate_environments(
    args: argparse.Namespace, target: EvaluationTarget, selected: "dict[str, EnvironmentSettings]"
) -> "list[EvaluationResult]":
    """Evaluate one environment after another, with a progress bar in a terminal."""
    from keel.rollout.environments.environment import close_environments
    from keel.rollout.environments.registry import load_environment
    from keel.rollout.policy_client import derive_seed
    from keel.run.evaluation.evaluate import evaluate

    settings = target.settings
    # environments first: an invalid name is then an error before the model is loaded
    loaded = {
        name: (load_environment(environment), resolve_sampling(args, settings, environment.sampling))
        for name, environment in selected.items()
    }
    results = []
    engine, renderer = await open_policy(target)
    try:
        with progress_bars(hidden=args.json) as add_bar:
            for name, (environment, sampling) in loaded.items():
                result = await evaluate(
                    engine,
                    renderer,
                    environment,
                    num_tasks=args.tasks or settings.evaluation.num_tasks,
                    samples_per_task=args.samples or settings.evaluation.samples_per_task,
                    sampling=sampling,
                    limits=selected[name].limits,
                    # the seed of the training loop, so that the evaluation of its last step can be reproduced
                    seed=derive_seed(settings.seed if args.seed is None else args.seed, "evaluation"),
                    max_in_flight=settings.scheduler.max_in_flight,
                    progress=add_bar(name),
                    name=name,
                )
                results.append(result)
    finally:
        await close_environments(environment for environment, _ in loaded.values())
        await engine.close()
    return results


@contextmanager
def progress_bars(*, hidden: bool) -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """Yield a function that adds a progress bar; bars are removed at the end and only shown in a terminal."""
    screen = console()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=screen, transient=True, disable=hidden or not screen.is_terminal) as progress:

        def add_bar(name: str) -> Callable[[int, int], None]:
            task = progress.add_task(escape_unprintable(name), total=None)
            return lambda done, total: progress.update(task, completed=done, total=total)

        yield add_bar


def print_evaluations(target: EvaluationTarget, evaluations: "list[EvaluationResult]") -> None:
    """Print a table with one row per environment."""
    table = Table(box=None, pad_edge=False)
    passes = sorted({k for result in evaluations for k in result.pass_at_k})
    table.add_column("environment", overflow="fold")
    for title in ("tasks", "reward", "95 % interval", *(f"pass@{k}" for k in passes), "failed", "seconds"):
        table.add_column(title, justify="right", no_wrap=True)
    for result in evaluations:
        table.add_row(
            Text(escape_unprintable(result.environment)),
            f"{result.num_tasks} x {result.samples_per_task}",
            f"{result.reward:.3f}",
            format_interval(result.low, result.high),
            *(f"{result.pass_at_k[k]:.3f}" for k in passes),
            str(result.failed_episodes),
            f"{result.seconds:.1f}",
        )
    screen = console()
    step = "" if target.step is None else f", step {target.step}"
    screen.print(Text(escape_unprintable(target.weights) + step), soft_wrap=True)
    screen.print(table)
    for result in evaluations:
        for line in _detail_lines(result):
            screen.print(Text(escape_unprintable(line)), soft_wrap=True)
        if result.failed_episodes:
            screen.print(
                Text(escape_unprintable(f"{result.environment}: first failure: {result.first_error}")),
                soft_wrap=True,
            )


def _detail_lines(result: "EvaluationResult") -> Iterator[str]:
    """Yield the lengths of the completions, and the means of what the environment reported."""
    if lengths := result.completions:
        yield (
            f"{result.environment}: completions of {lengths['completion_tokens']:.1f} tokens on average,"
            f" {lengths['completion_tokens_max']:.0f} at most; {lengths['truncated']:.1%} truncated"
        )
    if result.samples_per_task > 1:
        estimates = [
            f"pass@{k} {value:.3f} ({format_interval(*result.pass_at_k_intervals[k])})"
            for k, value in result.pass_at_k.items()
        ]
        yield f"{result.environment}: {', '.join(estimates)}"
    for prefix, title in ((f"{REWARD_COMPONENTS}/", "reward components"), (f"{ENVIRONMENT_METRICS}/", "metrics")):
        means = [
            f"{name.removeprefix(prefix)} {value:.3g}"
            for name, value in result.environment_means.items()
            if name.startswith(prefix)
        ]
        if means:
            yield f"{result.environment}: {title} {', '.join(means)}"
