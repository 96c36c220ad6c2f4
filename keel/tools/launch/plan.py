"""Turn a recipe into the components of a launch: what is started, with which resources, by which command.

All settings are checked here, before anything starts. A launch changes only how a run samples: its engine becomes a
pool of the launched servers, discovered through a watched file and protected by a key in a separate file. This module
starts nothing and does not depend on Ray.
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
"""In the run's folder: the folder of the launch; in it the URLs of the engines and the API key, next to the logs."""
LAUNCHED_VARIABLE = "KEEL_LAUNCHED"
"""Environment variable that tells `keel train` that it was started by a launch."""
POOL_SOURCES = ("urls", "dns", "file", "discovery_url")
"""Settings of `pool` that name servers."""

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
        """Its resources as a Ray bundle. A component without resources gets a tiny share of a CPU to be placed."""
        amounts = {"CPU": self.resources.cpus, "GPU": self.resources.gpus}
        amounts["memory"] = float(round((self.resources.memory_gb or 0.0) * 1e9))
        return {name: amount for name, amount in amounts.items() if amount} or {"CPU": 0.001}


@dataclass(frozen=True)
class LaunchPlan:
    """A validated launch."""

    run_folder: Path
    """Absolute path of the run's folder, the same on every node."""
    loaded: LoadedSettings
    backend: Literal["keel", "vllm"]
    model: str
    """Name or path of the model that the engine servers load."""
    overrides: tuple[str, ...] = field(default=(), repr=False)
    """Overrides that turn the run's settings into those of the launch."""

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
        """The trainer ranks; rank 0 also runs the training loop."""
        settings, ranks = self.launch.trainer, self.settings.trainer.ranks
        first = _add_resources(settings, self.launch.orchestrator)
        return [Component("trainer", rank, settings if rank else first, settings.restarts) for rank in range(ranks)]

    @property
    def engines(self) -> list[Component]:
        settings = self.launch.engine
        return [Component("engine", index, settings, settings.restarts) for index in range(self.launch.engines)]

    def engine_command(self, host: str, port: int) -> Command:
        """Return the command of an engine server that listens on this address only and requires the key."""
        engine, settings = self.launch.engine, self.settings
        dtype = engine.dtype if engine.dtype != "auto" else settings.model.dtype
        url_host = f"[{host}]" if ":" in host else host
        health_url = f"http://{url_host}:{port}/health"
        if self.backend == "vllm":
            rank = settings.model.lora.rank if settings.model.lora else None
            argv = vllm_process.vllm_argv(self.model, host, port, dtype, rank)
            return Command(
                (*argv, *engine.extra_args),
                python=str(Path(settings.engine.vllm_python).absolute()),
                environment=vllm_process.SERVER_ENV,
                secret_env=("VLLM_API_KEY", str(self.key_file)),
                health_url=health_url,
            )
        argv = ["-m", "keel.cli", "serve", self.model, "--name", "policy", "--host", host, "--port", str(port)]
        argv += ["--api-key-file", str(self.key_file), "--dtype", dtype, "--max-batch", str(settings.engine.max_batch)]
        argv += ["--weights-from", str(self.run_folder)]
        argv += ["--native-kernels", engine.native_kernels]
        argv += ["--int8"] if engine.int8 else []
        return Command((*argv, *engine.extra_args), health_url=health_url)

    def trainer_command(self, rank: int, address: str, port: int, attempt: int) -> Command:
        """Return the command of a trainer rank. The run's folder already exists, so the first start resumes it too."""
        ranks = self.settings.trainer.ranks
        environment = {
            LAUNCHED_VARIABLE: "1",
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            # Ray shows each rank only its own GPUs, so device 0 is always the rank's own
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
        }
        argv = ("-m", "keel.cli", "train", "--resume", str(self.run_folder))
        return Command(argv, environment=environment if ranks > 1 else {LAUNCHED_VARIABLE: "1"})


def make_plan(file: Path, overrides: Sequence[str], run_folder: Path) -> LaunchPlan:
    """Build and check the launch described by a recipe, or the `config.toml` of a run, and overrides."""
    run_folder = run_folder.absolute()
    tree = read_tables(file, overrides)
    changes = _launch_overrides(tree, run_folder / LAUNCH_FOLDER)
    loaded = load_settings(file, [*overrides, *changes])
    settings = loaded.settings
    plan = LaunchPlan(
        run_folder, loaded, "keel" if settings.pool is None else settings.pool.backend, _server_model(settings), changes
    )
    if plan.backend == "vllm" and plan.launch.engine.int8 and plan.launch.engines:
        raise ConfigError("launch.engine.int8 = true has no effect with vLLM servers; remove it")
    if plan.backend == "vllm" and plan.launch.engine.native_kernels != "auto" and plan.launch.engines:
        value = to_toml(plan.launch.engine.native_kernels)
        raise ConfigError(f"launch.engine.native_kernels = {value} has no effect with vLLM servers; remove it")
    _ = plan.trainers  # raises for resources that one process cannot have
    return plan


def check_overrides(overrides: Sequence[str], allow_changes: bool) -> None:
    """Raise if a resumed run would get other settings; the settings of the launch may always change."""
    others = [name for name, _ in parse_overrides(overrides) if name.partition(".")[0] != "launch"]
    if others and not allow_changes:
        raise ConfigError(
            f"--{others[0]} would change the settings that the run was started with; pass --allow-changes to resume"
            " with the new value, or remove it (--launch.* may always change)"
        )


def _launch_overrides(tree: Mapping[str, Any], launch_folder: Path) -> tuple[str, ...]:
    """Return the overrides that make the run sample from the servers of this launch."""
    launch = _table(tree, "launch")
    engines = launch.get("engines", LaunchSettings().engines)
    if engines == 0:
        # even without other settings, a launch table marks the run as launched
        return ("--launch.engines=0",)
    engine, pool = _table(tree, "engine"), _table(tree, "pool")
    try:
        engine_settings = EngineSettings.model_validate(engine)
    except ValidationError as error:
        raise to_config_error(error, ("engine",)) from None
    foreign = [name for name in POOL_SOURCES if pool.get(name) and not _is_own_engines_file(name, pool[name])]
    if foreign:
        raise ConfigError(
            f"pool.{foreign[0]} = {to_toml(pool[foreign[0]])} names existing servers, and launch.engines = {engines}"
            f" would start others; set launch.engines = 0, or remove pool.{foreign[0]}"
        )
    if engine_settings.kind == "pool":
        backend = pool.get("backend", "keel")
    else:
        backend = "vllm" if engine_settings.kind == "vllm" else "keel"
    values: dict[str, Any] = {
        "engine.kind": "pool",
        "pool.backend": backend,
        "pool.file": str(launch_folder / ENGINES_FILE),
        "pool.api_key_file": str(launch_folder / KEY_FILE),
        "launch.engines": engines,
    }
    # with a pool these are options of the servers: they move to launch.engine
    if engine_settings.int8:
        values |= {"engine.int8": False, "launch.engine.int8": True}
    if engine_settings.native_kernels != "auto":
        values |= {"engine.native_kernels": "auto", "launch.engine.native_kernels": engine_settings.native_kernels}
    if engine_settings.dtype != "auto":
        values |= {"engine.dtype": "auto", "launch.engine.dtype": engine_settings.dtype}
    return tuple(f"--{name}={to_toml(value)}" for name, value in values.items())


def _table(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    # a value that is not a table is reported when the settings are validated
    table = tree.get(name)
    return table if isinstance(table, dict) else {}


def _is_own_engines_file(name: str, value: Any) -> bool:
    """Return whether a pool setting is the engines file of an earlier launch, even if the run's folder was moved."""
    return name == "file" and Path(str(value)).parts[-2:] == (LAUNCH_FOLDER, ENGINES_FILE)


def _server_model(settings: RunSettings) -> str:
    """Return the model that a server on any node can load: a name, or a folder on a shared path."""
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
            f"launch.trainer.gpus = {first.gpus} and launch.orchestrator.gpus = {second.gpus} are for one process,"
            f" rank 0; their sum {first.gpus + second.gpus} must be an integer if it is above 1"
        ) from None
