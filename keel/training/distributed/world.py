"""Coordinate the ranks that train one model: process group, commands of rank 0, and sums over all ranks.

Rank 0 decides; the other ranks wait for a command, and then all ranks do the same work with the same arguments
(`run_on_all_ranks`). Between commands no rank is inside a collective, so hours of sampling need no long timeout. A rank
that dies, hangs or fails on its own raises a `RankError` on rank 0 that names it. Nothing is pickled. The commands
themselves are defined in `rank_worker`, and processes are started in `rank_processes`.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from keel.errors import ConfigError, KeelError, RankError

END_COMMAND = "end"
"""The command after which a rank exits."""
START_TIMEOUT = 600.0
"""Seconds within which all ranks must have started."""
FAILURE_GRACE = 60.0
"""Seconds a failed rank waits for rank 0 to fail with the same error before it concludes that it failed alone."""
_POLL_INTERVAL = timedelta(seconds=5)


@dataclass(frozen=True)
class RankInfo:
    """The rank of a process, with the fields of torchrun."""

    rank: int
    size: int
    local_rank: int
    address: str
    port: int
    has_agent_store: bool = False
    """Whether the launcher hosts the store; otherwise rank 0 does."""
    attempt: str = "0"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "RankInfo | None":
        """Read the variables that torchrun sets; return None if they are not set."""
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if any(name not in environment for name in names):
            return None
        try:
            rank, size, port = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
            local = int(environment.get("LOCAL_RANK", rank))
        except ValueError as error:
            raise ConfigError(f"RANK, WORLD_SIZE, LOCAL_RANK and MASTER_PORT must be integers: {error}") from error
        if not 0 <= rank < size:
            raise ConfigError(f"RANK = {rank} must be from 0 to WORLD_SIZE - 1 = {size - 1}")
        agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        return cls(rank, size, local, environment["MASTER_ADDR"], port, agent, attempt)


class World:
    """All ranks, as seen from one of them."""

    def __init__(
        self,
        rank_info: RankInfo,
        store: Store,
        timeout: float,
        find_exited_rank: Callable[[float], str] = lambda _seconds: "",
    ) -> None:
        """Return when all ranks have connected.

        `find_exited_rank` waits up to the given seconds and returns a message that names an exited rank, or "".
        """
        self.rank, self.size, self.local_rank = rank_info.rank, rank_info.size, rank_info.local_rank
        self.timeout, self.find_exited_rank = timeout, find_exited_rank
        self._store = PrefixStore(f"keel/{rank_info.attempt}", store)
        self._lock = threading.RLock()
        self._depth = self._command_number = 0
        self._broken_reason = ""
        self._meshes: dict[str, DeviceMesh] = {}
        self._wait_for_all_ranks()
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(
            backend,
            store=PrefixStore("group", self._store),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=timeout),
        )

    def _wait_for_all_ranks(self) -> None:
        """Wait for all ranks before the first collective, because starting may take longer than the timeout."""
        self._store.set(f"started/{self.rank}", "1")
        deadline = time.monotonic() + START_TIMEOUT
        for rank in range(self.size):
            while not self._store.check([f"started/{rank}"]):
                exited = self.find_exited_rank(0.0)
                if exited or time.monotonic() > deadline:
                    raise RankError(
                        exited
                        or f"rank {rank} of {self.size} did not connect within {START_TIMEOUT:g} s; was it started?"
                    )
                time.sleep(0.05)

    # -- commands -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def run_on_all_ranks(self, command: str, payload: Callable[[], bytes] | None = None) -> Iterator[None]:
        """Run a block on all ranks: rank 0 sends the command and its arguments to the ranks waiting in `commands`.

        A nested call is part of the outer command and sends nothing. Threads take turns.
        """
        if self.rank:
            yield
            return
        with self._lock:
            if self._depth:
                yield
                return
            if self._broken_reason:
                raise RankError(self._broken_reason)
            self._depth = 1
            try:
                self._send(command, payload() if payload is not None else b"")
                yield
                # detect a rank that failed outside a collective
                self.all_reduce_sum(torch.zeros(1))
            except KeelError:
                raise  # the same code raises the same error for the same samples or files on the other ranks
            except BaseException as error:
                self._broken_reason = f"rank 0 failed in command '{command}': {type(error).__name__}: {error}"
                cause = self._explain_failure(error) if isinstance(error, RuntimeError) else ""
                if not cause:
                    raise
                self._broken_reason = f"while all ranks ran command '{command}': {cause}"
                raise RankError(self._broken_reason) from error
            finally:
                self._depth = 0
                if not self._broken_reason:
                    self._store.set(f"done/{self._command_number}", "1")

    def commands(self) -> Iterator[tuple[str, bytes]]:
        """Yield the commands of rank 0 and their payloads, on another rank, until the end command.

        The loop body must execute the command.
        """
        while True:
            self._command_number += 1
            header = json.loads(self._wait_for_key(f"command/{self._command_number}"))
            if header["command"] == END_COMMAND:
                return
            payload = torch.empty(header["bytes"], dtype=torch.uint8)
            if len(payload):
                dist.broadcast(payload, 0)
            yield header["command"], payload.numpy().tobytes()

    def acknowledge(self) -> None:
        """Report from another rank that its part of a command is complete."""
        self.all_reduce_sum(torch.zeros(1))

    def report_refusal(self, error: KeelError) -> None:
        """Report from another rank that a command raised a `KeelError`, which is expected if rank 0 raises it too."""
        self.report_failure(error)
        try:
            self._store.wait([f"done/{self._command_number}"], timedelta(seconds=FAILURE_GRACE))
        except dist.DistStoreError:
            raise RankError(f"rank {self.rank} failed, but rank 0 did not: {error}") from error
        self._store.delete_key(f"error/{self.rank}")

    def report_failure(self, error: Exception) -> None:
        """Store the reason why another rank failed, for rank 0 to read."""
        with contextlib.suppress(RuntimeError):  # the store itself may be unreachable
            self._store.set(f"error/{self.rank}", f"{type(error).__name__}: {error}")

    @property
    def broken(self) -> bool:
        """Whether the ranks are out of sync, so that no further command can run."""
        return bool(self._broken_reason)

    def end_workers(self) -> None:
        """Send the end command from rank 0 to the other ranks."""
        if not self.rank and not self._broken_reason:
            with contextlib.suppress(RuntimeError):
                self._send(END_COMMAND, b"")

    def shutdown(self) -> None:
        """Leave the process group."""
        if dist.is_initialized() and not self._broken_reason:
            dist.destroy_process_group()

    def check_alive(self) -> None:
        """Raise `RankError` if a rank has exited, also while no command is running."""
        exited = self.find_exited_rank(0.0)
        if exited:
            self._broken_reason = self._broken_reason or exited
            raise RankError(self._broken_reason)

    # -- collectives --------------------------------------------------------------------------------------------------

    def mesh(self, device: str) -> DeviceMesh:
        """Return the one-dimensional mesh of all ranks on devices of this type."""
        if device not in self._meshes:
            self._meshes[device] = init_device_mesh(device, (self.size,))
        return self._meshes[device]

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Sum values over all ranks, in place."""
        dist.all_reduce(values)
        return values

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _send(self, command: str, payload: bytes) -> None:
        self._command_number += 1
        self._store.set(f"command/{self._command_number}", json.dumps({"command": command, "bytes": len(payload)}))
        if payload:
            dist.broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8), 0)

    def _wait_for_key(self, key: str) -> bytes:
        while True:
            try:
                self._store.wait([key], _POLL_INTERVAL)
            except dist.DistStoreError:
                continue  # rank 0 may sample for hours; if it has exited, so has the store, and another error is raised
            return bytes(self._store.get(key))

    def _explain_failure(self, error: RuntimeError) -> str:
        """Describe the rank that caused an error in a collective; "" if the error has another cause."""
        exited = self.find_exited_rank(3.0)
        failures = "; ".join(filter(None, (self._rank_failure(rank) for rank in range(1, self.size))))
        if exited or failures:
            return "; ".join(filter(None, (failures, exited)))
        if not isinstance(error, dist.DistError) and "gloo" not in str(error).lower():
            return ""
        return (
            f"another rank was lost, or did not respond within trainer.rank_timeout = {self.timeout:g} s"
            f" ({str(error).splitlines()[0]})"
        )

    def _rank_failure(self, rank: int) -> str:
        try:
            if not self._store.check([f"error/{rank}"]):
                return ""
            return f"rank {rank} failed: {self._store.get(f'error/{rank}').decode()}"
        except RuntimeError:
            return ""


def end_with_parent() -> None:
    """Exit this process when its parent exits; a killed parent could not end it explicitly."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        sys.stderr.flush()
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="keel-parent").start()
