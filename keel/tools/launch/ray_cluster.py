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
from keel.tools.launch.node_agent import MARK_FILE, Command, NodeAgent, NodeInfo, Probe
from keel.tools.launch.plan import Component, LaunchPlan
from keel.tools.launch.supervisor import NodeLost

CONNECT_TIMEOUT = 5.0
"""Seconds to reach the head of a cluster."""
REQUEST_TIMEOUT = 30.0
"""Seconds that a holder has to answer before its node counts as lost."""
OBJECT_STORE_BYTES = 80_000_000
"""Bytes of Ray's object store in a cluster started here; nothing is kept there, and less it does not take."""
RESOURCE_UNITS = {"CPU": "CPUs", "GPU": "GPUs", "memory": "GB of memory"}


class RayCluster:
    """A cluster for as long as the block lasts; one that was started here ends with it."""

    def __init__(self, cluster_address: str, plan: LaunchPlan) -> None:
        """`where`: local, auto, or the address of a head."""
        self._cluster_address, self._plan = cluster_address, plan
        self._components = {part.name: part for part in (*plan.trainers, *plan.engines)}
        self._bundle_indices = {name: index for index, name in enumerate(self._components)}
        self._agents: dict[str, Any] = {}
        self._node_infos: dict[str, NodeInfo] = {}
        self._placement_group: Any = None
        self._cleanup_process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        require_ray()
        address = _find_cluster() if self._cluster_address == "auto" else self._cluster_address
        if address == "local":
            token = secrets.token_urlsafe(32)
            os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
            self._cleanup_process = ray_cleanup.start(token)
        self._ray = _connect_ray(address)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # a signal must not leave Ray half ended
        for holder in self._agents.values():
            with contextlib.suppress(Exception):
                self._ray.kill(holder)
        if self._placement_group is not None:
            from ray.util.placement_group import remove_placement_group

            with contextlib.suppress(Exception):
                remove_placement_group(self._placement_group)
        self._ray.shutdown()
        if self._cleanup_process is not None:
            ray_cleanup.close(self._cleanup_process)

    # -- before anything starts ---------------------------------------------------------------------------------------

    @property
    def is_single_node(self) -> bool:
        """Whether all parts are on one machine, where nothing has to listen but on loopback."""
        return len(self.node_resources()) == 1

    def node_resources(self) -> list[dict[str, float]]:
        """What each living node has."""
        return [dict(node["Resources"]) for node in self._ray.nodes() if node["Alive"]]

    def reserve_resources(self) -> None:
        """Resources for every part, or an error that says what is missing."""
        from ray.util.placement_group import placement_group

        launch, bundles = self._plan.launch, [part.bundle for part in self._components.values()]
        self._wait_for_nodes()
        check_resources(list(self._components.values()), self.node_resources())
        self._placement_group = placement_group(bundles, strategy=launch.strategy.upper())
        if not self._placement_group.wait(launch.placement_timeout):
            raise ConfigError(
                f"the parts could not be placed within launch.placement_timeout = {launch.placement_timeout:g} s: they ask for"
                f" {_format_resources(_sum_resources(bundles))}, and {_format_resources(self._ray.available_resources(), _sum_resources(bundles))}"
                " is free, perhaps on nodes that are each too small; wait for the others, raise launch.placement_timeout, or ask"
                " for less (launch.engines, launch.*.cpus)"
            )

    def _wait_for_nodes(self) -> None:
        """Wait until as many nodes have joined as were asked for."""
        launch = self._plan.launch
        deadline = time.monotonic() + launch.placement_timeout
        while (joined := len(self.node_resources())) < launch.nodes:
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"{joined} of launch.nodes = {launch.nodes} nodes have joined the cluster after launch.placement_timeout ="
                    f" {launch.placement_timeout:g} s; look why the others have not, raise launch.placement_timeout, or lower launch.nodes"
                )
            time.sleep(0.5)

    def start_agents(self) -> None:
        """A holder for every part, on a node that sees the run's folder."""
        for name in self._components:
            self._place_agent(name)
        for name in self._components:
            self._check_agent(name)

    # -- what a supervisor needs --------------------------------------------------------------------------------------

    def allocate_address(self, name: str) -> tuple[str, int]:
        if name not in self._agents:
            self._place_agent(name)
            self._check_agent(name)
        host = "127.0.0.1" if self.is_single_node else self._node_infos[name].address
        return host, int(self._call_agent(name, "free_port", host))

    def start(self, name: str, command: Command) -> None:
        if name not in self._agents:
            self._place_agent(name)
            self._check_agent(name)
        self._call_agent(name, "start", command, os.getcwd())

    def host(self, name: str) -> str:
        """The name of the node that a part is on."""
        return self._node_infos[name].host if name in self._node_infos else ""

    def probe_all(self, names: Iterable[str]) -> dict[str, Probe]:
        """All at once: the slowest holder is waited for, not the sum of all."""
        names = list(names)
        asked = {name: self._agents[name].probe.remote() for name in names if name in self._agents}
        looks = {name: Probe(lost_reason="its node is gone") for name in names if name not in self._agents}
        if asked:
            self._ray.wait(list(asked.values()), num_returns=len(asked), timeout=REQUEST_TIMEOUT)
        for name, reference in asked.items():
            try:
                looks[name] = self._ray.get(reference, timeout=0)
            except self._ray.exceptions.RayError as error:
                self._forget_agent(name)
                looks[name] = Probe(lost_reason=f"is lost with its node ({type(error).__name__})")
        return looks

    def terminate(self, names: Iterable[str]) -> None:
        self._call_agents(names, "terminate")

    def kill(self, names: Iterable[str]) -> None:
        self._call_agents(names, "kill")

    # -- holders ------------------------------------------------------------------------------------------------------

    def _place_agent(self, name: str) -> None:
        """A holder in the part's bundle; Ray starts it in its own time."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = self._components[name].bundle
        placed = PlacementGroupSchedulingStrategy(
            self._placement_group, placement_group_bundle_index=self._bundle_indices[name]
        )
        options = {
            "num_cpus": bundle.get("CPU", 0),
            "num_gpus": bundle.get("GPU", 0),
            "memory": bundle.get("memory") or None,
            "scheduling_strategy": placed,
            "max_restarts": 0,
        }
        holder = self._ray.remote(NodeAgent).options(**options)
        self._agents[name] = holder.remote(str(self._plan.launch_folder), name, self._ray.util.get_node_ip_address)

    def _check_agent(self, name: str) -> None:
        """Wait for the holder, and refuse a node that could not do its part."""
        try:
            where: NodeInfo = self._ray.get(
                self._agents[name].node_info.remote(), timeout=self._plan.launch.placement_timeout
            )
        except self._ray.exceptions.RayError as error:
            self._forget_agent(name)
            raise NodeLost(f"has no place: {_first_line(error)}") from None
        mark = (self._plan.launch_folder / MARK_FILE).read_text()
        if where.mark != mark:
            raise ConfigError(
                f"node {where.host} ({where.address}) does not see {self._plan.run_folder}; put the run on a path that all"
                " nodes share, by --run"
            )
        self._node_infos[name] = where

    def _call_agent(self, name: str, method: str, *args: object) -> Any:
        try:
            return self._ray.get(getattr(self._agents[name], method).remote(*args), timeout=REQUEST_TIMEOUT)
        except self._ray.exceptions.RayTaskError as error:
            raise NodeLost(f"could not be started: {_first_line(error.cause)}") from None
        except self._ray.exceptions.RayError as error:
            self._forget_agent(name)
            raise NodeLost(f"is lost with its node ({type(error).__name__})") from None

    def _call_agents(self, names: Iterable[str], method: str) -> None:
        """Tell many at once; what is gone needs no telling."""
        asked = [getattr(self._agents[name], method).remote() for name in names if name in self._agents]
        if asked:
            self._ray.wait(asked, num_returns=len(asked), timeout=REQUEST_TIMEOUT)

    def _forget_agent(self, name: str) -> None:
        """Forget a holder; if it lives after all, its part ends with it."""
        holder = self._agents.pop(name, None)
        if holder is not None:
            with contextlib.suppress(Exception):
                self._ray.kill(holder)


def require_ray() -> None:
    """Refuse in words when Ray is not there."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("keel launch needs Ray: pip install 'keel-rl[ray]' (or: pip install 'ray>=2.59')")


def check_resources(components: Sequence[Component], nodes: Sequence[Mapping[str, float]]) -> None:
    """Refuse parts that could not be placed if nobody else used the cluster."""
    total, asked = _sum_resources(nodes), _sum_resources([part.bundle for part in components])
    for part in components:
        if not any(_fits(part.bundle, node) for node in nodes):
            largest = "; ".join(sorted({_format_resources(node, part.bundle) for node in nodes})) or "none"
            raise ConfigError(
                f"{part.name} asks for {_format_resources(part.bundle)}, and no node of the cluster has that (nodes:"
                f" {largest}); ask for less by launch.{part.role}{_orchestrator_hint(part)}, or add a node"
            )
    if not _fits(asked, total):
        raise ConfigError(
            f"{len(components)} parts ask for {_format_resources(asked)} in all, and the cluster has {_format_resources(total, asked)}; ask"
            " for less (launch.engines, launch.engine.cpus, launch.trainer.cpus, trainer.ranks), or add nodes"
        )


def _connect_ray(address: str) -> Any:
    """Ray, connected to a head, or as a cluster of its own that ends with this process."""
    # Ray reads these when it is imported
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")  # a part without GPUs sees none
    quiet: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    quiet |= {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True, "namespace": "keel"}
    if address == "local":
        # parts inherit the priority of Ray's workers, which is low by default
        os.environ.setdefault("RAY_worker_niceness", "0")
        quiet["object_store_memory"] = OBJECT_STORE_BYTES
    else:
        _check_reachable(address)
    import ray

    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"--cluster {address}: Ray refused: {_first_line(error)}") from None
    return ray


def _find_cluster() -> str:
    """The cluster that Ray's own variable names, or that `ray start` left its address of here; else a new one."""
    named = os.environ.get("RAY_ADDRESS")
    if named:
        return named
    file = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    with contextlib.suppress(OSError, ConfigError):
        address = file.read_text().strip()
        _check_reachable(address)
        return address
    return "local"


def _check_reachable(address: str) -> None:
    """A head that cannot be reached is found out here, in seconds."""
    host, colon, port = address.rpartition(":")
    if "://" in address or not colon or not port.isdecimal():
        raise ConfigError(
            f"--cluster {address} is not the address of a head, such as 10.0.0.1:6379; run keel launch on a node of"
            " the cluster, with auto, local or that address"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--cluster {address} cannot be reached: {error}; is `ray start --head` running?") from None


def _fits(requested: Mapping[str, float], available: Mapping[str, float]) -> bool:
    return all(available.get(name, 0.0) + 1e-9 >= amount for name, amount in requested.items() if amount)


def _sum_resources(tables: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for table in tables:
        for name in RESOURCE_UNITS:
            total[name] = total.get(name, 0.0) + table.get(name, 0.0)
    return total


def _format_resources(resources: Mapping[str, float], requested: Mapping[str, float] | None = None) -> str:
    """Resources in words, such as 2 CPUs and 1 GPUs; of what is asked for if given, also where there is none."""
    names = [name for name in RESOURCE_UNITS if (resources if requested is None else requested).get(name)]
    shown = [
        f"{resources.get(name, 0.0) / (1e9 if name == 'memory' else 1.0):.4g} {RESOURCE_UNITS[name]}" for name in names
    ]
    return " and ".join(shown) or "nothing"


def _orchestrator_hint(component: Component) -> str:
    return " and launch.orchestrator" if component.role == "trainer" and component.index == 0 else ""


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__).strip()
