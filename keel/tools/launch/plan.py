"""From a recipe to the parts of a launch: what is started, with which resources, by which command.

Everything that can be refused is refused here, before anything starts. A launch changes only how a run samples: its
engine becomes a pool of the servers that are started, found by a watched file, behind a key that is in a file of its
own. It starts nothing and knows nothing of Ray.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from keel.common.settings import to_config_error
from keel.config import EngineSettings, LaunchSettings, LoadedSettings, RunSettings, load_settings
from keel.config.launch import Resources
from keel.config.load import parse_overrides, read_tables
from keel.config.toml_writer import to_toml
from keel.errors import ConfigError
from keel.inference.pool import vllm_process
from keel.tools.launch.node_agent import Command
from keel.training.model import model_source, tiny_models

LAUNCH_FOLDER, ENGINES_FILE, KEY_FILE = "launch", "engines.txt", "key"
"""In the run's folder: the logs of all parts, the addresses of the engines, and what the engines ask for."""
POOL_SOURCES = ("urls", "dns", "file", "list_url")

ComponentRole = Literal["trainer", "engine"]


@dataclass(frozen=True)
class Component:
    """One process of a launch."""

    role: ComponentRole
    index: int
    resources: Resources
    max_restarts: int

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"

    @property
    def bundle(self) -> dict[str, float]:
        """Its resources in Ray's words. A part that needs nothing still has a place."""
        asked = {"CPU": self.resources.cpus, "GPU": self.resources.gpus}
        asked["memory"] = float(round((self.resources.memory_gb or 0.0) * 1e9))
        return {name: amount for name, amount in asked.items() if amount} or {"CPU": 0.001}


@dataclass(frozen=True)
class LaunchPlan:
    """A launch that was checked."""

    run_folder: Path
    """The run's folder, absolute: every node sees it under this path."""
    loaded: LoadedSettings
    backend: Literal["keel", "vllm"]
    model: str
    """What the engine servers load."""
    overrides: tuple[str, ...] = field(default=(), repr=False)
    """Overrides by which the run's settings become those of the launch."""

    @property
    def settings(self) -> RunSettings:
        return self.loaded.settings

    @property
    def launch(self) -> LaunchSettings:
        return self.settings.launch or LaunchSettings()

    @property
    def launch_folder(self) -> Path:
        return self.run_folder / LAUNCH_FOLDER

    @property
    def engines_file(self) -> Path:
        return self.launch_folder / ENGINES_FILE

    @property
    def key_file(self) -> Path:
        return self.launch_folder / KEY_FILE

    def log_path(self, name: str) -> Path:
        return self.launch_folder / f"{name}.log"

    @property
    def trainers(self) -> list[Component]:
        """The ranks; the first one runs the loop too."""
        asked, ranks = self.launch.trainer, self.settings.trainer.ranks
        first = _add_resources(asked, self.launch.orchestrator)
        return [Component("trainer", rank, asked if rank else first, asked.restarts) for rank in range(ranks)]

    @property
    def engines(self) -> list[Component]:
        asked = self.launch.engine
        return [Component("engine", index, asked, asked.restarts) for index in range(self.launch.engines)]

    def engine_command(self, host: str, port: int) -> Command:
        """An engine server on an address of its node. It listens there only, and answers holders of the key only."""
        asked, settings = self.launch.engine, self.settings
        dtype = asked.dtype if asked.dtype != "auto" else settings.model.dtype
        shown = f"[{host}]" if ":" in host else host
        health = f"http://{shown}:{port}/health"
        if self.backend == "vllm":
            rank = settings.model.lora.rank if settings.model.lora else None
            words = vllm_process.vllm_argv(self.model, host, port, dtype, rank)
            return Command(
                (*words, *asked.extra_args),
                python=str(Path(settings.engine.vllm_python).absolute()),
                environment=vllm_process.SERVER_ENV,
                secret_env=("VLLM_API_KEY", str(self.key_file)),
                health_url=health,
            )
        words = ["-m", "keel.cli", "serve", self.model, "--name", "policy", "--host", host, "--port", str(port)]
        words += ["--api-key-file", str(self.key_file), "--dtype", dtype, "--max-batch", str(settings.engine.max_batch)]
        words += ["--weights-from", str(self.run_folder)]
        words += ["--native-kernels", asked.native_kernels]
        words += ["--int8"] if asked.int8 else []
        return Command((*words, *asked.extra_args), health_url=health)

    def trainer_command(self, rank: int, address: str, port: int, attempt: int) -> Command:
        """A rank of the trainer. The run's folder is there already: the first start goes on with it like any other."""
        ranks = self.settings.trainer.ranks
        place = {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            # Ray shows each rank its own GPUs only, so that everyone's first is its own
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
        }
        words = ("-m", "keel.cli", "train", "--resume", str(self.run_folder))
        return Command(words, environment=place if ranks > 1 else {})


def make_plan(file: Path, overrides: Sequence[str], run_folder: Path) -> LaunchPlan:
    """The launch that a recipe, or the `config.toml` of a run, and overrides describe."""
    run_folder = run_folder.absolute()
    tree = read_tables(file, overrides)
    changes = _launch_overrides(tree, run_folder / LAUNCH_FOLDER)
    loaded = load_settings(file, [*overrides, *changes])
    settings = loaded.settings
    plan = LaunchPlan(
        run_folder, loaded, "keel" if settings.pool is None else settings.pool.backend, _server_model(settings), changes
    )
    if plan.backend == "vllm" and plan.launch.engine.int8 and plan.launch.engines:
        raise ConfigError("launch.engine.int8 = true cannot act: vLLM samples by itself; leave it out")
    if plan.backend == "vllm" and plan.launch.engine.native_kernels != "auto" and plan.launch.engines:
        shown = to_toml(plan.launch.engine.native_kernels)
        raise ConfigError(f"launch.engine.native_kernels = {shown} cannot act: vLLM samples by itself; leave it out")
    _ = plan.trainers  # refuses resources that one process cannot have
    return plan


def check_overrides(overrides: Sequence[str], allow_changes: bool) -> None:
    """A run that is gone on with keeps its settings; where its parts live may always be another."""
    others = [name for name, _ in parse_overrides(overrides) if name.partition(".")[0] != "launch"]
    if others and not allow_changes:
        raise ConfigError(
            f"--{others[0]} would change the settings that the run was started with; go on with them by"
            " --allow-changes, or leave it out (--launch.* may be given at any time)"
        )


def _launch_overrides(tree: Mapping[str, Any], launch_folder: Path) -> tuple[str, ...]:
    """What makes the run sample from the servers of this launch, as overrides."""
    launch = _table(tree, "launch")
    engines = launch.get("engines", LaunchSettings().engines)
    if engines == 0:
        # a table that says nothing else still says that this is a launch
        return ("--launch.engines=0",)
    engine, pool = _table(tree, "engine"), _table(tree, "pool")
    try:
        asked = EngineSettings.model_validate(engine)
    except ValidationError as error:
        raise to_config_error(error, ("engine",)) from None
    foreign = [name for name in POOL_SOURCES if pool.get(name) and not _is_own_engines_file(name, pool[name])]
    if foreign:
        raise ConfigError(
            f"pool.{foreign[0]} = {to_toml(pool[foreign[0]])} names servers that somebody else started, and"
            f" launch.engines = {engines} would start others; set launch.engines = 0, or leave pool.{foreign[0]} out"
        )
    server = pool.get("server", "keel") if asked.kind == "pool" else "vllm" if asked.kind == "vllm" else "keel"
    values: dict[str, Any] = {
        "engine.kind": "pool",
        "pool.backend": server,
        "pool.file": str(launch_folder / ENGINES_FILE),
        "pool.api_key_file": str(launch_folder / KEY_FILE),
        "launch.engines": engines,
    }
    # the servers of a pool have their own of these: they move to where the servers are described
    if asked.int8:
        values |= {"engine.int8": False, "launch.engine.int8": True}
    if asked.native_kernels != "auto":
        values |= {"engine.native_kernels": "auto", "launch.engine.native_kernels": asked.native_kernels}
    if asked.dtype != "auto":
        values |= {"engine.dtype": "auto", "launch.engine.dtype": asked.dtype}
    return tuple(f"--{name}={to_toml(value)}" for name, value in values.items())


def _table(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    # a table that is none is refused when the settings are checked
    table = tree.get(name)
    return table if isinstance(table, dict) else {}


def _is_own_engines_file(name: str, value: Any) -> bool:
    """Whether it is the file of an earlier launch, wherever the run's folder was then."""
    return name == "file" and Path(str(value)).parts[-2:] == (LAUNCH_FOLDER, ENGINES_FILE)


def _server_model(settings: RunSettings) -> str:
    """What a server on any node can load: a name, or a folder on a path that all share."""
    model = settings.model
    if model.name in tiny_models.MODEL_NAMES:
        return str(model_source.resolve_model(model.name, settings.seed, model.sft_warmup_steps).folder)
    folder = Path(model.name).expanduser()
    return str(folder.resolve()) if folder.is_dir() else model.name


def _add_resources(first: Resources, second: Resources) -> Resources:
    memory = (first.memory_gb or 0.0) + (second.memory_gb or 0.0)
    try:
        return Resources(cpus=first.cpus + second.cpus, gpus=first.gpus + second.gpus, memory_gb=memory or None)
    except ValidationError:
        raise ConfigError(
            f"launch.trainer.gpus = {first.gpus} and launch.orchestrator.gpus = {second.gpus} are for one process, rank 0;"
            f" their sum {first.gpus + second.gpus} must be a whole number above 1"
        ) from None
