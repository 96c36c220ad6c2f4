"""What a client may ask the server for: the OpenAI fields that can act here, read strictly.

Guarantees that a request that is taken is answered as it was asked: a field that this server does not know, cannot do,
or that is beyond its limits is an error that names field and value, never ignored. It samples nothing.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, ValidationError, WithJsonSchema, model_validator

from keel.common.settings import Settings, setting_error, to_config_error
from keel.config import Sampling
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
"""What else a message may hold is its template's to say."""

IGNORED_FIELDS = frozenset({"user", "metadata", "store", "service_tier", "priority", "cache_salt", "safety_identifier"})
"""Fields about the client, not about the answer."""

NO_OP_VALUES: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True, False),
    "best_of": (1,),
    "continue_final_message": (False,),
    "echo": (False,),
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
    "top_logprobs": (0,),
}
"""Fields that cannot act here, with the values at which they need not."""


class RequestError(Exception):
    """A request that is answered by an error, in the OpenAI shape."""

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


MIN_TEMPERATURE = 1e-4
"""Divided by less, logits are no longer finite; 0 stands for the likeliest token."""
DEFAULT_RATE_LIMIT = RateLimit(per_second=1000, burst=2000)
"""More than one process answers here: it keeps a client in an endless loop from holding everybody else up."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one server answers at most."""

    body_bytes: int = 8 * 2**20
    """Of one request's body."""
    prompts_per_request: int = 64
    """Prompts of one request."""
    n: int = 128
    """Answers to one prompt."""
    max_tokens: int = 32768
    """Tokens of one answer."""
    max_in_flight: int = 1024
    """Answers under way at once, running and waiting; beyond it clients are told to come back (429)."""
    rate_limit: RateLimit | None = DEFAULT_RATE_LIMIT
    """Requests of one client, whatever they ask for; beyond it 429. None: no limit."""
    body_timeout: float = 60.0
    """In which a body must have arrived."""


class StreamOptions(Settings):
    """What a stream holds beside its answers."""

    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False
    include_obfuscation: bool = False


class CommonRequest(Settings):
    """What completions and chat completions have in common."""

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
    """Token ids of prompt and answer in the response."""
    group: str | None = None
    """Keel's own: requests of one group have the same prompt, which is then computed once."""

    @model_validator(mode="after")
    def _check_temperature(self) -> Self:
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise setting_error(
                f"{{temperature}} must be 0 or at least {MIN_TEMPERATURE}", temperature=self.temperature
            )
        return self

    def to_sampling(self, max_tokens: int, index: int) -> Sampling:
        """For answer `index` of a prompt; with a seed every answer has one of its own."""
        return Sampling(
            temperature=self.temperature,
            max_tokens=max_tokens,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            seed=None if self.seed is None else self.seed + index,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
        )


class CompletionRequest(CommonRequest):
    """POST /v1/completions."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    max_tokens: Count = 16
    """OpenAI's default."""
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None
    """0 or 1: the log-prob of each sampled token; those of other tokens are not computed."""


class ChatRequest(CommonRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    """Given to the chat template, for example enable_thinking."""

    @property
    def length_limit(self) -> tuple[str, int]:
        """The field that says how long an answer may be, and its value."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", Sampling().max_tokens if self.max_tokens is None else self.max_tokens


class ToolChatRequest(ChatRequest):
    """POST /v1/chat/completions of a server that reads tool calls."""

    tools: list[dict[str, Any]] = []
    tool_choice: Literal["auto", "none"] = "auto"
    """none: the tools are not shown."""
    parallel_tool_calls: Literal[True] = True
    """An answer may hold several calls; nothing keeps it from that."""

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        """The tools that the model is told of."""
        return self.tools if self.tool_choice == "auto" else []


class WeightsRequest(Settings):
    """POST /v1/load_weights: all weights, from a Hugging Face folder on the server's machine."""

    folder: Annotated[str, Field(min_length=1)]
    version: Version
    drain: bool = False
    """Answers under way end first, and later ones wait; else they go on with the new weights."""


class BroadcastRequest(Settings):
    """POST /v1/receive_weights: all weights, from a broadcast that whoever asks sends meanwhile."""

    port: Annotated[int, Field(ge=1, le=65535)]
    rank: Annotated[int, Field(ge=1, le=100_000)]
    version: Version
    drain: bool = False


class AdapterRequest(Settings):
    """POST /v1/load_lora_adapter: a PEFT adapter from a folder on the server's machine, fields as in vLLM."""

    lora_path: Annotated[str, Field(min_length=1)]
    lora_name: str | None = None
    """Another name under which requests may ask for the policy from now on."""
    version: Version | None = None
    """Not given: one more than the live one."""
    drain: bool = False
    load_inplace: bool = True


RequestT = TypeVar("RequestT", bound=Settings)


def parse_request(schema: type[RequestT], body: bytes) -> RequestT:
    """A request from its JSON, or an error that names what is wrong with it."""
    try:
        data = json.loads(body, parse_float=_parse_number)
        if b"\\ud" in body.lower():
            # half of a pair of surrogates is no text: no tokenizer takes it, and no answer could show it
            json.dumps(data, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON in UTF-8: {type(error).__name__}: {str(error)[:200]}") from None
    if not isinstance(data, dict):
        raise RequestError(400, f"the body must be a JSON object, not {type(data).__name__}")
    known = schema.model_fields
    given = {}
    for name, value in data.items():
        if value is None or (name in IGNORED_FIELDS and name not in known):
            continue
        if name in NO_OP_VALUES and name not in known:
            if value not in NO_OP_VALUES[name]:
                able = " or ".join(json.dumps(neutral) for neutral in NO_OP_VALUES[name])
                raise RequestError(400, f"{name} = {json.dumps(value)} is not supported; only {able} is", param=name)
            continue
        given[name] = value
    try:
        # strict: "1" is no number and 1 is no truth, as the description of the server says
        return schema.model_validate(given, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        param = str(first["loc"][0]) if first["loc"] else first.get("ctx", {}).get("key")
        raise RequestError(400, str(to_config_error(error)), param=param) from None


def _parse_number(text: str) -> int | float:
    """A number of JSON, which has one kind of them: 3.0 is as whole as 3."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def json_schema(schema: type[Settings], limits: Limits) -> dict[str, Any]:
    """What `read` takes for this schema within the limits, as JSON schema: from the same fields and tables."""
    told = schema.model_json_schema(ref_template="#/$defs/{model}")
    needed = told.get("required", [])
    most = {"n": limits.n, "max_tokens": limits.max_tokens, "max_completion_tokens": limits.max_tokens}
    for name in most.keys() & told["properties"].keys():
        told["properties"][name] = {"type": "integer", "minimum": 1, "maximum": most[name]}
    properties = {
        name: inner if name in needed else {"anyOf": [inner, {"type": "null"}]}
        for name, inner in _inline_refs(told["properties"], told.get("$defs", {})).items()
    }
    for name, neutral in NO_OP_VALUES.items():
        properties.setdefault(name, {"enum": [*neutral, None]})
    for name in IGNORED_FIELDS:
        properties.setdefault(name, {})
    return {"type": "object", "properties": properties, "required": needed, "additionalProperties": False}


def _inline_refs(tree: Any, definitions: Mapping[str, Any]) -> Any:
    """The schema without references: it is put into another document, where they would lead elsewhere."""
    if isinstance(tree, list):
        return [_inline_refs(inner, definitions) for inner in tree]
    if not isinstance(tree, dict):
        return tree
    if "$ref" in tree:
        return _inline_refs(definitions[tree["$ref"].removeprefix("#/$defs/")], definitions)
    return {name: _inline_refs(inner, definitions) for name, inner in tree.items() if name != "default"}


def check_limit(name: str, value: int, limit: int) -> None:
    """Refuse more than this server answers."""
    if value > limit:
        raise RequestError(400, f"{name} = {value} is above this server's limit of {limit}", param=name)
