"""The in-process engine: continuous batching on a transformers model, with log-probs equal to the trainer's.

Decoding runs in one worker thread, so the event loop stays free. Requests join between two decode steps and leave as
soon as they end. Prompts and their long common prefixes are computed once, and finished completions stay cached for a
while, so that the next turn of a conversation computes only its new tokens.

Guarantees: the log-prob of a token equals that of a full float32 forward pass, to rounding (not with int8); the tokens
sampled with a seed do not depend on other requests, to rounding; each token carries the version of the weights that
computed its logits; a version is reported only after its weights are live. New weights apply to requests in flight from
their next token on, while keys and values of earlier tokens stay those of the old weights. With `drain`, running
requests end first and waiting ones start afterwards, so that each completion has one version. New requests never reuse
a prompt that old weights computed.

The engine owns its network: no other code may run or change the network until `close`.
"""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from keel.common.openmp import release_openmp_threads
from keel.config import EngineSettings, Sampling
from keel.inference.local.continuous_batch import ContinuousBatch, GenerationRequest
from keel.inference.local.decoder_selection import select_decoder
from keel.inference.local.prefix_cache import TokenIds
from keel.inference.local.sampling import StopStringDetector
from keel.inference.local.weight_loading import WeightSlot
from keel.inference.protocol import (
    BroadcastSlot,
    EngineError,
    Generation,
    Health,
    PromptScores,
    ScoredSampling,
    WeightSource,
)
from keel.inference.server.openai_responses import TokenChunk
from keel.inference.tensor_broadcast import receive_broadcast

SETTLE_TURNS = 16
"""Turns of the event loop between two decode steps in lockstep mode."""


@dataclass(eq=False, slots=True)
class WeightUpdate:
    """A change of the weights between two decode steps."""

    apply: Callable[[], Any]
    """Changes the weights and returns the network to run."""
    version: int
    """Version of the weights after the update."""
    drain: bool
    """Whether to wait until no request is running."""
    done: Future[None] = field(default_factory=Future)


@dataclass(eq=False, slots=True)
class PromptScoring:
    """A prompt whose log-probs are computed between two decode steps."""

    prompt: TokenIds
    top_count: int
    done: Future[PromptScores] = field(default_factory=Future)


class LocalEngine:
    """Samples from `network`. Implements `keel.inference.protocol.Engine`; use it from one event loop."""

    serves_scores: Literal[True] = True

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
        """Start the worker thread.

        `lockstep` lets the event loop run between decode steps, so that the composition of batches does not depend on
        timing, even in conversations of several turns. `threads` is the number of compute threads (default: torch's).
        """
        settings = settings or EngineSettings()
        config = network.config.get_text_config()
        self._network, self._tokenizer, self._version = network, tokenizer, version
        self._original_attention = network.config._attn_implementation
        network.train(False)
        self._vocab_size = int(network.get_input_embeddings().weight.shape[0])
        self._max_length: int | None = getattr(config, "max_position_embeddings", None)
        self._eos_ids = _eos_token_ids(network, tokenizer)
        # with int8 the float32 weights are not packed, because they would not be used
        decoder = select_decoder(
            network, type(network).__name__, native_kernels=settings.native_kernels == "auto", pack=not settings.int8
        )
        release_openmp_threads()  # only the worker thread computes from here on
        self._weights = WeightSlot(network, int8=settings.int8, fused=decoder.fused)
        decoder.network = self._weights.active_network
        self._batch = ContinuousBatch(decoder, settings.max_batch)
        self._condition = threading.Condition()
        self._pending: list[GenerationRequest] = []
        """Requests of the current turn of the event loop."""
        self._inbox: list[GenerationRequest] = []
        """Requests for the worker to pick up."""
        self._updates: deque[WeightUpdate] = deque()
        self._scorings: deque[PromptScoring] = deque()
        self._closed, self._error = False, ""
        self._lockstep, self._threads = lockstep, threads
        self._loop: asyncio.AbstractEventLoop | None = None
        self._load_lock = asyncio.Lock()
        self._worker = threading.Thread(target=self._run_worker, name="keel-engine", daemon=True)
        self._worker.start()

    # methods of the event loop

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, group: str | None = None) -> Generation:
        """Return a completion. Equal prompts share their computation, so `group` is ignored."""
        del group
        request = self._make_request(prompt, sampling)
        if not isinstance(sampling, ScoredSampling) or not sampling.score_prompt:
            return await self._submit(request)
        scores = await self._score_prompt(request.prompt, sampling.top_logprobs)
        if sampling.score_only:
            return Generation((), (), (), "length", sampling.temperature, prompt_scores=scores)
        return replace(await self._submit(request), prompt_scores=scores)

    async def _score_prompt(self, prompt: TokenIds, top_count: int) -> PromptScores:
        scoring = PromptScoring(prompt, top_count)
        with self._condition:
            self._check_open()
            self._scorings.append(scoring)
            self._condition.notify()
        return await asyncio.wrap_future(scoring.done)

    async def stream(
        self, prompt: Sequence[int], sampling: Sampling, *, group: str | None = None
    ) -> AsyncIterator[TokenChunk]:
        """Yield the completion in chunks as it is sampled; closing the iterator frees its row."""
        del group
        request = self._make_request(prompt, sampling)
        progress = asyncio.Event()
        request.on_token = partial(_notify_loop, asyncio.get_running_loop(), progress)
        completion = self._submit(request)
        completion.add_done_callback(lambda _: progress.set())
        sent = 0
        try:
            while not completion.done():
                await progress.wait()
                progress.clear()
                # `versions` is appended to last: its tokens are in the other lists too
                part = slice(sent, len(request.versions))
                if part.stop > sent and not completion.done():
                    sent = part.stop
                    yield TokenChunk(
                        tuple(request.tokens[part]),
                        tuple(request.logprobs[part]),
                        tuple(request.versions[part]),
                        top_logprobs=tuple(request.top_logprobs[part]),
                    )
            result = completion.result()
            yield TokenChunk(
                result.token_ids[sent:],
                result.logprobs[sent:],
                result.versions[sent:],
                result.finish_reason,
                result.top_logprobs[sent:],
            )
        finally:
            completion.cancel()

    async def clear_prefix_cache(self) -> None:
        """Recompute prompts from now on, as after a weight update."""
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
        """Receive all weights from a broadcast of the host at `sender_address`."""
        check = partial(self._weights.check_compatible, f"the broadcast of version {version}")
        await self._replace_weights(
            lambda: receive_broadcast(slot, sender_address, own_address, self._network.device, check), version, drain
        )

    async def _load_adapter(self, folder: str, version: int, drain: bool) -> None:
        self._check_open()
        async with self._load_lock:
            await asyncio.to_thread(self._weights.validate_adapter, folder)
            await self._run_between_steps(lambda: self._weights.merge_adapter(folder), version, drain)

    async def _replace_weights(self, read: Callable[[], Mapping[str, Tensor]], version: int, drain: bool) -> None:
        """Replace all weights by the result of `read`, which runs in a thread while decoding continues."""
        self._check_open()
        async with self._load_lock:
            state = await asyncio.to_thread(read)
            await self._run_between_steps(lambda: self._weights.replace_weights(state), version, drain)

    async def version(self) -> int:
        return self._version

    @property
    def busy(self) -> bool:
        """Whether any request is running or waiting."""
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
            invalid = next(token for token in ids if not 0 <= token < self._vocab_size)
            raise EngineError(
                f"the prompt has token id {invalid}; the model has token ids 0 to {self._vocab_size - 1}",
                retryable=False,
            )
        max_tokens = sampling.max_tokens
        if self._max_length is not None:
            if len(ids) >= self._max_length:
                raise EngineError(
                    f"the prompt has {len(ids)} tokens and the model supports {self._max_length}: shorten the prompt",
                    retryable=False,
                )
            max_tokens = min(max_tokens, self._max_length - len(ids))
        stop_ids = self._eos_ids | frozenset(sampling.stop_token_ids)
        detector = StopStringDetector(self._tokenizer, sampling.stop)
        return GenerationRequest(ids, sampling, stop_ids, detector, max_tokens)

    def _submit(self, request: GenerationRequest) -> asyncio.Future[Generation]:
        self._check_open()
        self._loop = asyncio.get_running_loop()
        if not self._pending:
            # flush at the end of this turn of the event loop, so that concurrent requests arrive together
            self._loop.call_soon(self._flush_requests)
        self._pending.append(request)
        # cancelling the result cancels the request's future, which the worker checks before each step
        return asyncio.wrap_future(request.future)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")

    def _flush_requests(self) -> None:
        requests, self._pending = self._pending, []
        with self._condition:
            if not self._closed:
                self._inbox.extend(requests)
                self._condition.notify()
                return
        for request in requests:
            request.fail(EngineError("the engine is closed"))

    async def _run_between_steps(self, action: Callable[[], Any], version: int, drain: bool) -> None:
        update = WeightUpdate(action, version, drain)
        with self._condition:
            self._check_open()
            self._updates.append(update)
            self._condition.notify()
        await asyncio.wrap_future(update.done)

    # the worker thread

    def _run_worker(self) -> None:
        if self._threads is not None:
            # for this thread and for threads that start later without a setting of their own
            torch.set_num_threads(self._threads)
        try:
            while self._wait_for_work():
                self._apply_updates()
                self._score_next_prompt()
                self._step()
                if self._lockstep:
                    self._yield_to_loop()
        finally:
            # also after an unexpected error: no caller may wait indefinitely
            self._shut_down()

    def _yield_to_loop(self) -> None:
        """Wait until callers whose requests completed had time to submit their next request."""
        settled = threading.Event()

        def next_turn(turns_left: int) -> None:
            # a completion passes through a few callbacks before its caller submits the next request
            if turns_left and self._loop is not None:
                self._loop.call_soon(next_turn, turns_left - 1)
            else:
                settled.set()

        if self._loop is not None and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # the loop closed in the meantime: no more requests
                self._loop.call_soon_threadsafe(next_turn, SETTLE_TURNS)
                settled.wait(1.0)

    def _wait_for_work(self) -> bool:
        """Wait for work and accept new requests; return False when the engine is closed."""
        with self._condition:
            while not (self._closed or self._inbox or self._updates or self._scorings or self._batch.busy):
                release_openmp_threads()
                self._condition.wait()
            self._accept_requests()
            return not self._closed

    def _accept_requests(self) -> None:
        waiting = self._batch.waiting
        if self._draining and not self._closed:
            # requests that have not started go back to the queue, without prompts computed by the old weights
            for request in reversed(waiting):
                request.leaf = None
                self._inbox.insert(0, request)
            waiting.clear()
            return
        waiting.extend(self._inbox)
        self._inbox.clear()

    @property
    def _draining(self) -> bool:
        """Whether the next update waits for running requests to end; a cancelled update does not."""
        first = self._updates[0] if self._updates else None
        return first is not None and first.drain and not first.done.cancelled()

    def _apply_updates(self) -> None:
        """Apply weight updates between two steps."""
        while self._updates and not (self._draining and self._batch.rows):
            update = self._updates.popleft()
            if not update.done.set_running_or_notify_cancel():
                continue
            try:
                self._batch.decoder.network = update.apply()
            except EngineError as error:
                update.done.set_exception(error)
                continue
            except BaseException as error:
                # the weights may be partly changed: end the worker, and with it the engine
                message = f"the weights were loaded only in part: {type(error).__name__}: {error}"
                update.done.set_exception(EngineError(message))
                raise
            self._batch.clear_prefix_cache()
            self._version = update.version
            update.done.set_result(None)

    def _score_next_prompt(self) -> None:
        """Score one waiting prompt, so that running completions wait for no more than one."""
        if not self._scorings:
            return
        scoring = self._scorings.popleft()
        if not scoring.done.set_running_or_notify_cancel():
            return
        try:
            scoring.done.set_result(self._batch.score_prompt(scoring.prompt, scoring.top_count))
        except Exception as error:  # noqa: BLE001 - models raise anything; fail this request and continue
            scoring.done.set_exception(EngineError(f"a prompt could not be scored: {type(error).__name__}: {error}"))

    def _step(self) -> None:
        try:
            self._batch.step(self._version)
        except Exception as error:  # noqa: BLE001 - models raise anything; fail these requests and continue
            self._error = message = f"a decode step failed: {type(error).__name__}: {error}"
            self._batch.fail(lambda: EngineError(message), include_waiting=False)
        else:
            self._error = ""

    def _shut_down(self) -> None:
        with self._condition:
            self._closed = True
            self._accept_requests()
        self._batch.fail(lambda: EngineError("the engine is closed"), include_waiting=True)
        for queue in (self._updates, self._scorings):
            self._fail_all(queue)
        if self._batch.decoder.fused is not None:
            self._batch.decoder.fused.restore()
        if self._network.config._attn_implementation != self._original_attention:
            self._network.set_attn_implementation(self._original_attention)

    @staticmethod
    def _fail_all(queue: "deque[Any]") -> None:
        """Fail the callers of waiting updates or scorings: the engine is closed."""
        while queue:
            done = queue.popleft().done
            if done.set_running_or_notify_cancel():
                done.set_exception(EngineError("the engine is closed"))


def _notify_loop(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """Set an event of the loop from the worker thread; the loop may be closed already."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(event.set)


def _eos_token_ids(network: Any, tokenizer: Any) -> frozenset[int]:
    """Return the end-of-sequence ids of the model's configuration and the tokenizer."""
    eos_ids: set[int] = set()
    for source in (network.generation_config, network.config.get_text_config(), tokenizer):
        value = getattr(source, "eos_token_id", None)
        ids = value if isinstance(value, list | tuple) else [value]
        eos_ids |= {int(token) for token in ids if token is not None}
    return frozenset(eos_ids)
