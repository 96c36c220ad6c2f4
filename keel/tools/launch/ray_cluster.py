"""Ray as the cluster: connecting to it or starting one here, checking what it has, and a place for every part.

Guarantees that what can never be placed is refused at once and by its numbers, that what others use is waited for only
so long, and that a cluster started here asks for a token, since Ray listens on every address of a machine. Ray only
places holders (`holder.py`) and tells when a node is gone; no data of a run travels through it. This is the only module
that imports Ray.
"""

import contextlib
import importlib.util
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from keel.errors import ConfigError
from keel.tools.launch import ray_cleanup
from keel.tools.launch.node_agent import MARK, Command, Holder, Look, Where
from keel.tools.launch.plan import Part, Plan
from keel.tools.launch.supervisor import Lost

CONNECT = 5.0
"""Seconds to reach the head of a cluster."""
ASK = 30.0
"""Seconds that a holder has to answer before its node counts as lost."""
STORE = 80_000_000
"""Bytes of Ray's object store in a cluster started here; nothing is kept there, and less it does not take."""
SHOWN = {"CPU": "CPUs", "GPU": "GPUs", "memory": "GB of memory"}


class RayCluster:
    """A cluster for as long as the block lasts; one that was started here ends with it."""

    def __init__(self, where: str, plan: Plan) -> None:
        """`where`: local, auto, or the address of a head."""
        self._where, self._plan = where, plan
        self._parts = {part.name: part for part in (*plan.trainers, *plan.engines)}
        self._bundles = {name: index for index, name in enumerate(self._parts)}
        self._holders: dict[str, Any] = {}
        self._nodes: dict[str, Where] = {}
        self._group: Any = None
        self._sweeper: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        require_ray()
        address = _found() if self._where == "auto" else self._where
        if address == "local":
            token = secrets.token_urlsafe(32)
            os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
            self._sweeper = ray_cleanup.start(token)
        self._ray = _connect(address)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # a signal must not leave Ray half ended
        for holder in self._holders.values():
            with contextlib.suppress(Exception):
                self._ray.kill(holder)
        if self._group is not None:
            from ray.util.placement_group import remove_placement_group

            with contextlib.suppress(Exception):
                remove_placement_group(self._group)
        self._ray.shutdown()
        if self._sweeper is not None:
            ray_cleanup.close(self._sweeper)

    # -- before anything starts ---------------------------------------------------------------------------------------

    @property
    def single(self) -> bool:
        """Whether all parts are on one machine, where nothing has to listen but on loopback."""
        return len(self.nodes()) == 1

    def nodes(self) -> list[dict[str, float]]:
        """What each living node has."""
        return [dict(node["Resources"]) for node in self._ray.nodes() if node["Alive"]]

    def reserve(self) -> None:
        """Resources for every part, or an error that says what is missing."""
        from ray.util.placement_group import placement_group

        launch, bundles = self._plan.launch, [part.bundle for part in self._parts.values()]
        self._assemble()
        check(list(self._parts.values()), self.nodes())
        self._group = placement_group(bundles, strategy=launch.strategy.upper())
        if not self._group.wait(launch.wait):
            raise ConfigError(
                f"the parts could not be placed within launch.wait = {launch.wait:g} s: they ask for"
                f" {_amounts(_sum(bundles))}, and {_amounts(self._ray.available_resources(), _sum(bundles))}"
                " is free, perhaps on nodes that are each too small; wait for the others, raise launch.wait, or ask"
                " for less (launch.engines, launch.*.cpus)"
            )

    def _assemble(self) -> None:
        """Wait until as many nodes have joined as were asked for."""
        launch = self._plan.launch
        deadline = time.monotonic() + launch.wait
        while (joined := len(self.nodes())) < launch.nodes:
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"{joined} of launch.nodes = {launch.nodes} nodes have joined the cluster after launch.wait ="
                    f" {launch.wait:g} s; look why the others have not, raise launch.wait, or lower launch.nodes"
                )
            time.sleep(0.5)

    def settle(self) -> None:
        """A holder for every part, on a node that sees the run's folder."""
        for name in self._parts:
            self._hold(name)
        for name in self._parts:
            self._greet(name)

    # -- what a supervisor needs --------------------------------------------------------------------------------------

    def address(self, name: str) -> tuple[str, int]:
        if name not in self._holders:
            self._hold(name)
            self._greet(name)
        host = "127.0.0.1" if self.single else self._nodes[name].address
        return host, int(self._ask(name, "free_port", host))

    def start(self, name: str, command: Command) -> None:
        if name not in self._holders:
            self._hold(name)
            self._greet(name)
        self._ask(name, "start", command, os.getcwd())

    def host(self, name: str) -> str:
        """The name of the node that a part is on."""
        return self._nodes[name].host if name in self._nodes else ""

    def looks(self, names: Iterable[str]) -> dict[str, Look]:
        """All at once: the slowest holder is waited for, not the sum of all."""
        names = list(names)
        asked = {name: self._holders[name].look.remote() for name in names if name in self._holders}
        looks = {name: Look(lost="its node is gone") for name in names if name not in self._holders}
        if asked:
            self._ray.wait(list(asked.values()), num_returns=len(asked), timeout=ASK)
        for name, reference in asked.items():
            try:
                looks[name] = self._ray.get(reference, timeout=0)
            except self._ray.exceptions.RayError as error:
                self._drop(name)
                looks[name] = Look(lost=f"is lost with its node ({type(error).__name__})")
        return looks

    def end(self, names: Iterable[str]) -> None:
        self._each(names, "end")

    def kill(self, names: Iterable[str]) -> None:
        self._each(names, "kill")

    # -- holders ------------------------------------------------------------------------------------------------------

    def _hold(self, name: str) -> None:
        """A holder in the part's bundle; Ray starts it in its own time."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = self._parts[name].bundle
        placed = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self._bundles[name])
        options = {
            "num_cpus": bundle.get("CPU", 0),
            "num_gpus": bundle.get("GPU", 0),
            "memory": bundle.get("memory") or None,
            "scheduling_strategy": placed,
            "max_restarts": 0,
        }
        holder = self._ray.remote(Holder).options(**options)
        self._holders[name] = holder.remote(str(self._plan.folder), name, self._ray.util.get_node_ip_address)

    def _greet(self, name: str) -> None:
        """Wait for the holder, and refuse a node that could not do its part."""
        try:
            where: Where = self._ray.get(self._holders[name].where.remote(), timeout=self._plan.launch.wait)
        except self._ray.exceptions.RayError as error:
            self._drop(name)
            raise Lost(f"has no place: {_first_line(error)}") from None
        mark = (self._plan.folder / MARK).read_text()
        if where.mark != mark:
            raise ConfigError(
                f"node {where.host} ({where.address}) does not see {self._plan.run}; put the run on a path that all"
                " nodes share, by --run"
            )
        self._nodes[name] = where

    def _ask(self, name: str, method: str, *args: object) -> Any:
        try:
            return self._ray.get(getattr(self._holders[name], method).remote(*args), timeout=ASK)
        except self._ray.exceptions.RayTaskError as error:
            raise Lost(f"could not be started: {_first_line(error.cause)}") from None
        except self._ray.exceptions.RayError as error:
            self._drop(name)
            raise Lost(f"is lost with its node ({type(error).__name__})") from None

    def _each(self, names: Iterable[str], method: str) -> None:
        """Tell many at once; what is gone needs no telling."""
        asked = [getattr(self._holders[name], method).remote() for name in names if name in self._holders]
        if asked:
            self._ray.wait(asked, num_returns=len(asked), timeout=ASK)

    def _drop(self, name: str) -> None:
        """Forget a holder; if it lives after all, its part ends with it."""
        holder = self._holders.pop(name, None)
        if holder is not None:
            with contextlib.suppress(Exception):
                self._ray.kill(holder)


def require_ray() -> None:
    """Refuse in words when Ray is not there."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("keel launch needs Ray: pip install 'keel-rl[ray]' (or: pip install 'ray>=2.59')")


def check(parts: Sequence[Part], nodes: Sequence[Mapping[str, float]]) -> None:
    """Refuse parts that could not be placed if nobody else used the cluster."""
    total, asked = _sum(nodes), _sum([part.bundle for part in parts])
    for part in parts:
        if not any(_fits(part.bundle, node) for node in nodes):
            largest = "; ".join(sorted({_amounts(node, part.bundle) for node in nodes})) or "none"
            raise ConfigError(
                f"{part.name} asks for {_amounts(part.bundle)}, and no node of the cluster has that (nodes:"
                f" {largest}); ask for less by launch.{part.role}{_also(part)}, or add a node"
            )
    if not _fits(asked, total):
        raise ConfigError(
            f"{len(parts)} parts ask for {_amounts(asked)} in all, and the cluster has {_amounts(total, asked)}; ask"
            " for less (launch.engines, launch.engine.cpus, launch.trainer.cpus, trainer.ranks), or add nodes"
        )


def _connect(address: str) -> Any:
    """Ray, connected to a head, or as a cluster of its own that ends with this process."""
    # Ray reads these when it is imported
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")  # a part without GPUs sees none
    quiet: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    quiet |= {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True, "namespace": "keel"}
    if address == "local":
        # parts inherit the priority of Ray's workers, which is low by default
        os.environ.setdefault("RAY_worker_niceness", "0")
        quiet["object_store_memory"] = STORE
    else:
        _reach(address)
    import ray

    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"--cluster {address}: Ray refused: {_first_line(error)}") from None
    return ray


def _found() -> str:
    """The cluster that Ray's own variable names, or that `ray start` left its address of here; else a new one."""
    named = os.environ.get("RAY_ADDRESS")
    if named:
        return named
    file = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    with contextlib.suppress(OSError, ConfigError):
        address = file.read_text().strip()
        _reach(address)
        return address
    return "local"


def _reach(address: str) -> None:
    """A head that cannot be reached is found out here, in seconds."""
    host, colon, port = address.rpartition(":")
    if "://" in address or not colon or not port.isdecimal():
        raise ConfigError(
            f"--cluster {address} is not the address of a head, such as 10.0.0.1:6379; run keel launch on a node of"
            " the cluster, with auto, local or that address"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--cluster {address} cannot be reached: {error}; is `ray start --head` running?") from None


def _fits(asked: Mapping[str, float], has: Mapping[str, float]) -> bool:
    return all(has.get(name, 0.0) + 1e-9 >= amount for name, amount in asked.items() if amount)


def _sum(tables: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for table in tables:
        for name in SHOWN:
            total[name] = total.get(name, 0.0) + table.get(name, 0.0)
    return total


def _amounts(table: Mapping[str, float], asked: Mapping[str, float] | None = None) -> str:
    """Resources in words, such as 2 CPUs and 1 GPUs; of what is asked for if given, also where there is none."""
    names = [name for name in SHOWN if (table if asked is None else asked).get(name)]
    shown = [f"{table.get(name, 0.0) / (1e9 if name == 'memory' else 1.0):.4g} {SHOWN[name]}" for name in names]
    return " and ".join(shown) or "nothing"


def _also(part: Part) -> str:
    return " and launch.orchestrator" if part.role == "trainer" and part.index == 0 else ""


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__).strip()
