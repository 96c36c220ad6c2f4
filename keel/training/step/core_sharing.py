"""Cores dealt between the trainer and an engine in the same process.

Where both compute at once with as many threads as there are cores, each waits for threads of its own that the other
has pushed aside. So the thread that trains asks before every decoder layer, forward and backward, how many threads it
may use just now. Changes no result beyond rounding, and nothing where no decoder layers are named by the model.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def share_cores(network: Any, threads: Callable[[], int]) -> Iterator[None]:
    """While it lasts, whoever runs the network does so with `threads()` threads, asked for anew before each layer."""

    def take(*_: object) -> None:
        torch.set_num_threads(threads())

    def before(_layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        take()
        for state in (*given, *named.values()):
            if isinstance(state, Tensor) and state.requires_grad:
                # the layer has been gone back through when its input gets a gradient
                state.register_hook(take)  # type: ignore[no-untyped-call]
                return

    names = set(getattr(network, "_no_split_modules", None) or ())
    layers = [module for module in network.modules() if type(module).__name__ in names]
    handles = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
