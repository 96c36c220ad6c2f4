"""A whole step against TRL's GRPOTrainer: the same model, tasks, prompts, group size, lengths and learning rate.

TRL is installed into an environment of its own (.venv-trl). The sides run one after the other, each in its own process:
keel by recipes/larger_number.toml; TRL tuned for a CPU (the allocator keeps its memory, no gradient checkpointing); TRL
as it comes. The first step of each is left out of the times. Claims: at least 3.5 times the steps a minute of TRL
tuned, 4.5 times TRL as it comes, and a reward that is no worse after the same number of steps.
"""

import os
import sys

# the repository in place of this folder, whose signal.py is not the standard library's
sys.path.insert(0, os.path.dirname(os.path.abspath(sys.path.pop(0))))

import argparse
import json
import subprocess
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import verdict

ROOT = Path(__file__).parent.parent
TRL = ROOT / ".venv-trl"
RECIPE = ROOT / "recipes" / "larger_number.toml"
PACKAGES = ["torch==2.13.0", "trl==1.16.0", "transformers>=5.16.1,<5.20"]
KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "20000000000",
    "MALLOC_TOP_PAD_": "268435456",
}
TUNED, PLAIN = 3.5, 4.5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="of keel and of TRL tuned (default: 10)")
    parser.add_argument("--plain-steps", type=int, default=4, help="of TRL as it comes; 0: leave it out (default: 4)")
    parser.add_argument("--trl", type=Path, default=TRL, help="environment with TRL; made when missing")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(keel_side(json.loads(args.side))))
        return 0
    install(args.trl)
    with tempfile.TemporaryDirectory() as scratch:
        given = prepare(Path(scratch), args.steps)
        sides = {"keel": run([sys.executable, __file__, "--side"], given)}
        trl = [str(args.trl / "bin" / "python"), str(ROOT / "benchmarks" / "trl_side.py")]
        sides["TRL tuned"] = run(trl, given | {"gradient_checkpointing": False}, KEEP_MEMORY)
        if args.plain_steps:
            sides["TRL as it comes"] = run(trl, given | {"steps": args.plain_steps})
    return report(sides)


def install(folder: Path) -> None:
    """TRL in an environment of its own."""
    if (folder / "installed").is_file():
        return
    print(f"installing TRL into {folder} ...", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
    # torch first and alone, by its exact version: nothing later may pull another build
    subprocess.run([*pip, PACKAGES[0]], check=True)
    subprocess.run([*pip, *PACKAGES], check=True)
    (folder / "installed").touch()


def prepare(scratch: Path, steps: int) -> dict[str, Any]:
    """What both sides are given: the model's folder, and the tasks in the order in which keel takes them."""
    from keel.config import load_settings
    from keel.rollout.environments.registry import load_environment
    from keel.training.model.model_source import resolve_model

    settings = load_settings(RECIPE).settings
    (environment,) = settings.environments.values()
    made: Any = load_environment(environment)
    tasks = list(made.tasks("train"))[: steps * settings.scheduler.groups_per_step]
    rows = [
        {
            "prompt": [
                {"role": "system", "content": made.system},
                *task.data["examples"],
                {"role": "user", "content": task.data["question"]},
            ],
            "answer": task.data["answer"],
        }
        for task in tasks
    ]
    (scratch / "tasks.json").write_text(json.dumps(rows))
    return {
        "model": str(resolve_model(settings.model.name).folder),
        "tasks": str(scratch / "tasks.json"),
        "scratch": str(scratch),
        "steps": steps,
        "groups": settings.scheduler.groups_per_step,
        "group_size": settings.scheduler.group_size,
        "max_tokens": settings.sampling.max_tokens,
        "temperature": settings.sampling.temperature,
        "lr": settings.trainer.optimizer.lr,
        "gradient_checkpointing": True,
    }


def run(command: list[str], given: dict[str, Any], environment: dict[str, str] | None = None) -> dict[str, Any]:
    """One side in a process of its own; the JSON object that it prints last."""
    name = "keel" if "--side" in command else "TRL"
    print(f"{name}: {given['steps']} steps ...", flush=True)
    done = subprocess.run(
        [*command, json.dumps(given)],
        env={**os.environ, **(environment or {})},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def keel_side(given: dict[str, Any]) -> dict[str, Any]:
    """The run as `keel train` makes it, without evaluations."""
    import asyncio

    from keel.config import load_settings
    from keel.run.folder import RunFolder
    from keel.run.loop import TrainingRun

    changes = [f"--steps={given['steps']}", "--evaluation.when=never", "--checkpoints.every=100000"]
    folder = RunFolder.create(Path(given["scratch"]) / "run", load_settings(RECIPE, changes))
    asyncio.run(TrainingRun(folder).train())
    rows = folder.ledger.steps()
    times = [later.time - row.time for row, later in pairwise(rows)]
    rewards = [row.metrics["reward"] for row in rows]
    folder.close()
    return {"seconds": times, "rewards": rewards}


def report(sides: dict[str, dict[str, Any]]) -> int:
    missed = False
    ours = sides["keel"]["seconds"]
    print(f"\n{'':<16} seconds a step (median, lowest, highest)   reward by step")
    for name, side in sides.items():
        times = side["seconds"]
        rewards = " ".join(f"{reward:.2f}" for reward in side["rewards"])
        print(f"{name:<16} {median(times):6.1f} {min(times):6.1f} {max(times):6.1f}{'':>23} {rewards}")
    for name, bar in (("TRL tuned", TUNED), ("TRL as it comes", PLAIN)):
        if name in sides:
            theirs = sides[name]["seconds"]
            ratio, low, high = median(theirs) / median(ours), min(theirs) / max(ours), max(theirs) / min(ours)
            missed |= ratio < bar
            print(f"{name}: {ratio:.2f}x ({low:.2f} to {high:.2f}), bar {bar}: {verdict(ratio >= bar)}")
    few = max(len(sides["keel"]["rewards"]) // 2, 1)
    mine, theirs = (sum(sides[name]["rewards"][-few:]) / few for name in ("keel", "TRL tuned"))
    # eight prompts a step: two standard errors of the difference of two such means
    slack = 2 * (2 * 0.25 / (64 * few)) ** 0.5
    missed |= mine < theirs - slack
    print(f"reward of the last {few} steps: keel {mine:.2f}, TRL {theirs:.2f}: {verdict(mine >= theirs - slack)}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
