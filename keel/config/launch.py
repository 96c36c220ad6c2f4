"""Settings of `keel launch`: how many parts a run has on a cluster, what each needs, and how often it is started again.

Guarantees that what Ray would refuse only when it places a part is refused here. Says nothing of machines: which part
lands where is the cluster's to decide.
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
"""What a launch says to every engine server itself: an address, a key, a model."""


class Resources(Settings):
    """What one process is given, of what its node has."""

    cpus: Annotated[float, Field(ge=0)] = 1.0
    """Cores; half a core is one that is shared."""
    gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs; below 1 it is shared, above 1 a whole number."""
    memory_gb: Annotated[float, Field(gt=0)] | None = None
    """Memory to set aside, in 10^9 bytes; not given: it is not counted."""

    @model_validator(mode="after")
    def _check_gpus(self) -> Self:
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise setting_error("{gpus} must be a whole number: only less than one GPU can be shared", gpus=self.gpus)
        return self


class ComponentSettings(Resources):
    """A kind of part: its resources, and how often one of it is started again."""

    restarts: NonNegative = 3
    """How often it is started again after it died before the launch is given up."""


class EngineComponentSettings(ComponentSettings):
    """The engine servers."""

    int8: bool = False
    """keel: linear layers in int8. Taken from `engine.int8` when that is set."""
    native_kernels: Literal["auto", "off"] = "auto"
    """keel: in C where there is a compiler, or torch's own. Taken from `engine.native_kernels` when that is set."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the weights that sample; auto: as the model that is trained. Taken from `engine.dtype` when that is set."""
    extra_args: list[str] = []
    """More words for the server's command line, such as ["--tensor-parallel-size", "4"] for vLLM."""

    @model_validator(mode="after")
    def _check_extra_args(self) -> Self:
        for word in self.extra_args:
            if word.partition("=")[0] in RESERVED_FLAGS:
                shown = word.partition("=")[0]
                raise setting_error(f"an option {shown} cannot act: the launch decides it; leave it out of the options")
        return self


class LaunchSettings(Settings):
    """Where the parts of a run live on a cluster; read by `keel launch` alone."""

    engines: NonNegative = 1
    """Engine servers to start; 0: none, the run samples as its table `engine` says."""
    engine: EngineComponentSettings = EngineComponentSettings()
    """Each engine server."""
    trainer: ComponentSettings = ComponentSettings()
    """Each rank of the trainer; there are trainer.ranks. All ranks are started again together."""
    orchestrator: Resources = Resources()
    """What rank 0 is given on top: it runs the loop, the schedule and the environments."""
    strategy: Literal["pack", "spread"] = "pack"
    """Parts on few nodes, or on many."""
    nodes: Annotated[int, Field(ge=1)] = 1
    """Nodes that are waited for before it is judged what the cluster has: those of a job join one after another."""
    placement_timeout: Seconds = 60.0
    """Seconds to wait for these nodes, and for resources that the cluster has and others use."""
    startup_timeout: Seconds = 600.0
    """Seconds that an engine server may take until it answers; then it counts as dead."""
    health_timeout: Seconds = 120.0
    """Seconds without an answer after which an engine server that runs counts as dead."""
    backoff: Seconds = 1.0
    """Seconds before a part is started again; twice as long each further time, and at most a minute."""
    restart_reset_after: Seconds = 3600.0
    """A part that has been up for so many seconds has all its restarts again."""
    shutdown_timeout: Seconds = 60.0
    """Seconds that the trainer has to finish its step when the launch has failed."""
