"""Two processes that share a step unevenly get the loss and the gradient of one process."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import keel
from tests.support.strategies import assert_same_pairs, close, pairs, random_step, run

RANKS = 2
OBJECTIVES: dict[str, tuple[str, dict[str, Any]]] = {
    "icepop": ("icepop", {}),
    "opsm": ("opsm", {}),
    "m2po": ("m2po", {}),
    "gspo, kept": (
        "gspo",
        {
            "eps": 0.2,
            "eps_high": 0.3,
            "denominator": "kept",
            "gates": [{"statistic": "ratio", "low": 0.4, "high": 2.5}],
        },
    ),
    "kl_penalty": ("icepop", {"kl_penalty_coef": 0.3}),
    "loglinear": ("decoupled_ppo_loglinear", {"denominator": "kept", "reduction": "sequences"}),
}


def step() -> keel.TokenBatch:
    """Return a step without trainer_version, which is then the newest version on any rank."""
    return keel.TokenBatch(**random_step(50).tensors())


def _splits(size: int) -> dict[str, list[list[Tensor]]]:
    """Return the positions of the micro-batches of each rank. Sequences are split between ranks."""
    positions = torch.arange(size)
    untrainable = (~step().trainable).nonzero().squeeze(1)
    trainable = step().trainable.nonzero().squeeze(1)
    return {
        "uneven": [[positions[:7]], [positions[7:20], positions[20:21], positions[21:]]],
        "one rank without a trainable token": [[trainable], [untrainable]],
        "one rank without a token": [[positions[:15], positions[15:]], [positions[:0]]],
    }


def _all_gather(part: Any) -> list[Any]:
    parts: list[Any] = [None] * RANKS
    dist.all_gather_object(parts, part)
    return parts


def run_rank(rank: int, folder: str) -> None:
    """Write one rank's part of loss, gradient and metrics for each objective and each split of the step."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    results: dict[str, Any] = {}
    for split, micro_batches in _splits(len(step())).items():
        for case, (name, parameters) in OBJECTIVES.items():
            objective = keel.objective(name, **parameters)
            batches = [step().take(positions) for positions in micro_batches[rank]]
            totals = objective.totals(batches, gather=_all_gather)
            results[f"{split}: {case}"] = [_evaluate(objective, micro_batch, totals) for micro_batch in batches]
    Path(folder, f"rank{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def _evaluate(objective: keel.Objective, micro_batch: keel.TokenBatch, totals: keel.StepTotals) -> dict[str, Any]:
    loss, gradient, result = run(objective, micro_batch, totals)
    masked = result.metrics["is_masked"]
    return {
        "loss": loss.item(),
        "gradient": gradient.tolist(),
        "reasons": result.reasons.tolist(),
        "masked": [masked.sum, masked.count],
    }


@pytest.fixture(scope="module")
def rank_results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(run_rank, args=(str(folder),), nprocs=RANKS)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.process
@pytest.mark.parametrize("split", _splits(len(step())))
@pytest.mark.parametrize("case", OBJECTIVES)
def test_two_ranks_get_the_loss_and_gradient_of_one_process(
    case: str, split: str, rank_results: list[dict[str, Any]]
) -> None:
    name, parameters = OBJECTIVES[case]
    loss, gradient, result = run(keel.objective(name, **parameters), step())
    total_loss, total_gradient = 0.0, torch.zeros_like(gradient)
    reasons = torch.zeros(len(gradient), dtype=torch.uint8)
    masked = [0.0, 0.0]
    for micro_batches, parts in zip(_splits(len(gradient))[split], rank_results, strict=True):
        for positions, part in zip(micro_batches, parts[f"{split}: {case}"], strict=True):
            total_loss += part["loss"]
            total_gradient[positions] = torch.tensor(part["gradient"], dtype=torch.float64)
            reasons[positions] = torch.tensor(part["reasons"], dtype=torch.uint8)
            masked = [a + b for a, b in zip(masked, part["masked"], strict=True)]
    assert total_loss == pytest.approx(loss.item(), rel=1e-9)
    close(total_gradient, gradient)
    assert torch.equal(reasons, result.reasons)
    assert gradient.abs().max() > 0
    assert_same_pairs({"is_masked": masked}, {"is_masked": pairs(result.metrics)["is_masked"]})


@pytest.mark.parametrize("case", ["icepop", "opsm", "m2po", "gspo, kept"])
def test_ranks_without_common_totals_get_another_gradient(case: str) -> None:
    """Denominators and thresholds per rank give another gradient, which is why the totals are gathered."""
    name, parameters = OBJECTIVES[case]
    objective = keel.objective(name, **parameters)
    gradient = run(objective, step())[1]
    per_rank = torch.zeros_like(gradient)
    for (positions,) in ([torch.arange(7)], [torch.arange(7, len(gradient))]):
        per_rank[positions] = run(objective, step().take(positions))[1] / RANKS
    assert (per_rank - gradient).abs().max() > 1e-4


def test_the_invalid_logprob_fraction_is_that_of_all_ranks() -> None:
    """One invalid token in seven is too many for one rank alone, but not for the step of both ranks."""
    valid = step().take(step().trainable.nonzero().squeeze(1))
    invalid = valid.take(torch.arange(7))
    invalid = invalid.replace(sampler_logprobs=invalid.sampler_logprobs.index_fill(0, torch.tensor([3]), torch.nan))
    objective = keel.objective("icepop", max_invalid_logprob_fraction=0.1)
    parts: list[Any] = []

    def record(part: Any) -> list[Any]:
        parts.append(part)
        return [part]

    objective.totals([valid], record)
    with pytest.raises(keel.InvalidSignalError, match="1 of 7"):
        objective.totals([invalid])
    assert objective.totals([invalid], lambda part: [part, parts[0]]).num_trainable == 7 + len(valid)
