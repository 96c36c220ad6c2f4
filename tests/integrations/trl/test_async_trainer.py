"""Keel's objectives inside TRL's AsyncGRPOTrainer, on the batches that its own collator packs."""

import queue
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import keel
from tests.support.trl_trainers import NO_TRL, tiny

pytest.importorskip("trl", reason=NO_TRL)
pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("ignore::UserWarning")]


class StubWorker:
    """A rollout worker without rollouts."""

    def __init__(self) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()


def path_attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *, tree_kv_index: Any, tree_cu_seqlens_q: Any,
    tree_cu_seqlens_k: Any, scaling: float | None = None, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attention of each segment to its path, in place of the GPU kernel that TRL uses."""
    del attention_mask
    repeats = module.num_key_value_groups
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    out = torch.empty_like(query)
    bounds = zip(tree_cu_seqlens_q.tolist(), tree_cu_seqlens_k.tolist(), strict=True)
    (start, path_start), *ends = list(bounds)
    for end, path_end in ends:
        path = tree_kv_index[path_start:path_end]
        size, length = end - start, path_end - path_start
        visible = torch.ones(size, length, dtype=torch.bool).tril(length - size)
        out[:, :, start:end] = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, start:end], key[:, :, path], value[:, :, path], attn_mask=visible, scale=scaling
        )
        start, path_start = end, path_end
    return out.transpose(1, 2), None


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the tiny model; TRL asks CUDA for the speed of the device, and there may be none."""
    from trl.experimental.async_grpo import async_grpo_trainer

    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)
    network, tokenizer = tiny()
    network.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path


def make(folder: Path, objective: Any = None, accumulated: int = 1, **options: Any) -> Any:
    from transformers import AttentionInterface
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    from keel.integrations.trl import KeelAsyncGRPOTrainer

    args = AsyncGRPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=1,
        gradient_accumulation_steps=accumulated,
        dtype="float32",
        bf16=False,
        use_cpu=True,
        report_to="none",
        gradient_checkpointing=False,
        token_budget=0,
        **options,
    )
    from datasets import Dataset

    arguments = {
        "model": str(folder / "model"),
        "args": args,
        "train_dataset": Dataset.from_list([{"prompt": "a"}]),
        "rollout_worker": StubWorker(),
        "weight_transfer": object(),
    }
    kind = AsyncGRPOTrainer if objective is None else KeelAsyncGRPOTrainer
    trainer = kind(**arguments) if objective is None else kind(objective=objective, **arguments)
    AttentionInterface.register("tree_fa3", path_attention)
    return trainer


def collate(trainer: Any, seed: int, samples: int) -> dict[str, torch.Tensor]:
    """Return a micro-batch of samples that share prompts, packed by TRL."""
    from trl.experimental.async_grpo.async_grpo_trainer import DataCollatorForRollout
    from trl.experimental.async_grpo.packing import TreeRow

    generator, row = np.random.default_rng(seed), TreeRow()
    for number in range(samples):
        completion = generator.integers(3, 200, generator.integers(2, 7))
        ids = np.concatenate([[5, 6, 7, 8 + number // 2], completion])
        mask = np.concatenate([np.zeros(4, np.int64), generator.random(len(completion)) < 0.8])
        mask[4] = 1
        row.add(
            {
                "input_ids": ids,
                "completion_mask": mask.astype(np.int64),
                "old_log_probs": -5.5 + 0.4 * generator.standard_normal(len(ids)),
                "advantage": float(generator.standard_normal()),
                "group_id": number // 2,
                "metrics": {},
            }
        )
    return dict(DataCollatorForRollout(trainer.processing_class.pad_token_id)([[row]]))


def step(trainer: Any, micro_batches: list[dict[str, torch.Tensor]]) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradient of a step, as TRL accumulates them."""
    trainer.model.train()
    trainer.model.zero_grad()
    fetched, _ = trainer.get_batch_samples(iter(micro_batches), len(micro_batches), torch.device("cpu"))
    trainer.current_gradient_accumulation_steps = len(fetched)
    loss = 0.0
    for part in fetched:
        value = trainer.compute_loss(trainer.model, part)
        value.backward()
        loss += value.item()
    return loss, {name: value.grad.clone() for name, value in trainer.model.named_parameters()}


def test_the_clipped_loss_agrees_with_trls_own(folder: Path) -> None:
    own, hosted = make(folder, epsilon_high=0.28), make(folder, "dapo")
    batch = collate(own, 0, 6)
    (own_loss, own_gradient), (loss, gradient) = step(own, [batch]), step(hosted, [batch])
    assert loss == pytest.approx(own_loss, rel=1e-5)
    for name, value in own_gradient.items():
        torch.testing.assert_close(gradient[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["icepop", "gspo", "opsm", "tis"])
def test_accumulation_is_the_step_of_all_samples(name: str, folder: Path) -> None:
    hosted = make(folder, name, accumulated=2)
    parts = [collate(hosted, 0, 2), collate(hosted, 1, 6)]
    loss, gradient = step(hosted, parts)
    batches = []
    for number, part in enumerate(parts):
        outputs = hosted.model(**_model_inputs(part))
        hosted._next_micro_batch = number
        batches.append(hosted._token_batch(part, outputs))
    hosted.model.zero_grad()
    whole = keel.objective(name)(keel.TokenBatch.cat(batches))
    whole.loss.backward()
    assert loss == pytest.approx(whole.loss.item(), rel=1e-5, abs=1e-7)
    for parameter, value in hosted.model.named_parameters():
        torch.testing.assert_close(gradient[parameter], value.grad, rtol=1e-4, atol=1e-6)


def _model_inputs(part: dict[str, torch.Tensor]) -> dict[str, Any]:
    mask = part["attention_mask"].bool()
    named = {name: part[name][mask][None] for name in ("input_ids", "position_ids", "shift_labels")}
    tree = {name: part[name].flatten() for name in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")}
    return named | tree | {"fused_lm_head": True, "tree_max_seqlen_q": 0, "tree_max_seqlen_k": 0}


def test_metrics_are_those_of_the_objective(folder: Path) -> None:
    hosted = make(folder, {"name": "icepop", "ratio_high": 1.2})
    step(hosted, [collate(hosted, 0, 6)])
    logs: dict[str, float] = {}
    hosted.log(logs)
    assert 0 < logs["keel/is_masked"] < 1 and "entropy" in logs and "clip_ratio/low_mean" not in logs


@pytest.mark.parametrize(
    ("objective", "accumulated", "options", "message"),
    [
        ("m2po", 2, {}, r"gradient_accumulation_steps = 2 it computes one micro-batch at a time"),
        ("decoupled_ppo_loglinear", 1, {}, r"its collator drops the version"),
        ("icepop", 1, {"epsilon": 0.3}, r"AsyncGRPOConfig.epsilon = 0.3 has no effect with KeelAsyncGRPOTrainer"),
    ],
)
def test_what_it_cannot_compute_is_refused(
    objective: str, accumulated: int, options: dict[str, Any], message: str, folder: Path
) -> None:
    with pytest.raises(keel.ConfigError, match=message):
        make(folder, objective, accumulated, **options)
