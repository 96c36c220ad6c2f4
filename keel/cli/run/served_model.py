"""What `keel serve` serves: the checkpoint of a run, an adapter on its base, or a model by name or folder."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keel.config import ModelSettings, load_settings
from keel.errors import ConfigError


@dataclass(frozen=True)
class ServedModel:
    """A model to load, and the adapter on top of it."""

    settings: ModelSettings
    seed: int = 0
    adapter: Path | None = None
    step: int | None = None
    """Step of the checkpoint of a run."""


def find_served_model(
    model: str | None, adapter: Path | None, step: int | None, *, dtype: str, device: str
) -> ServedModel:
    """Return what MODEL, --adapter and --step name. A folder that holds only an adapter is served on its base."""
    if model is None and adapter is None:
        raise ConfigError("pass a MODEL, the folder of a run, or --adapter DIR; for example: keel serve smollm2-135m")
    folder = None if model is None else Path(model).expanduser()
    if folder is not None and (folder / "run.db").is_file():
        if adapter is not None:
            raise ConfigError(f"--adapter {adapter} cannot be combined with the run {model}; name its base as MODEL")
        return _run_checkpoint(folder, step, dtype, device)
    if step is not None:
        raise ConfigError(f"--step {step} has no effect: {model or adapter} is not the folder of a run")
    if adapter is None and folder is not None and (folder / "adapter_config.json").is_file():
        model, adapter = None, folder
    settings = ModelSettings(name=model or _adapter_base(adapter), dtype=dtype, device=device)  # type: ignore[arg-type]
    return ServedModel(settings, adapter=adapter)


def _run_checkpoint(folder: Path, step: int | None, dtype: str, device: str) -> ServedModel:
    from keel.training import Checkpoints

    settings = load_settings(folder / "config.toml").settings
    checkpoints = Checkpoints(folder / "checkpoints", settings.checkpoints)
    if step is None:
        step = checkpoints.latest()
    else:
        checkpoints.verify(step)
    if step is None:
        raise ConfigError(f"{folder / 'checkpoints'} has no complete checkpoint yet; wait for the first one")
    path = checkpoints.path(step)
    changes: dict[str, Any] = {"lora": None, "device": device}
    if dtype != "auto":
        changes["dtype"] = dtype
    if settings.model.lora is None:
        changes |= {"name": str(path), "sft_warmup_steps": 0}
    model = ModelSettings.model_validate(settings.model.model_dump() | changes)
    return ServedModel(model, settings.seed, None if settings.model.lora is None else path, step)


def _adapter_base(adapter: Path | None) -> str:
    """Return the base model that an adapter names in its configuration."""
    from keel.common.lora_config_check import check_adapter

    assert adapter is not None
    base = check_adapter(adapter).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ConfigError(f"--adapter {adapter} does not name its base model; pass the base as MODEL")
    return base


def tool_session_factory(tokenizer: Any) -> Callable[[list[Any], list[dict[str, Any]]], Any]:
    """Return a function that opens a chat session with tools; the renderer is built for the first one.

    A model without a chat template, or with one that has no tools, raises a `ConfigError` that says so.
    """
    conversations: list[Any] = []

    def open_session(messages: list[Any], tools: list[dict[str, Any]]) -> Any:
        from keel.api.conversations import Conversations
        from keel.config import RendererSettings
        from keel.rollout.rendering.renderer import Renderer

        if not conversations:
            conversations.append(Conversations(Renderer(tokenizer, RendererSettings())))
        return conversations[0].open_session(copy.deepcopy(messages), tools)

    return open_session
