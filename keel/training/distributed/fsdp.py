"""Shard a network over ranks with FSDP2, and gather tensors where the full value is needed.

Decoder layers are gathered one at a time while they compute. Gradients are summed over ranks, never averaged, because
the objective has already divided by the counts of the full step. The output head is not run as a module but fused with
the loss, so it is gathered once for all micro-batches (`GatheredHead`) and its gradient is reduced once at the end.
Which samples a rank computes is decided in `keel.training.step.forward`.
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
    """Shard every weight over the ranks, in place. Layers compute in `dtype`; gradients are in `reduce_dtype`."""
    stored = {weight.dtype for weight in network.parameters() if weight.requires_grad}
    compute = dtype if stored != {dtype} else None
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce_dtype)
    head = network.get_output_embeddings()  # type: ignore[no-untyped-call]
    tied = next(
        (module for module in body.modules() if head is not None and _owns_parameter(module, head.weight)), None
    )
    for part in [*_decoder_layers(network, body), body]:
        # the root is also resharded after its forward: unsharded parameters could be neither saved nor switched
        module = fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        # a plain sum, not NCCL's scaled reduction, which uses another kernel
        module.set_force_sum_reduction_for_comms(True)
        # an expert that received no token on this rank has no gradient here, but may have one on other ranks
        module.set_reduce_scatter_unused_params(True, recurse=False)
    if head is None:
        return
    for name, weight in list(head.named_parameters(recurse=False)):
        sharded = getattr(tied, "weight", None) if tied is not None and name == "weight" else None
        if not isinstance(sharded, nn.Parameter):
            shard = distribute_tensor(weight.detach().to(mesh.device_type), mesh, [Shard(0)], src_data_rank=None)
            sharded = nn.Parameter(shard, requires_grad=weight.requires_grad)
        setattr(head, name, sharded)


class GatheredHead:
    """The unsharded weights of the output head, valid until the next optimizer step."""

    def __init__(self, head: nn.Linear, dtype: torch.dtype, reduce_dtype: torch.dtype) -> None:
        self._sharded_parameters = dict(head.named_parameters(recurse=False))
        self._reduce_dtype = reduce_dtype
        self.weights = {
            name: full_tensor(weight, dtype).requires_grad_(weight.requires_grad)
            for name, weight in self._sharded_parameters.items()
        }

    def reduce_gradient(self) -> None:
        """Sum the gradients of the unsharded weights over ranks and add them to the gradients of the shards."""
        for name, weight in self._sharded_parameters.items():
            if not weight.requires_grad:
                continue
            assert isinstance(weight, DTensor)
            leaf = self.weights[name]
            local = (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad).to(self._reduce_dtype)
            partial = DTensor.from_local(local, weight.device_mesh, [Partial()])
            summed = partial.redistribute(placements=[Shard(0)]).to(weight.dtype)
            weight.grad = summed if weight.grad is None else weight.grad + summed
            leaf.grad = None


@contextmanager
def use_gathered_head(head: nn.Linear, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Make the head callable as a module, without gradients, until the block ends."""
    sharded = dict(head.named_parameters(recurse=False))
    for name, weight in weights.items():
        setattr(head, name, nn.Parameter(weight.detach(), requires_grad=False))
    try:
        yield
    finally:
        for name, weight in sharded.items():
            setattr(head, name, weight)


def full_tensor(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the unsharded tensor, detached, on its device; all ranks must call it."""
    tensor = tensor.detach() if dtype is None or not tensor.is_floating_point() else tensor.detach().to(dtype)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard of a full tensor if `like` is sharded, without communication."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def grad_norm(gradients: Iterable[Tensor], dtype: torch.dtype, world: World | None) -> float:
    """Return the norm of all gradients together, over all ranks."""
    norms = [torch.linalg.vector_norm(_local_shard(gradient), dtype=dtype) for gradient in gradients]
    if world is None:
        return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0
    squares = torch.stack(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64)
    return float(world.all_reduce_sum(squares.cpu()).sqrt())


def _local_shard(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _owns_parameter(module: nn.Module, weight: Any) -> bool:
    return any(parameter is weight for parameter in module.parameters(recurse=False))


def _decoder_layers(network: transformers.PreTrainedModel, body: nn.Module) -> list[nn.Module]:
    """Return the outermost modules in the network's `_no_split_modules`: its decoder layers."""
    names = set(network._no_split_modules or ())
    layers = [module for module in body.modules() if module is not body and type(module).__name__ in names]
    inner = {id(part) for layer in layers for part in layer.modules() if part is not layer}
    return [layer for layer in layers if id(layer) not in inner]
