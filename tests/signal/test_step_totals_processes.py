"""Two real processes that split a step unevenly get the loss and the gradient of one process."""

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
    """Without trainer_version: the newest token of the step, on whichever rank, tells it."""
    whole = random_step(50)
    return keel.TokenBatch(**whole.tensors())


def _shares(size: int) -> dict[str, list[list[Tensor]]]:
    """Who holds which positions, as one list of micro-batches for each rank; sequences are cut between ranks."""
    whole = torch.arange(size)
    untrainable = (~step().trainable).nonzero().squeeze(1)
    trainable = step().trainable.nonzero().squeeze(1)
    return {
        "uneven": [[whole[:7]], [whole[7:20], whole[20:21], whole[21:]]],
        "one rank without a trainable token": [[trainable], [untrainable]],
        "one rank without a token": [[whole[:15], whole[15:]], [whole[:0]]],
    }


def _all_gather(part: Any) -> list[Any]:
    parts: list[Any] = [None] * RANKS
    dist.all_gather_object(parts, part)
    return parts


def work(rank: int, folder: str) -> None:
    """One rank: its part of the loss, gradient and metrics for each objective and each way to share the step."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    answers: dict[str, Any] = {}
    for share, holdings in _shares(len(step())).items():
        for case, (name, parameters) in OBJECTIVES.items():
            rule = keel.objective(name, **parameters)
            batches = [step().take(positions) for positions in holdings[rank]]
            totals = rule.totals(batches, gather=_all_gather)
            answers[f"{share}: {case}"] = [_score(rule, micro_batch, totals) for micro_batch in batches]
    Path(folder, f"rank{rank}.json").write_text(json.dumps(answers))
    dist.barrier()
    dist.destroy_process_group()


def _score(rule: keel.Objective, micro_batch: keel.TokenBatch, totals: keel.StepTotals) -> dict[str, Any]:
    loss, gradient, result = run(rule, micro_batch, totals)
    masked = result.metrics["is_masked"]
    return {
        "loss": loss.item(),
        "gradient": gradient.tolist(),
        "reasons": result.reasons.tolist(),
        "masked": [masked.sum, masked.count],
    }


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(work, args=(str(folder),), nprocs=RANKS)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("share", _shares(len(step())))
@pytest.mark.parametrize("case", OBJECTIVES)
def test_ranks_together_get_the_loss_and_gradient_of_one_process(
    case: str, share: str, answers: list[dict[str, Any]]
) -> None:
    name, parameters = OBJECTIVES[case]
    loss, gradient, result = run(keel.objective(name, **parameters), step())
    total, joined = 0.0, torch.zeros_like(gradient)
    reasons = torch.zeros(len(gradient), dtype=torch.uint8)
    masked = [0.0, 0.0]
    for held, answer in zip(_shares(len(gradient))[share], answers, strict=True):
        for positions, part in zip(held, answer[f"{share}: {case}"], strict=True):
            total += part["loss"]
            joined[positions] = torch.tensor(part["gradient"], dtype=torch.float64)
            reasons[positions] = torch.tensor(part["reasons"], dtype=torch.uint8)
            masked = [a + b for a, b in zip(masked, part["masked"], strict=True)]
    assert total == pytest.approx(loss.item(), rel=1e-9)
    close(joined, gradient)
    assert torch.equal(reasons, result.reasons)
    assert gradient.abs().max() > 0
    assert_same_pairs({"is_masked": masked}, {"is_masked": pairs(result.metrics)["is_masked"]})


@pytest.mark.parametrize("case", ["icepop", "opsm", "m2po", "gspo, kept"])
def test_ranks_by_themselves_would_have_got_it_wrong(case: str) -> None:
    """The reason for gathering: per-rank denominators and thresholds give another gradient."""
    name, parameters = OBJECTIVES[case]
    rule = keel.objective(name, **parameters)
    gradient = run(rule, step())[1]
    alone = torch.zeros_like(gradient)
    for (positions,) in ([torch.arange(7)], [torch.arange(7, len(gradient))]):
        alone[positions] = run(rule, step().take(positions))[1] / RANKS
    assert (alone - gradient).abs().max() > 1e-4


def test_refusal_of_unusable_tokens_is_decided_over_all_ranks() -> None:
    """One bad token in seven is too many for a rank by itself, and few enough for the step of both."""
    clean = step().take(step().trainable.nonzero().squeeze(1))
    bad = clean.take(torch.arange(7))
    bad = bad.replace(sampler_logprobs=bad.sampler_logprobs.index_fill(0, torch.tensor([3]), torch.nan))
    rule = keel.objective("icepop", max_invalid_logprob_fraction=0.1)
    parts: list[Any] = []

    def record(part: Any) -> list[Any]:
        parts.append(part)
        return [part]

    rule.totals([clean], record)
    with pytest.raises(keel.SignalRefused, match="1 of 7"):
        rule.totals([bad])
    assert rule.totals([bad], lambda part: [part, parts[0]]).num_trainable == 7 + len(clean)
