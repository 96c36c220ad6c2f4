"""From sampled tokens to the OpenAI shapes: text as it grows, choices, chunks, usage.

Guarantees that the deltas of a stream joined are the text of the whole answer, that no delta ends inside a character or
holds the beginning of a stop text that later turns out to be one, and that token ids, log-probs and versions are passed
on as they were sampled, one per token. What ended an answer is in its tokens and not in its text, as at OpenAI.
"""

import math
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from keel.inference.protocol import FinishReason, Message
from keel.inference.server.openai_requests import RequestError

FINISH_REASONS: Mapping[str, str] = {"stop": "stop", "length": "length", "abort": "abort"}
"""The finish reasons of answers in the words of the protocol ("abort" is vLLM's)."""

REPLACEMENT_CHAR = "\ufffd"
"""What a tokenizer shows for bytes that are not yet a character."""


class Tokenizer(Protocol):
    """What the server needs of a Hugging Face tokenizer."""

    def decode(self, token_ids: Any, **options: Any) -> Any:
        """Token ids as text."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Messages as token ids."""

    def __call__(self, text: Any, **options: Any) -> Any:
        """Text as token ids."""

    def __len__(self) -> int:
        """Token ids are below it."""


class ChatSession(Protocol):
    """One chat request to a server that knows its conversations token by token."""

    prompt: Sequence[int]
    """Token ids: those of an earlier turn as they were sampled and what is new, where the messages go on from one."""
    split_reason: str | None
    """Why they do not extend an earlier turn; none when they do, and for a first turn."""
    stop_token_ids: Sequence[int]
    """The ids that end an answer."""

    def record_completion(self, token_ids: Sequence[int], stop: Sequence[str]) -> Message:
        """What an answer says, tool calls and thinking apart, noted for the turns that go on from it."""

    def record_streamed(self, token_ids: Sequence[int], text: str) -> None:
        """Note an answer that was handed out as plain text."""


SessionFactory = Callable[[list[Message], list[dict[str, Any]]], ChatSession]
"""From the messages and tools of a request."""


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """The next tokens of an answer; a finish says that they are its last."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason | None = None


@dataclass
class IncrementalDetokenizer:
    """The text of one answer while its tokens arrive."""

    tokenizer: Tokenizer
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    _token_ids: list[int] = field(default_factory=list)
    _prefix_offset: int = 0
    """Where decoding begins: a token or more before the first one whose text is not yet out."""
    _read_offset: int = 0
    """Tokens whose text was taken."""
    _held_text: str = ""
    """Text that may still turn out to begin a stop text."""
    _stopped: bool = False

    def push(self, token_ids: Sequence[int], is_last: bool) -> str:
        """The text that these tokens add for certain."""
        self._token_ids += [token for token in token_ids if token not in self.stop_token_ids]
        self._held_text += self._decode_new(is_last)
        if self._stopped:
            return ""
        ends = [at for at in (self._held_text.find(stop) for stop in self.stop) if at >= 0]
        if ends:
            self._stopped = True
            out, self._held_text = self._held_text[: min(ends)], ""
            return out
        keep = 0 if is_last else self._partial_stop_length()
        cut = len(self._held_text) - keep
        out, self._held_text = self._held_text[:cut], self._held_text[cut:]
        return out

    def _decode_new(self, is_last: bool) -> str:
        # decoded from a few tokens back, since a tokenizer may treat the first token of a text in its own way
        before = self._decode(self._token_ids[self._prefix_offset : self._read_offset])
        now = self._decode(self._token_ids[self._prefix_offset :])
        if len(now) <= len(before) or (now.endswith(REPLACEMENT_CHAR) and not is_last):
            return ""
        self._prefix_offset, self._read_offset = self._read_offset, len(self._token_ids)
        return now[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _partial_stop_length(self) -> int:
        """Characters at the end that a stop text could begin with."""
        longest = max((len(stop) for stop in self.stop), default=1) - 1
        for length in range(min(longest, len(self._held_text)), 0, -1):
            if any(stop.startswith(self._held_text[-length:]) for stop in self.stop):
                return length
        return 0


@dataclass
class ResponseBuilder:
    """How one endpoint writes its answers: completions or chat, whole or in chunks."""

    model: str
    chat: bool
    stream: bool
    logprobs: bool
    token_ids: bool
    training_fields: bool = False
    """All that training needs is in every choice, asked for or not."""
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.logprobs = self.logprobs or self.training_fields
        self.token_ids = self.token_ids or self.training_fields
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"

    def envelope(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """A response or a chunk with these choices."""
        kind = ("chat.completion.chunk" if self.stream else "chat.completion") if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices, **more}

    def choice(
        self,
        index: int,
        chunk: TokenChunk,
        text: str,
        tokenizer: Tokenizer,
        text_offset: int = 0,
        message: Message | None = None,
    ) -> dict[str, Any]:
        """One choice, or what a piece adds to it; `offset` is the length of its text so far.

        `message`: what the answer says, where it was read by more than its text.
        """
        check_chunk(chunk)
        choice: dict[str, Any] = {"index": index}
        if not self.chat:
            choice["text"] = text
        elif self.stream:
            choice["delta"] = {"content": text}
        else:
            choice["message"] = message or {"role": "assistant", "content": text}
        choice["finish_reason"] = None if chunk.finish_reason is None else FINISH_REASONS[chunk.finish_reason]
        if chunk.finish_reason == "stop" and message and message.get("tool_calls"):
            choice["finish_reason"] = "tool_calls"
        choice["logprobs"] = self._logprobs(chunk, tokenizer, text_offset) if self.logprobs else None
        choice["versions"] = list(chunk.versions)
        if self.token_ids:
            choice["token_ids"] = list(chunk.token_ids)
        return choice

    def _logprobs(self, chunk: TokenChunk, tokenizer: Tokenizer, text_offset: int) -> dict[str, Any]:
        tokens: list[str] = [
            tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            for token in chunk.token_ids
        ]
        if self.chat:
            rows = zip(tokens, chunk.logprobs, strict=True)
            return {
                "content": [
                    {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []}
                    for token, value in rows
                ]
            }
        offsets = []
        for token in tokens:
            offsets.append(text_offset)
            text_offset += len(token)
        # the likeliest other tokens are not computed, which null says
        return {
            "tokens": tokens,
            "token_logprobs": list(chunk.logprobs),
            "top_logprobs": None,
            "text_offset": offsets,
        }


def check_chunk(chunk: TokenChunk) -> None:
    """Refuse to pass on what is not one finite log-prob and one version per token."""
    if not len(chunk.token_ids) == len(chunk.logprobs) == len(chunk.versions):
        raise RequestError(
            500,
            f"the engine gave {len(chunk.token_ids)} tokens, {len(chunk.logprobs)} log-probs and"
            f" {len(chunk.versions)} versions",
        )
    for value in chunk.logprobs:
        if not math.isfinite(value):
            raise RequestError(500, f"the engine gave a log-prob of {value}")


def count_usage(prompts: Iterable[Sequence[int]], completion_tokens: int) -> dict[str, int]:
    """Tokens of a request; a prompt counts once however many answers it has."""
    prompt = sum(len(ids) for ids in prompts)
    return {"prompt_tokens": prompt, "completion_tokens": completion_tokens, "total_tokens": prompt + completion_tokens}
