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
from keel.inference.protocol import Engine, Generation, Seat
from keel.inference.server.middleware import ClientGone, as_request_error, error_body, error_response, unless_gone
from keel.inference.server.openai_requests import Asked, RequestError
from keel.inference.server.openai_responses import Piece, Shape, Talk, Text, Tokenizer, usage

Item = TypeVar("Item")


class StreamingEngine(Engine, Protocol):
    """An engine that also hands out tokens while it samples; others stream each answer as one piece."""

    def stream(self, prompt: Sequence[int], sampling: Sampling, *, group: str | None = None) -> AsyncIterator[Piece]:
        """As `generate`, token by token; closing the iterator frees what it holds."""


@runtime_checkable
class Receiver(Protocol):
    """An engine that also takes weights from a broadcast."""

    async def receive_weights(self, seat: Seat, sender: str, own: str, version: int, *, drain: bool) -> None:
        """Take all weights that the machine at address `sender` broadcasts; `own` is this machine's address."""


class Room:
    """How many answers may be under way at once, running and waiting."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.under_way = 0

    @contextmanager
    def taken(self, count: int) -> Iterator[None]:
        """Room for so many answers, or 429."""
        if self.under_way + count > self.limit:
            raise RequestError(
                429,
                f"{self.under_way} answers are under way and {count} more would be above this server's limit of"
                f" {self.limit}; try again later",
            )
        self.under_way += count
        try:
            yield
        finally:
            self.under_way -= count


class Job:
    """One request for answers: every prompt `n` times."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        room: Room,
        asked: Asked,
        prompts: list[list[int]],
        max_tokens: int,
        shape: Shape,
        talk: Talk | None = None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.room = room
        self.prompts = prompts
        self.shape = shape
        self.talk = talk
        self.usage_chunk = asked.stream_options.include_usage
        # one request's answers to one prompt are a group, also when the client did not name it
        group = asked.group or shape.id
        self.calls = [
            (prompt, asked.sampling(max_tokens, index), group if len(prompts) == 1 else f"{group}/{number}")
            for number, prompt in enumerate(prompts)
            for index in range(asked.n)
        ]

    async def whole(self) -> dict[str, Any]:
        """All answers in one response."""
        with self.room.taken(len(self.calls)):
            answers = await _all(
                [self.engine.generate(prompt, sampling, group=group) for prompt, sampling, group in self.calls]
            )
        choices = []
        for index, ((prompt, sampling, _), answer) in enumerate(zip(self.calls, answers, strict=True)):
            text = self._text(sampling).push(answer.token_ids, last=True)
            message = None if self.talk is None else self.talk.answered(answer.token_ids, sampling.stop)
            choice = self.shape.choice(index, _piece(answer), text, self.tokenizer, message=message)
            choices.append(choice | self._recorded(prompt, sampling))
        sampled = sum(len(answer.token_ids) for answer in answers)
        return self.shape.envelope(choices, **self._prompt_ids(), usage=usage(self.prompts, sampled))

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """All answers as they grow, their pieces interleaved."""
        shape, sampled = self.shape, 0
        texts = [self._text(sampling) for _, sampling, _ in self.calls]
        offsets = [0] * len(self.calls)
        begun: set[int] = set()
        said: list[tuple[list[int], list[str]]] = [([], []) for _ in self.calls]
        with self.room.taken(len(self.calls)):
            async with aclosing(_merged([self._pieces(*call) for call in self.calls])) as merged:
                async for index, piece in merged:
                    sampled += len(piece.token_ids)
                    first = index not in begun
                    if first and shape.chat:
                        head = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                        yield shape.envelope([head], **({} if begun else self._prompt_ids()))
                    begun.add(index)
                    text = texts[index].push(piece.token_ids, last=piece.finish is not None)
                    choice = shape.choice(index, piece, text, self.tokenizer, offsets[index])
                    offsets[index] += len(text)
                    said[index][0].extend(piece.token_ids)
                    said[index][1].append(text)
                    if self.talk is not None and piece.finish is not None:
                        self.talk.streamed(said[index][0], "".join(said[index][1]))
                    yield shape.envelope([choice | (self._recorded(*self.calls[index][:2]) if first else {})])
        if self.usage_chunk:
            yield shape.envelope([], usage=usage(self.prompts, sampled))

    def _recorded(self, prompt: list[int], sampling: Sampling) -> dict[str, Any]:
        """What a choice says about how it was sampled: its prompt, and in exact servers all that training needs."""
        if not self.shape.exact:
            return {"prompt_token_ids": prompt} if self.shape.token_ids and not self.shape.chat else {}
        return {
            "prompt_token_ids": prompt,
            "prompt_reason": None if self.talk is None else self.talk.reason,
            "model": self.shape.model,
            "sampling": sampling.model_dump(include={"temperature", "top_p", "top_k", "min_p"}),
        }

    def _prompt_ids(self) -> dict[str, Any]:
        # as vLLM: of a chat beside the choices, of completions in each choice
        return {"prompt_token_ids": self.prompts[0]} if self.shape.token_ids and self.shape.chat else {}

    def _text(self, sampling: Sampling) -> Text:
        return Text(self.tokenizer, sampling.stop, sampling.stop_token_ids)

    async def _pieces(self, prompt: list[int], sampling: Sampling, group: str) -> AsyncIterator[Piece]:
        if hasattr(self.engine, "stream"):
            stream = cast(StreamingEngine, self.engine).stream(prompt, sampling, group=group)
            async for piece in stream:
                yield piece
        else:
            yield _piece(await self.engine.generate(prompt, sampling, group=group))


class Events(Response):
    """Chunks as server-sent events. What fails before the first one is an ordinary error response."""

    def __init__(self, chunks: AsyncIterator[dict[str, Any]]) -> None:
        super().__init__(status_code=200)
        self.chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end, the first failure, or the client's leaving."""
        with contextlib.suppress(ClientGone):
            await unless_gone(receive, self._send(scope, receive, send))

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
                    await event(json.dumps(error_body(as_request_error(error))), more=False)
                return
        await event("[DONE]", more=False)


def _piece(answer: Generation) -> Piece:
    return Piece(answer.token_ids, answer.logprobs, answer.versions, answer.finish)


async def _all(calls: list[Coroutine[Any, Any, Generation]]) -> list[Generation]:
    """Every answer, or the first failure with the rest cancelled."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _merged(streams: list[AsyncIterator[Item]]) -> AsyncGenerator[tuple[int, Item], None]:
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
