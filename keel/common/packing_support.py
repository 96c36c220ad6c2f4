"""Decide from its configuration whether a transformers model supports several sequences in one row of a forward pass.

The trainer's packing and the engine's batched decoding use the same hook for attention functions, so both call this
first. Each then also compares a probe with the model's own forward pass, which this check does not replace. Does not
import torch.
"""

from typing import Any


def packing_obstacle(network: Any) -> str | None:
    """Return why sequences packed into one row would affect each other, or None if they would not."""
    config = network.config.get_text_config()
    if getattr(network, "_is_stateful", False):
        return "it carries a recurrent state from token to token"
    kinds = set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    if kinds:
        return f"it has layers of type {', '.join(sorted(kinds))}"
    for name in ("expert_capacity", "capacity_factor", "moe_capacity_factor"):
        if getattr(config, name, None):
            return f"its experts have a capacity ({name} = {getattr(config, name)})"
    if not network._can_set_attn_implementation():
        return "its attention has no hook"
    return None
