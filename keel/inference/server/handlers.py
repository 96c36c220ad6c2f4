"""What the server's routes do: from a validated request to prompts, from prompts to completions, and weight loading.

Guarantees that a request is checked against the model and the limits before anything is sampled, and that weights are
loaded one after another and only from allowed folders. Tool calls are parsed only by an `open_session` given to the
server; log-probs of the prompt and of the most likely tokens need an engine that computes them (`ScoringEngine`).
"""

import asyncio
import inspect
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from jinja2 import TemplateError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from keel.errors import ConfigError
from keel.inference.protocol import BroadcastSlot, Engine, ScoringEngine, WeightSource
from keel.inference.server.allowed_paths import AllowedFolders
from keel.inference.server.completion_job import BroadcastReceiver, Capacity, CompletionJob, EventStream
from keel.inference.server.middleware import cancel_on_disconnect
from keel.inference.server.openai_requests import (
    AdapterRequest,
    BroadcastRequest,
    ChatRequest,
    CommonRequest,
    CompletionRequest,
    Limits,
    RequestError,
    ToolChatRequest,
    WeightsRequest,
    check_limit,
)
from keel.inference.server.openai_responses import (
    ChatSession,
    HealthResponse,
    ModelCard,
    ModelList,
    ResponseBuilder,
    SessionFactory,
    Tokenizer,
    VersionResponse,
    WeightsResponse,
)
from keel.inference.server.prometheus import CONTENT_TYPE, ServerMetrics, meter_engine
from keel.inference.server.token_texts import TokenTexts


class RequestHandlers:
    """Handle the requests to one engine."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        model: str,
        limits: Limits,
        vocab_size: int,
        training_fields: bool = False,
        open_session: SessionFactory | None = None,
        allowed_folders: AllowedFolders | None = None,
        open_tool_session: SessionFactory | None = None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.token_texts = TokenTexts(tokenizer)
        self.open_tool_session = open_tool_session
        self.model_names = [model]
        self.limits = limits
        self.vocab_size = vocab_size
        self.training_fields = training_fields
        self.open_session = open_session
        self.allowed_folders = allowed_folders or AllowedFolders()
        self.capacity = Capacity(limits.max_in_flight)
        self.server_metrics = ServerMetrics(model)
        self._metered_engine = meter_engine(engine, self.server_metrics)
        self._load_lock = asyncio.Lock()

    @property
    def chat_schema(self) -> type[ChatRequest]:
        """Request model of chat completions: with tools only if the server parses tool calls."""
        return ChatRequest if self.open_session is None and self.open_tool_session is None else ToolChatRequest

    # --- routes ---

    async def completions(self, request: Request, params: CompletionRequest) -> Response:
        """POST /v1/completions."""
        max_tokens = self._completion_limit(params, "max_tokens", params.max_tokens)
        prompts = self._tokenize_prompts(params)
        echoed = self._prompt_texts(params, prompts) if params.echo else ()
        return await self._respond(request, params, prompts, max_tokens, params.logprobs is not None, echoed=echoed)

    async def chat(self, request: Request, params: ChatRequest) -> Response:
        """POST /v1/chat/completions."""
        field, max_tokens = params.length_limit
        max_tokens = self._completion_limit(params, field, max_tokens)
        if not isinstance(params, ToolChatRequest) or (self.open_session is None and not params.shown_tools):
            return await self._respond(request, params, [self._render_chat(params)], max_tokens, params.logprobs)
        session = self._start_session(params)
        stop_token_ids = dict.fromkeys((*params.stop_token_ids, *session.stop_token_ids))
        params = params.model_copy(update={"stop_token_ids": list(stop_token_ids)})
        return await self._respond(request, params, [list(session.prompt)], max_tokens, params.logprobs, session)

    def models(self) -> ModelList:
        """GET /v1/models."""
        return ModelList(data=[ModelCard(id=name) for name in self.model_names])

    async def health(self) -> Response:
        """GET /health: 200 when the engine is ready, 503 when not."""
        health = await self.engine.health()
        body = HealthResponse(
            ready=health.ready,
            version=health.version,
            running=health.running,
            waiting=health.waiting,
            error=health.error,
        )
        return JSONResponse(body.model_dump(), 200 if health.ready else 503)

    async def version(self) -> VersionResponse:
        """GET /version."""
        return VersionResponse(version=await self.engine.version())

    async def metrics(self) -> Response:
        """GET /metrics."""
        page = self.server_metrics.render(await self.engine.health(), self.capacity.in_flight)
        return Response(page, media_type=CONTENT_TYPE)

    async def load_weights(self, params: WeightsRequest) -> WeightsResponse:
        """POST /v1/load_weights."""
        folder = str(await asyncio.to_thread(self.allowed_folders.resolve, "folder", params.folder))
        async with self._load_lock:
            await self.engine.load_weights(WeightSource.folder(folder), params.version, drain=params.drain)
            del self.model_names[1:]
        return WeightsResponse(version=await self.engine.version())

    async def load_adapter(self, params: AdapterRequest) -> WeightsResponse:
        """POST /v1/load_lora_adapter."""
        folder = str(await asyncio.to_thread(self.allowed_folders.resolve, "lora_path", params.lora_path))
        async with self._load_lock:
            version = await self.engine.version() + 1 if params.version is None else params.version
            await self.engine.load_weights(WeightSource.adapter(folder), version, drain=params.drain)
            self.model_names[1:] = [] if params.lora_name in (None, self.model_names[0]) else [params.lora_name]
        return WeightsResponse(version=await self.engine.version())

    async def receive_weights(self, request: Request, params: BroadcastRequest) -> WeightsResponse:
        """POST /v1/receive_weights: receive a broadcast from the client's address and no other."""
        client, server = request.client, request.scope.get("server")
        if not isinstance(self.engine, BroadcastReceiver) or client is None or server is None:
            raise RequestError(400, "this server's engine does not support broadcasts; load weights from a folder")
        async with self._load_lock:
            slot = BroadcastSlot(params.port, params.rank)
            await self.engine.receive_weights(slot, client.host, server[0], params.version, drain=params.drain)
            del self.model_names[1:]
        return WeightsResponse(version=await self.engine.version())

    # --- from a request to prompts ---

    def _completion_limit(self, params: CommonRequest, field: str, max_tokens: int) -> int:
        """Return the maximum number of tokens; an explicit value above the limit is an error, a default is clamped."""
        if field in params.model_fields_set:
            check_limit(field, max_tokens, self.limits.max_tokens)
        return min(max_tokens, self.limits.max_tokens)

    def _tokenize_prompts(self, params: CompletionRequest) -> list[list[int]]:
        prompt = params.prompt
        is_single = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
        inputs = cast("list[str | list[int]]", [prompt] if is_single else prompt)
        check_limit("the number of prompts", len(inputs), self.limits.prompts_per_request)
        prompts = [list(self.tokenizer(item)["input_ids"]) if isinstance(item, str) else item for item in inputs]
        if not prompts or not all(prompts):
            raise RequestError(400, f"prompt = {json.dumps(prompt)[:80]} has no tokens", param="prompt")
        self._check_token_ids("prompt", (token for token_ids in prompts for token in token_ids))
        return prompts

    def _prompt_texts(self, params: CompletionRequest, prompts: list[list[int]]) -> list[str]:
        """Return the text of each prompt: as it was sent, or decoded from its token ids."""
        prompt_items = [params.prompt] if isinstance(params.prompt, str) else params.prompt
        return [
            item
            if isinstance(item, str)
            else self.tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            for item, token_ids in zip(
                prompt_items if len(prompt_items) == len(prompts) else prompts, prompts, strict=True
            )
        ]

    def _render_chat(self, params: ChatRequest) -> list[int]:
        messages = _validate_messages(params)
        # clients may set template variables, but not the tokenizer's arguments (another template, tensors, no tokens)
        reserved = inspect.signature(self.tokenizer.apply_chat_template).parameters.keys() & params.chat_template_kwargs
        if reserved:
            field = "chat_template_kwargs"
            raise RequestError(400, f"{field} holds {min(reserved)}, which is not a template variable", param=field)
        with _template_errors():
            ids = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False, **params.chat_template_kwargs
            )
        return list(ids)

    def _start_session(self, params: ToolChatRequest) -> ChatSession:
        open_session = self.open_session or self.open_tool_session
        assert open_session is not None
        if params.chat_template_kwargs:
            value, field = json.dumps(params.chat_template_kwargs), "chat_template_kwargs"
            raise RequestError(
                400, f"{field} = {value} has no effect: this server renders conversations turn by turn", param=field
            )
        if params.stream and params.shown_tools:
            raise RequestError(
                400, "completions with tools cannot be streamed; leave out stream or tools", param="stream"
            )
        messages = _validate_messages(params)
        with _template_errors():
            try:
                return open_session(messages, params.shown_tools)
            except ConfigError as error:  # no chat template, or one without tools
                raise RequestError(400, str(error), param="tools" if params.shown_tools else "messages") from error

    def _check_token_ids(self, field: str, token_ids: Iterable[int]) -> None:
        for token in token_ids:
            if token >= self.vocab_size:
                message = f"{field} holds token id {token}, but the model has {self.vocab_size} token ids"
                raise RequestError(400, message, param=field)

    # --- from prompts to completions ---

    async def _respond(
        self,
        request: Request,
        params: CommonRequest,
        prompts: list[list[int]],
        max_tokens: int,
        logprobs: bool,
        session: ChatSession | None = None,
        echoed: Sequence[str] = (),
    ) -> Response:
        if params.model is not None and params.model not in self.model_names:
            served = ", ".join(self.model_names)
            raise RequestError(404, f"model {params.model} is not served here; available: {served}", param="model")
        check_limit("n", params.n, self.limits.n)
        if not isinstance(self.engine, ScoringEngine):
            params = _without_scores(params)
        self._check_token_ids("stop_token_ids", params.stop_token_ids)
        builder = ResponseBuilder(
            model=params.model or self.model_names[0],
            chat=isinstance(params, ChatRequest),
            stream=params.stream,
            logprobs=logprobs,
            token_ids=params.return_token_ids,
            top_count=params.top_count,
            training_fields=self.training_fields,
        )
        job = CompletionJob(
            self._metered_engine,
            self.tokenizer,
            self.token_texts,
            self.capacity,
            params,
            prompts,
            max_tokens,
            builder,
            session,
            echoed,
        )
        if params.stream:
            return EventStream(job.stream_chunks())
        return JSONResponse(await cancel_on_disconnect(request.receive, job.run()))


def _without_scores(params: CommonRequest) -> CommonRequest:
    """Return a request for an engine that computes log-probs of sampled tokens only, or raise if it asks for others."""
    field, value = "", ""
    if params.scores_prompt:
        field, value = "echo", "true"
    elif isinstance(params, ChatRequest) and params.top_logprobs:
        field, value = "top_logprobs", str(params.top_logprobs)
    elif isinstance(params, CompletionRequest) and (params.logprobs or 0) > 1:
        field, value = "logprobs", str(params.logprobs)
    if field:
        raise RequestError(
            400, f"{field} = {value} is not supported: this server's engine does not compute it", param=field
        )
    # 1 is what most clients write for the log-probs of the sampled tokens
    return params.model_copy(update={"logprobs": 0}) if params.top_count else params


def _validate_messages(params: ChatRequest) -> list[dict[str, Any]]:
    """Return the messages of a request, each with a role and its content as text."""
    for index, message in enumerate(params.messages):
        if not isinstance(message.get("role"), str):
            raise RequestError(400, f"messages[{index}] has no role: {json.dumps(message)[:80]}", param="messages")
    return [{**message, "content": _text_content(index, message)} for index, message in enumerate(params.messages)]


@contextmanager
def _template_errors() -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, KeyError, TemplateError) as error:
        message = f"the model's chat template failed on the messages: {error}"
        raise RequestError(400, message, param="messages") from error


def _text_content(index: int, message: dict[str, Any]) -> str:
    """Return the content of a message as text; parts other than text are an error."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise RequestError(400, f"messages[{index}].content must be text or a list of parts", param="messages")
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            value = json.dumps(part)[:80]
            raise RequestError(
                400, f"messages[{index}].content holds {value}; only text is supported", param="messages"
            )
    return "".join(part["text"] for part in content)
