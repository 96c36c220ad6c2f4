"""How the server answers: from a request that was read to prompts, from prompts to answers, and new weights.

Guarantees that a request is checked against the model and the limits before anything is sampled, and that weights are
loaded one after another and only from folders that may be loaded from. It parses no tool calls of its own (`talk` may)
and computes no log-probs but those of sampled tokens.
"""

import asyncio
import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from jinja2 import TemplateError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from keel.inference.protocol import BroadcastSlot, Engine, WeightSource
from keel.inference.server.allowed_paths import AllowedFolders
from keel.inference.server.completion_job import BroadcastReceiver, Capacity, CompletionJob, EventStream
from keel.inference.server.middleware import cancel_on_disconnect, read_body
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
    parse_request,
)
from keel.inference.server.openai_responses import ChatSession, ResponseBuilder, SessionFactory, Tokenizer
from keel.inference.server.prometheus import (
    CONTENT_TYPE,
    ServerMetrics,
    meter_engine,
    render_metrics,
    single_value_family,
)


class RequestHandlers:
    """One engine and what is under way on it."""

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
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.model_names = [model]
        self.limits = limits
        self.vocab_size = vocab_size
        self.training_fields = training_fields
        self.open_session = open_session
        self.allowed_folders = allowed_folders or AllowedFolders()
        self.capacity = Capacity(limits.max_in_flight)
        self.server_metrics = ServerMetrics()
        self._metered_engine = meter_engine(engine, self.server_metrics)
        self._load_lock = asyncio.Lock()

    @property
    def chat_schema(self) -> type[ChatRequest]:
        """What a chat request may hold: tools only where their calls are read."""
        return ChatRequest if self.open_session is None else ToolChatRequest

    # --- what is answered ---

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        asked = parse_request(CompletionRequest, await read_body(request, self.limits))
        max_tokens = self._completion_limit(asked, "max_tokens", asked.max_tokens)
        return await self._respond(
            request, asked, self._tokenize_prompts(asked), max_tokens, asked.logprobs is not None
        )

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        asked = parse_request(self.chat_schema, await read_body(request, self.limits))
        name, max_tokens = asked.length_limit
        max_tokens = self._completion_limit(asked, name, max_tokens)
        if not isinstance(asked, ToolChatRequest):
            return await self._respond(request, asked, [self._render_chat(asked)], max_tokens, asked.logprobs)
        talk = self._start_session(asked)
        stops = dict.fromkeys((*asked.stop_token_ids, *talk.stop_token_ids))
        asked = asked.model_copy(update={"stop_token_ids": list(stops)})
        return await self._respond(request, asked, [list(talk.prompt)], max_tokens, asked.logprobs, talk)

    async def models(self, _request: Request) -> Response:
        """GET /v1/models."""
        return JSONResponse(
            {
                "object": "list",
                "data": [
                    {"id": name, "object": "model", "created": 0, "owned_by": "keel"} for name in self.model_names
                ],
            }
        )

    async def health(self, _request: Request) -> Response:
        """GET /health: 200 when requests are answered, 503 when not."""
        health = await self.engine.health()
        body = {
            "ready": health.ready,
            "version": health.version,
            "running": health.running,
            "waiting": health.waiting,
            "error": health.error,
        }
        return JSONResponse(body, 200 if health.ready else 503)

    async def version(self, _request: Request) -> Response:
        """GET /version: of the weights that are live."""
        return JSONResponse({"version": await self.engine.version(), "server": "keel"})

    async def metrics(self, _request: Request) -> Response:
        """GET /metrics: for Prometheus."""
        health = await self.engine.health()
        now = [
            single_value_family("keel_info", "gauge", "What is served.", 1, model=self.model_names[0]),
            single_value_family("keel_ready", "gauge", "Whether requests are answered.", health.ready),
            single_value_family(
                "keel_version", "gauge", "Policy version of the weights that are live.", health.version
            ),
            single_value_family("keel_completions_running", "gauge", "Answers being sampled.", health.running),
            single_value_family(
                "keel_completions_waiting", "gauge", "Answers that wait for their turn.", health.waiting
            ),
            single_value_family(
                "keel_completions_in_flight", "gauge", "Answers that clients wait for.", self.capacity.in_flight
            ),
        ]
        return Response(render_metrics([*now, *self.server_metrics.families()]), media_type=CONTENT_TYPE)

    async def load_weights(self, request: Request) -> Response:
        """POST /v1/load_weights; answers when they are live."""
        asked = parse_request(WeightsRequest, await read_body(request, self.limits))
        folder = str(await asyncio.to_thread(self.allowed_folders.resolve, "folder", asked.folder))
        async with self._load_lock:
            await self.engine.load_weights(WeightSource.folder(folder), asked.version, drain=asked.drain)
            del self.model_names[1:]
        return JSONResponse({"version": await self.engine.version()})

    async def load_adapter(self, request: Request) -> Response:
        """POST /v1/load_lora_adapter; answers when it is live."""
        asked = parse_request(AdapterRequest, await read_body(request, self.limits))
        folder = str(await asyncio.to_thread(self.allowed_folders.resolve, "lora_path", asked.lora_path))
        async with self._load_lock:
            version = await self.engine.version() + 1 if asked.version is None else asked.version
            await self.engine.load_weights(WeightSource.adapter(folder), version, drain=asked.drain)
            self.model_names[1:] = [] if asked.lora_name in (None, self.model_names[0]) else [asked.lora_name]
        return JSONResponse({"version": await self.engine.version()})

    async def receive_weights(self, request: Request) -> Response:
        """POST /v1/receive_weights; answers when they are live. They come from whoever asks, and from nobody else."""
        asked = parse_request(BroadcastRequest, await read_body(request, self.limits))
        client, server = request.client, request.scope.get("server")
        if not isinstance(self.engine, BroadcastReceiver) or client is None or server is None:
            raise RequestError(400, "this server's engine receives no broadcast; load weights from a folder")
        async with self._load_lock:
            seat = BroadcastSlot(asked.port, asked.rank)
            await self.engine.receive_weights(seat, client.host, server[0], asked.version, drain=asked.drain)
            del self.model_names[1:]
        return JSONResponse({"version": await self.engine.version()})

    # --- from a request to prompts ---

    def _completion_limit(self, params: CommonRequest, name: str, value: int) -> int:
        """How long an answer may be: as asked, or refused; whoever did not say gets what there is."""
        if name in params.model_fields_set:
            check_limit(name, value, self.limits.max_tokens)
        return min(value, self.limits.max_tokens)

    def _tokenize_prompts(self, params: CompletionRequest) -> list[list[int]]:
        given = params.prompt
        one = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
        several = cast("list[str | list[int]]", [given] if one else given)
        check_limit("the number of prompts", len(several), self.limits.prompts_per_request)
        prompts = [list(self.tokenizer(each)["input_ids"]) if isinstance(each, str) else each for each in several]
        if not prompts or not all(prompts):
            raise RequestError(400, f"prompt = {json.dumps(given)[:80]} has no tokens", param="prompt")
        self._check_token_ids("prompt", (token for prompt in prompts for token in prompt))
        return prompts

    def _render_chat(self, params: ChatRequest) -> list[int]:
        messages = _validate_messages(params)
        # what the tokenizer's own arguments say (another template, tensors, no tokens) is not the client's to choose
        taken = inspect.signature(self.tokenizer.apply_chat_template).parameters.keys() & params.chat_template_kwargs
        if taken:
            name = "chat_template_kwargs"
            raise RequestError(400, f"{name} holds {min(taken)}, which is no variable of the template", param=name)
        with _template_errors():
            ids = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False, **params.chat_template_kwargs
            )
        return list(ids)

    def _start_session(self, params: ToolChatRequest) -> ChatSession:
        assert self.open_session is not None
        if params.chat_template_kwargs:
            shown, name = json.dumps(params.chat_template_kwargs), "chat_template_kwargs"
            raise RequestError(400, f"{name} = {shown} cannot act: this server renders turn by turn", param=name)
        if params.stream and params.shown_tools:
            raise RequestError(400, "answers with tools come whole; leave out stream, or tools", param="stream")
        messages = _validate_messages(params)
        with _template_errors():
            return self.open_session(messages, params.shown_tools)

    def _check_token_ids(self, name: str, token_ids: Any) -> None:
        for token in token_ids:
            if token >= self.vocab_size:
                message = f"{name} holds token id {token}, and the model has {self.vocab_size} token ids"
                raise RequestError(400, message, param=name)

    # --- from prompts to answers ---

    async def _respond(
        self,
        request: Request,
        params: CommonRequest,
        prompts: list[list[int]],
        max_tokens: int,
        logprobs: bool,
        session: ChatSession | None = None,
    ) -> Response:
        if params.model is not None and params.model not in self.model_names:
            raise RequestError(
                404, f"model {params.model} is not served here; {', '.join(self.model_names)} is", param="model"
            )
        check_limit("n", params.n, self.limits.n)
        self._check_token_ids("stop_token_ids", params.stop_token_ids)
        shape = ResponseBuilder(
            model=params.model or self.model_names[0],
            chat=isinstance(params, ChatRequest),
            stream=params.stream,
            logprobs=logprobs,
            token_ids=params.return_token_ids,
            training_fields=self.training_fields,
        )
        job = CompletionJob(
            self._metered_engine, self.tokenizer, self.capacity, params, prompts, max_tokens, shape, session
        )
        if params.stream:
            return EventStream(job.stream_chunks())
        return JSONResponse(await cancel_on_disconnect(request.receive, job.run()))


def _validate_messages(params: ChatRequest) -> list[dict[str, Any]]:
    """The messages of a request, each with a role and its content as text."""
    for at, message in enumerate(params.messages):
        if not isinstance(message.get("role"), str):
            raise RequestError(400, f"messages[{at}] has no role: {json.dumps(message)[:80]}", param="messages")
    return [{**message, "content": _text_content(at, message)} for at, message in enumerate(params.messages)]


@contextmanager
def _template_errors() -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, KeyError, TemplateError) as error:
        message = f"the model's chat template did not take the messages: {error}"
        raise RequestError(400, message, param="messages") from error


def _text_content(index: int, message: dict[str, Any]) -> str:
    """The content of a message as text; parts of other kinds than text are refused."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise RequestError(400, f"messages[{index}].content must be text or a list of parts", param="messages")
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            shown = json.dumps(part)[:80]
            raise RequestError(400, f"messages[{index}].content holds {shown}; only text is taken", param="messages")
    return "".join(part["text"] for part in content)
