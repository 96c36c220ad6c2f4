"""Several processes that train one model: who is here, what rank 0 wants done, and sums over all.

Rank 0 decides; the others wait until it names a command, and then all ranks do the same work on the same arguments
(`together`). Between two commands nobody is inside a collective, so that hours of sampling need no long timeout. A rank
that dies, hangs or fails alone becomes a `RankError` on rank 0 that names it. Nothing travels as pickle. What the
commands are, and how processes are started, is not known here.
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
"""The command after which a rank leaves."""
START_TIMEOUT = 600.0
"""Seconds in which all ranks must be there."""
FAILURE_GRACE = 60.0
"""Seconds that a rank which failed alone waits for rank 0 to fail too, before it takes itself for the only one."""
_POLL_INTERVAL = timedelta(seconds=5)


@dataclass(frozen=True)
class RankInfo:
    """A process among those that train together, in the words of torchrun."""

    rank: int
    size: int
    local_rank: int
    address: str
    port: int
    has_agent_store: bool = False
    """The launcher keeps the store that all meet at; else rank 0 does."""
    attempt: str = "0"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "RankInfo | None":
        """From the variables that torchrun sets; None when they are not there."""
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if any(name not in environment for name in names):
            return None
        try:
            rank, size, port = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
            local = int(environment.get("LOCAL_RANK", rank))
        except ValueError as error:
            raise ConfigError(f"RANK, WORLD_SIZE, LOCAL_RANK and MASTER_PORT must be whole numbers: {error}") from error
        if not 0 <= rank < size:
            raise ConfigError(f"RANK = {rank} must be from 0 to WORLD_SIZE - 1 = {size - 1}")
        agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        return cls(rank, size, local, environment["MASTER_ADDR"], port, agent, attempt)


class World:
    """The ranks, seen from one of them."""

    def __init__(
        self,
        rank_info: RankInfo,
        store: Store,
        timeout: float,
        find_exited_rank: Callable[[float], str] = lambda _seconds: "",
    ) -> None:
        """Returns when all ranks are here. `missing` says in words which rank is gone, within so many seconds."""
        self.rank, self.size, self.local_rank = rank_info.rank, rank_info.size, rank_info.local_rank
        self.timeout, self.find_exited_rank = timeout, find_exited_rank
        self._store = PrefixStore(f"keel/{rank_info.attempt}", store)
        self._lock = threading.RLock()
        self._depth = self._command_number = 0
        self._broken_reason = ""
        self._meshes: dict[str, DeviceMesh] = {}
        self._wait_for_all_ranks()
        both = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(
            both,
            store=PrefixStore("group", self._store),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=timeout),
        )

    def _wait_for_all_ranks(self) -> None:
        """Wait for all ranks before the first collective: to start takes longer than to answer may."""
        self._store.set(f"here/{self.rank}", "1")
        deadline = time.monotonic() + START_TIMEOUT
        for rank in range(self.size):
            while not self._store.check([f"here/{rank}"]):
                gone = self.find_exited_rank(0.0)
                if gone or time.monotonic() > deadline:
                    raise RankError(
                        gone or f"rank {rank} of {self.size} was not there after {START_TIMEOUT:g} s; was it started?"
                    )
                time.sleep(0.05)

    # -- what is done together ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def run_on_all_ranks(self, command: str, payload: Callable[[], bytes] | None = None) -> Iterator[None]:
        """Work of all ranks: rank 0 names it and sends its arguments, the others are in `commands` already.

        Within such a block another one is a part of it, and says nothing. Threads take turns.
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
                # a rank that failed where no other had to wait for it is found here
                self.all_reduce_sum(torch.zeros(1))
            except KeelError:
                raise  # the other ranks have it too: the same code refused the same samples or files
            except BaseException as error:
                self._broken_reason = f"rank 0 failed at '{command}': {type(error).__name__}: {error}"
                why = self._explain_failure(error) if isinstance(error, RuntimeError) else ""
                if not why:
                    raise
                self._broken_reason = f"while all ranks were at work on '{command}': {why}"
                raise RankError(self._broken_reason) from error
            finally:
                self._depth = 0
                if not self._broken_reason:
                    self._store.set(f"done/{self._command_number}", "1")

    def commands(self) -> Iterator[tuple[str, bytes]]:
        """What rank 0 wants, for another rank; ends when it says so. The body of the loop is the work."""
        while True:
            self._command_number += 1
            said = json.loads(self._wait_for_key(f"said/{self._command_number}"))
            if said["command"] == END_COMMAND:
                return
            content = torch.empty(said["bytes"], dtype=torch.uint8)
            if len(content):
                dist.broadcast(content, 0)
            yield said["command"], content.numpy().tobytes()

    def acknowledge(self) -> None:
        """Another rank has done its part of a command."""
        self.all_reduce_sum(torch.zeros(1))

    def report_refusal(self, error: KeelError) -> None:
        """Another rank refuses its part of a command, which is well when rank 0 does too."""
        self.report_failure(error)
        try:
            self._store.wait([f"done/{self._command_number}"], timedelta(seconds=FAILURE_GRACE))
        except dist.DistStoreError:
            raise RankError(f"rank {self.rank} failed, and rank 0 did not: {error}") from error
        self._store.delete_key(f"error/{self.rank}")

    def report_failure(self, error: Exception) -> None:
        """Another rank leaves word of why it cannot go on."""
        with contextlib.suppress(RuntimeError):  # the store may be what is gone
            self._store.set(f"error/{self.rank}", f"{type(error).__name__}: {error}")

    @property
    def broken(self) -> bool:
        """Whether the ranks are no longer in step with each other: nothing more can be done together."""
        return bool(self._broken_reason)

    def end_workers(self) -> None:
        """Rank 0 lets the others go."""
        if not self.rank and not self._broken_reason:
            with contextlib.suppress(RuntimeError):
                self._send(END_COMMAND, b"")

    def shutdown(self) -> None:
        """This process is no rank any more."""
        if dist.is_initialized() and not self._broken_reason:
            dist.destroy_process_group()

    def check_alive(self) -> None:
        """Refuse to go on when a rank is gone, also while no command is under way."""
        gone = self.find_exited_rank(0.0)
        if gone:
            self._broken_reason = self._broken_reason or gone
            raise RankError(self._broken_reason)

    # -- collectives --------------------------------------------------------------------------------------------------

    def mesh(self, device: str) -> DeviceMesh:
        """All ranks in one row, on their devices of this type."""
        if device not in self._meshes:
            self._meshes[device] = init_device_mesh(device, (self.size,))
        return self._meshes[device]

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Over all ranks, in place."""
        dist.all_reduce(values)
        return values

    # -- small things -------------------------------------------------------------------------------------------------

    def _send(self, command: str, payload: bytes) -> None:
        self._command_number += 1
        self._store.set(f"said/{self._command_number}", json.dumps({"command": command, "bytes": len(payload)}))
        if payload:
            dist.broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8), 0)

    def _wait_for_key(self, key: str) -> bytes:
        while True:
            try:
                self._store.wait([key], _POLL_INTERVAL)
            except dist.DistStoreError:
                continue  # rank 0 samples, and may take hours; when it is gone, so is the store, which is another error
            return bytes(self._store.get(key))

    def _explain_failure(self, error: RuntimeError) -> str:
        """Which rank an error of a collective came from; empty when it is no such error."""
        gone = self.find_exited_rank(3.0)
        said = "; ".join(filter(None, (self._rank_failure(rank) for rank in range(1, self.size))))
        if gone or said:
            return "; ".join(filter(None, (said, gone)))
        if not isinstance(error, dist.DistError) and "gloo" not in str(error).lower():
            return ""
        return (
            f"another rank was lost, or did not answer within trainer.rank_timeout = {self.timeout:g} s"
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
    """End this process when the one that started it does: one that was killed cannot say so."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        sys.stderr.flush()
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="keel-parent").start()
