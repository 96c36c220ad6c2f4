"""OpenAI response bodies from sampled tokens: incremental text, choices, chunks and usage.

Guarantees that the deltas of a stream concatenate to the text of the complete completion, that no delta ends inside a
character or contains the start of a stop string that is completed later, and that token ids, log-probs and versions are
returned as sampled, one per token. As at OpenAI, a stop string or stop token is in the tokens but not in the text.
"""

import math
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pydantic import BaseModel

from keel.inference.protocol import FinishReason, Generation, Message, TopLogprobs
from keel.inference.server.openai_requests import RequestError
from keel.inference.server.token_texts import TokenTexts

REPLACEMENT_CHAR = "\ufffd"
"""Decoded form of bytes that are not a complete character yet."""


class ModelCard(BaseModel):
    """A served model."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "keel"


class ModelList(BaseModel):
    """Response of /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class HealthResponse(BaseModel):
    """Response of /health."""

    ready: bool
    version: int
    running: int
    waiting: int
    error: str


class VersionResponse(BaseModel):
    """Response of /version."""

    version: int
    server: Literal["keel"] = "keel"


class WeightsResponse(BaseModel):
    """Response to a weight update: the version that is live now."""

    version: int


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that the server uses."""

    def decode(self, token_ids: Any, **options: Any) -> Any:
        """Return the text of token ids."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Return the token ids of messages."""

    def __call__(self, text: Any, **options: Any) -> Any:
        """Return the token ids of a text, under `input_ids`."""

    def __len__(self) -> int:
        """Return the number of token ids."""


class ChatSession(Protocol):
    """One chat request to a server that tracks its conversations token by token."""

    prompt: Sequence[int]
    """Token ids; if the messages continue an earlier turn, they start with its tokens as sampled."""
    split_reason: str | None
    """Why the messages do not extend an earlier turn; None if they do, and for a first turn."""
    stop_token_ids: Sequence[int]
    """Token ids that end a completion."""

    def record_completion(self, token_ids: Sequence[int], stop: Sequence[str]) -> Message:
        """Parse a completion into a message with tool calls and thinking, and record it for later turns."""

    def record_streamed(self, token_ids: Sequence[int], text: str) -> None:
        """Record a completion that was streamed as plain text."""


SessionFactory = Callable[[list[Message], list[dict[str, Any]]], ChatSession]
"""Open a session for the messages and tools of a request."""


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """The next tokens of a completion; the last chunk has a finish reason."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason | None = None
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """The most likely tokens at each position, if they were requested."""


@dataclass
class IncrementalDetokenizer:
    """Text of one completion while its tokens arrive."""

    tokenizer: Tokenizer
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    _token_ids: list[int] = field(default_factory=list)
    _prefix_offset: int = 0
    """Index of the token at which decoding starts, before the first token whose text was not returned yet."""
    _read_offset: int = 0
    """Number of tokens whose text was decoded."""
    _held_text: str = ""
    """Text that may be the start of a stop string."""
    _stopped: bool = False

    def push(self, token_ids: Sequence[int], is_last: bool) -> str:
        """Add tokens and return the text that is final."""
        self._token_ids += [token for token in token_ids if token not in self.stop_token_ids]
        self._held_text += self._decode_new(is_last)
        if self._stopped:
            return ""
        ends = [end for end in (self._held_text.find(stop) for stop in self.stop) if end >= 0]
        if ends:
            self._stopped = True
            out, self._held_text = self._held_text[: min(ends)], ""
            return out
        keep = 0 if is_last else self._partial_stop_length()
        cut = len(self._held_text) - keep
        out, self._held_text = self._held_text[:cut], self._held_text[cut:]
        return out

    def _decode_new(self, is_last: bool) -> str:
        # decode from a few tokens back: a tokenizer may decode the first token of a text differently
        old_text = self._decode(self._token_ids[self._prefix_offset : self._read_offset])
        text = self._decode(self._token_ids[self._prefix_offset :])
        if len(text) <= len(old_text) or (text.endswith(REPLACEMENT_CHAR) and not is_last):
            return ""
        self._prefix_offset, self._read_offset = self._read_offset, len(self._token_ids)
        return text[len(old_text) :]

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _partial_stop_length(self) -> int:
        """Return the length of the longest suffix that is the start of a stop string."""
        longest = max((len(stop) for stop in self.stop), default=1) - 1
        for length in range(min(longest, len(self._held_text)), 0, -1):
            if any(stop.startswith(self._held_text[-length:]) for stop in self.stop):
                return length
        return 0


@dataclass
class ResponseBuilder:
    """Build the response bodies of one request: completion or chat, complete or in chunks."""

    model: str
    chat: bool
    stream: bool
    logprobs: bool
    token_ids: bool
    top_count: int = 0
    """The number of most likely tokens at each position."""
    training_fields: bool = False
    """Put everything that training needs into every choice, requested or not."""
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.logprobs = self.logprobs or self.training_fields
        self.token_ids = self.token_ids or self.training_fields
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"

    def envelope(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Return a response or chunk with these choices."""
        kind = ("chat.completion.chunk" if self.stream else "chat.completion") if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices, **more}

    def choice(
        self,
        index: int,
        chunk: TokenChunk,
        text: str,
        texts: TokenTexts,
        text_offset: int = 0,
        message: Message | None = None,
    ) -> dict[str, Any]:
        """Return one choice, or the delta that a chunk adds to it.

        Args:
            index: Index of the choice.
            chunk: The tokens.
            text: Their text.
            texts: Texts of single tokens, for the log-probs.
            text_offset: Length of the choice's text before this chunk.
            message: The parsed message, if a chat session parsed it; default: the text.
        """
        check_chunk(chunk)
        choice: dict[str, Any] = {"index": index}
        if not self.chat:
            choice["text"] = text
        elif self.stream:
            choice["delta"] = {"content": text}
        else:
            choice["message"] = message or {"role": "assistant", "content": text}
        choice["finish_reason"] = chunk.finish_reason
        if chunk.finish_reason == "stop" and message and message.get("tool_calls"):
            choice["finish_reason"] = "tool_calls"
        choice["logprobs"] = self._logprobs(chunk, texts, text_offset) if self.logprobs else None
        choice["versions"] = list(chunk.versions)
        if self.token_ids:
            choice["token_ids"] = list(chunk.token_ids)
        return choice

    def prepend_prompt(
        self, choice: dict[str, Any], text: str, prompt: Sequence[int], generation: Generation, texts: TokenTexts
    ) -> None:
        """Put the prompt before the completion of a choice, with its log-probs if they were requested."""
        choice["text"] = text + choice["text"]
        if generation.prompt_scores is None:
            return
        scores, legacy = generation.prompt_scores, LegacyLogprobs(texts, self.top_count)
        rows = ((None, *scores.logprobs), ((), *(scores.top_logprobs or ((),) * len(scores.logprobs))))
        for token, logprob, top in zip(prompt, *rows, strict=True):
            legacy.append(token, logprob, top)
        tops = generation.top_logprobs or ((),) * len(generation.token_ids)
        for token, value, top in zip(generation.token_ids, generation.logprobs, tops, strict=True):
            legacy.append(token, value, top)
        choice["logprobs"] = legacy.body()

    def _logprobs(self, chunk: TokenChunk, texts: TokenTexts, text_offset: int) -> dict[str, Any]:
        tops = chunk.top_logprobs or ((),) * len(chunk.token_ids)
        rows = list(zip(chunk.token_ids, chunk.logprobs, tops, strict=True))
        if self.chat:
            return {
                "content": [
                    {
                        **_token_entry(token, value, texts),
                        "top_logprobs": [_token_entry(*pair, texts) for pair in top[: self.top_count]],
                    }
                    for token, value, top in rows
                ]
            }
        legacy = LegacyLogprobs(texts, self.top_count, text_offset)
        for token, value, top in rows:
            legacy.append(token, value, top)
        return legacy.body()


class LegacyLogprobs:
    """The `logprobs` of a text completion: lists with one entry per token."""

    def __init__(self, texts: TokenTexts, top_count: int, text_offset: int = 0) -> None:
        self._texts, self._top_count, self._text_offset = texts, top_count, text_offset
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._tops: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def append(self, token: int, logprob: float | None, top: TopLogprobs) -> None:
        """Add a token; the first one of a prompt has no log-prob."""
        text = self._texts.text(token)
        self._tokens.append(text)
        self._logprobs.append(logprob)
        self._offsets.append(self._text_offset)
        self._text_offset += len(text)
        by_text: dict[str, float] = {}
        for other, value in (*top[: self._top_count], *(() if logprob is None else ((token, logprob),))):
            by_text.setdefault(self._texts.text(other), value)  # of equal texts the most likely counts
        self._tops.append(None if logprob is None else by_text)

    def body(self) -> dict[str, Any]:
        """Return the object of the response; `top_logprobs` is null if none were requested."""
        return {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._tops if self._top_count else None,
            "text_offset": self._offsets,
        }


def _token_entry(token: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    return {"token": texts.text(token), "logprob": logprob, "bytes": list(texts.raw_bytes(token))}


def check_chunk(chunk: TokenChunk) -> None:
    """Raise if a chunk does not have one finite log-prob and one version per token."""
    if not len(chunk.token_ids) == len(chunk.logprobs) == len(chunk.versions):
        raise RequestError(
            500,
            f"the engine returned {len(chunk.token_ids)} tokens, {len(chunk.logprobs)} log-probs and"
            f" {len(chunk.versions)} versions",
        )
    for value in chunk.logprobs:
        if not math.isfinite(value):
            raise RequestError(500, f"the engine returned a log-prob of {value}")


def count_usage(prompts: Iterable[Sequence[int]], completion_tokens: int) -> dict[str, int]:
    """Return the token counts of a request; each prompt counts once, whatever the number of its completions."""
    prompt = sum(len(ids) for ids in prompts)
    return {"prompt_tokens": prompt, "completion_tokens": completion_tokens, "total_tokens": prompt + completion_tokens}
