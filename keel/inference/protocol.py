"""What travels between engines, rollouts and the run: what was sampled, and what an engine can do.

Plain data without torch, so that it can cross processes. It holds no policy of its own: an engine answers or raises
`EngineError`, and whoever asked decides what to do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
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


class Engine(Protocol):
    """Whatever samples. All methods may be called at any time from one event loop."""

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, group: str | None = None) -> Generation:
        """An answer to these tokens. Requests of one `group` share a prompt and, where possible, its computation.

        Cancelling the call frees what it holds at once.
        """

    async def load_weights(self, folder: str, version: int, *, drain: bool = False) -> None:
        """Take all weights from a Hugging Face folder. Returns when they are live.

        Requests in flight go on, and their later tokens are of the new version; with `drain` they end first, later
        ones wait, and every answer is of one version.
        """

    async def load_adapter(self, folder: str, version: int, *, drain: bool = False) -> None:
        """Take a PEFT adapter for the base model. Returns when it is live."""

    async def version(self) -> int:
        """Of the weights that are live."""

    async def health(self) -> Health: ...

    async def close(self) -> None:
        """Stop; requests in flight end with an `EngineError`."""
