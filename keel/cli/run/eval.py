"""`keel eval`: how well a run's checkpoint, or any model, does on held-out tasks, with 95 % intervals.

Samples in this process from the weights as they were trained, whatever the run itself samples with: int8 or another
dtype of its engine is not in the numbers. It writes nothing into the run.
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
from keel.cli.display.progress import escape_unprintable, format_interval
from keel.cli.modules import add_module_folders
from keel.errors import ConfigError

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
        description="Play the held-out tasks of each environment and print mean reward and pass@k with 95 % intervals."
        "\n\nWHAT is the folder of a run (its newest whole checkpoint, its environments and sampling), or a model: a"
        "\nbuilt-in name, a Hugging Face folder or a hub name, with --environment or --recipe.\n\n"
        "An answer passes with full marks. An episode that fails is worth 0 and is counted.",
        epilog="examples:\n  keel eval runs/first\n  keel eval runs/first --step 20 --samples 8\n"
        "  keel eval smollm2-135m --recipe recipes/larger_number.toml\n"
        "  keel eval smollm2-135m --environment larger_number --max-tokens 16",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("what", metavar="WHAT")
    parser.add_argument("--step", type=int, metavar="N", help="of a run: this checkpoint and not the newest")
    parser.add_argument(
        "--environment",
        action="append",
        default=[],
        metavar="NAME",
        help="on this one; may be repeated. One of the run's or the recipe's, or any by its name",
    )
    parser.add_argument("--recipe", metavar="FILE", help="of a model: environments and sampling as in this file")
    parser.add_argument("--tasks", type=int, metavar="N", help="held-out tasks of each environment (default: 64)")
    parser.add_argument("--samples", type=int, metavar="K", help="answers to each, for pass@k (default: 1)")
    parser.add_argument("--temperature", type=float, metavar="T", help="of sampling; 0: the likeliest token")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="tokens of one answer")
    parser.add_argument("--seed", type=int, metavar="S", help="of the answers (default: the run's, or 0)")
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class EvaluationTarget:
    """What is evaluated."""

    settings: "RunSettings"
    weights: str
    """A folder or a name, for people."""
    step: int | None
    checkpoint: Path | None

    def load(self) -> "tuple[Model, LocalEngine]":
        """The model and an engine that samples from it. Call it within an event loop."""
        from keel.config import EngineSettings
        from keel.inference.local.local_engine import LocalEngine
        from keel.training import load_model
        from keel.training.step.malloc import retain_freed_memory

        retain_freed_memory(self.settings.trainer.retain_freed_memory)
        wanted = self.settings.model.model_copy(update={"lora": None})
        if self.checkpoint is not None and self.settings.model.lora is None:
            wanted = wanted.model_copy(update={"name": str(self.checkpoint), "sft_warmup_steps": 0})
        model = load_model(wanted, self.settings.seed)
        engine = EngineSettings(max_batch=self.settings.engine.max_batch)
        return model, LocalEngine(model.network, model.tokenizer, engine, version=self.step or 0)


def run(args: argparse.Namespace) -> int:
    """Evaluate and print."""
    for name in ("tasks", "samples", "max_tokens"):
        given = getattr(args, name)
        if given is not None and given < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {given} must be at least 1")
    add_module_folders(args.recipe, args.what)
    subject = resolve_target(args)
    chosen = select_environments(args.environment, subject.settings)
    found = asyncio.run(evaluate_environments(args, subject, chosen))
    if args.json:
        evaluations = [{"environment": one.environment, **one.scalars()} for one in found]
        said = {"model": subject.weights, "step": subject.step, "evaluations": evaluations}
        write_stdout(json.dumps(said, indent=2) + "\n")
        return 0
    print_evaluations(subject, found)
    return 0


def resolve_target(args: argparse.Namespace) -> EvaluationTarget:
    """The run or the model that is meant."""
    from keel.config import ModelSettings, load_settings

    folder = Path(args.what)
    if (folder / "config.toml").is_file():
        if args.recipe is not None:
            raise ConfigError(f"--recipe {args.recipe} cannot act: {folder} is a run, with settings of its own")
        return _run_target(folder, args.step)
    if args.step is not None:
        raise ConfigError(f"--step {args.step} cannot act: {args.what} is no run (it has no config.toml)")
    settings = load_settings(args.recipe).settings
    # of the recipe's model only what fits any: its adapters and warm-up are what is to be compared with
    model = ModelSettings(name=args.what, dtype=settings.model.dtype, device=settings.model.device)
    if args.recipe is not None and args.what == settings.model.name:
        model = settings.model.model_copy(update={"lora": None})
    return EvaluationTarget(settings.model_copy(update={"model": model}), args.what, None, None)


def _run_target(folder: Path, step: int | None) -> EvaluationTarget:
    from keel.config import load_settings
    from keel.training import Checkpoints

    settings = load_settings(folder / "config.toml").settings
    kept = Checkpoints(folder / "checkpoints", settings.checkpoints)
    if step is None:
        step = kept.latest()
        if step is None:
            raise ConfigError(f"{folder / 'checkpoints'} holds no whole checkpoint yet: there is nothing to evaluate")
    else:
        kept.verify(step)
    return EvaluationTarget(settings, str(kept.path(step)), step, kept.path(step))


def select_environments(names: list[str], settings: "RunSettings") -> "dict[str, EnvironmentSettings]":
    """What to evaluate on: those named, or all that the settings have."""
    from keel.config import EnvironmentSettings

    if not names:
        if not settings.environments:
            raise ConfigError("there is nothing to evaluate on; give --environment NAME or --recipe FILE")
        return dict(settings.environments)
    return {name: settings.environments.get(name) or EnvironmentSettings(name=name) for name in names}


def resolve_sampling(
    args: argparse.Namespace, settings: "RunSettings", environment_sampling: "Sampling | None"
) -> "Sampling":
    """How answers are drawn: by the command line, the evaluation's table, the environment's, the run's."""
    from pydantic import ValidationError

    from keel.common.settings import to_config_error
    from keel.config import Sampling

    given = {"temperature": args.temperature, "max_tokens": args.max_tokens}
    base = settings.evaluation.sampling or environment_sampling or settings.sampling
    try:
        return Sampling.model_validate(
            base.model_dump() | {name: value for name, value in given.items() if value is not None}
        )
    except ValidationError as error:
        raise to_config_error(error, ("sampling",)) from None


async def evaluate_environments(
    args: argparse.Namespace, target: EvaluationTarget, selected: "dict[str, EnvironmentSettings]"
) -> "list[EvaluationResult]":
    """Evaluate each environment in turn, with a bar in a terminal."""
    from keel.inference.protocol import WeightSource
    from keel.rollout.environments.registry import load_environment
    from keel.rollout.policy_client import derive_seed
    from keel.rollout.rendering.renderer import Renderer
    from keel.run.evaluate import evaluate
    from keel.training.model.references import check_adapter_base

    settings = target.settings
    # before the model is loaded: a wrong name should cost no time
    made = {
        name: (load_environment(one), resolve_sampling(args, settings, one.sampling)) for name, one in selected.items()
    }
    model, engine = target.load()
    found = []
    try:
        if settings.model.lora is not None and target.checkpoint is not None:
            check_adapter_base(target.checkpoint, model)
            await engine.load_weights(WeightSource.adapter(target.checkpoint), target.step or 0)
        renderer = Renderer(model.tokenizer, settings.renderer)
        with progress_bars(hidden=args.json) as told:
            for name, (environment, drawn) in made.items():
                one = await evaluate(
                    engine,
                    renderer,
                    environment,
                    num_tasks=args.tasks or settings.evaluation.num_tasks,
                    samples_per_task=args.samples or settings.evaluation.samples_per_task,
                    sampling=drawn,
                    limits=selected[name].limits,
                    # as in the training loop: the evaluation of its last step can be had again
                    seed=derive_seed(settings.seed if args.seed is None else args.seed, "evaluation"),
                    max_in_flight=settings.scheduler.max_in_flight,
                    progress=told(name),
                    name=name,
                )
                found.append(one)
    finally:
        await engine.close()
    return found


@contextmanager
def progress_bars(*, hidden: bool) -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """A progress bar for each environment by name, gone when the block ends; away from a terminal, none."""
    screen = console()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=screen, transient=True, disable=hidden or not screen.is_terminal) as shown:

        def tell(name: str) -> Callable[[int, int], None]:
            task = shown.add_task(escape_unprintable(name), total=None)
            return lambda done, total: shown.update(task, completed=done, total=total)

        yield tell


def print_evaluations(target: EvaluationTarget, evaluations: "list[EvaluationResult]") -> None:
    """A table for people."""
    table = Table(box=None, pad_edge=False)
    passes = sorted({k for one in evaluations for k in one.pass_at_k})
    table.add_column("environment", overflow="fold")
    for title in ("tasks", "reward", "95 % interval", *(f"pass@{k}" for k in passes), "failed", "seconds"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in evaluations:
        table.add_row(
            Text(escape_unprintable(one.environment)),
            f"{one.num_tasks} x {one.samples_per_task}",
            f"{one.reward:.3f}",
            format_interval(one.low, one.high),
            *(f"{one.pass_at_k[k]:.3f}" for k in passes),
            str(one.failed_episodes),
            f"{one.seconds:.1f}",
        )
    screen = console()
    at = "" if target.step is None else f", step {target.step}"
    screen.print(Text(escape_unprintable(target.weights) + at), soft_wrap=True)
    screen.print(table)
    for one in evaluations:
        if one.failed_episodes:
            screen.print(
                Text(escape_unprintable(f"{one.environment}: the first that failed is {one.first_error}")),
                soft_wrap=True,
            )
