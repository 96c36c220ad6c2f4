"""Optional dependencies: which extra of keel-rl installs a package that cannot be imported.

The core (torch, numpy, pydantic, jaxtyping, rich) is enough for objectives, the audit and their commands. Everything
else is imported where it is used, and a missing package becomes an error that names the command to install it.
"""

from keel.errors import MissingDependencyError

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
