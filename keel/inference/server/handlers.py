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

from keel.inference.protocol import Engine, Seat
from keel.inference.server.allowed_paths import Roots
from keel.inference.server.completion_job import Events, Job, Receiver, Room
from keel.inference.server.middleware import read_body, unless_gone
from keel.inference.server.openai_requests import (
    AdapterRequest,
    Asked,
    BroadcastRequest,
    ChatRequest,
    CompletionRequest,
    Limits,
    RequestError,
    ToolChatRequest,
    WeightsRequest,
    check_limit,
    read,
)
from keel.inference.server.openai_responses import OpenTalk, Shape, Talk, Tokenizer
from keel.inference.server.prometheus import CONTENT_TYPE, Meter, family, metered, text


class Service:
    """One engine and what is under way on it."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        model: str,
        limits: Limits,
        vocabulary: int,
        exact: bool = False,
        talk: OpenTalk | None = None,
        roots: Roots | None = None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.names = [model]
        self.limits = limits
        self.vocabulary = vocabulary
        self.exact = exact
        self.open_talk = talk
        self.roots = roots or Roots()
        self.room = Room(limits.requests)
        self.meter = Meter()
        self._counted = metered(engine, self.meter)
        self._loading = asyncio.Lock()

    @property
    def chat_schema(self) -> type[ChatRequest]:
        """What a chat request may hold: tools only where their calls are read."""
        return ChatRequest if self.open_talk is None else ToolChatRequest

    # --- what is answered ---

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        asked = read(CompletionRequest, await read_body(request, self.limits))
        max_tokens = self._length(asked, "max_tokens", asked.max_tokens)
        return await self._answer(request, asked, self._prompts(asked), max_tokens, asked.logprobs is not None)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        asked = read(self.chat_schema, await read_body(request, self.limits))
        name, max_tokens = asked.limit
        max_tokens = self._length(asked, name, max_tokens)
        if not isinstance(asked, ToolChatRequest):
            return await self._answer(request, asked, [self._rendered(asked)], max_tokens, asked.logprobs)
        talk = self._talk(asked)
        stops = dict.fromkeys((*asked.stop_token_ids, *talk.stop_token_ids))
        asked = asked.model_copy(update={"stop_token_ids": list(stops)})
        return await self._answer(request, asked, [list(talk.prompt)], max_tokens, asked.logprobs, talk)

    async def models(self, _request: Request) -> Response:
        """GET /v1/models."""
        return JSONResponse(
            {
                "object": "list",
                "data": [{"id": name, "object": "model", "created": 0, "owned_by": "keel"} for name in self.names],
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
            family("keel_info", "gauge", "What is served.", 1, model=self.names[0]),
            family("keel_ready", "gauge", "Whether requests are answered.", health.ready),
            family("keel_version", "gauge", "Policy version of the weights that are live.", health.version),
            family("keel_answers_running", "gauge", "Answers being sampled.", health.running),
            family("keel_answers_waiting", "gauge", "Answers that wait for their turn.", health.waiting),
            family("keel_answers_under_way", "gauge", "Answers that clients wait for.", self.room.under_way),
        ]
        return Response(text([*now, *self.meter.families()]), media_type=CONTENT_TYPE)

    async def load_weights(self, request: Request) -> Response:
        """POST /v1/load_weights; answers when they are live."""
        asked = read(WeightsRequest, await read_body(request, self.limits))
        folder = str(await asyncio.to_thread(self.roots.folder, "folder", asked.folder))
        async with self._loading:
            await self.engine.load_weights(folder, asked.version, drain=asked.drain)
            del self.names[1:]
        return JSONResponse({"version": await self.engine.version()})

    async def load_adapter(self, request: Request) -> Response:
        """POST /v1/load_lora_adapter; answers when it is live."""
        asked = read(AdapterRequest, await read_body(request, self.limits))
        folder = str(await asyncio.to_thread(self.roots.folder, "lora_path", asked.lora_path))
        async with self._loading:
            version = await self.engine.version() + 1 if asked.version is None else asked.version
            await self.engine.load_adapter(folder, version, drain=asked.drain)
            self.names[1:] = [] if asked.lora_name in (None, self.names[0]) else [asked.lora_name]
        return JSONResponse({"version": await self.engine.version()})

    async def receive_weights(self, request: Request) -> Response:
        """POST /v1/receive_weights; answers when they are live. They come from whoever asks, and from nobody else."""
        asked = read(BroadcastRequest, await read_body(request, self.limits))
        client, server = request.client, request.scope.get("server")
        if not isinstance(self.engine, Receiver) or client is None or server is None:
            raise RequestError(400, "this server's engine receives no broadcast; load weights from a folder")
        async with self._loading:
            seat = Seat(asked.port, asked.rank)
            await self.engine.receive_weights(seat, client.host, server[0], asked.version, drain=asked.drain)
            del self.names[1:]
        return JSONResponse({"version": await self.engine.version()})

    # --- from a request to prompts ---

    def _length(self, asked: Asked, name: str, value: int) -> int:
        """How long an answer may be: as asked, or refused; whoever did not say gets what there is."""
        if name in asked.model_fields_set:
            check_limit(name, value, self.limits.max_tokens)
        return min(value, self.limits.max_tokens)

    def _prompts(self, asked: CompletionRequest) -> list[list[int]]:
        given = asked.prompt
        one = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
        several = cast("list[str | list[int]]", [given] if one else given)
        check_limit("the number of prompts", len(several), self.limits.prompts)
        prompts = [list(self.tokenizer(each)["input_ids"]) if isinstance(each, str) else each for each in several]
        if not prompts or not all(prompts):
            raise RequestError(400, f"prompt = {json.dumps(given)[:80]} has no tokens", param="prompt")
        self._check_ids("prompt", (token for prompt in prompts for token in prompt))
        return prompts

    def _rendered(self, asked: ChatRequest) -> list[int]:
        messages = _messages(asked)
        # what the tokenizer's own arguments say (another template, tensors, no tokens) is not the client's to choose
        taken = inspect.signature(self.tokenizer.apply_chat_template).parameters.keys() & asked.chat_template_kwargs
        if taken:
            name = "chat_template_kwargs"
            raise RequestError(400, f"{name} holds {min(taken)}, which is no variable of the template", param=name)
        with _template_errors():
            ids = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False, **asked.chat_template_kwargs
            )
        return list(ids)

    def _talk(self, asked: ToolChatRequest) -> Talk:
        assert self.open_talk is not None
        if asked.chat_template_kwargs:
            shown, name = json.dumps(asked.chat_template_kwargs), "chat_template_kwargs"
            raise RequestError(400, f"{name} = {shown} cannot act: this server renders turn by turn", param=name)
        if asked.stream and asked.shown_tools:
            raise RequestError(400, "answers with tools come whole; leave out stream, or tools", param="stream")
        messages = _messages(asked)
        with _template_errors():
            return self.open_talk(messages, asked.shown_tools)

    def _check_ids(self, name: str, token_ids: Any) -> None:
        for token in token_ids:
            if token >= self.vocabulary:
                message = f"{name} holds token id {token}, and the model has {self.vocabulary} token ids"
                raise RequestError(400, message, param=name)

    # --- from prompts to answers ---

    async def _answer(
        self,
        request: Request,
        asked: Asked,
        prompts: list[list[int]],
        max_tokens: int,
        logprobs: bool,
        talk: Talk | None = None,
    ) -> Response:
        if asked.model is not None and asked.model not in self.names:
            raise RequestError(
                404, f"model {asked.model} is not served here; {', '.join(self.names)} is", param="model"
            )
        check_limit("n", asked.n, self.limits.n)
        self._check_ids("stop_token_ids", asked.stop_token_ids)
        shape = Shape(
            model=asked.model or self.names[0],
            chat=isinstance(asked, ChatRequest),
            stream=asked.stream,
            logprobs=logprobs,
            token_ids=asked.return_token_ids,
            exact=self.exact,
        )
        job = Job(self._counted, self.tokenizer, self.room, asked, prompts, max_tokens, shape, talk)
        if asked.stream:
            return Events(job.chunks())
        return JSONResponse(await unless_gone(request.receive, job.whole()))


def _messages(asked: ChatRequest) -> list[dict[str, Any]]:
    """The messages of a request, each with a role and its content as text."""
    for at, message in enumerate(asked.messages):
        if not isinstance(message.get("role"), str):
            raise RequestError(400, f"messages[{at}] has no role: {json.dumps(message)[:80]}", param="messages")
    return [{**message, "content": _plain(at, message)} for at, message in enumerate(asked.messages)]


@contextmanager
def _template_errors() -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, KeyError, TemplateError) as error:
        message = f"the model's chat template did not take the messages: {error}"
        raise RequestError(400, message, param="messages") from error


def _plain(at: int, message: dict[str, Any]) -> str:
    """The content of a message as text; parts of other kinds than text are refused."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise RequestError(400, f"messages[{at}].content must be text or a list of parts", param="messages")
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            shown = json.dumps(part)[:80]
            raise RequestError(400, f"messages[{at}].content holds {shown}; only text is taken", param="messages")
    return "".join(part["text"] for part in content)
