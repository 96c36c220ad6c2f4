"""Share the cores between the trainer and an engine in the same process.

If both compute concurrently with as many threads as there are cores, each waits for its own preempted threads. The
training thread therefore asks before every decoder layer, forward and backward, how many threads it may use. Results
change by rounding only. This is a no-op for models that do not name their decoder layers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def share_cores(network: Any, threads: Callable[[], int]) -> Iterator[None]:
    """Run the network with `threads()` threads, queried again before each layer, until the block ends."""

    def set_threads(*_: object) -> None:
        torch.set_num_threads(threads())

    def before_layer(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        set_threads()
        for state in (*args, *kwargs.values()):
            if isinstance(state, Tensor) and state.requires_grad:
                # the backward of the layer is complete when its input receives a gradient
                state.register_hook(set_threads)  # type: ignore[no-untyped-call]
                return

    names = set(getattr(network, "_no_split_modules", None) or ())
    layers = [module for module in network.modules() if type(module).__name__ in names]
    handles = [layer.register_forward_pre_hook(before_layer, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
