"""Keel's objectives and Keel's engine inside TRL: `KeelGRPOTrainer`, `KeelAsyncGRPOTrainer` and `keel_rollout`.

Names are imported on first use, so that the table of presets can be read where TRL is not installed.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keel.integrations.trl.async_trainer import KeelAsyncGRPOTrainer
    from keel.integrations.trl.grpo_trainer import KeelGRPOTrainer
    from keel.integrations.trl.rollout import keel_rollout

_MODULE_OF = {
    "KeelGRPOTrainer": "keel.integrations.trl.grpo_trainer",
    "KeelAsyncGRPOTrainer": "keel.integrations.trl.async_trainer",
    "keel_rollout": "keel.integrations.trl.rollout",
}

__all__ = ["KeelAsyncGRPOTrainer", "KeelGRPOTrainer", "keel_rollout"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'keel.integrations.trl' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)
