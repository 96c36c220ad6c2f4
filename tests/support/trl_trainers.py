"""Real TRL trainers on a tiny model, for tests of Keel inside TRL."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from keel.config import ModelSettings
from keel.training import load_model

NO_TRL = 'TRL is not installed: pip install "keel-rl[trl]"'

PROMPTS = [f"Which is larger, {number} or {9 - number}?" for number in range(8)]


def tiny(seed: int = 0) -> tuple[Any, PreTrainedTokenizerBase]:
    """Return the tiny model in float32 and its tokenizer."""
    model = load_model(ModelSettings(name="tiny"), seed=seed)
    return model.network, model.tokenizer


def sum_digit(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return rewards that differ between completions."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def config(folder: Path, **changes: Any) -> Any:
    """Return a `GRPOConfig` for short runs on a CPU."""
    from trl import GRPOConfig

    settings = {
        "output_dir": str(folder / "trl"),
        "max_steps": 2,
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "num_generations": 4,
        "max_completion_length": 6,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "bf16": False,
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 0,
    }
    return GRPOConfig(**(settings | changes))


def make_trainer(folder: Path, objective: Any = None, *, trainer: dict[str, Any] | None = None, **changes: Any) -> Any:
    """Return Keel's trainer with this objective, or TRL's own without one."""
    from datasets import Dataset
    from trl import GRPOTrainer

    from keel.integrations.trl import KeelGRPOTrainer

    network, tokenizer = tiny()
    arguments = {
        "model": network,
        "processing_class": tokenizer,
        "reward_funcs": sum_digit,
        "args": config(folder, **changes),
        "train_dataset": Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
        **(trainer or {}),
    }
    return GRPOTrainer(**arguments) if objective is None else KeelGRPOTrainer(objective=objective, **arguments)


def micro_batch(trainer: Any, seed: int, rows: int = 4) -> dict[str, Any]:
    """Return inputs of `_compute_loss` with padding, tool output, and log-probs that differ from the policy's."""
    generator = torch.Generator().manual_seed(seed)

    def ids(length: int) -> torch.Tensor:
        return torch.randint(3, 200, (rows, length), generator=generator)

    inputs: dict[str, Any] = {"prompt_ids": ids(5), "completion_ids": ids(7), "prompt_mask": torch.ones(rows, 5).long()}
    inputs["prompt_mask"][0, :2] = 0
    lengths = torch.randint(2, 8, (rows,), generator=generator)
    inputs["completion_mask"] = (torch.arange(7) < lengths[:, None]).long()
    inputs["tool_mask"] = (torch.rand(rows, 7, generator=generator) > 0.2).long()
    inputs["tool_mask"][:, 0] = 1
    inputs["advantages"] = torch.randn(rows, generator=generator)
    with torch.no_grad():
        rows_ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        logprobs, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, rows_ids, attention, 7)
    for name, width in (("old_per_token_logps", 0.3), ("ref_per_token_logps", 0.5)):
        inputs[name] = logprobs + width * torch.randn(rows, 7, generator=generator)
    mask = inputs["completion_mask"] * inputs["tool_mask"]
    inputs["num_items_in_batch"] = mask.sum()
    first = 100 * seed
    inputs["keel_sequence"] = torch.arange(first, first + rows)
    return inputs


def loss_and_gradient(trainer: Any, micro_batches: list[dict[str, Any]]) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradient of an optimizer step over these micro-batches, as TRL accumulates them."""
    trainer.model.train()
    trainer.model.zero_grad()
    trainer._buffered_inputs, trainer._step = micro_batches, 0
    trainer.current_gradient_accumulation_steps = len(micro_batches)
    total = sum(int(part["num_items_in_batch"]) for part in micro_batches)
    loss = 0.0
    for part in micro_batches:
        part["num_items_in_batch"] = torch.tensor(total)
    for part in micro_batches:
        value = trainer._compute_loss(trainer.model, part)
        value.backward()
        loss += value.item()
        trainer._step += 1
    return loss, {name: value.grad.clone() for name, value in trainer.model.named_parameters() if value.requires_grad}
