"""The `Engine` protocol and the data that engines, rollouts and the run exchange.

Everything here is plain data without torch, so that it can cross process boundaries. Retry policies are not part of the
protocol: an engine returns a result or raises `EngineError`, and the caller decides what to do next.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from keel.config import Sampling
from keel.errors import KeelError

Message = dict[str, Any]
"""A chat message in the OpenAI format: role, content, and for tools tool_calls or tool_call_id."""

FinishReason = Literal["stop", "length", "abort"]
"""Why a generation ended: a stop id or string, max_tokens (or the model's length limit), or the engine gave it up."""


class EngineError(KeelError):
    """An engine failed to produce a result."""

    def __init__(self, message: str, *, retryable: bool = True) -> None:
        super().__init__(message)
        self.retryable = retryable
        """Whether the same request may succeed later or on another engine; False for an invalid request."""


class ScoredSampling(Sampling):
    """Sampling that also returns log-probs of tokens that were not sampled; see `ScoringEngine`."""

    top_logprobs: int = 0
    """Return this many of the most likely tokens at each position."""
    score_prompt: bool = False
    """Return the log-probs of the prompt's tokens, at temperature 1."""
    score_only: bool = False
    """Sample nothing."""


TopLogprobs = tuple[tuple[int, float], ...]
"""The most likely tokens at one position with their log-probs, the most likely first."""


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probs of a prompt's tokens after the first, which follows nothing."""

    logprobs: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Generation:
    """One completion with per-token data; all tuples have the same length."""

    token_ids: tuple[int, ...]
    """Sampled token ids, including the stop id or the tokens of the stop string."""
    logprobs: tuple[float, ...]
    """Log-prob of each token under the sampler, at `temperature`."""
    versions: tuple[int, ...]
    """Policy version that sampled each token."""
    finish_reason: FinishReason
    temperature: float
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """The most likely tokens at each position, if they were requested."""
    prompt_scores: PromptScores | None = None
    """Log-probs of the prompt, if they were requested."""

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"a generation of {len(self.token_ids)} tokens has {len(self.logprobs)} log-probs and"
                f" {len(self.versions)} versions"
            )


@dataclass(frozen=True, slots=True)
class Health:
    """Status of an engine."""

    ready: bool
    version: int
    running: int = 0
    """Requests being decoded."""
    waiting: int = 0
    """Queued requests."""
    error: str = ""
    """Last error, or an empty string."""


@dataclass(frozen=True, slots=True)
class BroadcastSlot:
    """A receiver's port and rank in a weight broadcast; the host is the one that assigned the slot."""

    port: int
    """Port of the sender."""
    rank: int
    """Rank of the receiver, from 1; the sender has rank 0."""


class BroadcastClient(Protocol):
    """An engine that can tell its server to receive a broadcast."""

    async def receive_weights(self, slot: BroadcastSlot, version: int, *, drain: bool = False) -> None:
        """Receive all weights at this slot. Returns when they are live."""


class WeightSender(Protocol):
    """Sends weights to one server while the server receives them."""

    async def send_to(self, engine: BroadcastClient, version: int, *, drain: bool) -> None:
        """Send this version through the engine's `receive_weights`. Returns when the weights are live."""


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Where an engine gets new weights from. Two sources are equal if their kind and path are."""

    kind: Literal["in_memory", "folder", "adapter", "broadcast"]
    path: Path | None = None
    """Folder with all weights (`folder`) or a PEFT adapter (`adapter`), on a path that the engine can read."""
    tensors: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """State dict of all weights (`in_memory`)."""
    sender: WeightSender | None = field(default=None, compare=False, repr=False)
    """Sender of all weights (`broadcast`)."""

    @classmethod
    def folder(cls, path: str | Path) -> "WeightSource":
        """Return the source of all weights in a Hugging Face folder."""
        return cls("folder", Path(path))

    @classmethod
    def adapter(cls, path: str | Path) -> "WeightSource":
        """Return the source of a PEFT adapter in a folder; it applies to the base weights loaded last."""
        return cls("adapter", Path(path))

    def __str__(self) -> str:
        return self.kind if self.path is None else str(self.path)

    def unsupported_by(self, engine: str) -> EngineError:
        """Return the error of an engine that cannot load from this kind of source."""
        return EngineError(f"{engine} cannot load weights from a source of kind {self.kind}", retryable=False)


@runtime_checkable
class ScoringEngine(Protocol):
    """An engine that serves `ScoredSampling`; other engines treat it as plain sampling."""

    serves_scores: Literal[True]


class Engine(Protocol):
    """Samples completions. All methods may be called at any time from one event loop."""

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, group: str | None = None) -> Generation:
        """Return a completion of these tokens.

        Requests of one `group` have the same prompt and share its computation where possible. Cancelling the call frees
        its resources immediately.
        """

    async def load_weights(self, source: WeightSource, version: int, *, drain: bool = False) -> None:
        """Load all weights, or an adapter on top of those loaded last. Returns when they are live.

        Requests in flight continue, and their later tokens are sampled with the new version. With `drain` they finish
        first, later requests wait, and every completion has tokens of a single version.
        """

    async def version(self) -> int:
        """Return the version of the live weights."""

    async def health(self) -> Health:
        """Return the current status; never waits for decoding."""

    async def close(self) -> None:
        """Stop the engine; requests in flight fail with `EngineError`."""
