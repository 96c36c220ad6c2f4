"""Leave the weights alone in a step in which no token trains, inside any trainer of transformers."""

from typing import Any

import torch
from transformers import TrainerCallback


class SkipEmptySteps(TrainerCallback):
    """Removes the gradients of a step without a kept token, so that no decay and no momentum is applied."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._kept_tokens = 0

    def add(self, kept_tokens: int) -> None:
        """Count the kept tokens of a micro-batch."""
        self._kept_tokens += kept_tokens

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        del args, state, control
        trainer, kept = self._trainer, self._kept_tokens
        self._kept_tokens = 0
        if trainer.accelerator.num_processes > 1:
            kept = int(
                trainer.accelerator.reduce(torch.tensor(kept, device=trainer.accelerator.device), reduction="sum")
            )
        trainer._metrics["train"]["keel/skipped_steps"].append(float(kept == 0))
        # DeepSpeed keeps gradients outside of the parameters
        if kept == 0 and not trainer.is_deepspeed_enabled:
            for parameter in model.parameters():
                parameter.grad = None
