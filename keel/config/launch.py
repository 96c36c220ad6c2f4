"""Settings of `keel launch`: the components of a run on a cluster, their resources and their restart limits.

Guarantees that resources which Ray would only reject at placement are rejected here. The settings do not name machines:
Ray decides which component runs on which node.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from keel.common.settings import Settings, setting_error

Seconds = Annotated[float, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]

RESERVED_FLAGS = (
    "--host",
    "--port",
    "--api-key",
    "--api-key-file",
    "--model",
    "--name",
    "--served-model-name",
    "--weights-from",
)
"""Flags that `keel launch` passes to every engine server: address, key and model."""


class Resources(Settings):
    """Resources of one process on its node."""

    cpus: Annotated[float, Field(ge=0)] = 1.0
    """CPU cores. A fraction means a shared core."""
    gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs. Below 1 means a shared GPU; above 1 it must be a whole number."""
    memory_gb: Annotated[float, Field(gt=0)] | None = None
    """Memory to reserve, in units of 10^9 bytes. By default no memory is reserved."""

    @model_validator(mode="after")
    def _check_gpus(self) -> Self:
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise setting_error(
                "{gpus} must be a whole number: only a fraction below 1 can share a GPU", gpus=self.gpus
            )
        return self


class ComponentSettings(Resources):
    """One kind of component: its resources and its restart limit."""

    restarts: NonNegative = 3
    """Restarts of one component after a crash before the launch fails."""


class EngineComponentSettings(ComponentSettings):
    """The engine servers."""

    int8: bool = False
    """Run linear layers in int8. Keel servers only. Taken from `engine.int8` if that is set."""
    native_kernels: Literal["auto", "off"] = "auto"
    """auto: native kernels if a C compiler is available; off: torch's kernels. Keel servers only. Taken from
    `engine.native_kernels` if that is set."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights that sample. auto: the type of the trained model. Taken from `engine.dtype` if that is
    set."""
    extra_args: list[str] = []
    """More arguments for the server's command line, such as ["--tensor-parallel-size", "4"] for vLLM."""

    @model_validator(mode="after")
    def _check_extra_args(self) -> Self:
        for argument in self.extra_args:
            flag = argument.partition("=")[0]
            if flag in RESERVED_FLAGS:
                # the value is not shown: it may be a key
                raise setting_error(f"launch.engine.extra_args must not contain {flag}: keel launch sets it; remove it")
        return self


class LaunchSettings(Settings):
    """How the components of a run are placed on a cluster. Read only by `keel launch`."""

    engines: NonNegative = 1
    """Engine servers to start. 0: none; the run samples as its table `engine` says."""
    engine: EngineComponentSettings = EngineComponentSettings()
    """Resources and options of each engine server."""
    trainer: ComponentSettings = ComponentSettings()
    """Resources of each trainer rank. The number of ranks is trainer.ranks; all ranks are restarted together."""
    orchestrator: Resources = Resources()
    """Additional resources of rank 0, which runs the training loop, the scheduler and the environments."""
    strategy: Literal["pack", "spread"] = "pack"
    """Ray placement strategy: pack components onto few nodes, or spread them over many."""
    nodes: Annotated[int, Field(ge=1)] = 1
    """Nodes that must have joined before the resources of the cluster are checked."""
    placement_timeout: Seconds = 60.0
    """Seconds to wait for these nodes, and for resources that other jobs currently use."""
    startup_timeout: Seconds = 600.0
    """Seconds an engine server may take to become healthy before it counts as dead."""
    health_timeout: Seconds = 120.0
    """Seconds without a response after which a running engine server counts as dead."""
    backoff: Seconds = 1.0
    """Seconds before the first restart of a component. Doubles with each further restart, up to one minute."""
    restart_reset_after: Seconds = 3600.0
    """Seconds a component must stay up to get its full number of restarts back."""
    shutdown_timeout: Seconds = 60.0
    """Seconds the trainer has to finish its step after the launch has failed."""
