"""What travels between engines, rollouts and the run: what was sampled, and what an engine can do.

Plain data without torch, so that it can cross processes. It holds no policy of its own: an engine answers or raises
`EngineError`, and whoever asked decides what to do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from keel.config import Sampling
from keel.errors import KeelError

Message = dict[str, Any]
"""A chat message in the OpenAI form: role, content, and for tools tool_calls or tool_call_id."""

FinishReason = Literal["stop", "length", "abort"]
"""Why a generation ended: a stop id or string, max_tokens (or the model's own limit), or nobody wanted it any more."""


class EngineError(KeelError):
    """An engine that could not answer."""

    def __init__(self, message: str, *, retryable: bool = True) -> None:
        super().__init__(message)
        self.retryable = retryable
        """Whether the same request may succeed elsewhere or later; a request that is wrong in itself never will."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer, token by token."""

    token_ids: tuple[int, ...]
    """As sampled, the id or text that stopped it included."""
    logprobs: tuple[float, ...]
    """Of each token under the sampler, at the temperature."""
    versions: tuple[int, ...]
    """The policy version that each token was sampled from."""
    finish_reason: FinishReason
    temperature: float

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"a generation of {len(self.token_ids)} tokens has {len(self.logprobs)} log-probs and"
                f" {len(self.versions)} versions"
            )


@dataclass(frozen=True, slots=True)
class Health:
    """How an engine is doing."""

    ready: bool
    version: int
    running: int = 0
    """Requests being answered."""
    waiting: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class BroadcastSlot:
    """A receiver's place in a broadcast of weights; the address is that of whoever hands the seat out."""

    port: int
    """Where the sender can be met."""
    rank: int
    """From 1; the sender is 0."""


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


class Engine(Protocol):
    """Whatever samples. All methods may be called at any time from one event loop."""

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, group: str | None = None) -> Generation:
        """An answer to these tokens. Requests of one `group` share a prompt and, where possible, its computation.

        Cancelling the call frees what it holds at once.
        """

    async def load_weights(self, source: WeightSource, version: int, *, drain: bool = False) -> None:
        """Load all weights, or an adapter on top of those loaded last. Returns when they are live.

        Requests in flight continue, and their later tokens are sampled with the new version. With `drain` they finish
        first, later requests wait, and every completion has tokens of a single version.
        """

    async def version(self) -> int:
        """Of the weights that are live."""

    async def health(self) -> Health: ...

    async def close(self) -> None:
        """Stop; requests in flight end with an `EngineError`."""
