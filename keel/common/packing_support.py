"""Whether a transformers model lets several sequences share a row of its forward pass, by its configuration alone.

The trainer packs and the engine decodes by the same hook for attention functions, so both ask here first; each then
compares a probe with the model's own code, which this does not replace. Imports nothing, torch included.
"""

from typing import Any


def packing_obstacle(network: Any) -> str | None:
    """Why sequences in one row would change each other's numbers; None when nothing speaks against it."""
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
