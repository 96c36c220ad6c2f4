"""Keel inside TRL compared with TRL alone: the cost of the loss, and the time to sample the completions of a step.

Both sides run in this process in turn, in the environment of `keel-rl[trl,train,offline]`. The loss is
`_compute_loss` without the forward pass of the model, with metrics and backward, in one thread, on 64 completions of up
to 512 tokens. Sampling is `_generate` on 8 prompts x 8 completions of up to 16 tokens with SmolLM2-135M; Keel's side
loads the trainer's weights into the engine every time. Thresholds: at most 1.1 times the cost of TRL's loss, at least
2.5 times its sampling speed.
"""

import os
import sys

# replace this folder, whose signal.py would shadow the standard library's, by the repository
sys.path.insert(0, os.path.dirname(os.path.abspath(sys.path.pop(0))))
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import interleave, ratio, verdict

LOSS_THRESHOLD, SAMPLING_THRESHOLD = 1.1, 2.5
ROWS, LENGTH, PROMPT = 64, 512, 32


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loss-rounds", type=int, default=200, help="rounds of the loss (default: 200)")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of sampling; 0 skips it (default: 4)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        passed = compare_losses(Path(scratch), args.loss_rounds)
        if args.rounds:
            passed &= compare_sampling(Path(scratch), args.rounds)
    return int(not passed)


def make_trainer(scratch: Path, model: str, objective: str | None = None, **options: Any) -> Any:
    """Return TRL's trainer, or Keel's with an objective, on the same model."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from keel.config import ModelSettings
    from keel.integrations.trl import KeelGRPOTrainer
    from keel.training import load_model

    loaded = load_model(ModelSettings(name=model), seed=0)
    settings = GRPOConfig(
        output_dir=str(scratch / "trl"),
        per_device_train_batch_size=ROWS,
        num_generations=8,
        gradient_checkpointing=False,
        report_to="none",
        bf16=False,
        use_cpu=True,
        **options,
    )
    arguments = {
        "model": loaded.network,
        "processing_class": loaded.tokenizer,
        "reward_funcs": lambda completions, **_: [0.0] * len(completions),
        "args": settings,
        "train_dataset": Dataset.from_list([{"prompt": "a"}] * 8),
    }
    return GRPOTrainer(**arguments) if objective is None else KeelGRPOTrainer(objective=objective, **arguments)


def compare_losses(scratch: Path, rounds: int) -> bool:
    own = make_trainer(scratch, "tiny", epsilon_high=0.28)
    hosted = make_trainer(scratch, "tiny", "dapo")
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(LENGTH // 4, LENGTH + 1, (ROWS,), generator=generator)
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    old = -2 * torch.rand(ROWS, LENGTH, generator=generator)
    logprobs = (old + 0.2 * torch.randn(ROWS, LENGTH, generator=generator)).requires_grad_()
    inputs = {
        "prompt_ids": torch.ones(ROWS, PROMPT, dtype=torch.long),
        "prompt_mask": torch.ones(ROWS, PROMPT, dtype=torch.long),
        "completion_ids": torch.randint(3, 200, (ROWS, LENGTH), generator=generator),
        "completion_mask": mask,
        "advantages": torch.randn(ROWS, generator=generator),
        "old_per_token_logps": old,
        "num_items_in_batch": mask.sum(),
    }
    entropy = torch.rand(ROWS, LENGTH, generator=generator)
    losses: dict[str, float] = {}

    def side(name: str, trainer: Any) -> Callable[[], None]:
        trainer.model.train()
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, entropy, None)
        trainer.current_gradient_accumulation_steps = 1

        def run() -> None:
            logprobs.grad = None
            loss = trainer._compute_loss(trainer.model, inputs)
            loss.backward()
            losses[name] = loss.item()

        return run

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a millisecond of work: threads would measure the scheduler of the machine
    times = interleave({"TRL": side("TRL", own), "Keel": side("Keel", hosted)}, rounds)
    torch.set_num_threads(threads)
    middle, low, high = ratio(times, "Keel", "TRL")
    print(f"loss of {int(mask.sum())} tokens: TRL {losses['TRL']:.6f}, Keel {losses['Keel']:.6f}")
    for name, seconds in times.items():
        print(f"  {name:<5} {1000 * sorted(seconds)[len(seconds) // 2]:6.1f} ms (median of {rounds})")
    passed = middle <= LOSS_THRESHOLD
    print(f"  cost {middle:.2f}x ({low:.2f} to {high:.2f}), threshold {LOSS_THRESHOLD}: {verdict(passed)}", flush=True)
    return passed


def compare_sampling(scratch: Path, rounds: int) -> bool:
    from keel.integrations.trl import keel_rollout

    trainer = make_trainer(scratch, "smollm2-135m", max_completion_length=16)
    rollout = keel_rollout()
    prompts = [_prompt(number) for number in range(8) for _ in range(8)]

    def sample(rollout_func: Any) -> Callable[[], None]:
        def run() -> None:
            trainer.rollout_func = rollout_func
            trainer.state.global_step += 1  # newer weights, which the engine has to load
            trainer._generate(prompts)

        return run

    times = interleave({"TRL": sample(None), "Keel": sample(rollout)}, rounds)
    rollout.close()
    middle, low, high = ratio(times, "TRL", "Keel")
    print(f"sampling {len(prompts)} completions of up to 16 tokens")
    for name, seconds in times.items():
        print(f"  {name:<5} {sorted(seconds)[len(seconds) // 2]:6.2f} s (median of {rounds})")
    passed = middle >= SAMPLING_THRESHOLD
    print(f"  {middle:.2f}x faster ({low:.2f} to {high:.2f}), threshold {SAMPLING_THRESHOLD}: {verdict(passed)}")
    return passed


def _prompt(number: int) -> list[dict[str, str]]:
    question = f"Which is larger, {number} or {(number * 7 + 3) % 10}? Answer with the number only."
    return [{"role": "system", "content": "You answer briefly."}, {"role": "user", "content": question}]


if __name__ == "__main__":
    sys.exit(main())
