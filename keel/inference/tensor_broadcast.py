"""Weights from one sender to several receivers by torch.distributed, layer by layer.

A broadcast is a meeting of its own: the sender opens a port, receivers come with the ranks they were given, look at the
table of tensors and say whether it fits, and those that do form a process group with the sender for as long as the
tensors travel. Guarantees: who does not come, or refuses, is left out and holds nobody up; a receiver has all tensors
or an error, in bounded time; no buffer is made for a table that does not fit. The meeting place asks for no key: it is
open while weights travel, on the address given, to whoever reaches it.

gloo between CPUs; NCCL where sender and receivers are all on GPUs, which no machine of ours has tried.
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
"""Seconds in which receivers must come, and everybody must be told who did."""
LAYER_TIMEOUT = 120.0
"""Seconds that one layer may take."""
_ALIGNMENT = 16
_dist: Any = dist  # its annotations lack the names that its documentation gives
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_DTYPES = {str(kind).removeprefix("torch."): kind for kind in (*_FLOATS, torch.int64, torch.int32, torch.bool)}
_LAYER_PREFIX = re.compile(r"^.*?\.\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the table."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def padded_nbytes(self) -> int:
        """Bytes in a layer's buffer: each tensor begins where any type may."""
        return -(-self.nbytes // _ALIGNMENT) * _ALIGNMENT


class BroadcastSender:
    """One broadcast of tensors that must not change until it is over. Its port is open from the start."""

    def __init__(self, address: str, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self._address, self._tensors, self._device = address, tensors, device
        self._absent: set[int] = set()
        try:
            self._listener = socket.create_server((address, 0))
        except OSError as error:
            raise EngineError(
                f"cannot listen on publish.bind_address = {address}: {error}; give an address of this machine",
                retryable=False,
            ) from error
        self.port: int = self._listener.getsockname()[1]

    def mark_absent(self, rank: int) -> None:
        """The receiver with this rank will not come."""
        self._absent.add(rank)

    def send(self, receivers: int) -> int:
        """Wait for so many receivers and send everything to those that come; how many did. Blocks: for a thread."""
        store = _dist.TCPStore(
            self._address,
            self.port,
            is_master=True,
            timeout=timedelta(seconds=JOIN_TIMEOUT),
            wait_for_workers=False,
            master_listen_fd=self._listener.detach(),
        )
        table = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors.items()]
        store.set("table", json.dumps([[each.name, _dtype_name(each.dtype), each.shape] for each in table]))
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
        """The devices of the receivers that came and take the table, by rank."""
        deadline = time.monotonic() + JOIN_TIMEOUT
        said: dict[int, str] = {}
        while True:
            for rank in range(1, receivers + 1):
                if rank not in said and store.check([f"here/{rank}"]):
                    said[rank] = store.get(f"here/{rank}").decode()
            if len(said.keys() | self._absent) >= receivers or time.monotonic() > deadline:
                return {rank: device for rank, device in sorted(said.items()) if device}
            time.sleep(0.002)


def receive_broadcast(
    slot: BroadcastSlot,
    sender_address: str,
    own_address: str,
    device: torch.device,
    check_table: Callable[[Mapping[str, Tensor]], None],
) -> dict[str, Tensor]:
    """All tensors of a broadcast, by name. `fits` refuses a table (tensors without memory). Blocks: for a thread.

    `sender` is the address of whoever sends, `own` the one that others reach this machine by.
    """
    try:
        # the store would try to reach a port that nobody listens on for a minute
        socket.create_connection((sender_address, slot.port), JOIN_TIMEOUT).close()
        store = _dist.TCPStore(
            sender_address, slot.port, timeout=timedelta(seconds=JOIN_TIMEOUT), wait_for_workers=False
        )
        try:
            table = _read_table(store.get("table"))
            check_table({each.name: torch.empty(each.shape, dtype=each.dtype, device="meta") for each in table})
        except EngineError:
            store.set(f"here/{slot.rank}", "")
            raise
        store.set(f"here/{slot.rank}", device.type)
        present = json.loads(store.get("present"))
        if slot.rank not in present["ranks"]:
            raise EngineError("came too late for the broadcast")
        rank, size = 1 + present["ranks"].index(slot.rank), 1 + len(present["ranks"])
        found: dict[str, Tensor] = {}
        with _process_group(present["backend"], store, rank, size, own_address) as group:
            for layer in group_by_layer(table):
                size_of_layer = sum(each.padded_nbytes for each in layer)
                buffer = torch.empty(
                    size_of_layer, dtype=torch.uint8, device=_transfer_device(present["backend"], device)
                )
                _broadcast(group, buffer)
                found |= _unpack_layer(layer, buffer)
            group.barrier().wait()
        return found
    except EngineError:
        raise
    except (OSError, RuntimeError, ValueError, LookupError, TypeError) as error:
        raise EngineError(f"a broadcast from {sender_address} broke off: {str(error).splitlines()[0]}") from error


def group_by_layer(table: Sequence[TensorSpec]) -> list[list[TensorSpec]]:
    """The table in order, cut where a tensor belongs to another layer than the one before it."""

    def layer(entry: TensorSpec) -> str:
        found = _LAYER_PREFIX.match(entry.name)
        return found.group() if found else entry.name

    return [list(entries) for _, entries in itertools.groupby(table, layer)]


@contextlib.contextmanager
def _process_group(backend: str, store: Any, rank: int, size: int, address: str) -> Iterator[Any]:
    """A process group of its own, apart from any that the process is in; broken off when the block fails."""
    apart = _dist.PrefixStore("weights", store)
    limit = timedelta(seconds=LAYER_TIMEOUT)
    if backend == "nccl":
        nccl = _dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = limit
        group = nccl(apart, rank, size, options)
    else:
        gloo = _dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = limit
        # by its address and not by the machine's name, which may lead elsewhere
        options._devices = [gloo.create_device(hostname=address)]
        group = gloo(apart, rank, size, options)
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
    buffer = torch.zeros(sum(each.padded_nbytes for each in layer), dtype=torch.uint8)
    at = 0
    for each in layer:
        buffer[at : at + each.nbytes] = tensors[each.name].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        at += each.padded_nbytes
    return buffer


def _unpack_layer(layer: Sequence[TensorSpec], buffer: Tensor) -> dict[str, Tensor]:
    found, at = {}, 0
    for each in layer:
        found[each.name] = buffer[at : at + each.nbytes].view(each.dtype).reshape(each.shape)
        at += each.padded_nbytes
    return found


def _read_table(payload: bytes) -> list[TensorSpec]:
    table = json.loads(payload)
    found = [TensorSpec(str(name), _DTYPES[dtype], tuple(int(size) for size in shape)) for name, dtype, shape in table]
    if any(size < 0 for each in found for size in each.shape):
        raise EngineError("a broadcast's table holds a negative size")
    return found


def _transfer_device(backend: str, device: torch.device) -> torch.device:
    return device if backend == "nccl" else torch.device("cpu")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
