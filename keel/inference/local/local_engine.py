"""The engine in this process: continuous batching on a transformers model, exact to the trainer's log-probs.

Decoding runs in one worker thread and the event loop stays free. Requests join between two decode steps and leave the
moment they end; prompts, and long beginnings that prompts have in common, are computed once, and what an answer has
come to is kept for a while, so that the next turn of a conversation computes only what is new. Guarantees: a
token's log-prob is that of a full forward pass in float32 to rounding; what a seed gives depends on no other request
(to rounding; with int8 only this second one holds); each token carries the version whose weights computed its logits;
a version is advanced after its weights are live. New weights reach requests in flight at their next token, while the
keys and values of their earlier tokens stay as the old weights made them; or with `drain` what runs ends first and what
waits begins afterwards, so that each answer is of one version. New requests never reuse a prompt that old weights
computed.

The engine owns the network that it is given: nobody else may run or change it until `close`.
"""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from keel.common.openmp import release
from keel.config import EngineSettings, Sampling
from keel.inference.local.continuous_batch import Batch, Request
from keel.inference.local.decoders import choose
from keel.inference.local.sampling import StopText
from keel.inference.local.weight_loading import Load, Weights
from keel.inference.protocol import EngineError, Generation, Health, Seat
from keel.inference.server.openai_responses import Piece
from keel.inference.tensor_broadcast import receive

HOPS = 16
"""Turns of the event loop between two steps in lockstep."""


@dataclass(eq=False, slots=True)
class Order:
    """Something to do between two decode steps, after which the weights are of this version."""

    action: Callable[[], Any]
    """Returns the network to run."""
    version: int
    drain: bool
    """Only when no answer is under way."""
    done: Future[None] = field(default_factory=Future)


class LocalEngine:
    """Samples from `network`. Implements `keel.inference.protocol.Engine`; call it from one event loop."""

    def __init__(
        self,
        network: Any,
        tokenizer: Any,
        settings: EngineSettings | None = None,
        *,
        version: int = 0,
        load: Load | None = None,
        lockstep: bool = False,
        threads: int | None = None,
    ) -> None:
        """`load` reads a folder of weights into a state dict; not given: a Hugging Face folder of this model.

        `lockstep`: after each decode step the event loop has its turn before the next one begins, so that which answers
        are decoded together does not depend on time, in conversations of several turns too. `threads`: how many
        compute; not given: torch's own number.
        """
        settings = settings or EngineSettings()
        config = network.config.get_text_config()
        self._network, self._tokenizer, self._version = network, tokenizer, version
        self._attention = network.config._attn_implementation
        network.train(False)
        self._vocabulary = int(network.get_input_embeddings().weight.shape[0])
        self._limit: int | None = getattr(config, "max_position_embeddings", None)
        self._ends = _ends(network, tokenizer)
        # weights that are quantised are not packed: what would be packed is never read
        decoder = choose(network, type(network).__name__, compiled=settings.kernels == "auto", pack=not settings.int8)
        release()  # the worker computes from now on
        self._weights = Weights(network, int8=settings.int8, load=load, fused=decoder.fused)
        decoder.network = self._weights.live
        self._batch = Batch(decoder, settings.max_batch)
        self._wake = threading.Condition()
        self._asked: list[Request] = []
        """In this turn of the event loop."""
        self._inbox: list[Request] = []
        self._orders: deque[Order] = deque()
        self._closed, self._error = False, ""
        self._lockstep, self._threads = lockstep, threads
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loading = asyncio.Lock()
        self._worker = threading.Thread(target=self._work, name="keel-engine", daemon=True)
        self._worker.start()

    # what the event loop calls

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, group: str | None = None) -> Generation:
        """An answer. Equal prompts share their computation, so `group` need not be known here."""
        del group
        return await self._submit(self._request(prompt, sampling))

    async def stream(
        self, prompt: Sequence[int], sampling: Sampling, *, group: str | None = None
    ) -> AsyncIterator[Piece]:
        """As `generate`, in pieces as they are sampled, which joined are what it gives; closing it frees the row."""
        del group
        request = self._request(prompt, sampling)
        more = asyncio.Event()
        request.heard = partial(_tell, asyncio.get_running_loop(), more)
        answer = self._submit(request)
        answer.add_done_callback(lambda _: more.set())
        sent = 0
        try:
            while not answer.done():
                await more.wait()
                more.clear()
                # the list that a token is added to last: what is counted there is in the others too
                part = slice(sent, len(request.versions))
                if part.stop > sent and not answer.done():
                    sent = part.stop
                    yield Piece(
                        tuple(request.tokens[part]), tuple(request.logprobs[part]), tuple(request.versions[part])
                    )
            whole = answer.result()
            yield Piece(whole.token_ids[sent:], whole.logprobs[sent:], whole.versions[sent:], whole.finish)
        finally:
            answer.cancel()

    async def forget_prompts(self) -> None:
        """Compute prompts anew from here on, as after new weights."""
        await self._between_steps(lambda: self._weights.live, self._version, drain=False)

    async def load_weights(self, folder: str, version: int, *, drain: bool = False) -> None:
        await self._replace(lambda: self._weights.read(folder), version, drain)

    async def receive_weights(self, seat: Seat, sender: str, own: str, version: int, *, drain: bool = False) -> None:
        """Take all weights that the machine at address `sender` broadcasts; `own` is this machine's address."""
        fits = partial(self._weights.fit, f"the broadcast of version {version}")
        await self._replace(lambda: receive(seat, sender, own, self._network.device, fits), version, drain)

    async def load_adapter(self, folder: str, version: int, *, drain: bool = False) -> None:
        self._need_open()
        async with self._loading:
            await asyncio.to_thread(self._weights.read_adapter, folder)
            await self._between_steps(lambda: self._weights.adapt(folder), version, drain)

    async def _replace(self, read: Callable[[], Mapping[str, Tensor]], version: int, drain: bool) -> None:
        """Take all weights as `read` gives them, which runs beside decoding."""
        self._need_open()
        async with self._loading:
            state = await asyncio.to_thread(read)
            await self._between_steps(lambda: self._weights.replace(state), version, drain)

    async def version(self) -> int:
        return self._version

    @property
    def computing(self) -> bool:
        """Whether there is an answer to decode."""
        return self._batch.busy

    async def health(self) -> Health:
        return Health(
            ready=not self._closed,
            version=self._version,
            running=len(self._batch.rows),
            waiting=len(self._asked) + len(self._inbox) + len(self._batch.waiting),
            error="closed" if self._closed else self._error,
        )

    async def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        await asyncio.to_thread(self._worker.join)

    # requests

    def _request(self, prompt: Sequence[int], sampling: Sampling) -> Request:
        ids = tuple(int(token) for token in prompt)
        if not ids:
            raise EngineError("the prompt is empty; it needs at least one token", retryable=False)
        if min(ids) < 0 or max(ids) >= self._vocabulary:
            wrong = next(token for token in ids if not 0 <= token < self._vocabulary)
            raise EngineError(f"the prompt has token id {wrong}; the model knows {self._vocabulary}", retryable=False)
        room = sampling.max_tokens
        if self._limit is not None:
            if len(ids) >= self._limit:
                raise EngineError(
                    f"the prompt has {len(ids)} tokens, and the model ends at {self._limit}: shorten it",
                    retryable=False,
                )
            room = min(room, self._limit - len(ids))
        stops = self._ends | frozenset(sampling.stop_token_ids)
        return Request(ids, sampling, stops, StopText(self._tokenizer, sampling.stop), room)

    def _submit(self, request: Request) -> asyncio.Future[Generation]:
        self._need_open()
        self._loop = asyncio.get_running_loop()
        if not self._asked:
            # at the end of this turn of the event loop: what is asked at once arrives at once
            self._loop.call_soon(self._announce)
        self._asked.append(request)
        # cancelling it cancels the request's future, which the worker sees before its next step
        return asyncio.wrap_future(request.future)

    def _need_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")

    def _announce(self) -> None:
        asked, self._asked = self._asked, []
        with self._wake:
            if not self._closed:
                self._inbox.extend(asked)
                self._wake.notify()
                return
        for request in asked:
            request.fail(EngineError("the engine is closed"))

    async def _between_steps(self, action: Callable[[], Any], version: int, drain: bool) -> None:
        order = Order(action, version, drain)
        with self._wake:
            self._need_open()
            self._orders.append(order)
            self._wake.notify()
        await asyncio.wrap_future(order.done)

    # the worker

    def _work(self) -> None:
        if self._threads is not None:
            # of this thread, and of every thread that begins later and does not say otherwise
            torch.set_num_threads(self._threads)
        try:
            while self._next():
                self._obey()
                self._step()
                if self._lockstep:
                    self._settle()
        finally:
            # also when the thread dies of something unforeseen: nobody may wait for ever
            self._end()

    def _settle(self) -> None:
        """Wait until whoever was answered has had the time to ask again."""
        settled = threading.Event()

        def hop(left: int) -> None:
            # an answer passes through a few callbacks before the next question is announced
            if left and self._loop is not None:
                self._loop.call_soon(hop, left - 1)
            else:
                settled.set()

        if self._loop is not None and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # closed at this very moment: nobody will ask again
                self._loop.call_soon_threadsafe(hop, HOPS)
                settled.wait(1.0)

    def _next(self) -> bool:
        """Wait for something to do and take what has come; False when closed."""
        with self._wake:
            while not (self._closed or self._inbox or self._orders or self._batch.busy):
                release()
                self._wake.wait()
            self._take()
            return not self._closed

    def _take(self) -> None:
        waiting = self._batch.waiting
        if self._draining and not self._closed:
            # what has not begun goes back in line, without what the old weights computed for it
            for request in reversed(waiting):
                request.leaf = None
                self._inbox.insert(0, request)
            waiting.clear()
            return
        waiting.extend(self._inbox)
        self._inbox.clear()

    @property
    def _draining(self) -> bool:
        """Whether the next order waits for what is under way to end; one that nobody waits for any more does not."""
        first = self._orders[0] if self._orders else None
        return first is not None and first.drain and not first.done.cancelled()

    def _obey(self) -> None:
        """New weights, between two steps."""
        while self._orders and not (self._draining and self._batch.rows):
            order = self._orders.popleft()
            if not order.done.set_running_or_notify_cancel():
                continue
            try:
                self._batch.decoder.network = order.action()
            except EngineError as error:
                order.done.set_exception(error)
                continue
            except BaseException as error:
                # nobody knows what the weights are now: the worker ends, and the engine with it
                why = f"new weights were taken in part: {type(error).__name__}: {error}"
                order.done.set_exception(EngineError(why))
                raise
            self._batch.forget()
            self._version = order.version
            order.done.set_result(None)

    def _step(self) -> None:
        try:
            self._batch.step(self._version)
        except Exception as error:  # noqa: BLE001 - whatever a model raises, requests must hear of it and others go on
            self._error = message = f"a decode step failed: {type(error).__name__}: {error}"
            self._batch.fail(lambda: EngineError(message), waiting=False)
        else:
            self._error = ""

    def _end(self) -> None:
        with self._wake:
            self._closed = True
            self._take()
        self._batch.fail(lambda: EngineError("the engine is closed"), waiting=True)
        while self._orders:
            done = self._orders.popleft().done
            if done.set_running_or_notify_cancel():
                done.set_exception(EngineError("the engine is closed"))
        if self._batch.decoder.fused is not None:
            self._batch.decoder.fused.undo()
        if self._network.config._attn_implementation != self._attention:
            self._network.set_attn_implementation(self._attention)


def _tell(loop: asyncio.AbstractEventLoop, more: asyncio.Event) -> None:
    """From the worker, that there is a token. Whoever listened may be gone with the loop."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(more.set)


def _ends(network: Any, tokenizer: Any) -> frozenset[int]:
    """The ids that end an answer, by the model's configuration and the tokenizer."""
    found: set[int] = set()
    for holder in (network.generation_config, network.config.get_text_config(), tokenizer):
        ends = getattr(holder, "eos_token_id", None)
        found |= {int(one) for one in (ends if isinstance(ends, list | tuple) else [ends]) if one is not None}
    return frozenset(found)
