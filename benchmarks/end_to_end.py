"""Complete training steps compared with TRL's GRPOTrainer: same model, tasks, group size, lengths and learning rate.

TRL is installed into a separate environment (.venv-trl). The sides run one after the other, each in its own process:
keel with the recipe larger_number; TRL tuned for a CPU (the allocator retains memory, no gradient checkpointing); TRL
stock. The first step of each side is not timed. Thresholds: at least 3.5 times the steps per minute of tuned TRL, 4.5
times those of stock TRL, and a reward that is not worse after the same number of steps.
"""

import os
import sys

# replace this folder, whose signal.py would shadow the standard library's, by the repository
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
RETAIN_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "20000000000",
    "MALLOC_TOP_PAD_": "268435456",
}
TUNED_THRESHOLD, STOCK_THRESHOLD = 3.5, 4.5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="steps of keel and of tuned TRL (default: 10)")
    parser.add_argument("--plain-steps", type=int, default=4, help="steps of stock TRL; 0 skips it (default: 4)")
    parser.add_argument("--trl", type=Path, default=TRL, help="virtual environment with TRL; created if missing")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(keel_side(json.loads(args.side))))
        return 0
    install(args.trl)
    with tempfile.TemporaryDirectory() as scratch:
        config = prepare(Path(scratch), args.steps)
        sides = {"keel": run([sys.executable, __file__, "--side"], config)}
        trl = [str(args.trl / "bin" / "python"), str(ROOT / "benchmarks" / "trl_side.py")]
        sides["TRL tuned"] = run(trl, config | {"gradient_checkpointing": False}, RETAIN_MEMORY)
        if args.plain_steps:
            sides["TRL stock"] = run(trl, config | {"steps": args.plain_steps})
    return report(sides)


def install(folder: Path) -> None:
    """Install TRL into its own virtual environment."""
    if (folder / "installed").is_file():
        return
    print(f"installing TRL into {folder} ...", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
    # install torch first, with its exact version, so that no later package pulls another build
    subprocess.run([*pip, PACKAGES[0]], check=True)
    subprocess.run([*pip, *PACKAGES], check=True)
    (folder / "installed").touch()


def prepare(scratch: Path, steps: int) -> dict[str, Any]:
    """Return the configuration of both sides: the model folder, the tasks in keel's order and the settings."""
    from keel.config import load_settings
    from keel.rollout.environments.registry import load_environment
    from keel.training.model.model_source import resolve_model

    settings = load_settings(RECIPE).settings
    (environment,) = settings.environments.values()
    loaded: Any = load_environment(environment)
    tasks = list(loaded.tasks("train"))[: steps * settings.scheduler.groups_per_step]
    rows = [
        {
            "prompt": [
                {"role": "system", "content": loaded.system},
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


def run(command: list[str], config: dict[str, Any], environment: dict[str, str] | None = None) -> dict[str, Any]:
    """Run one side in its own process and return the JSON object on its last line."""
    name = "keel" if "--side" in command else "TRL"
    print(f"{name}: {config['steps']} steps ...", flush=True)
    process = subprocess.run(
        [*command, json.dumps(config)],
        env={**os.environ, **(environment or {})},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


def keel_side(config: dict[str, Any]) -> dict[str, Any]:
    """Train as `keel train` does, without evaluations."""
    import asyncio

    from keel.config import load_settings
    from keel.run.folder import RunFolder
    from keel.run.loop import TrainingRun

    changes = [f"--steps={config['steps']}", "--evaluation.when=never", "--checkpoints.every=100000"]
    folder = RunFolder.create(Path(config["scratch"]) / "run", load_settings(RECIPE, changes))
    asyncio.run(TrainingRun(folder).train())
    rows = folder.ledger.steps()
    times = [later.time - row.time for row, later in pairwise(rows)]
    rewards = [row.metrics["reward"] for row in rows]
    folder.close()
    return {"seconds": times, "rewards": rewards}


def report(sides: dict[str, dict[str, Any]]) -> int:
    missed = False
    keel_times = sides["keel"]["seconds"]
    print(f"\n{'':<16} seconds a step (median, lowest, highest)   reward by step")
    for name, side in sides.items():
        times = side["seconds"]
        rewards = " ".join(f"{reward:.2f}" for reward in side["rewards"])
        print(f"{name:<16} {median(times):6.1f} {min(times):6.1f} {max(times):6.1f}{'':>23} {rewards}")
    for name, threshold in (("TRL tuned", TUNED_THRESHOLD), ("TRL stock", STOCK_THRESHOLD)):
        if name in sides:
            times = sides[name]["seconds"]
            ratio = median(times) / median(keel_times)
            low, high = min(times) / max(keel_times), max(times) / min(keel_times)
            missed |= ratio < threshold
            print(
                f"{name}: {ratio:.2f}x ({low:.2f} to {high:.2f}), threshold {threshold}: {verdict(ratio >= threshold)}"
            )
    count = max(len(sides["keel"]["rewards"]) // 2, 1)
    keel_reward, trl_reward = (sum(sides[name]["rewards"][-count:]) / count for name in ("keel", "TRL tuned"))
    # 64 completions per step: two standard errors of the difference of two means
    tolerance = 2 * (2 * 0.25 / (64 * count)) ** 0.5
    passed = keel_reward >= trl_reward - tolerance
    missed |= not passed
    print(f"reward of the last {count} steps: keel {keel_reward:.2f}, TRL {trl_reward:.2f}: {verdict(passed)}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
