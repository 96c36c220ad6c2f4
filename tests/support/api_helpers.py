"""Helpers for tests of the Python API: conversations with the tiny model, and an independent trainer."""

import asyncio
import math
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

import keel
from keel.api.trajectories import get_field

Value = TypeVar("Value")
LORA = {"rank": 4, "alpha": 8}


def run(work: Coroutine[Any, Any, Value], seconds: float = 60.0) -> Value:
    async def limited() -> Value:
        return await asyncio.wait_for(work, seconds)

    return asyncio.run(limited())


def agent(name: str = "agent-1", **settings: Any) -> keel.TrainableModel:
    return keel.TrainableModel(name=name, base="tiny", device="cpu", **settings)


async def say(model: keel.TrainableModel, messages: list[Any], **options: Any) -> Any:
    """Request one completion from the endpoint with the real OpenAI client."""
    options = {"max_tokens": 6, **options}
    return await model.openai_client().chat.completions.create(model=model.name, messages=messages, **options)


async def attempt(
    model: keel.TrainableModel, text: str = "hi", *, reward: float | None = None, turns: int = 1, **options: Any
) -> keel.Trajectory:
    """Play a conversation with a tool message between completions; the default reward is the share of even tokens."""
    trajectory = keel.Trajectory(messages_and_choices=[{"role": "user", "content": text}])
    for turn in range(turns):
        if turn:
            trajectory.messages_and_choices.append(
                {"role": "tool", "content": f"result {turn}", "tool_call_id": "none"}
            )
        response = await say(model, trajectory.messages(), **options)
        trajectory.messages_and_choices.append(response.choices[0])
    tokens = [token for choice in trajectory.choices for token in choice.token_ids]
    trajectory.reward = sum(token % 2 == 0 for token in tokens) / len(tokens) if reward is None else reward
    return trajectory


async def attempts(model: keel.TrainableModel, size: int = 4, **options: Any) -> list[keel.TrajectoryGroup]:
    """Return two groups of attempts, each with different rewards."""
    return await keel.gather_groups(
        keel.TrajectoryGroup(attempt(model, text, reward=float(index), **options) for index in range(size))
        for text in ("hi", "and you")
    )


def replayed(trainer: keel.Trainer, choice: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probs recorded in a choice, and those of a trainer for the same tokens."""
    prompt, completion = list(get_field(choice, "prompt_token_ids")), list(get_field(choice, "token_ids"))
    sample = keel.Sample(
        token_ids=prompt + completion,
        trainable=[False] * len(prompt) + [True] * len(completion),
        advantage=0.0,
        temperature=get_field(choice, "sampling")["temperature"],
    )
    recorded = torch.tensor([entry.logprob for entry in choice.logprobs.content])
    recomputed = trainer.logprobs([sample])[0]
    return recorded, recomputed[torch.from_numpy(np.asarray(sample.trainable))].float()


def trainer_at(folder: Path, step: int, model: keel.TrainableModel) -> keel.Trainer:
    """Return a new trainer with the weights of a checkpoint."""
    trainer = keel.Trainer(model.settings)
    trainer.load(keel.Checkpoints(folder / model.name / "checkpoints", keel.CheckpointSettings()), step)
    return trainer


def furthest(recorded: torch.Tensor, recomputed: torch.Tensor) -> float:
    """Return the largest absolute difference."""
    largest = float((recorded - recomputed).abs().max())
    assert math.isfinite(largest)
    return largest
