"""The `keel` command: each subcommand is a module whose `add(subparsers)` registers its arguments and its function.

An error of the user is one line on standard error and exit code 2, without a traceback. Commands that only read
settings do not import torch.
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import keel
from keel.cli.inspect import audit, compare, config, data, doctor, lens, objectives, reward, simulate
from keel.cli.run import eval, export, launch, pool, serve, sft, sweep, train
from keel.common.extras import missing_dependency
from keel.common.settings import suggest_name
from keel.errors import KeelError

COMMAND_FLAGS = {
    "objectives": objectives.FLAGS,
    "config": config.FLAGS,
    "audit": audit.FLAGS,
    "train": train.FLAGS,
    "sft": sft.FLAGS,
    "eval": eval.FLAGS,
    "launch": launch.FLAGS,
    "compare": compare.FLAGS,
    "sweep": sweep.FLAGS,
    "simulate": simulate.FLAGS,
}
"""The commands that take overrides (`--setting value`) in addition to their own flags, and those flags."""


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code.

    0: success; 1: the command ended, and what it checked or trained failed; 2: an error of the user; 130: Ctrl-C.
    """
    parser, argv = build_parser(), sys.argv[1:] if argv is None else argv
    if not argv:
        parser.print_help(sys.stderr)
        return 2
    args, rest = parser.parse_known_args(join_overrides(argv))
    if rest and args.command not in COMMAND_FLAGS:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    args.overrides = rest
    try:
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except KeelError as error:
        sys.stderr.write("".join(f"keel: {line}\n" for line in str(error).splitlines()))
        return 2
    except ModuleNotFoundError as error:
        missing = missing_dependency(error)
        if missing is None:
            raise
        sys.stderr.write(f"keel: {args.command}: {missing}\n")
        return 2
    except BrokenPipeError:
        # the reader closed the pipe (`keel objectives | head`); nothing more can be written, not even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("keel: interrupted\n")
        return 130


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = CommandParser(
        prog="keel",
        description="Reinforcement-learning post-training for language models.",
        epilog="examples:\n  keel train larger_number\n  keel lens runs\n"
        "  keel eval runs/larger_number\n  keel objectives icepop --ratio_high 8\n"
        "  keel config larger_number --objective.kl_tau 0.01\n\n"
        "keel COMMAND --help shows the arguments of a command.",
    )
    parser.add_argument("-V", "--version", action="version", version=f"keel {keel.__version__}")
    subparsers = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    # the order of `keel --help`: run, inspect, serve, check
    for command in (train, sft, launch, eval, sweep, export, lens, compare, serve, pool):
        command.add(subparsers)
    for command in (data, reward, objectives, audit, config, simulate, doctor):
        command.add(subparsers)
    return parser


class CommandParser(argparse.ArgumentParser):
    """A parser that keeps the line breaks of its texts, takes flags only in full, and suggests a command for a typo."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        match = re.match(r"argument COMMAND: invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if match is not None:
            known = [name.strip("' ") for name in match[2].split(",")]
            message = f"{match[1]} is not a command; {suggest_name(match[1], known)}"
        super().error(message)


def join_overrides(argv: Sequence[str]) -> list[str]:
    """Join `--setting value` to `--setting=value`, so that no value is parsed as an argument of the command."""
    args = list(argv)
    if not args or args[0] not in COMMAND_FLAGS:
        return args
    joined, rest = [args[0]], args[1:]
    while rest:
        arg = rest.pop(0)
        override = arg.startswith("--") and arg not in (*COMMAND_FLAGS[args[0]], "--help")
        joined.append(f"{arg}={rest.pop(0)}" if override and "=" not in arg and rest else arg)
    return joined
