"""The answers that are decoded together: who waits, who runs, and what one step does for all of them.

Invariant: every request that enters leaves exactly once, finished, failed or cancelled, and requests start in the order
in which they came. A finished or cancelled row is gone before the next forward pass. Knows nothing of threads or event
loops: `step` is called by whoever owns the batch.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from keel.config import Sampling
from keel.inference.local.fused_linear import FusedLinears
from keel.inference.local.prefix_cache import PrefixNode, TokenIds
from keel.inference.local.sampling import StopStringDetector, sample_tokens
from keel.inference.protocol import EngineError, FinishReason, Generation

MAX_PREFILL_TOKENS = 2048
"""No further prompts join a step that has this many prompt tokens to compute: answers under way wait for it."""


@dataclass(eq=False)
class GenerationRequest:
    """One answer under way."""

    prompt: TokenIds
    sampling: Sampling
    stop_ids: frozenset[int]
    stop_detector: StopStringDetector
    max_tokens: int
    """How many tokens it may have."""
    future: Future[Generation] = field(default_factory=Future)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    on_token: Callable[[], None] | None = None
    """Called after each token but the last."""
    leaf: PrefixNode | None = None
    """Where its prompt ends, while that is computed and kept; later also where the older part of a long answer ends."""

    def __post_init__(self) -> None:
        # of its own, so that nobody else's draws change what it gets
        self.rng = random.Random(self.sampling.seed)

    @property
    def cached_length(self) -> int:
        """Own tokens that have been through the model since the leaf; the last one has not."""
        return max(len(self.prompt) + len(self.tokens) - 1 - (self.leaf.end if self.leaf else 0), 0)

    def append_token(self, token: int, logprob: float, version: int) -> FinishReason | None:
        """One more token; why it was the last, if it was."""
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
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(
                Generation(
                    token_ids=tuple(self.tokens),
                    logprobs=tuple(self.logprobs),
                    versions=tuple(self.versions),
                    finish_reason=reason,
                    temperature=self.sampling.temperature,
                )
            )

    def fail(self, error: EngineError) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class Decoder(Protocol):
    """What computes. Rows are numbered 0..n-1, and keep their numbers between two calls unless they are moved."""

    network: Any
    """What is run; another one after int8 layers were made anew."""
    fused: FusedLinears | None
    """Layers of the network that are computed as one."""

    def find_prompt(self, prompt: TokenIds) -> PrefixNode | None:
        """Where the prompt ends, if it need not be computed."""

    def compute_logits(self, rows: Sequence[GenerationRequest]) -> Tensor:
        """[n, V] for the next token of each row; rows without tokens are new, and come last."""

    def move_row(self, source: int, target: int, row: GenerationRequest) -> None:
        """The row has another number now."""

    def clear_row(self, row_index: int) -> None:
        """The row with this number held what must not be seen again."""

    def retain_finished(self, rows: Mapping[int, GenerationRequest]) -> None:
        """Rows with these numbers are finished: what they have computed may be the beginning of a prompt to come."""

    def clear_prefix_cache(self) -> None:
        """The weights have changed, or a step failed: compute new prompts anew."""


class ContinuousBatch:
    """Up to `size` rows, and the requests that wait for one."""

    def __init__(self, decoder: Decoder, max_rows: int) -> None:
        self.decoder, self.max_rows = decoder, max_rows
        self.waiting: deque[GenerationRequest] = deque()
        self.rows: list[GenerationRequest] = []

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.rows)

    @torch.inference_mode()
    def step(self, version: int) -> None:
        """One token for every row, after new ones have joined. `version` is of the weights that are live."""
        self._drop_cancelled()
        joined = self._admit()
        if not self.rows:
            return
        logits = self.decoder.compute_logits(self.rows)
        for request in self.waiting if joined else ():  # a prompt is kept as long as somebody waits for it
            request.leaf = request.leaf or self.decoder.find_prompt(request.prompt)
        chance = [row.rng.random() for row in self.rows]
        tokens, logprobs = sample_tokens(logits, [row.sampling for row in self.rows], chance)
        ended: dict[int, FinishReason | None] = {}
        """Rows that leave, with None for those whose logits are not finite."""
        for number, (row, token, logprob) in enumerate(zip(self.rows, tokens, logprobs, strict=True)):
            why = row.append_token(token, logprob, version) if math.isfinite(logprob) else None
            if why is not None or not math.isfinite(logprob):
                ended[number] = why
        self.decoder.retain_finished({number: self.rows[number] for number, why in ended.items() if why is not None})
        for number in reversed(ended):
            row, why = self.rows[number], ended[number]
            self._remove(number, clear_cache=why is None)
            if why is None:
                row.fail(EngineError(f"the model of version {version} gives logits that are not finite"))
            else:
                row.complete(why)

    def clear_prefix_cache(self) -> None:
        """The weights have changed: what waits is computed by the new ones; what runs goes on with what it has."""
        self.decoder.clear_prefix_cache()
        for request in self.waiting:
            request.leaf = None

    @torch.inference_mode()
    def fail(self, make_error: Callable[[], EngineError], *, include_waiting: bool) -> None:
        """End what runs, and what waits too if asked."""
        for number in reversed(range(len(self.rows))):
            row = self.rows[number]
            self._remove(number, clear_cache=True)
            row.fail(make_error())
        while include_waiting and self.waiting:
            self.waiting.popleft().fail(make_error())
        self.clear_prefix_cache()

    def _admit(self) -> bool:
        """Whether anybody joined."""
        new = 0
        joined: set[TokenIds] = set()
        while self.waiting and len(self.rows) < self.max_rows:
            prompt = self.waiting[0].prompt
            if prompt not in joined and self.decoder.find_prompt(prompt) is None:
                if new and new + len(prompt) > MAX_PREFILL_TOKENS:
                    break
                new += len(prompt)
            joined.add(prompt)
            self.rows.append(self.waiting.popleft())
        return bool(joined)

    def _drop_cancelled(self) -> None:
        if any(request.future.cancelled() for request in self.waiting):
            self.waiting = deque(request for request in self.waiting if not request.future.cancelled())
        for number in reversed(range(len(self.rows))):
            if self.rows[number].future.cancelled():
                self._remove(number)

    def _remove(self, row_index: int, *, clear_cache: bool = False) -> None:
        """Rows stay numbered without gaps: the last takes the place of the one that leaves."""
        if clear_cache:
            self.decoder.clear_row(row_index)
        last = self.rows.pop()
        if row_index < len(self.rows):
            self.rows[row_index] = last
            self.decoder.move_row(len(self.rows), row_index, last)
