"""One request's answers, whole or as a stream of events.

Guarantees that whatever ends a request (its answers, a failure of one of them, a client that left) frees all of its
answers and the room they took, and that a stream which broke off says so and does not end like a whole one.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from keel.config import Sampling
from keel.inference.protocol import BroadcastSlot, Engine, Generation
from keel.inference.server.middleware import (
    ClientGone,
    cancel_on_disconnect,
    error_body,
    error_response,
    to_request_error,
)
from keel.inference.server.openai_requests import CommonRequest, RequestError
from keel.inference.server.openai_responses import (
    ChatSession,
    IncrementalDetokenizer,
    ResponseBuilder,
    TokenChunk,
    Tokenizer,
    count_usage,
)

Item = TypeVar("Item")


class StreamingEngine(Engine, Protocol):
    """An engine that also hands out tokens while it samples; others stream each answer as one piece."""

    def stream(
        self, prompt: Sequence[int], sampling: Sampling, *, group: str | None = None
    ) -> AsyncIterator[TokenChunk]:
        """As `generate`, token by token; closing the iterator frees what it holds."""


@runtime_checkable
class BroadcastReceiver(Protocol):
    """An engine that also takes weights from a broadcast."""

    async def receive_weights(
        self, slot: BroadcastSlot, sender_address: str, own_address: str, version: int, *, drain: bool
    ) -> None:
        """Take all weights that the machine at address `sender` broadcasts; `own` is this machine's address."""


class Capacity:
    """How many answers may be under way at once, running and waiting."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_flight = 0

    @contextmanager
    def reserve(self, count: int) -> Iterator[None]:
        """Room for so many answers, or 429."""
        if self.in_flight + count > self.limit:
            raise RequestError(
                429,
                f"{self.in_flight} answers are under way and {count} more would be above this server's limit of"
                f" {self.limit}; try again later",
            )
        self.in_flight += count
        try:
            yield
        finally:
            self.in_flight -= count


class CompletionJob:
    """One request for answers: every prompt `n` times."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        capacity: Capacity,
        params: CommonRequest,
        prompts: list[list[int]],
        max_tokens: int,
        response: ResponseBuilder,
        session: ChatSession | None = None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.capacity = capacity
        self.prompts = prompts
        self.response = response
        self.session = session
        self.include_usage = params.stream_options.include_usage
        # one request's answers to one prompt are a group, also when the client did not name it
        group = params.group or response.id
        self.calls = [
            (prompt, params.to_sampling(max_tokens, index), group if len(prompts) == 1 else f"{group}/{number}")
            for number, prompt in enumerate(prompts)
            for index in range(params.n)
        ]

    async def run(self) -> dict[str, Any]:
        """All answers in one response."""
        with self.capacity.reserve(len(self.calls)):
            answers = await _gather_or_cancel(
                [self.engine.generate(prompt, sampling, group=group) for prompt, sampling, group in self.calls]
            )
        choices = []
        for index, ((prompt, sampling, _), answer) in enumerate(zip(self.calls, answers, strict=True)):
            text = self._make_detokenizer(sampling).push(answer.token_ids, is_last=True)
            message = None if self.session is None else self.session.record_completion(answer.token_ids, sampling.stop)
            choice = self.response.choice(index, _to_chunk(answer), text, self.tokenizer, message=message)
            choices.append(choice | self._sampling_record(prompt, sampling))
        sampled = sum(len(answer.token_ids) for answer in answers)
        return self.response.envelope(choices, **self._prompt_ids(), usage=count_usage(self.prompts, sampled))

    async def stream_chunks(self) -> AsyncIterator[dict[str, Any]]:
        """All answers as they grow, their pieces interleaved."""
        shape, sampled = self.response, 0
        texts = [self._make_detokenizer(sampling) for _, sampling, _ in self.calls]
        offsets = [0] * len(self.calls)
        begun: set[int] = set()
        said: list[tuple[list[int], list[str]]] = [([], []) for _ in self.calls]
        with self.capacity.reserve(len(self.calls)):
            async with aclosing(_merge_streams([self._stream_tokens(*call) for call in self.calls])) as merged:
                async for index, piece in merged:
                    sampled += len(piece.token_ids)
                    first = index not in begun
                    if first and shape.chat:
                        head = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                        yield shape.envelope([head], **({} if begun else self._prompt_ids()))
                    begun.add(index)
                    text = texts[index].push(piece.token_ids, is_last=piece.finish_reason is not None)
                    choice = shape.choice(index, piece, text, self.tokenizer, offsets[index])
                    offsets[index] += len(text)
                    said[index][0].extend(piece.token_ids)
                    said[index][1].append(text)
                    if self.session is not None and piece.finish_reason is not None:
                        self.session.record_streamed(said[index][0], "".join(said[index][1]))
                    yield shape.envelope([choice | (self._sampling_record(*self.calls[index][:2]) if first else {})])
        if self.include_usage:
            yield shape.envelope([], usage=count_usage(self.prompts, sampled))

    def _sampling_record(self, prompt: list[int], sampling: Sampling) -> dict[str, Any]:
        """What a choice says about how it was sampled: its prompt, and in exact servers all that training needs."""
        if not self.response.training_fields:
            return {"prompt_token_ids": prompt} if self.response.token_ids and not self.response.chat else {}
        return {
            "prompt_token_ids": prompt,
            "prompt_reason": None if self.session is None else self.session.split_reason,
            "model": self.response.model,
            "sampling": sampling.model_dump(include={"temperature", "top_p", "top_k", "min_p"}),
        }

    def _prompt_ids(self) -> dict[str, Any]:
        # as vLLM: of a chat beside the choices, of completions in each choice
        return {"prompt_token_ids": self.prompts[0]} if self.response.token_ids and self.response.chat else {}

    def _make_detokenizer(self, sampling: Sampling) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(self.tokenizer, sampling.stop, sampling.stop_token_ids)

    async def _stream_tokens(self, prompt: list[int], sampling: Sampling, group: str) -> AsyncIterator[TokenChunk]:
        if hasattr(self.engine, "stream"):
            stream = cast(StreamingEngine, self.engine).stream(prompt, sampling, group=group)
            async for piece in stream:
                yield piece
        else:
            yield _to_chunk(await self.engine.generate(prompt, sampling, group=group))


class EventStream(Response):
    """Chunks as server-sent events. What fails before the first one is an ordinary error response."""

    def __init__(self, chunks: AsyncIterator[dict[str, Any]]) -> None:
        super().__init__(status_code=200)
        self.chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end, the first failure, or the client's leaving."""
        with contextlib.suppress(ClientGone):
            await cancel_on_disconnect(receive, self._send(scope, receive, send))

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def event(data: str, more: bool = True) -> None:
            body = f"data: {data}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": more})

        begun = False
        async with aclosing(cast(Any, self.chunks)) as chunks:
            try:
                async for chunk in chunks:
                    if not begun:
                        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
                        await send({"type": "http.response.start", "status": 200, "headers": headers})
                        begun = True
                    await event(json.dumps(chunk, ensure_ascii=False, allow_nan=False))
            except Exception as error:  # noqa: BLE001 - whatever failed, the client is told in the stream
                if not begun:
                    await error_response(error)(scope, receive, send)
                else:
                    # no [DONE]: what came before is not a whole answer
                    await event(json.dumps(error_body(to_request_error(error))), more=False)
                return
        await event("[DONE]", more=False)


def _to_chunk(generation: Generation) -> TokenChunk:
    return TokenChunk(generation.token_ids, generation.logprobs, generation.versions, generation.finish_reason)


async def _gather_or_cancel(calls: list[Coroutine[Any, Any, Generation]]) -> list[Generation]:
    """Every answer, or the first failure with the rest cancelled."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _merge_streams(streams: list[AsyncIterator[Item]]) -> AsyncGenerator[tuple[int, Item], None]:
    """What several streams give, as it comes; the first failure ends all of them."""
    # bounded, so that a client that reads slowly slows the pieces down instead of piling them up
    queue: asyncio.Queue[tuple[int, Item | None, Exception | None]] = asyncio.Queue(maxsize=64)

    async def pump(index: int, stream: AsyncIterator[Item]) -> None:
        try:
            async with aclosing(cast(Any, stream)) as pieces:
                async for item in pieces:
                    await queue.put((index, item, None))
            await queue.put((index, None, None))
        except Exception as error:  # noqa: BLE001 - raised again where the pieces are read
            await queue.put((index, None, error))

    tasks = [asyncio.ensure_future(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            index, item, error = await queue.get()
            if error is not None:
                raise error
            if item is None:
                left -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
