"""Request models of the OpenAI-compatible server, validated strictly.

Guarantees that an accepted request is served exactly as written: a field that is unknown, not supported here, or beyond
the server's limits is an error that names field and value, and never ignored. Nothing is sampled here.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, ValidationError, WithJsonSchema, model_validator

from keel.common.settings import Settings, setting_error, to_config_error
from keel.config import Sampling
from keel.inference.protocol import ScoredSampling
from keel.inference.server.access import RateLimit

Count = Annotated[int, Field(ge=1)]
TokenId = Annotated[int, Field(ge=0)]
Version = Annotated[int, Field(ge=0, lt=2**31)]

MESSAGE_SCHEMA = {
    "type": "object",
    "properties": {"role": {"type": "string"}, "content": {"type": ["string", "array", "null"]}},
    "required": ["role"],
}
Message = Annotated[dict[str, Any], WithJsonSchema(MESSAGE_SCHEMA)]
"""A chat message; the chat template decides which other fields it may have."""

IGNORED_FIELDS = frozenset({"user", "metadata", "store", "service_tier", "priority", "cache_salt", "safety_identifier"})
"""Fields about the client that do not change the completion; accepted and ignored."""

NO_OP_VALUES: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True, False),
    "best_of": (1,),
    "continue_final_message": (False,),
    "frequency_penalty": (0,),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}
"""Fields without an effect here, with the values at which OpenAI's have none either; other values are errors."""


class RequestError(Exception):
    """An error response to a request."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after = retry_after


MAX_TOP_LOGPROBS = 20
"""Most likely tokens that a request may ask for at each position, as at OpenAI."""
MIN_TEMPERATURE = 1e-4
"""Logits divided by less overflow; temperature 0 selects the most likely token."""
DEFAULT_RATE_LIMIT = RateLimit(per_second=1000, burst=2000)
"""More than one process can serve; it keeps a client in a request loop from blocking all others."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one server."""

    body_bytes: int = 8 * 2**20
    """Size of a request body."""
    prompts_per_request: int = 64
    """Prompts per request."""
    n: int = 128
    """Completions per prompt."""
    max_tokens: int = 32768
    """Tokens per completion."""
    max_in_flight: int = 1024
    """Completions in flight, running and waiting; above it requests get status 429."""
    rate_limit: RateLimit | None = DEFAULT_RATE_LIMIT
    """Requests per client, whatever the path; above it requests get status 429. None for no limit."""
    body_timeout: float = 60.0
    """Seconds in which a body must arrive."""


class StreamOptions(Settings):
    """What a stream contains in addition to completions."""

    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False
    include_obfuscation: bool = False


class CommonRequest(Settings):
    """Fields shared by completions and chat completions."""

    model: str | None = None
    n: Count = 1
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    seed: Annotated[int, Field(ge=0, lt=2**62)] | None = None
    stop: Annotated[str, Field(min_length=1)] | list[Annotated[str, Field(min_length=1)]] = []
    stop_token_ids: list[TokenId] = []
    return_token_ids: bool = False
    """Return the token ids of prompt and completion."""
    group: str | None = None
    """Keel extension: requests of one group share a prompt, which is computed once."""

    @model_validator(mode="after")
    def _check_temperature(self) -> Self:
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise setting_error(
                f"{{temperature}} must be 0 or at least {MIN_TEMPERATURE}", temperature=self.temperature
            )
        return self

    @property
    def top_count(self) -> int:
        """The number of most likely tokens to return at each position."""
        return 0

    @property
    def scores_prompt(self) -> bool:
        """Whether to return the log-probs of the prompt."""
        return False

    def to_sampling(self, max_tokens: int, index: int) -> Sampling:
        """Return the sampling settings of completion `index` of a prompt; each completion gets its own seed."""
        scored: dict[str, Any] = {
            "top_logprobs": self.top_count,
            "score_prompt": self.scores_prompt,
            "score_only": max_tokens == 0,
        }
        kind = partial(ScoredSampling, **scored) if any(scored.values()) else Sampling
        return kind(
            temperature=self.temperature,
            max_tokens=max(max_tokens, 1),
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            seed=None if self.seed is None else self.seed + index,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
        )


class CompletionRequest(CommonRequest):
    """Body of POST /v1/completions."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    max_tokens: TokenId = 16
    """OpenAI's default. 0 is for `echo`: nothing is sampled."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """Return the log-prob of each token, and of this many of the most likely tokens at its position."""
    echo: bool = False
    """Return the prompt before the completion, with its log-probs if `logprobs` is set."""

    @property
    def top_count(self) -> int:
        return self.logprobs or 0

    @property
    def scores_prompt(self) -> bool:
        return self.echo and self.logprobs is not None

    @model_validator(mode="after")
    def _check_echo(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise setting_error("{max_tokens} returns nothing without echo = true", max_tokens=self.max_tokens)
        if self.echo and self.stream:
            raise setting_error("{echo} cannot be streamed; leave out stream", echo=self.echo)
        return self


class ChatRequest(CommonRequest):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    """Return this many of the most likely tokens at each position; needs `logprobs`."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables for the chat template, for example enable_thinking."""

    @model_validator(mode="after")
    def _check_top_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise setting_error("{top_logprobs} needs logprobs = true", top_logprobs=self.top_logprobs)
        return self

    @property
    def top_count(self) -> int:
        return self.top_logprobs

    @property
    def length_limit(self) -> tuple[str, int]:
        """The field that limits the completion's length, and its value."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", Sampling().max_tokens if self.max_tokens is None else self.max_tokens


class ToolChatRequest(ChatRequest):
    """Body of POST /v1/chat/completions on a server that parses tool calls."""

    tools: list[dict[str, Any]] = []
    tool_choice: Literal["auto", "none"] = "auto"
    """none: the model does not see the tools."""
    parallel_tool_calls: Literal[True] = True
    """A completion may hold several calls; the server cannot prevent it."""

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        """The tools that the model sees."""
        return self.tools if self.tool_choice == "auto" else []


class WeightsRequest(Settings):
    """Body of POST /v1/load_weights."""

    folder: Annotated[str, Field(min_length=1)]
    version: Version
    drain: bool = False
    """Finish completions in flight first and queue later ones; otherwise they continue with the new weights."""


class BroadcastRequest(Settings):
    """Body of POST /v1/receive_weights; the client sends the broadcast while the request is open."""

    port: Annotated[int, Field(ge=1, le=65535)]
    rank: Annotated[int, Field(ge=1, le=100_000)]
    version: Version
    drain: bool = False


class AdapterRequest(Settings):
    """Body of POST /v1/load_lora_adapter, with vLLM's field names."""

    lora_path: Annotated[str, Field(min_length=1)]
    lora_name: str | None = None
    """Additional model name for requests from now on."""
    version: Version | None = None
    """Default: the live version plus one."""
    drain: bool = False
    load_inplace: bool = True


RequestT = TypeVar("RequestT", bound=Settings)


def parse_request(schema: type[RequestT], body: bytes) -> RequestT:
    """Parse a JSON body, or raise `RequestError` naming field and value."""
    try:
        data = json.loads(body, parse_float=_parse_number)
        if b"\\ud" in body.lower():
            # a lone surrogate is not text: tokenizers fail on it, and no response could contain it
            json.dumps(data, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON in UTF-8: {type(error).__name__}: {str(error)[:200]}") from None
    if not isinstance(data, dict):
        raise RequestError(400, f"the body must be a JSON object, not {type(data).__name__}")
    known = schema.model_fields
    fields = {}
    for name, value in data.items():
        if value is None or (name in IGNORED_FIELDS and name not in known):
            continue
        if name in NO_OP_VALUES and name not in known:
            if value not in NO_OP_VALUES[name]:
                allowed = " or ".join(json.dumps(no_op) for no_op in NO_OP_VALUES[name])
                raise RequestError(400, f"{name} = {json.dumps(value)} is not supported; only {allowed} is", param=name)
            continue
        fields[name] = value
    try:
        # strict: "1" is not a number and 1 is not a boolean, as /openapi.json says
        return schema.model_validate(fields, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        param = str(first["loc"][0]) if first["loc"] else first.get("ctx", {}).get("keys", [None])[0]
        raise RequestError(400, str(to_config_error(error)), param=param) from None


def _parse_number(text: str) -> int | float:
    """Parse a JSON number; JSON has one number type, so 3.0 is an integer like 3."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def json_schema(schema: type[Settings], limits: Limits) -> dict[str, Any]:
    """Return the JSON schema of what `parse_request` accepts, from the same fields and tables."""
    document = schema.model_json_schema(ref_template="#/$defs/{model}")
    required = document.get("required", [])
    maxima = {"n": limits.n, "max_tokens": limits.max_tokens, "max_completion_tokens": limits.max_tokens}
    for name in maxima.keys() & document["properties"].keys():
        lowest = 0 if name == "max_tokens" and schema is CompletionRequest else 1
        document["properties"][name] = {"type": "integer", "minimum": lowest, "maximum": maxima[name]}
    properties = {
        name: field if name in required else {"anyOf": [field, {"type": "null"}]}
        for name, field in _inline_refs(document["properties"], document.get("$defs", {})).items()
    }
    for name, no_op_values in NO_OP_VALUES.items():
        properties.setdefault(name, {"enum": [*no_op_values, None]})
    for name in IGNORED_FIELDS:
        properties.setdefault(name, {})
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _inline_refs(tree: Any, definitions: Mapping[str, Any]) -> Any:
    """Replace references by their definitions: in the OpenAPI document they would not resolve."""
    if isinstance(tree, list):
        return [_inline_refs(item, definitions) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if "$ref" in tree:
        return _inline_refs(definitions[tree["$ref"].removeprefix("#/$defs/")], definitions)
    return {name: _inline_refs(value, definitions) for name, value in tree.items() if name != "default"}


def check_limit(field: str, value: int, limit: int) -> None:
    """Raise `RequestError` if a value is above the server's limit."""
    if value > limit:
        raise RequestError(400, f"{field} = {value} is above this server's limit of {limit}", param=field)
