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

from keel.common.openmp import release_openmp_threads
from keel.config import EngineSettings, Sampling
from keel.inference.local.continuous_batch import ContinuousBatch, GenerationRequest
from keel.inference.local.decoders import select_decoder
from keel.inference.local.sampling import StopStringDetector
from keel.inference.local.weight_loading import WeightSlot
from keel.inference.protocol import BroadcastSlot, EngineError, Generation, Health, WeightSource
from keel.inference.server.openai_responses import TokenChunk
from keel.inference.tensor_broadcast import receive_broadcast

SETTLE_TURNS = 16
"""Turns of the event loop between two steps in lockstep."""


@dataclass(eq=False, slots=True)
class WeightUpdate:
    """Something to do between two decode steps, after which the weights are of this version."""

    apply: Callable[[], Any]
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
        lockstep: bool = False,
        threads: int | None = None,
    ) -> None:
        """`lockstep`: after each decode step the event loop has its turn before the next one begins, so that which answers
        are decoded together does not depend on time, in conversations of several turns too. `threads`: how many
        compute; not given: torch's own number.
        """
        settings = settings or EngineSettings()
        config = network.config.get_text_config()
        self._network, self._tokenizer, self._version = network, tokenizer, version
        self._original_attention = network.config._attn_implementation
        network.train(False)
        self._vocab_size = int(network.get_input_embeddings().weight.shape[0])
        self._max_length: int | None = getattr(config, "max_position_embeddings", None)
        self._eos_ids = _eos_token_ids(network, tokenizer)
        # weights that are quantised are not packed: what would be packed is never read
        decoder = select_decoder(
            network, type(network).__name__, native_kernels=settings.native_kernels == "auto", pack=not settings.int8
        )
        release_openmp_threads()  # the worker computes from now on
        self._weights = WeightSlot(network, int8=settings.int8, fused=decoder.fused)
        decoder.network = self._weights.active_network
        self._batch = ContinuousBatch(decoder, settings.max_batch)
        self._condition = threading.Condition()
        self._pending: list[GenerationRequest] = []
        """In this turn of the event loop."""
        self._inbox: list[GenerationRequest] = []
        self._updates: deque[WeightUpdate] = deque()
        self._closed, self._error = False, ""
        self._lockstep, self._threads = lockstep, threads
        self._loop: asyncio.AbstractEventLoop | None = None
        self._load_lock = asyncio.Lock()
        self._worker = threading.Thread(target=self._run_worker, name="keel-engine", daemon=True)
        self._worker.start()

    # what the event loop calls

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, group: str | None = None) -> Generation:
        """An answer. Equal prompts share their computation, so `group` need not be known here."""
        del group
        return await self._submit(self._make_request(prompt, sampling))

    async def stream(
        self, prompt: Sequence[int], sampling: Sampling, *, group: str | None = None
    ) -> AsyncIterator[TokenChunk]:
        """As `generate`, in pieces as they are sampled, which joined are what it gives; closing it frees the row."""
        del group
        request = self._make_request(prompt, sampling)
        more = asyncio.Event()
        request.on_token = partial(_notify_loop, asyncio.get_running_loop(), more)
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
                    yield TokenChunk(
                        tuple(request.tokens[part]), tuple(request.logprobs[part]), tuple(request.versions[part])
                    )
            whole = answer.result()
            yield TokenChunk(whole.token_ids[sent:], whole.logprobs[sent:], whole.versions[sent:], whole.finish_reason)
        finally:
            answer.cancel()

    async def clear_prefix_cache(self) -> None:
        """Compute prompts anew from here on, as after new weights."""
        await self._run_between_steps(lambda: self._weights.active_network, self._version, drain=False)

    async def load_weights(self, source: WeightSource, version: int, *, drain: bool = False) -> None:
        if source.kind == "adapter":
            await self._load_adapter(str(source.path), version, drain)
        elif source.kind == "folder":
            await self._replace_weights(lambda: self._weights.read_weights(str(source.path)), version, drain)
        elif source.kind == "in_memory":
            await self._replace_weights(lambda: self._weights.check_tensors(source.tensors), version, drain)
        else:
            raise source.unsupported_by("an engine in this process")

    async def receive_weights(
        self, slot: BroadcastSlot, sender_address: str, own_address: str, version: int, *, drain: bool = False
    ) -> None:
        """Take all weights that the machine at address `sender` broadcasts; `own` is this machine's address."""
        fits = partial(self._weights.check_compatible, f"the broadcast of version {version}")
        await self._replace_weights(
            lambda: receive_broadcast(slot, sender_address, own_address, self._network.device, fits), version, drain
        )

    async def _load_adapter(self, folder: str, version: int, drain: bool) -> None:
        self._check_open()
        async with self._load_lock:
            await asyncio.to_thread(self._weights.validate_adapter, folder)
            await self._run_between_steps(lambda: self._weights.merge_adapter(folder), version, drain)

    async def _replace_weights(self, read: Callable[[], Mapping[str, Tensor]], version: int, drain: bool) -> None:
        """Take all weights as `read` gives them, which runs beside decoding."""
        self._check_open()
        async with self._load_lock:
            state = await asyncio.to_thread(read)
            await self._run_between_steps(lambda: self._weights.replace_weights(state), version, drain)

    async def version(self) -> int:
        return self._version

    @property
    def busy(self) -> bool:
        """Whether there is an answer to decode."""
        return self._batch.busy

    async def health(self) -> Health:
        return Health(
            ready=not self._closed,
            version=self._version,
            running=len(self._batch.rows),
            waiting=len(self._pending) + len(self._inbox) + len(self._batch.waiting),
            error="closed" if self._closed else self._error,
        )

    async def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify()
        await asyncio.to_thread(self._worker.join)

    # requests

    def _make_request(self, prompt: Sequence[int], sampling: Sampling) -> GenerationRequest:
        ids = tuple(int(token) for token in prompt)
        if not ids:
            raise EngineError("the prompt is empty; it needs at least one token", retryable=False)
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            wrong = next(token for token in ids if not 0 <= token < self._vocab_size)
            raise EngineError(f"the prompt has token id {wrong}; the model knows {self._vocab_size}", retryable=False)
        room = sampling.max_tokens
        if self._max_length is not None:
            if len(ids) >= self._max_length:
                raise EngineError(
                    f"the prompt has {len(ids)} tokens, and the model ends at {self._max_length}: shorten it",
                    retryable=False,
                )
            room = min(room, self._max_length - len(ids))
        stops = self._eos_ids | frozenset(sampling.stop_token_ids)
        return GenerationRequest(ids, sampling, stops, StopStringDetector(self._tokenizer, sampling.stop), room)

    def _submit(self, request: GenerationRequest) -> asyncio.Future[Generation]:
        self._check_open()
        self._loop = asyncio.get_running_loop()
        if not self._pending:
            # at the end of this turn of the event loop: what is asked at once arrives at once
            self._loop.call_soon(self._flush_requests)
        self._pending.append(request)
        # cancelling it cancels the request's future, which the worker sees before its next step
        return asyncio.wrap_future(request.future)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")

    def _flush_requests(self) -> None:
        asked, self._pending = self._pending, []
        with self._condition:
            if not self._closed:
                self._inbox.extend(asked)
                self._condition.notify()
                return
        for request in asked:
            request.fail(EngineError("the engine is closed"))

    async def _run_between_steps(self, action: Callable[[], Any], version: int, drain: bool) -> None:
        order = WeightUpdate(action, version, drain)
        with self._condition:
            self._check_open()
            self._updates.append(order)
            self._condition.notify()
        await asyncio.wrap_future(order.done)

    # the worker

    def _run_worker(self) -> None:
        if self._threads is not None:
            # of this thread, and of every thread that begins later and does not say otherwise
            torch.set_num_threads(self._threads)
        try:
            while self._wait_for_work():
                self._apply_updates()
                self._step()
                if self._lockstep:
                    self._yield_to_loop()
        finally:
            # also when the thread dies of something unforeseen: nobody may wait for ever
            self._shut_down()

    def _yield_to_loop(self) -> None:
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
                self._loop.call_soon_threadsafe(hop, SETTLE_TURNS)
                settled.wait(1.0)

    def _wait_for_work(self) -> bool:
        """Wait for something to do and take what has come; False when closed."""
        with self._condition:
            while not (self._closed or self._inbox or self._updates or self._batch.busy):
                release_openmp_threads()
                self._condition.wait()
            self._accept_requests()
            return not self._closed

    def _accept_requests(self) -> None:
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
        first = self._updates[0] if self._updates else None
        return first is not None and first.drain and not first.done.cancelled()

    def _apply_updates(self) -> None:
        """New weights, between two steps."""
        while self._updates and not (self._draining and self._batch.rows):
            order = self._updates.popleft()
            if not order.done.set_running_or_notify_cancel():
                continue
            try:
                self._batch.decoder.network = order.apply()
            except EngineError as error:
                order.done.set_exception(error)
                continue
            except BaseException as error:
                # nobody knows what the weights are now: the worker ends, and the engine with it
                why = f"new weights were taken in part: {type(error).__name__}: {error}"
                order.done.set_exception(EngineError(why))
                raise
            self._batch.clear_prefix_cache()
            self._version = order.version
            order.done.set_result(None)

    def _step(self) -> None:
        try:
            self._batch.step(self._version)
        except Exception as error:  # noqa: BLE001 - whatever a model raises, requests must hear of it and others go on
            self._error = message = f"a decode step failed: {type(error).__name__}: {error}"
            self._batch.fail(lambda: EngineError(message), include_waiting=False)
        else:
            self._error = ""

    def _shut_down(self) -> None:
        with self._condition:
            self._closed = True
            self._accept_requests()
        self._batch.fail(lambda: EngineError("the engine is closed"), include_waiting=True)
        while self._updates:
            done = self._updates.popleft().done
            if done.set_running_or_notify_cancel():
                done.set_exception(EngineError("the engine is closed"))
        if self._batch.decoder.fused is not None:
            self._batch.decoder.fused.restore()
        if self._network.config._attn_implementation != self._original_attention:
            self._network.set_attn_implementation(self._original_attention)


def _notify_loop(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """From the worker, that there is a token. Whoever listened may be gone with the loop."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(event.set)


def _eos_token_ids(network: Any, tokenizer: Any) -> frozenset[int]:
    """The ids that end an answer, by the model's configuration and the tokenizer."""
    found: set[int] = set()
    for holder in (network.generation_config, network.config.get_text_config(), tokenizer):
        ends = getattr(holder, "eos_token_id", None)
        found |= {int(one) for one in (ends if isinstance(ends, list | tuple) else [ends]) if one is not None}
    return frozenset(found)
