"""Start the processes of a multi-rank trainer, or join those started by torchrun.

Processes started here run on this machine, communicate over loopback only, and end when rank 0 ends, even if it is
killed. Rank 0 monitors them and reports an exited rank with its exit code within a second. Ranks are not restarted; a
run resumes from its last committed step with `--resume`.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Self

import torch
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from keel.config.trainer import TrainerSettings
from keel.errors import ConfigError, RankError
from keel.training.distributed.world import START_TIMEOUT, RankInfo, World

_LOOPBACK_ENV = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
_EXIT_TIMEOUT = 10.0
"""Seconds a rank may take to exit after the end command."""


class RankProcesses:
    """The ranks of a run, of which this process is rank 0. With one rank this is a no-op."""

    def __init__(self, settings: TrainerSettings, rank_info: RankInfo | None = None) -> None:
        """`rank_info` is this process's rank if a launcher started it; None starts the other ranks here."""
        if rank_info is not None and settings.ranks not in (1, rank_info.size):
            raise ConfigError(
                f"trainer.ranks = {settings.ranks}, but the launcher started {rank_info.size} (WORLD_SIZE);"
                " leave trainer.ranks out, or start that many"
            )
        self.size = rank_info.size if rank_info is not None else settings.ranks
        self.world: World | None = None
        self._timeout = settings.rank_timeout
        self._rank_info = rank_info
        self._processes: list[subprocess.Popen[bytes]] = []
        self._threads = torch.get_num_threads()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def join(self) -> World | None:
        """Wait for all ranks and return their world; None if this process is the only rank."""
        if self.size == 1:
            return None
        try:
            if self._rank_info is None:
                store = self._start_ranks()
                with _loopback_only():
                    self.world = World(RankInfo(0, self.size, 0, "", 0), store, self._timeout, self._find_exited_rank)
            else:
                self.world = World(self._rank_info, connect_store(self._rank_info), self._timeout)
        except RuntimeError as error:
            raise RankError(
                self._find_exited_rank(3.0) or f"the {self.size} ranks could not connect: {error}"
            ) from error
        return self.world

    def check_alive(self) -> None:
        """Raise `RankError` if a rank has exited."""
        if self.world is not None:
            self.world.check_alive()

    def close(self) -> None:
        """End the other ranks: send the end command, then kill those that have not exited in time."""
        if self.world is not None:
            self.world.end_workers()
        responsive = self.world is not None and not self.world.broken
        deadline = time.monotonic() + (_EXIT_TIMEOUT if responsive else 0.0)
        while time.monotonic() < deadline and any(process.poll() is None for process in self._processes):
            time.sleep(0.02)
        for process in self._processes:
            process.kill()
            process.wait()
        if self.world is not None:
            self.world.shutdown()
        self.world, self._processes = None, []
        torch.set_num_threads(self._threads)

    def _start_ranks(self) -> Store:
        """Start the store and the other ranks."""
        # an explicit socket, because the store would listen on every address of the machine
        listener = socket.create_server(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        threads = max(1, self._threads // self.size)
        torch.set_num_threads(threads)
        for rank in range(1, self.size):
            rank_variables = {"RANK": rank, "WORLD_SIZE": self.size, "LOCAL_RANK": rank, "MASTER_PORT": port}
            environment = {
                **_LOOPBACK_ENV,
                **os.environ,
                "MASTER_ADDR": "127.0.0.1",
                "OMP_NUM_THREADS": str(threads),
                **{name: str(value) for name, value in rank_variables.items()},
            }
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "keel.cli", "train"],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C goes to rank 0 only, which finishes the step with the others
                )
            )
        return store

    def _find_exited_rank(self, timeout: float) -> str:
        deadline = time.monotonic() + timeout
        while True:
            for rank, process in enumerate(self._processes, start=1):
                code = process.poll()
                if code is not None:
                    return f"rank {rank} of the trainer exited {_describe_exit(code)}; rerun with --resume"
            if time.monotonic() >= deadline or not self._processes:
                return ""
            time.sleep(0.05)


@contextmanager
def _loopback_only() -> Iterator[None]:
    """Make gloo listen on loopback only, until the block ends; it can only be configured by the environment."""
    added = {name: value for name, value in _LOOPBACK_ENV.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def connect_store(rank_info: RankInfo) -> Store:
    """Connect to the store of all ranks, which the launcher or rank 0 hosts."""
    is_host = rank_info.rank == 0 and not rank_info.has_agent_store
    return TCPStore(
        rank_info.address,
        rank_info.port,
        is_master=is_host,
        wait_for_workers=False,
        timeout=timedelta(seconds=START_TIMEOUT),
    )


def _describe_exit(exit_code: int) -> str:
    if exit_code >= 0:
        return f"with exit code {exit_code}"
    try:
        return f"after {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"after signal {-exit_code}"
