"""What int8 sampling costs in mismatch, and what each objective does about it, on the real 135M model.

Tokens are sampled by the local engine in int8 and scored by the trainer in float32. Shown: how far the two log-probs
are apart, and which share of the same tokens the gates of each objective drop. Half of the answers of each group have
advantage +1 and half -1, since some gates ask for the sign. No token is trained.

    python benchmarks/int8.py              # 8 prompts x 8 answers
    python benchmarks/int8.py --float32    # the same without int8: what the gates do when nothing is wrong
"""

import argparse
import os
import sys
from typing import Any

# the repository in place of this folder, whose signal.py is not the standard library's
sys.path.insert(0, os.path.dirname(os.path.abspath(sys.path.pop(0))))

import numpy as np
import torch

import keel
from benchmarks.engine import Case, Ours
from keel.config import ModelSettings, TrainerSettings
from keel.training import Sample, Trainer, load_model

OBJECTIVES = ("icepop", "ipo_kl", "dppo_tv", "dppo_kl", "opsm")


def sampled(case: Case, *, int8: bool) -> list[Sample]:
    """Answers, with what the sampler said of each token."""
    model = load_model(ModelSettings())
    prompts = case.ids(model)
    side = Ours(model, prompts, case.group, int8=int8)
    side()
    side.close()
    samples = []
    for number, (prompt, one) in enumerate(zip(side.prompts, side.found, strict=True)):
        ids = np.array([*prompt, *one.token_ids])
        samples.append(
            Sample(
                token_ids=ids,
                trainable=np.arange(len(ids)) >= len(prompt),
                advantage=1.0 if number % 2 else -1.0,
                sampler_logprobs=np.array([0.0] * len(prompt) + list(one.logprobs)),
                temperature=one.temperature,
            )
        )
    return samples


def batch_of(samples: list[Sample]) -> keel.TokenBatch:
    """The trained tokens with the trainer's log-probs."""
    truth = Trainer(load_model(ModelSettings()), TrainerSettings()).logprobs(samples)
    masks = [torch.as_tensor(one.trainable) for one in samples]
    counts = torch.tensor([int(mask.sum()) for mask in masks])

    def trained(values: list[Any]) -> torch.Tensor:
        return torch.cat([torch.tensor(np.asarray(one))[mask] for one, mask in zip(values, masks, strict=True)]).float()

    return keel.TokenBatch(
        logprobs=trained(list(truth)),
        sampler_logprobs=trained([one.sampler_logprobs for one in samples]),
        advantages=trained([one.advantage for one in samples]),
        trainable=torch.ones(int(counts.sum()), dtype=torch.bool),
        sequence=torch.arange(len(samples)).repeat_interleave(counts),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--float32", action="store_true")
    args = parser.parse_args()
    batch = batch_of(sampled(Case(50), int8=not args.float32))
    assert batch.sampler_logprobs is not None
    apart = batch.logprobs - batch.sampler_logprobs
    ratios = apart.exp()
    outside = float(((ratios < 0.9) | (ratios > 1.1)).float().mean())
    print(f"SmolLM2-135M sampled in {'float32' if args.float32 else 'int8'}, scored in float32: {len(apart)} tokens")
    print(f"  log-probs apart: mean {apart.abs().mean():.4f}, p99 {apart.abs().quantile(0.99):.4f}")
    print(f"  policy / sampler outside [0.9, 1.1]: {100 * outside:.1f} % of tokens")
    print("  dropped by the gates of")
    for name in OBJECTIVES:
        dropped = ~keel.objective(name)(batch).keep
        sequences = len(set(batch.sequence[dropped].tolist()))
        print(f"    {name:8} {100 * float(dropped.float().mean()):5.1f} % of tokens, in {sequences} of 64 answers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
