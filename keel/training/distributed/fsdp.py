"""A network in shards, one for each rank (FSDP2), and the few places where something must be whole.

Decoder layers are gathered one at a time while they compute; gradients are summed over ranks, never averaged: the
objective has divided by the step's own counts already. The output head is not run as a module but fused with the loss,
so it is made whole once for all micro-batches (`WholeHead`) and its gradient summed once at the end. Which samples a
rank computes is decided elsewhere.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from keel.training.distributed.world import World


def apply_fsdp(
    network: transformers.PreTrainedModel,
    body: nn.Module,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    reduce_dtype: torch.dtype,
) -> None:
    """Give each rank its part of every weight, in place. `dtype` is what layers compute in, `reduce` what is summed."""
    kept = {weight.dtype for weight in network.parameters() if weight.requires_grad}
    compute = dtype if kept != {dtype} else None
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce_dtype)
    head = network.get_output_embeddings()  # type: ignore[no-untyped-call]
    tied = next(
        (module for module in body.modules() if head is not None and _owns_parameter(module, head.weight)), None
    )
    for part in [*_decoder_layers(network, body), body]:
        # the root too is cut again after its forward: what is not sharded could be neither saved nor switched
        module = fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        # NCCL's scaled sums take another kernel; a plain sum is what is wanted
        module.set_force_sum_reduction_for_comms(True)
        # experts that no token of this rank went to have no gradient here, and one elsewhere
        module.set_reduce_scatter_unused_params(True, recurse=False)
    if head is None:
        return
    for name, weight in list(head.named_parameters(recurse=False)):
        cut = getattr(tied, "weight", None) if tied is not None and name == "weight" else None
        if not isinstance(cut, nn.Parameter):
            mine = distribute_tensor(weight.detach().to(mesh.device_type), mesh, [Shard(0)], src_data_rank=None)
            cut = nn.Parameter(mine, requires_grad=weight.requires_grad)
        setattr(head, name, cut)


class GatheredHead:
    """The output head's weights, whole, for as long as they do not change."""

    def __init__(self, head: nn.Linear, dtype: torch.dtype, reduce_dtype: torch.dtype) -> None:
        self._sharded_parameters = dict(head.named_parameters(recurse=False))
        self._reduce_dtype = reduce_dtype
        self.weights = {
            name: full_tensor(weight, dtype).requires_grad_(weight.requires_grad)
            for name, weight in self._sharded_parameters.items()
        }

    def reduce_gradient(self) -> None:
        """Add what has come together in the whole weights, on all ranks, to the gradients of the shards."""
        for name, weight in self._sharded_parameters.items():
            if not weight.requires_grad:
                continue
            assert isinstance(weight, DTensor)
            leaf = self.weights[name]
            mine = (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad).to(self._reduce_dtype)
            parts = DTensor.from_local(mine, weight.device_mesh, [Partial()])
            summed = parts.redistribute(placements=[Shard(0)]).to(weight.dtype)
            weight.grad = summed if weight.grad is None else weight.grad + summed
            leaf.grad = None


@contextmanager
def use_gathered_head(head: nn.Linear, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """The head as a module that can be called; gradients do not go this way."""
    kept = dict(head.named_parameters(recurse=False))
    for name, weight in weights.items():
        setattr(head, name, nn.Parameter(weight.detach(), requires_grad=False))
    try:
        yield
    finally:
        for name, weight in kept.items():
            setattr(head, name, weight)


def full_tensor(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor as one, without a graph, on its device; every rank must ask for it."""
    tensor = tensor.detach() if dtype is None or not tensor.is_floating_point() else tensor.detach().to(dtype)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor, where `like` is in parts; without asking any other rank."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def grad_norm(gradients: Iterable[Tensor], dtype: torch.dtype, world: World | None) -> float:
    """Of all gradients together, over all ranks."""
    found = [torch.linalg.vector_norm(_local_shard(gradient), dtype=dtype) for gradient in gradients]
    if world is None:
        return float(torch.linalg.vector_norm(torch.stack(found))) if found else 0.0
    squares = torch.stack(found).double().square().sum() if found else torch.zeros((), dtype=torch.float64)
    return float(world.all_reduce_sum(squares.cpu()).sqrt())


def _local_shard(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _owns_parameter(module: nn.Module, weight: Any) -> bool:
    return any(own is weight for own in module.parameters(recurse=False))


def _decoder_layers(network: transformers.PreTrainedModel, body: nn.Module) -> list[nn.Module]:
    """The modules that the network itself names as not to be split: its decoder layers, not what is inside of them."""
    names = set(network._no_split_modules or ())
    found = [module for module in body.modules() if module is not body and type(module).__name__ in names]
    inner = {id(part) for module in found for part in module.modules() if part is not module}
    return [module for module in found if id(module) not in inner]
