"""`keel eval`: evaluate a checkpoint of a run, or any model, on held-out tasks, with 95 % intervals.

Samples in this process with the trained weights, whatever engine the run itself uses: its int8 or dtype settings do not
affect the result. Nothing is written to the run's folder.
"""

import argparse
import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from keel.cli.display.console import console, write_stdout
from keel.errors import ConfigError
from keel.rollout.rollout_metrics import ENVIRONMENT_METRICS, REWARD_COMPONENTS
from keel.run.monitor.progress import escape_unprintable, format_interval
from keel.run.start.module_folders import add_module_folders

if TYPE_CHECKING:
    from keel.config import EnvironmentSettings, RunSettings, Sampling
    from keel.inference.local.local_engine import LocalEngine
    from keel.run.evaluate import EvaluationResult
    from keel.training import Model


def add(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "eval",
        help="evaluate a run or a model on held-out tasks",
        description="Run the held-out tasks of each environment and print mean reward and pass@k with 95 % intervals."
        "\n\nTARGET is the folder of a run (evaluated with its newest complete checkpoint, its environments and its"
        "\nsampling), or a model: a built-in name, a Hugging Face folder or a hub name, with --environment or --recipe."
        "\n\nA completion passes with a reward of 1. A failed episode counts with reward 0.",
        epilog="examples:\n  keel eval runs/first\n  keel eval runs/first --step 20 --samples 8\n"
        "  keel eval smollm2-135m --recipe larger_number\n"
        "  keel eval smollm2-135m --environment larger_number --max-tokens 16",
    )
    parser.add_argument("target", metavar="TARGET", help="the folder of a run, or a model")
    parser.add_argument("--step", type=int, metavar="N", help="for a run: checkpoint to evaluate (default: the newest)")
    parser.add_argument(
        "--environment",
        action="append",
        default=[],
        metavar="NAME",
        help="an environment of the run or recipe, or any by its name; may be repeated (default: all of the run or"
        " recipe)",
    )
    parser.add_argument("--recipe", metavar="FILE", help="for a model: take environments and sampling from this file")
    parser.add_argument("--tasks", type=int, metavar="N", help="held-out tasks per environment (default: 64)")
    parser.add_argument("--samples", type=int, metavar="K", help="completions per task, for pass@k (default: 1)")
    parser.add_argument("--temperature", type=float, metavar="T", help="sampling temperature; 0: greedy")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of one completion")
    parser.add_argument("--seed", type=int, metavar="S", help="seed of sampling (default: that of the run, or 0)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class EvaluationTarget:
    """The model to evaluate and its settings."""

    settings: "RunSettings"
    weights: str
    """Folder or name of the model, for display."""
    step: int | None
    checkpoint: Path | None

    def load(self) -> "tuple[Model, LocalEngine]":
        """Load the model and an engine that samples from it. Must be called in an event loop."""
        from keel.config import EngineSettings
        from keel.inference.local.local_engine import LocalEngine
        from keel.training import load_model
        from keel.training.step.malloc import retain_freed_memory

        retain_freed_memory(self.settings.trainer.retain_freed_memory)
        model_settings = self.settings.model.model_copy(update={"lora": None})
        if self.checkpoint is not None and self.settings.model.lora is None:
            model_settings = model_settings.model_copy(update={"name": str(self.checkpoint), "sft_warmup_steps": 0})
        model = load_model(model_settings, self.settings.seed)
        engine = EngineSettings(max_batch=self.settings.engine.max_batch)
        return model, LocalEngine(model.network, model.tokenizer, engine, version=self.step or 0)


def run(args: argparse.Namespace) -> int:
    """Evaluate and print the result."""
    for name in ("tasks", "samples", "max_tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least 1")
    add_module_folders(args.recipe, args.target)
    target = resolve_target(args)
    selected = select_environments(args.environment, target)
    results = asyncio.run(evaluate_environments(args, target, selected))
    if args.json:
        evaluations = [{"environment": result.environment, **result.scalars()} for result in results]
        payload = {"model": target.weights, "step": target.step, "evaluations": evaluations}
        write_stdout(json.dumps(payload, indent=2) + "\n")
        return 0
    print_evaluations(target, results)
    return 0


def resolve_target(args: argparse.Namespace) -> EvaluationTarget:
    """Return the run or model that the arguments name."""
    from keel.config import ModelSettings, load_settings

    folder = Path(args.target)
    if (folder / "config.toml").is_file():
        if args.recipe is not None:
            raise ConfigError(
                f"--recipe {args.recipe} has no effect: {folder} is a run with its own settings; remove it"
            )
        return _run_target(folder, args.step)
    if args.step is not None:
        raise ConfigError(f"--step {args.step} has no effect: {args.target} is not a run (it has no config.toml)")
    settings = load_settings(args.recipe).settings
    # take only dtype and device from the recipe's model: its adapter and warm-up belong to another model
    model = ModelSettings(name=args.target, dtype=settings.model.dtype, device=settings.model.device)
    if args.recipe is not None and args.target == settings.model.name:
        model = settings.model.model_copy(update={"lora": None})
    return EvaluationTarget(settings.model_copy(update={"model": model}), args.target, None, None)


def _run_target(folder: Path, step: int | None) -> EvaluationTarget:
    from keel.config import load_settings
    from keel.training import Checkpoints

    settings = load_settings(folder / "config.toml").settings
    kept = Checkpoints(folder / "checkpoints", settings.checkpoints)
    if step is None:
        step = kept.latest()
        if step is None:
            raise ConfigError(f"{folder / 'checkpoints'} has no complete checkpoint yet; wait for the first one")
    else:
        kept.verify(step)
    return EvaluationTarget(settings, str(kept.path(step)), step, kept.path(step))


def select_environments(names: list[str], target: EvaluationTarget) -> "dict[str, EnvironmentSettings]":
    """Return the named environments, or all environments of the settings."""
    from keel.config import EnvironmentSettings

    environments = target.settings.environments
    if not names:
        if not environments:
            raise ConfigError(
                f"{target.weights} is not the folder of a run, so its environments are not known; pass"
                " --environment NAME or --recipe FILE"
            )
        return dict(environments)
    return {name: environments.get(name) or EnvironmentSettings(name=name) for name in names}


def resolve_sampling(
    args: argparse.Namespace, settings: "RunSettings", environment_sampling: "Sampling | None"
) -> "Sampling":
    """Return the sampling settings: command line over evaluation.sampling, the environment's, and the run's."""
    from pydantic import ValidationError

    from keel.common.settings import to_config_error
    from keel.config import Sampling

    overrides = {"temperature": args.temperature, "max_tokens": args.max_tokens}
    base = settings.evaluation.sampling or environment_sampling or settings.sampling
    try:
        return Sampling.model_validate(
            base.model_dump() | {name: value for name, value in overrides.items() if value is not None}
        )
    except ValidationError as error:
        raise to_config_error(error, ("sampling",)) from None


async def evaluate_environments(
    args: argparse.Namespace, target: EvaluationTarget, selected: "dict[str, EnvironmentSettings]"
) -> "list[EvaluationResult]":
    """Evaluate one environment after another, with a progress bar in a terminal."""
    from keel.inference.protocol import WeightSource
    from keel.rollout.environments.environment import close_environments
    from keel.rollout.environments.registry import load_environment
    from keel.rollout.policy_client import derive_seed
    from keel.rollout.rendering.renderer import Renderer
    from keel.run.evaluate import evaluate
    from keel.training.model.references import check_adapter_base

    settings = target.settings
    # environments first: an invalid name is then an error before the model is loaded
    loaded = {
        name: (load_environment(environment), resolve_sampling(args, settings, environment.sampling))
        for name, environment in selected.items()
    }
    model, engine = target.load()
    results = []
    try:
        if settings.model.lora is not None and target.checkpoint is not None:
            check_adapter_base(target.checkpoint, model)
            await engine.load_weights(WeightSource.adapter(target.checkpoint), target.step or 0)
        renderer = Renderer(model.tokenizer, settings.renderer)
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
    for prefix, title in ((f"{REWARD_COMPONENTS}/", "reward components"), (f"{ENVIRONMENT_METRICS}/", "metrics")):
        means = [
            f"{name.removeprefix(prefix)} {value:.3g}"
            for name, value in result.environment_means.items()
            if name.startswith(prefix)
        ]
        if means:
            yield f"{result.environment}: {title} {', '.join(means)}"
