"""The processes of a trainer on several ranks: started here, or by torchrun and the like, and joined.

A crew that was started here is on this machine and on loopback only; each process ends when rank 0 does, however that
ends. Rank 0 watches them: one that is gone is named, with its exit code, within a second. It does not restart any: a
run goes on from its last committed step by `--resume`.
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
"""Seconds that a rank may take to end when it was told to."""


class RankProcesses:
    """The ranks of a run, of which this process is rank 0. With one rank there is nothing to it."""

    def __init__(self, settings: TrainerSettings, rank_info: RankInfo | None = None) -> None:
        """`place`: where a launcher has put this process; None: the other ranks are started here."""
        if rank_info is not None and settings.ranks not in (1, rank_info.size):
            raise ConfigError(
                f"trainer.ranks = {settings.ranks}, and the launcher started {rank_info.size} (WORLD_SIZE);"
                " leave trainer.ranks out, or start as many"
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
        """All ranks, when they are there; None when this process is the only one."""
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
                self._find_exited_rank(3.0) or f"the {self.size} ranks did not come together: {error}"
            ) from error
        return self.world

    def check_alive(self) -> None:
        """Refuse to go on when a rank is gone."""
        if self.world is not None:
            self.world.check_alive()

    def close(self) -> None:
        """End the other ranks: told first, killed when they do not listen."""
        if self.world is not None:
            self.world.end_workers()
        listening = self.world is not None and not self.world.broken
        deadline = time.monotonic() + (_EXIT_TIMEOUT if listening else 0.0)
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
        """Start the other ranks, and the store where all meet."""
        # a socket of our own, because the store would listen on every address of the machine
        listener = socket.create_server(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        threads = max(1, self._threads // self.size)
        torch.set_num_threads(threads)
        for rank in range(1, self.size):
            own = {"RANK": rank, "WORLD_SIZE": self.size, "LOCAL_RANK": rank, "MASTER_PORT": port}
            environment = {
                **_LOOPBACK_ENV,
                **os.environ,
                "MASTER_ADDR": "127.0.0.1",
                "OMP_NUM_THREADS": str(threads),
                **{name: str(value) for name, value in own.items()},
            }
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "keel.cli", "train"],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for rank 0, which finishes the step with the others
                )
            )
        return store

    def _find_exited_rank(self, timeout: float) -> str:
        deadline = time.monotonic() + timeout
        while True:
            for rank, process in enumerate(self._processes, start=1):
                code = process.poll()
                if code is not None:
                    return f"rank {rank} of the trainer ended {_describe_exit(code)}; go on with --resume"
            if time.monotonic() >= deadline or not self._processes:
                return ""
            time.sleep(0.05)


@contextmanager
def _loopback_only() -> Iterator[None]:
    """While it lasts, gloo listens to this machine only; it has no other way to be told."""
    added = {name: value for name, value in _LOOPBACK_ENV.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def connect_store(rank_info: RankInfo) -> Store:
    """The store where all ranks meet, which the launcher or rank 0 keeps."""
    host = rank_info.rank == 0 and not rank_info.has_agent_store
    return TCPStore(
        rank_info.address,
        rank_info.port,
        is_master=host,
        wait_for_workers=False,
        timeout=timedelta(seconds=START_TIMEOUT),
    )


def _describe_exit(exit_code: int) -> str:
    if exit_code >= 0:
        return f"with exit code {exit_code}"
    try:
        return f"by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"by signal {-exit_code}"
