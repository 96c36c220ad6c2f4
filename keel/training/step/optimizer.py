"""Build AdamW and compute its learning rate, a function of the step number alone, so no scheduler state is saved."""

import math
from collections.abc import Iterable

import torch

from keel.config.trainer import OptimizerSettings
from keel.errors import ConfigError


def check_schedule(settings: OptimizerSettings) -> None:
    """Raise a `ConfigError` for a decay without a length. `keel train` takes the length from its number of steps."""
    if settings.lr_schedule != "constant" and settings.total_steps is None:
        raise ConfigError(
            f'trainer.optimizer.lr_schedule = "{settings.lr_schedule}" needs trainer.optimizer.total_steps: outside of'
            " `keel train` the number of steps is not known"
        )


def learning_rate(settings: OptimizerSettings, step: int) -> float:
    """Return the learning rate of an optimizer step, counted from 0."""
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / (settings.warmup_steps + 1)
    if settings.lr_schedule == "constant":
        return settings.lr
    assert settings.total_steps is not None  # see check_schedule
    progress = min((step - settings.warmup_steps) / (settings.total_steps - settings.warmup_steps), 1.0)
    decay = 1 - progress if settings.lr_schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    min_ratio = settings.min_lr_ratio or 0.0
    return settings.lr * (min_ratio + (1 - min_ratio) * decay)


def build_optimizer(settings: OptimizerSettings, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.AdamW:
    """Return AdamW over the parameters, with weight decay on matrices only, not on norms and biases."""
    matrices: list[torch.nn.Parameter] = []
    vectors: list[torch.nn.Parameter] = []
    for parameter in parameters:
        (matrices if parameter.dim() > 1 else vectors).append(parameter)
    groups = [
        {"params": group, "weight_decay": decay}
        for group, decay in ((matrices, settings.weight_decay), (vectors, 0.0))
        if group
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
