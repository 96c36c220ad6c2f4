"""Log-prob mismatch of int8 sampling and the share of tokens each objective drops (SmolLM2-135M).

The local engine samples tokens in int8 and the trainer scores them in float32. Prints the difference of the log-probs
and the share of these tokens that the gates of each objective drop. Half of the completions of each group have
advantage +1 and half -1, since some gates depend on the sign. Nothing is trained.

    python benchmarks/int8.py              # 8 prompts x 8 completions
    python benchmarks/int8.py --float32    # the same without int8, as a baseline
"""

import argparse
import os
import sys
from typing import Any

# replace this folder, whose signal.py would shadow the standard library's, by the repository
sys.path.insert(0, os.path.dirname(os.path.abspath(sys.path.pop(0))))

import numpy as np
import torch

import keel
from benchmarks.engine import Case, EngineSide
from keel.config import ModelSettings, TrainerSettings
from keel.training import Sample, Trainer, load_model

OBJECTIVES = ("icepop", "ipo_kl", "dppo_tv", "dppo_kl", "opsm")


def sample(case: Case, *, int8: bool) -> list[Sample]:
    """Return completions with the sampler's log-probs."""
    model = load_model(ModelSettings())
    prompts = case.ids(model)
    side = EngineSide(model, prompts, case.group, int8=int8)
    side()
    side.close()
    samples = []
    for number, (prompt, generation) in enumerate(zip(side.prompts, side.generations, strict=True)):
        ids = np.array([*prompt, *generation.token_ids])
        samples.append(
            Sample(
                token_ids=ids,
                trainable=np.arange(len(ids)) >= len(prompt),
                advantage=1.0 if number % 2 else -1.0,
                sampler_logprobs=np.array([0.0] * len(prompt) + list(generation.logprobs)),
                temperature=generation.temperature,
            )
        )
    return samples


def make_batch(samples: list[Sample]) -> keel.TokenBatch:
    """Return the trainable tokens with the trainer's log-probs."""
    logprobs = Trainer(load_model(ModelSettings()), TrainerSettings()).logprobs(samples)
    masks = [torch.as_tensor(sample.trainable) for sample in samples]
    counts = torch.tensor([int(mask.sum()) for mask in masks])

    def trainable_values(rows: list[Any]) -> torch.Tensor:
        return torch.cat([torch.tensor(np.asarray(row))[mask] for row, mask in zip(rows, masks, strict=True)]).float()

    return keel.TokenBatch(
        logprobs=trainable_values(list(logprobs)),
        sampler_logprobs=trainable_values([sample.sampler_logprobs for sample in samples]),
        advantages=trainable_values([sample.advantage for sample in samples]),
        trainable=torch.ones(int(counts.sum()), dtype=torch.bool),
        sequence=torch.arange(len(samples)).repeat_interleave(counts),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--float32", action="store_true")
    args = parser.parse_args()
    batch = make_batch(sample(Case(50), int8=not args.float32))
    assert batch.sampler_logprobs is not None
    log_ratios = batch.logprobs - batch.sampler_logprobs
    ratios = log_ratios.exp()
    outside = float(((ratios < 0.9) | (ratios > 1.1)).float().mean())
    print(
        f"SmolLM2-135M sampled in {'float32' if args.float32 else 'int8'}, scored in float32: {len(log_ratios)} tokens"
    )
    print(f"  log-prob difference: mean {log_ratios.abs().mean():.4f}, p99 {log_ratios.abs().quantile(0.99):.4f}")
    print(f"  policy / sampler outside [0.9, 1.1]: {100 * outside:.1f} % of tokens")
    print("  dropped by the gates of")
    for name in OBJECTIVES:
        dropped = ~keel.objective(name)(batch).keep
        sequences = len(set(batch.sequence[dropped].tolist()))
        print(f"    {name:8} {100 * float(dropped.float().mean()):5.1f} % of tokens, in {sequences} of 64 completions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
