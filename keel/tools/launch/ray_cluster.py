"""The Ray cluster of a launch: connect to it or start one locally, check its resources, and place every component.

Guarantees that a launch that can never be placed is an immediate error with the numbers, that resources in use by
others are waited for only up to `launch.placement_timeout`, and that a cluster started here requires a token, since Ray
listens on every address of a machine. Ray only places node agents (`node_agent.py`) and reports lost nodes; no data of
a run goes through it. This is the only module that imports Ray.
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
"""Seconds in which an agent must answer before its node counts as lost."""
OBJECT_STORE_BYTES = 80_000_000
"""Size of Ray's object store in a local cluster: the minimum that Ray accepts, since nothing is stored there."""
RESOURCE_UNITS = {"CPU": "CPUs", "GPU": "GPUs", "memory": "GB of memory"}


class RayCluster:
    """A context manager for a cluster; a cluster that it started is shut down on exit."""

    def __init__(self, cluster_address: str, plan: LaunchPlan) -> None:
        """`cluster_address`: "local", "auto", or the address of a head."""
        self._cluster_address, self._plan = cluster_address, plan
        self._components = {component.name: component for component in (*plan.trainers, *plan.engines)}
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
        # errors are suppressed so that Ray is always shut down completely
        for agent in self._agents.values():
            with contextlib.suppress(Exception):
                self._ray.kill(agent)
        if self._placement_group is not None:
            from ray.util.placement_group import remove_placement_group

            with contextlib.suppress(Exception):
                remove_placement_group(self._placement_group)
        self._ray.shutdown()
        if self._cleanup_process is not None:
            ray_cleanup.close(self._cleanup_process)

    # -- placement ----------------------------------------------------------------------------------------------------

    @property
    def is_single_node(self) -> bool:
        """Whether all components are on one machine, so that servers can listen on loopback only."""
        return len(self.node_resources()) == 1

    def node_resources(self) -> list[dict[str, float]]:
        """Return the resources of each living node."""
        return [dict(node["Resources"]) for node in self._ray.nodes() if node["Alive"]]

    def reserve_resources(self) -> None:
        """Reserve resources for every component, or raise an error that names what is missing."""
        from ray.util.placement_group import placement_group

        launch, bundles = self._plan.launch, [component.bundle for component in self._components.values()]
        requested = _sum_resources(bundles)
        self._wait_for_nodes()
        check_resources(list(self._components.values()), self.node_resources())
        self._placement_group = placement_group(bundles, strategy=launch.strategy.upper())
        if not self._placement_group.wait(launch.placement_timeout):
            raise ConfigError(
                f"the components could not be placed within launch.placement_timeout = {launch.placement_timeout:g} s:"
                f" they need {_format_resources(requested)}, and"
                f" {_format_resources(self._ray.available_resources(), requested)} are free, possibly on nodes that are"
                " each too small; wait for other jobs, raise launch.placement_timeout, or request less"
                " (launch.engines, launch.*.cpus)"
            )

    def _wait_for_nodes(self) -> None:
        """Wait until `launch.nodes` nodes have joined the cluster."""
        launch = self._plan.launch
        deadline = time.monotonic() + launch.placement_timeout
        while (joined := len(self.node_resources())) < launch.nodes:
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"{joined} of launch.nodes = {launch.nodes} nodes have joined the cluster after"
                    f" launch.placement_timeout = {launch.placement_timeout:g} s; check the missing nodes, raise"
                    " launch.placement_timeout, or lower launch.nodes"
                )
            time.sleep(0.5)

    def start_agents(self) -> None:
        """Start an agent for every component and check that its node sees the run's folder."""
        for name in self._components:
            self._place_agent(name)
        for name in self._components:
            self._check_agent(name)

    # -- the Cluster protocol -----------------------------------------------------------------------------------------

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
        """Return the host name of a component's node; empty if it has none."""
        return self._node_infos[name].host if name in self._node_infos else ""

    def probe_all(self, names: Iterable[str]) -> dict[str, Probe]:
        """Probe components concurrently."""
        names = list(names)
        pending = {name: self._agents[name].probe.remote() for name in names if name in self._agents}
        probes = {name: Probe(lost_reason="was lost with its node") for name in names if name not in self._agents}
        if pending:
            self._ray.wait(list(pending.values()), num_returns=len(pending), timeout=REQUEST_TIMEOUT)
        for name, reference in pending.items():
            try:
                probes[name] = self._ray.get(reference, timeout=0)
            except self._ray.exceptions.RayError as error:
                self._forget_agent(name)
                probes[name] = Probe(lost_reason=f"was lost with its node ({type(error).__name__})")
        return probes

    def terminate(self, names: Iterable[str]) -> None:
        self._call_agents(names, "terminate")

    def kill(self, names: Iterable[str]) -> None:
        self._call_agents(names, "kill")

    # -- agents -------------------------------------------------------------------------------------------------------

    def _place_agent(self, name: str) -> None:
        """Create an agent in the component's bundle; Ray starts it asynchronously."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = self._components[name].bundle
        strategy = PlacementGroupSchedulingStrategy(
            self._placement_group, placement_group_bundle_index=self._bundle_indices[name]
        )
        options = {
            "num_cpus": bundle.get("CPU", 0),
            "num_gpus": bundle.get("GPU", 0),
            "memory": bundle.get("memory") or None,
            "scheduling_strategy": strategy,
            "max_restarts": 0,
        }
        agent = self._ray.remote(NodeAgent).options(**options)
        self._agents[name] = agent.remote(str(self._plan.launch_folder), name, self._ray.util.get_node_ip_address)

    def _check_agent(self, name: str) -> None:
        """Wait for the agent and raise if its node does not see the run's folder."""
        try:
            node: NodeInfo = self._ray.get(
                self._agents[name].node_info.remote(), timeout=self._plan.launch.placement_timeout
            )
        except self._ray.exceptions.RayError as error:
            self._forget_agent(name)
            raise NodeLost(f"could not be placed: {_first_line(error)}") from None
        mark = (self._plan.launch_folder / MARK_FILE).read_text()
        if node.mark != mark:
            raise ConfigError(
                f"node {node.host} ({node.address}) does not see {self._plan.run_folder}; use --run with a path that"
                " all nodes share"
            )
        self._node_infos[name] = node

    def _call_agent(self, name: str, method: str, *args: object) -> Any:
        try:
            return self._ray.get(getattr(self._agents[name], method).remote(*args), timeout=REQUEST_TIMEOUT)
        except self._ray.exceptions.RayTaskError as error:
            raise NodeLost(f"could not be started: {_first_line(error.cause)}") from None
        except self._ray.exceptions.RayError as error:
            self._forget_agent(name)
            raise NodeLost(f"was lost with its node ({type(error).__name__})") from None

    def _call_agents(self, names: Iterable[str], method: str) -> None:
        """Call a method of several agents concurrently; lost agents are skipped."""
        pending = [getattr(self._agents[name], method).remote() for name in names if name in self._agents]
        if pending:
            self._ray.wait(pending, num_returns=len(pending), timeout=REQUEST_TIMEOUT)

    def _forget_agent(self, name: str) -> None:
        """Forget an agent, and kill it with its component in case it still runs."""
        agent = self._agents.pop(name, None)
        if agent is not None:
            with contextlib.suppress(Exception):
                self._ray.kill(agent)


def require_ray() -> None:
    """Raise if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("keel launch needs Ray: pip install 'keel-rl[ray]' (or: pip install 'ray>=2.59')")


def check_resources(components: Sequence[Component], nodes: Sequence[Mapping[str, float]]) -> None:
    """Raise if the components could not be placed even on an otherwise idle cluster."""
    total, requested = _sum_resources(nodes), _sum_resources([component.bundle for component in components])
    for component in components:
        bundle = component.bundle
        if not any(_fits(bundle, node) for node in nodes):
            available = "; ".join(sorted({_format_resources(node, bundle) for node in nodes})) or "none"
            raise ConfigError(
                f"{component.name} needs {_format_resources(bundle)}, and no node of the cluster has that (nodes:"
                f" {available}); request less with launch.{component.role}{_orchestrator_hint(component)}, or add a"
                " node"
            )
    if not _fits(requested, total):
        raise ConfigError(
            f"{len(components)} components need {_format_resources(requested)} in total, and the cluster has"
            f" {_format_resources(total, requested)}; request less (launch.engines, launch.engine.cpus,"
            " launch.trainer.cpus, trainer.ranks), or add nodes"
        )


def _connect_ray(address: str) -> Any:
    """Return the ray module, connected to a head or to a new local cluster that ends with this process."""
    # Ray reads these when it is imported
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")  # a component without GPUs sees none
    options: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    options |= {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True, "namespace": "keel"}
    if address == "local":
        # components inherit the priority of Ray's workers, which is low by default
        os.environ.setdefault("RAY_worker_niceness", "0")
        options["object_store_memory"] = OBJECT_STORE_BYTES
    else:
        _check_reachable(address)
    import ray

    try:
        ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"--cluster {address}: Ray could not connect: {_first_line(error)}") from None
    return ray


def _find_cluster() -> str:
    """Return the address in RAY_ADDRESS, else of a cluster that `ray start` runs here, else "local"."""
    configured = os.environ.get("RAY_ADDRESS")
    if configured:
        return configured
    file = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    with contextlib.suppress(OSError, ConfigError):
        address = file.read_text().strip()
        _check_reachable(address)
        return address
    return "local"


def _check_reachable(address: str) -> None:
    """Raise within seconds if a head cannot be reached."""
    host, colon, port = address.rpartition(":")
    if "://" in address or not colon or not port.isdecimal():
        raise ConfigError(
            f"--cluster {address} is not the address of a Ray head such as 10.0.0.1:6379; run keel launch on a node of"
            " the cluster and pass auto, local or that address"
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
    """Return resources as text, such as "2 CPUs and 1 GPUs"; with `requested`, exactly those kinds, even if zero."""
    names = [name for name in RESOURCE_UNITS if (resources if requested is None else requested).get(name)]
    parts = [
        f"{resources.get(name, 0.0) / (1e9 if name == 'memory' else 1.0):.4g} {RESOURCE_UNITS[name]}" for name in names
    ]
    return " and ".join(parts) or "nothing"


def _orchestrator_hint(component: Component) -> str:
    return " and launch.orchestrator" if component.role == "trainer" and component.index == 0 else ""


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__).strip()
