"""Broadcast weights from one sender to several receivers with torch.distributed, layer by layer.

Each broadcast has its own rendezvous: the sender opens a port, receivers connect with the ranks they were assigned,
check the table of tensors and accept or reject it. Those that accept form a process group with the sender for the
duration of the transfer. Guarantees: a receiver that does not connect, or rejects the table, is left out and does not
delay the others; a receiver gets all tensors or an error, in bounded time; no buffer is allocated for a rejected table.
The port has no authentication: while weights are transferred it is open to every host that can reach the address.

Uses gloo between CPUs, and NCCL if the sender and all receivers are on GPUs (not tested on real GPUs).
"""

import contextlib
import itertools
import json
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from keel.inference.protocol import BroadcastSlot, EngineError

JOIN_TIMEOUT = 30.0
"""Seconds for receivers to connect and for the sender to announce the participants."""
LAYER_TIMEOUT = 120.0
"""Seconds that the transfer of one layer may take."""
_ALIGNMENT = 16
_dist: Any = dist  # its type annotations lack documented names
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*_FLOATS, torch.int64, torch.int32, torch.bool)}
_LAYER_PREFIX = re.compile(r"^.*?\.\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype and shape of one tensor in the table of a broadcast."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def padded_nbytes(self) -> int:
        """Bytes in a layer's buffer: each tensor starts at an offset aligned for every dtype."""
        return -(-self.nbytes // _ALIGNMENT) * _ALIGNMENT


class BroadcastSender:
    """One broadcast of tensors, which must not change until it ends. The port is open from construction on."""

    def __init__(self, address: str, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self._address, self._tensors, self._device = address, tensors, device
        self._absent: set[int] = set()
        try:
            self._listener = socket.create_server((address, 0))
        except OSError as error:
            raise EngineError(
                f"cannot listen on publish.bind_address = {address}: {error}; set it to an address of this machine",
                retryable=False,
            ) from error
        self.port: int = self._listener.getsockname()[1]

    def mark_absent(self, rank: int) -> None:
        """Stop waiting for the receiver with this rank."""
        self._absent.add(rank)

    def send(self, receivers: int) -> int:
        """Wait for `receivers` receivers, send all tensors to those that join and return their number.

        Blocks; call it in a thread.
        """
        store = _dist.TCPStore(
            self._address,
            self.port,
            is_master=True,
            timeout=timedelta(seconds=JOIN_TIMEOUT),
            wait_for_workers=False,
            master_listen_fd=self._listener.detach(),
        )
        table = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors.items()]
        store.set("table", json.dumps([[spec.name, _dtype_name(spec.dtype), spec.shape] for spec in table]))
        devices = self._wait_for_receivers(store, receivers)
        backend = "nccl" if {self._device.type, *devices.values()} == {"cuda"} else "gloo"
        store.set("present", json.dumps({"ranks": list(devices), "backend": backend}))
        if devices:
            with _process_group(backend, store, 0, 1 + len(devices), self._address) as group:
                for layer in group_by_layer(table):
                    _broadcast(group, _pack_layer(layer, self._tensors).to(_transfer_device(backend, self._device)))
                group.barrier().wait()
        return len(devices)

    def _wait_for_receivers(self, store: Any, receivers: int) -> dict[int, str]:
        """Return rank -> device type of the receivers that joined and accepted the table."""
        deadline = time.monotonic() + JOIN_TIMEOUT
        replies: dict[int, str] = {}  # an empty device rejects the table
        while True:
            for rank in range(1, receivers + 1):
                if rank not in replies and store.check([f"joined/{rank}"]):
                    replies[rank] = store.get(f"joined/{rank}").decode()
            if len(replies.keys() | self._absent) >= receivers or time.monotonic() > deadline:
                return {rank: device for rank, device in sorted(replies.items()) if device}
            time.sleep(0.002)


def receive_broadcast(
    slot: BroadcastSlot,
    sender_address: str,
    own_address: str,
    device: torch.device,
    check_table: Callable[[Mapping[str, Tensor]], None],
) -> dict[str, Tensor]:
    """Return all tensors of a broadcast, by name. Blocks; call it in a thread.

    `check_table` gets the table as meta tensors and raises `EngineError` to reject it. `own_address` is the address at
    which the other participants reach this machine.
    """
    try:
        # TCPStore would retry a closed port for a minute
        socket.create_connection((sender_address, slot.port), JOIN_TIMEOUT).close()
        store = _dist.TCPStore(
            sender_address, slot.port, timeout=timedelta(seconds=JOIN_TIMEOUT), wait_for_workers=False
        )
        try:
            table = _read_table(store.get("table"))
            check_table({spec.name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in table})
        except EngineError:
            store.set(f"joined/{slot.rank}", "")
            raise
        store.set(f"joined/{slot.rank}", device.type)
        present = json.loads(store.get("present"))
        if slot.rank not in present["ranks"]:
            raise EngineError("joined too late for the broadcast")
        rank, size = 1 + present["ranks"].index(slot.rank), 1 + len(present["ranks"])
        received: dict[str, Tensor] = {}
        with _process_group(present["backend"], store, rank, size, own_address) as group:
            for layer in group_by_layer(table):
                layer_nbytes = sum(spec.padded_nbytes for spec in layer)
                buffer = torch.empty(
                    layer_nbytes, dtype=torch.uint8, device=_transfer_device(present["backend"], device)
                )
                _broadcast(group, buffer)
                received |= _unpack_layer(layer, buffer)
            group.barrier().wait()
        return received
    except EngineError:
        raise
    except (OSError, RuntimeError, ValueError, LookupError, TypeError) as error:
        raise EngineError(f"the broadcast from {sender_address} failed: {str(error).splitlines()[0]}") from error


def group_by_layer(table: Sequence[TensorSpec]) -> list[list[TensorSpec]]:
    """Split the table, in order, where a tensor belongs to another layer than the one before it."""

    def layer(entry: TensorSpec) -> str:
        prefix = _LAYER_PREFIX.match(entry.name)
        return prefix.group() if prefix else entry.name

    return [list(entries) for _, entries in itertools.groupby(table, layer)]


@contextlib.contextmanager
def _process_group(backend: str, store: Any, rank: int, size: int, address: str) -> Iterator[Any]:
    """Create a process group separate from any other of this process; abort it if the block fails."""
    group_store = _dist.PrefixStore("weights", store)
    timeout = timedelta(seconds=LAYER_TIMEOUT)
    if backend == "nccl":
        nccl = _dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timeout
        group = nccl(group_store, rank, size, options)
    else:
        gloo = _dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timeout
        # bind the address: the host name may resolve to another interface
        options._devices = [gloo.create_device(hostname=address)]
        group = gloo(group_store, rank, size, options)
    try:
        yield group
    except BaseException:
        group.abort()
        raise


def _broadcast(group: Any, buffer: Tensor) -> None:
    options = _dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([buffer], options).wait()


def _pack_layer(layer: Sequence[TensorSpec], tensors: Mapping[str, Tensor]) -> Tensor:
    buffer = torch.zeros(sum(spec.padded_nbytes for spec in layer), dtype=torch.uint8)
    offset = 0
    for spec in layer:
        values = tensors[spec.name].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        buffer[offset : offset + spec.nbytes] = values
        offset += spec.padded_nbytes
    return buffer


def _unpack_layer(layer: Sequence[TensorSpec], buffer: Tensor) -> dict[str, Tensor]:
    tensors, offset = {}, 0
    for spec in layer:
        tensors[spec.name] = buffer[offset : offset + spec.nbytes].view(spec.dtype).reshape(spec.shape)
        offset += spec.padded_nbytes
    return tensors


def _read_table(payload: bytes) -> list[TensorSpec]:
    entries = json.loads(payload)
    table = [
        TensorSpec(str(name), _DTYPES[dtype], tuple(int(size) for size in shape)) for name, dtype, shape in entries
    ]
    if any(size < 0 for spec in table for size in spec.shape):
        raise EngineError("the table of the broadcast contains a negative size")
    return table


def _transfer_device(backend: str, device: torch.device) -> torch.device:
    return device if backend == "nccl" else torch.device("cpu")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
