"""A model that agents talk to and that is trained on what they did.

It is a name, settings and, once a backend has registered it, an endpoint: an OpenAI-compatible server that samples from
the current weights. Any client works; `openai_client` creates the usual one. It holds no weights.
"""

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from keel.common.settings import to_config_error
from keel.config import LoraSettings, ModelSettings
from keel.errors import ConfigError, KeelError

if TYPE_CHECKING:
    import openai

_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass
class EndpointConnection:
    """The endpoint of a registered model."""

    base_url: str
    api_key: str
    clients: dict[str, Any] = field(default_factory=dict)
    """Clients created so far; they are closed with the endpoint."""


class TrainableModel:
    """A model to register with a backend.

    `name` is its folder below the backend's and its name in requests; `base` is the model it starts from. The other
    settings are those of `keel.ModelSettings`.
    """

    def __init__(
        self,
        *,
        name: str,
        base: str = "smollm2-135m",
        lora: LoraSettings | Mapping[str, Any] | None = None,
        dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto",
        device: str = "auto",
        gradient_checkpointing: bool = False,
        sft_warmup_steps: int = 0,
    ) -> None:
        if not isinstance(name, str) or not _NAME_PATTERN.fullmatch(name):
            raise ConfigError(
                f"name = {name!r} must be a valid folder name: up to 100 letters, digits, dots, dashes and underscores,"
                " starting with a letter or digit"
            )
        self.name = name
        settings = {
            "name": base,
            "lora": dict(lora) if isinstance(lora, Mapping) else lora,
            "dtype": dtype,
            "device": device,
            "gradient_checkpointing": gradient_checkpointing,
            "sft_warmup_steps": sft_warmup_steps,
        }
        try:
            self.settings = ModelSettings.model_validate(settings)
        except ValidationError as error:
            raise to_config_error(error, ("model",)) from None
        self._endpoint: EndpointConnection | None = None

    def __repr__(self) -> str:
        return f"TrainableModel(name={self.name!r}, base={self.settings.name!r})"

    @property
    def base_url(self) -> str:
        """URL of the endpoint, for any OpenAI-compatible client."""
        return self._require_endpoint().base_url

    @property
    def api_key(self) -> str:
        """Key of the endpoint; a new random one for each registration."""
        return self._require_endpoint().api_key

    def openai_client(self, **options: Any) -> "openai.AsyncOpenAI":
        """Return a client of the endpoint. `options` go to `openai.AsyncOpenAI`; equal options return the same client.

        The backend closes it. Send requests with `model=model.name`.
        """
        endpoint = self._require_endpoint()
        try:
            library = importlib.import_module("openai")
        except ImportError as error:
            raise KeelError(
                "openai_client needs the openai package: pip install openai; or use any other client with base_url and"
                " api_key"
            ) from error
        for name in ("base_url", "api_key"):
            if name in options:
                raise ConfigError(
                    f"{name} is set by the endpoint; create a client of another server with openai itself"
                )
        key = repr(sorted(options.items()))
        if key not in endpoint.clients:
            client = library.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, **options)
            endpoint.clients[key] = client
        result: openai.AsyncOpenAI = endpoint.clients[key]
        return result

    def _require_endpoint(self) -> EndpointConnection:
        if self._endpoint is None:
            raise KeelError(f'model "{self.name}" has no endpoint: await backend.register(model) first')
        return self._endpoint
