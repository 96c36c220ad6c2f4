"""`keel reward`: try reward functions on sampled completions before any training."""

import argparse
import asyncio
import json
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from rich.text import Text

from keel.cli.display.console import console, write_stdout
from keel.common.settings import to_config_error
from keel.errors import ConfigError
from keel.run.monitor.progress import escape_unprintable
from keel.run.start.module_folders import add_module_folders

if TYPE_CHECKING:
    from keel.rollout.environments.dataset import DatasetEnvironment
    from keel.tools.reward_trial import RewardTrial, ScoredCompletion

MAX_SHOWN = 300
"""Characters of a completion that are printed."""


def add(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "reward",
        help="try reward functions on sampled completions",
        description="Sample completions of a data set and score them: the distribution of the reward, the share of"
        " groups with a signal,\nfailures, seconds per call, and the best and worst completions. Nothing is trained."
        "\n\nExit code 0: some group has a signal; 1: none has, or every call failed; 2: invalid arguments or input.",
        epilog="examples:\n  keel reward my_rewards:reward --data train.jsonl --model smollm2-135m\n"
        "  keel reward number --data train.jsonl --tasks 16 --samples 4\n"
        """  keel reward '{name = "reward_model", options = {model = "./my-reward-model"}}' --data train.jsonl""",
    )
    parser.add_argument(
        "rewards", metavar="REWARD", nargs="+", help="a built-in reward, module:function, or a TOML table"
    )
    parser.add_argument("--data", metavar="FILE", required=True, help="a data set")
    parser.add_argument("--prompt", default="prompt", metavar="COLUMN", help="column of the prompt (default: prompt)")
    parser.add_argument("--answer", metavar="COLUMN", help='column of the answer (default: "answer" if there is one)')
    parser.add_argument("--model", default="smollm2-135m", metavar="NAME", help="model (default: smollm2-135m)")
    parser.add_argument("--tasks", type=int, default=8, metavar="N", help="rows to sample (default: 8)")
    parser.add_argument("--samples", type=int, default=8, metavar="K", help="completions per row (default: 8)")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="tokens per completion (default: 128)")
    parser.add_argument("--json", action="store_true", help="print JSON, with every completion")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the trial and return 1 if nothing can be learned from the rewards."""
    for name in ("tasks", "samples", "max_tokens"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    add_module_folders(None)
    from keel.config.rollout import EnvironmentSettings
    from keel.rollout.environments.dataset import DatasetEnvironment

    dataset = {"path": args.data, "prompt": args.prompt, "answer": args.answer, "eval_fraction": 0.0}
    table = {"name": "trial", "dataset": dataset, "rewards": args.rewards, "max_reward_failure_fraction": 1.0}
    try:
        settings = EnvironmentSettings.model_validate(table)
    except ValidationError as error:
        raise to_config_error(error) from error
    environment = DatasetEnvironment(settings)
    trial = asyncio.run(_sample(args, environment))
    if args.json:
        write_stdout(json.dumps(trial.as_json(), indent=2) + "\n")
    else:
        _print(trial)
    return 0 if trial.groups_with_signal else 1


async def _sample(args: argparse.Namespace, environment: "DatasetEnvironment") -> "RewardTrial":
    from keel.cli.run.eval import progress_bars
    from keel.config import EngineSettings, ModelSettings, Sampling
    from keel.inference.local.local_engine import LocalEngine
    from keel.rollout.rendering.renderer import Renderer
    from keel.tools.reward_trial import try_rewards
    from keel.training import load_model

    model = load_model(ModelSettings(name=args.model))
    engine = LocalEngine(model.network, model.tokenizer, EngineSettings())
    try:
        with progress_bars(hidden=args.json) as add_bar:
            return await try_rewards(
                environment,
                engine,
                Renderer(model.tokenizer),
                sampling=Sampling(max_tokens=args.max_tokens),
                num_tasks=args.tasks,
                samples_per_task=args.samples,
                progress=add_bar("completions"),
            )
    finally:
        await environment.close()
        await engine.close()


def _print(trial: "RewardTrial") -> None:
    screen, summary = console(), trial.summary()

    def line(label: str, text: str) -> None:
        screen.print(Text(f"{label:<12}{escape_unprintable(text)}"), soft_wrap=True)

    line("completions", f"{summary['completions']} of {summary['groups']} rows; {summary['failures']} not scored")
    if trial.failures:
        line("failure", str(summary["first_failure"]))
    line("seconds", f"{summary['median_seconds']:.3f} per completion (median), {summary['max_seconds']:.3f} at most")
    if not trial.scored:
        return
    line("reward", f"mean {summary['mean']:.3f}, std {summary['std']:.3f}, {summary['min']:g} to {summary['max']:g}")
    for name, mean in summary["components"].items():
        line("", f"{name} {mean:.3f}")
    for name, mean in summary["metrics"].items():
        line("", f"{name} {mean:.4g}")
    signal = summary["groups_with_signal"]
    hint = "" if signal else ": all completions of a row have the same reward, so nothing could be learned"
    line("signal", f"{signal} of {summary['groups']} groups have different rewards{hint}")
    for label, completion in (("best", trial.scored[0]), ("worst", trial.scored[-1])):
        line(label, _describe(completion))


def _describe(completion: "ScoredCompletion") -> str:
    return f"{completion.reward:g} for {_shorten(completion.completion)}, prompt {_shorten(completion.prompt)}"


def _shorten(text: str) -> str:
    return repr(text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "...")
