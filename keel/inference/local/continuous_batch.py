"""Continuous batching: the queue of waiting requests, the running rows, and one decode step for all of them.

Invariant: every request that enters leaves exactly once (finished, failed or cancelled), and requests start in order of
arrival. A finished or cancelled row is removed before the next forward pass. There are no threads or event loops here:
the owner of the batch calls `step`.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from keel.config import Sampling
from keel.inference.local.fused_linear import FusedLinears
from keel.inference.local.prefix_cache import PrefixNode, TokenIds
from keel.inference.local.sampling import StopStringDetector, log_softmax, sample_tokens, score_tokens, top_logprobs
from keel.inference.protocol import (
    EngineError,
    FinishReason,
    Generation,
    PromptScores,
    ScoredSampling,
    TopLogprobs,
)

MAX_PREFILL_TOKENS = 2048
"""Prompt tokens to compute in one step before further prompts must wait: running completions wait for the step too."""


@dataclass(eq=False)
class GenerationRequest:
    """One completion in progress."""

    prompt: TokenIds
    sampling: Sampling
    stop_ids: frozenset[int]
    stop_detector: StopStringDetector
    max_tokens: int
    """Most tokens to generate."""
    future: Future[Generation] = field(default_factory=Future)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    on_token: Callable[[], None] | None = None
    """Called after each token except the last."""
    leaf: PrefixNode | None = None
    """Prefix node at which the cached prompt ends; for a long completion, the node with its older tokens."""

    def __post_init__(self) -> None:
        # one generator per request, so that other requests do not change its draws
        self.rng = random.Random(self.sampling.seed)
        self.top_count = self.sampling.top_logprobs if isinstance(self.sampling, ScoredSampling) else 0

    @property
    def cached_length(self) -> int:
        """Number of generated tokens after the leaf that are in the KV cache; the last token is not yet."""
        return max(len(self.prompt) + len(self.tokens) - 1 - (self.leaf.end if self.leaf else 0), 0)

    def append_token(self, token: int, logprob: float, version: int) -> FinishReason | None:
        """Append a token; return the finish reason if it is the last one, else None."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token in self.stop_ids or self.stop_detector.detect(self.tokens):
            return "stop"
        if len(self.tokens) >= self.max_tokens:
            return "length"
        if self.on_token is not None:
            self.on_token()
        return None

    def complete(self, reason: FinishReason) -> None:
        """Resolve the future with the generation, unless the request was cancelled."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(
                Generation(
                    token_ids=tuple(self.tokens),
                    logprobs=tuple(self.logprobs),
                    versions=tuple(self.versions),
                    finish_reason=reason,
                    temperature=self.sampling.temperature,
                    top_logprobs=tuple(self.top_logprobs),
                )
            )

    def fail(self, error: EngineError) -> None:
        """Resolve the future with an error, unless the request was cancelled."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


def _with_sampled(top: TopLogprobs, token: int, logprob: float) -> TopLogprobs:
    """Return the most likely tokens, with the recorded log-prob of the sampled one if it is among them.

    The two are computed in a different order of summation and may differ in the last bit.
    """
    pairs = ((other, logprob if other == token else value) for other, value in top)
    return tuple(sorted(pairs, key=lambda pair: -pair[1]))


class Decoder(Protocol):
    """Computes the logits of a step. Rows have indices 0..n-1, which only `move_row` changes between two calls."""

    network: Any
    """The network to run; replaced when int8 layers are rebuilt."""
    fused: FusedLinears | None
    """Linear layers of the network that are fused or packed."""

    def find_prompt(self, prompt: TokenIds) -> PrefixNode | None:
        """Return the node at which the prompt ends if it is cached, else None."""

    def compute_logits(self, rows: Sequence[GenerationRequest]) -> Tensor:
        """Return the logits [n, V] of the next token of each row; rows without tokens are new and come last."""

    def prompt_logits(self, prompt: TokenIds) -> Iterator[Tensor]:
        """Yield the logits [n, V] after each token of a prompt, in parts."""

    def move_row(self, source: int, target: int, row: GenerationRequest) -> None:
        """Move the cached state of a row to another index."""

    def clear_row(self, row_index: int) -> None:
        """Erase the cached state of a row, which may contain values that are not finite."""

    def retain_finished(self, rows: Mapping[int, GenerationRequest]) -> None:
        """Keep the keys and values of finished rows (by index): they may be the prefix of a later prompt."""

    def clear_prefix_cache(self) -> None:
        """Recompute prompts from now on, because the weights have changed or a step has failed."""


class ContinuousBatch:
    """Up to `max_rows` running rows, and the requests that wait for a row."""

    def __init__(self, decoder: Decoder, max_rows: int) -> None:
        self.decoder, self.max_rows = decoder, max_rows
        self.waiting: deque[GenerationRequest] = deque()
        self.rows: list[GenerationRequest] = []

    @property
    def busy(self) -> bool:
        """Whether any request is running or waiting."""
        return bool(self.waiting or self.rows)

    @torch.inference_mode()
    def step(self, version: int) -> None:
        """Admit waiting requests, then sample one token for every row. `version` is that of the live weights."""
        self._drop_cancelled()
        joined = self._admit()
        if not self.rows:
            return
        logits = self.decoder.compute_logits(self.rows)
        for request in self.waiting if joined else ():  # a prompt stays cached while a request waits for it
            request.leaf = request.leaf or self.decoder.find_prompt(request.prompt)
        tops = {index: self._top_logprobs(row, logits[index]) for index, row in enumerate(self.rows) if row.top_count}
        uniforms = [row.rng.random() for row in self.rows]
        tokens, logprobs = sample_tokens(logits, [row.sampling for row in self.rows], uniforms)
        ended: dict[int, FinishReason | None] = {}  # row index -> finish reason, None if the logits are not finite
        for index, top in tops.items():
            self.rows[index].top_logprobs.append(_with_sampled(top, tokens[index], logprobs[index]))
        for index, (row, token, logprob) in enumerate(zip(self.rows, tokens, logprobs, strict=True)):
            reason = row.append_token(token, logprob, version) if math.isfinite(logprob) else None
            if reason is not None or not math.isfinite(logprob):
                ended[index] = reason
        self.decoder.retain_finished({index: self.rows[index] for index, reason in ended.items() if reason is not None})
        for index in reversed(ended):
            row, reason = self.rows[index], ended[index]
            self._remove(index, clear_cache=reason is None)
            if reason is None:
                row.fail(EngineError(f"the model produced logits that are not finite (weights of version {version})"))
            else:
                row.complete(reason)

    @staticmethod
    def _top_logprobs(row: GenerationRequest, logits: Tensor) -> TopLogprobs:
        """Return the most likely next tokens of a row, at its temperature."""
        return top_logprobs(log_softmax(logits[None] / (row.sampling.temperature or 1.0)), row.top_count)[0]

    def clear_prefix_cache(self) -> None:
        """Recompute the prompts of waiting requests after a weight change; running rows keep their cached keys."""
        self.decoder.clear_prefix_cache()
        for request in self.waiting:
            request.leaf = None

    @torch.inference_mode()
    def score_prompt(self, prompt: TokenIds, top_count: int) -> PromptScores:
        """Return the log-prob of each token of a prompt after the first, with the most likely tokens there."""
        logprobs: list[float] = []
        tops: list[TopLogprobs] = []
        for logits in self.decoder.prompt_logits(prompt):
            # the logits after the last token are those of a token that is not in the prompt
            targets = prompt[len(logprobs) + 1 : len(logprobs) + 1 + len(logits)]
            values, top = score_tokens(logits[: len(targets)], targets, top_count)
            logprobs += values
            tops += top
        if not all(map(math.isfinite, logprobs)):
            raise EngineError("the model produced logits that are not finite")
        return PromptScores(tuple(logprobs), tuple(tops))

    @torch.inference_mode()
    def fail(self, make_error: Callable[[], EngineError], *, include_waiting: bool) -> None:
        """Fail all running requests, and with `include_waiting` the waiting ones too."""
        for index in reversed(range(len(self.rows))):
            row = self.rows[index]
            self._remove(index, clear_cache=True)
            row.fail(make_error())
        while include_waiting and self.waiting:
            self.waiting.popleft().fail(make_error())
        self.clear_prefix_cache()

    def _admit(self) -> bool:
        """Move waiting requests to free rows; return whether there were any."""
        new_tokens = 0
        joined: set[TokenIds] = set()
        while self.waiting and len(self.rows) < self.max_rows:
            prompt = self.waiting[0].prompt
            if prompt not in joined and self.decoder.find_prompt(prompt) is None:
                if new_tokens and new_tokens + len(prompt) > MAX_PREFILL_TOKENS:
                    break
                new_tokens += len(prompt)
            joined.add(prompt)
            self.rows.append(self.waiting.popleft())
        return bool(joined)

    def _drop_cancelled(self) -> None:
        if any(request.future.cancelled() for request in self.waiting):
            self.waiting = deque(request for request in self.waiting if not request.future.cancelled())
        for index in reversed(range(len(self.rows))):
            if self.rows[index].future.cancelled():
                self._remove(index)

    def _remove(self, row_index: int, *, clear_cache: bool = False) -> None:
        """Remove a row and move the last row to its index, so that indices stay without gaps."""
        if clear_cache:
            self.decoder.clear_row(row_index)
        last = self.rows.pop()
        if row_index < len(self.rows):
            self.rows[row_index] = last
            self.decoder.move_row(len(self.rows), row_index, last)
