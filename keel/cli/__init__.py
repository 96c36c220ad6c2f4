"""The `keel` command: each subcommand is a module with `add(subparsers)`, which says what it takes and what runs.

What Keel refuses is one line on standard error and exit code 2, without a traceback. Commands that only read settings
do not load torch.
"""

import argparse
import os
import sys
from collections.abc import Sequence

import keel
from keel.cli.inspect import audit, compare, config, doctor, lens, objectives, simulate
from keel.cli.run import eval, export, launch, pool, serve, sweep, train
from keel.common.extras import missing_dependency
from keel.errors import KeelError

COMMAND_FLAGS = {
    "objectives": objectives.FLAGS,
    "config": config.FLAGS,
    "audit": audit.FLAGS,
    "train": train.FLAGS,
    "launch": launch.FLAGS,
    "compare": compare.FLAGS,
    "sweep": sweep.FLAGS,
    "simulate": simulate.FLAGS,
}
"""The commands that take `--setting value` beside flags of their own, and those flags."""


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code: 0 is good, 2 is refused."""
    parser = build_parser()
    args, rest = parser.parse_known_args(join_overrides(sys.argv[1:] if argv is None else argv))
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
        # the reader left (`keel objectives | head`); nothing more can be written, not even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="keel",
        description="Reinforcement-learning post-training with a training signal you can check.",
        epilog="examples:\n  keel objectives\n  keel objectives icepop --ratio_high 8\n"
        "  keel config run.toml --objective.kl_tau 0.01\n  keel audit icepop",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"keel {keel.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    objectives.add(subparsers)
    train.add(subparsers)
    launch.add(subparsers)
    config.add(subparsers)
    audit.add(subparsers)
    compare.add(subparsers)
    sweep.add(subparsers)
    simulate.add(subparsers)
    export.add(subparsers)
    eval.add(subparsers)
    serve.add(subparsers)
    pool.add(subparsers)
    lens.add(subparsers)
    doctor.add(subparsers)
    return parser


def join_overrides(argv: Sequence[str]) -> list[str]:
    """`--setting value` as `--setting=value`, so that no value is taken for a command's own argument."""
    words = list(argv)
    if not words or words[0] not in COMMAND_FLAGS:
        return words
    joined, rest = [words[0]], words[1:]
    while rest:
        word = rest.pop(0)
        override = word.startswith("--") and word not in (*COMMAND_FLAGS[words[0]], "--help")
        joined.append(f"{word}={rest.pop(0)}" if override and "=" not in word and rest else word)
    return joined
