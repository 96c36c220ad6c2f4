"""Run the completions of one request, complete or as a stream of server-sent events.

Guarantees that however a request ends (done, failed, client disconnected) all its completions and their capacity are
released, and that a stream that failed reports the error and does not end like a complete one.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from keel.common.tasks import gather_or_cancel
from keel.config import Sampling
from keel.inference.protocol import BroadcastSlot, Engine, Generation, ScoredSampling
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
from keel.inference.server.token_texts import TokenTexts

Item = TypeVar("Item")


class StreamingEngine(Engine, Protocol):
    """An engine that also returns tokens while it samples; other engines stream each completion as one chunk."""

    def stream(
        self, prompt: Sequence[int], sampling: Sampling, *, group: str | None = None
    ) -> AsyncIterator[TokenChunk]:
        """Generate token by token; closing the iterator cancels the completion."""


@runtime_checkable
class BroadcastReceiver(Protocol):
    """An engine that can receive weights from a broadcast."""

    async def receive_weights(
        self, slot: BroadcastSlot, sender_address: str, own_address: str, version: int, *, drain: bool
    ) -> None:
        """Receive all weights that the machine at `sender_address` broadcasts to this machine's `own_address`."""


class Capacity:
    """Limit on the completions in flight, running and waiting."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_flight = 0

    @contextmanager
    def reserve(self, count: int) -> Iterator[None]:
        """Reserve capacity for `count` completions, or raise a 429 error."""
        if self.in_flight + count > self.limit:
            raise RequestError(
                429,
                f"{self.in_flight} completions are in flight and {count} more would exceed this server's limit of"
                f" {self.limit}; retry later",
            )
        self.in_flight += count
        try:
            yield
        finally:
            self.in_flight -= count


class CompletionJob:
    """The completions of one request: `n` for every prompt."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        texts: TokenTexts,
        capacity: Capacity,
        params: CommonRequest,
        prompts: list[list[int]],
        max_tokens: int,
        response: ResponseBuilder,
        session: ChatSession | None = None,
        echoed: Sequence[str] = (),
    ) -> None:
        """`echoed` are the texts of the prompts if they are returned with their completions."""
        self.engine = engine
        self.tokenizer, self.texts, self.echoed = tokenizer, texts, list(echoed)
        self.capacity = capacity
        self.prompts = prompts
        self.response = response
        self.session = session
        self.n = params.n
        self.include_usage = params.stream_options.include_usage
        # the completions of one prompt form a group even if the client named none
        group = params.group or response.id
        self.calls = [
            (prompt, params.to_sampling(max_tokens, index), group if len(prompts) == 1 else f"{group}/{number}")
            for number, prompt in enumerate(prompts)
            for index in range(params.n)
        ]

    async def run(self) -> dict[str, Any]:
        """Return all completions in one response."""
        with self.capacity.reserve(len(self.calls)):
            generations = await gather_or_cancel(
                [self._generate(prompt, sampling, group) for prompt, sampling, group in self.calls]
            )
        choices = []
        for index, ((prompt, sampling, _), generation) in enumerate(zip(self.calls, generations, strict=True)):
            text = self._make_detokenizer(sampling).push(generation.token_ids, is_last=True)
            message = None
            if self.session is not None:
                message = self.session.record_completion(generation.token_ids, sampling.stop)
            choice = self.response.choice(index, _to_chunk(generation), text, self.texts, message=message)
            if self.echoed:
                self.response.prepend_prompt(choice, self.echoed[index // self.n], prompt, generation, self.texts)
            choices.append(choice | self._sampling_record(prompt, sampling))
        sampled = sum(len(generation.token_ids) for generation in generations)
        return self.response.envelope(choices, **self._prompt_ids(), usage=count_usage(self.prompts, sampled))

    async def _generate(self, prompt: list[int], sampling: Sampling, group: str) -> Generation:
        if isinstance(sampling, ScoredSampling) and sampling.score_only and not sampling.score_prompt:
            return Generation((), (), (), "length", sampling.temperature)  # only the prompt's text is returned
        return await self.engine.generate(prompt, sampling, group=group)

    async def stream_chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the chunks of all completions, interleaved."""
        builder, sampled = self.response, 0
        detokenizers = [self._make_detokenizer(sampling) for _, sampling, _ in self.calls]
        offsets = [0] * len(self.calls)
        started: set[int] = set()
        streamed: list[tuple[list[int], list[str]]] = [([], []) for _ in self.calls]
        with self.capacity.reserve(len(self.calls)):
            async with aclosing(_merge_streams([self._stream_tokens(*call) for call in self.calls])) as merged:
                async for index, chunk in merged:
                    sampled += len(chunk.token_ids)
                    first = index not in started
                    if first and builder.chat:
                        head = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                        yield builder.envelope([head], **({} if started else self._prompt_ids()))
                    started.add(index)
                    text = detokenizers[index].push(chunk.token_ids, is_last=chunk.finish_reason is not None)
                    choice = builder.choice(index, chunk, text, self.texts, offsets[index])
                    offsets[index] += len(text)
                    token_ids, texts = streamed[index]
                    token_ids.extend(chunk.token_ids)
                    texts.append(text)
                    if self.session is not None and chunk.finish_reason is not None:
                        self.session.record_streamed(token_ids, "".join(texts))
                    yield builder.envelope([choice | (self._sampling_record(*self.calls[index][:2]) if first else {})])
        if self.include_usage:
            yield builder.envelope([], usage=count_usage(self.prompts, sampled))

    def _sampling_record(self, prompt: list[int], sampling: Sampling) -> dict[str, Any]:
        """Return a choice's prompt and, with `training_fields`, how it was sampled."""
        if not self.response.training_fields:
            return {"prompt_token_ids": prompt} if self.response.token_ids and not self.response.chat else {}
        return {
            "prompt_token_ids": prompt,
            "prompt_reason": None if self.session is None else self.session.split_reason,
            "model": self.response.model,
            "sampling": sampling.model_dump(include={"temperature", "top_p", "top_k", "min_p"}),
        }

    def _prompt_ids(self) -> dict[str, Any]:
        # as vLLM: for chat next to the choices, for completions in each choice
        return {"prompt_token_ids": self.prompts[0]} if self.response.token_ids and self.response.chat else {}

    def _make_detokenizer(self, sampling: Sampling) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(self.tokenizer, sampling.stop, sampling.stop_token_ids)

    async def _stream_tokens(self, prompt: list[int], sampling: Sampling, group: str) -> AsyncIterator[TokenChunk]:
        if hasattr(self.engine, "stream"):
            stream = cast(StreamingEngine, self.engine).stream(prompt, sampling, group=group)
            async for chunk in stream:
                yield chunk
        else:
            yield _to_chunk(await self.engine.generate(prompt, sampling, group=group))


class EventStream(Response):
    """Send chunks as server-sent events. A failure before the first chunk becomes an ordinary error response."""

    def __init__(self, chunks: AsyncIterator[dict[str, Any]]) -> None:
        super().__init__(status_code=200)
        self.chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end, the first failure, or a disconnect."""
        with contextlib.suppress(ClientGone):
            await cancel_on_disconnect(receive, self._send(scope, receive, send))

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def event(data: str, more: bool = True) -> None:
            body = f"data: {data}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": more})

        started = False
        async with aclosing(cast(Any, self.chunks)) as chunks:
            try:
                async for chunk in chunks:
                    if not started:
                        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
                        await send({"type": "http.response.start", "status": 200, "headers": headers})
                        started = True
                    await event(json.dumps(chunk, ensure_ascii=False, allow_nan=False))
            except Exception as error:  # noqa: BLE001 - any failure is reported in the stream
                if not started:
                    await error_response(error)(scope, receive, send)
                else:
                    # no [DONE]: the completion is not complete
                    await event(json.dumps(error_body(to_request_error(error))), more=False)
                return
        await event("[DONE]", more=False)


def _to_chunk(generation: Generation) -> TokenChunk:
    return TokenChunk(
        generation.token_ids,
        generation.logprobs,
        generation.versions,
        generation.finish_reason,
        generation.top_logprobs,
    )


async def _merge_streams(streams: list[AsyncIterator[Item]]) -> AsyncGenerator[tuple[int, Item], None]:
    """Yield the items of several streams as they arrive; the first failure ends all of them."""
    # bounded: a slow reader slows sampling down instead of filling memory
    queue: asyncio.Queue[tuple[int, Item | None, Exception | None]] = asyncio.Queue(maxsize=64)

    async def pump(index: int, stream: AsyncIterator[Item]) -> None:
        try:
            async with aclosing(cast(Any, stream)) as items:
                async for item in items:
                    await queue.put((index, item, None))
            await queue.put((index, None, None))
        except Exception as error:  # noqa: BLE001 - raised again by the consumer below
            await queue.put((index, None, error))

    tasks = [asyncio.ensure_future(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            index, item, error = await queue.get()
            if error is not None:
                raise error
            if item is None:
                running -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
