"""Imports by name: optional packages, and the objects of a user that settings name as `module:attribute`.

The core (torch, numpy, pydantic, jaxtyping, rich) is enough for objectives, the audit and their commands. Everything
else is imported where it is used, and a missing package becomes an error that names the command to install it.
"""

import importlib
import traceback
from typing import Any

from keel.errors import ConfigError, MissingDependencyError

EXTRA_OF = {
    "transformers": "train",
    "tokenizers": "train",
    "peft": "train",
    "safetensors": "train",
    "huggingface_hub": "train",
    "filelock": "train",
    "jinja2": "train",
    "pyarrow": "train",
    "duckdb": "train",
    "httpx": "train",
    "starlette": "train",
    "fastapi": "train",
    "uvicorn": "train",
    "prometheus_client": "train",
    "packaging": "train",
    "gguf": "offline",
    "renderers": "environments",
    "reasoning_gym": "environments",
    "verifiers": "environments",
    "math_verify": "rewards",
    "jsonschema": "rewards",
    "datasets": "hub",
    "wandb": "metrics",
    "trackio": "metrics",
    "tensorboardX": "metrics",
    "ray": "ray",
    "trl": "trl",
}
"""The extra that installs each optional package, by the name it is imported under."""


def install_command(extra: str) -> str:
    """Return the command that installs an extra."""
    return f'pip install "keel-rl[{extra}]"'


def missing_dependency(error: ModuleNotFoundError) -> MissingDependencyError | None:
    """Return the error to show instead of a failed import, or None when the module is not an optional dependency."""
    package = (error.name or "").partition(".")[0]
    extra = EXTRA_OF.get(package)
    if extra is None:
        return None
    return MissingDependencyError(f"the package {package} is not installed; run: {install_command(extra)}")


def import_object(path: str, label: str, must_be: str = "") -> Any:
    """Return the callable that `module:attribute` names.

    `label` is how an error names the setting, with its value; `must_be` says what the object must be besides callable.
    A module that raises while it is imported is an error that names the line.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{label} is not an import path; write it as module:attribute")
    try:
        value: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            value = getattr(value, part)
    except Exception as error:  # importing a user's module may raise anything
        raise ConfigError(f"{label} cannot be imported: {_import_problem(error, module_name)}") from error
    if not callable(value):
        requirement = f"; it must be {must_be}" if must_be else ""
        raise ConfigError(f"{label} is a {type(value).__name__}, not a class or function{requirement}")
    return value


def _import_problem(error: Exception, module_name: str) -> str:
    """Describe why an import failed: what to do about a missing module, or the line that raised."""
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
        return f"{error}; put the module next to the recipe, in the current folder or on PYTHONPATH"
    if isinstance(error, ImportError | AttributeError):
        return str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = "" if isinstance(error, SyntaxError) else f" ({frame.filename}:{frame.lineno})"
    return f"{type(error).__name__}: {error}{place}"
