"""AdamW and the learning rate over a run. The rate is a function of the step's number alone: nothing to save."""

import math
from collections.abc import Iterable

import torch

from keel.config.trainer import OptimizerSettings


def learning_rate(settings: OptimizerSettings, step: int) -> float:
    """The learning rate of the optimizer step with this number, from 0."""
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / (settings.warmup_steps + 1)
    if settings.lr_schedule == "constant":
        return settings.lr
    assert settings.total_steps is not None
    done = min((step - settings.warmup_steps) / (settings.total_steps - settings.warmup_steps), 1.0)
    left = 1 - done if settings.lr_schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    floor = settings.min_lr_ratio or 0.0
    return settings.lr * (floor + (1 - floor) * left)


def build_optimizer(settings: OptimizerSettings, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.AdamW:
    """AdamW over the parameters; weight decay only on matrices, never on norms and biases."""
    matrices: list[torch.nn.Parameter] = []
    vectors: list[torch.nn.Parameter] = []
    for parameter in parameters:
        (matrices if parameter.dim() > 1 else vectors).append(parameter)
    groups = [
        {"params": members, "weight_decay": decay}
        for members, decay in ((matrices, settings.weight_decay), (vectors, 0.0))
        if members
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
