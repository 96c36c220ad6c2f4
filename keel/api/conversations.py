"""The endpoint's memory of sampled turns, so that later turns of a conversation extend the exact tokens.

A client sends messages, and text does not determine the tokens it was sampled as. Each completion is remembered with
the messages it answered; a request that continues from it gets the same tokens, followed by what is new. The memory is
bounded: a forgotten turn is rendered again, which is still exact and becomes a separate training sample.
"""

import copy
import hashlib
import json
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keel.inference.protocol import Message
from keel.rollout.rendering.renderer import Prompt, RenderedTurn, Renderer

MAX_REMEMBERED_TURNS = 16384
"""Remembered completions: more than are ever in flight."""


class Conversations:
    """Remembered turns, by the beginning of their conversation."""

    def __init__(self, renderer: Renderer, max_turns: int = MAX_REMEMBERED_TURNS) -> None:
        self._renderer = renderer
        self._max_turns = max_turns
        self._turn_count = 0
        self._turns: OrderedDict[str, list[RenderedTurn]] = OrderedDict()

    def open_session(self, messages: list[Message], tools: list[dict[str, Any]]) -> "RecordedChatSession":
        """Return the session of a request. Implements `open_session` of `keel.inference.server.openai_responses`."""
        # clients send messages back with their empty fields
        cleaned = [{key: value for key, value in message.items() if value is not None} for message in messages]
        key = _conversation_key(cleaned, tools)
        continues = any(message["role"] == "assistant" for message in cleaned)
        prompt = self._renderer.extend(self._turns.get(key, ()) if continues else (), cleaned, tools or None)
        return RecordedChatSession(self, self._renderer, key, prompt, tools or None)

    def record_turn(self, key: str, turn: RenderedTurn) -> None:
        """Remember a turn, and forget turns of the least recently used conversations."""
        self._turns.setdefault(key, []).append(turn)
        self._turns.move_to_end(key)
        self._turn_count += 1
        while self._turn_count > self._max_turns:
            oldest = next(iter(self._turns))
            turns = self._turns[oldest]
            del turns[0]
            self._turn_count -= 1
            if not turns:
                del self._turns[oldest]


@dataclass
class RecordedChatSession:
    """One request. Implements `ChatSession` of `keel.inference.server.openai_responses`."""

    conversations: Conversations
    renderer: Renderer
    conversation_key: str
    rendered: Prompt
    tools: list[dict[str, Any]] | None

    def __post_init__(self) -> None:
        self.prompt: Sequence[int] = self.rendered.ids
        self.split_reason = self.rendered.split_reason
        self.stop_token_ids: Sequence[int] = self.renderer.stop_token_ids

    def record_completion(self, token_ids: Sequence[int], stop: Sequence[str]) -> Message:
        """Remember a completion and return it as the message the client gets and may send back."""
        message = self.renderer.parse(token_ids, prompt_ids=self.prompt, tools=self.tools)
        message["content"] = _truncate_at_stop(str(message["content"]), stop)
        for call in message.get("tool_calls", ()):
            # unique, so that the next turn finds exactly this completion among equal ones
            call["id"] = f"call_{uuid.uuid4().hex}"
        self._record_turn(token_ids, message)
        return message

    def record_streamed(self, token_ids: Sequence[int], text: str) -> None:
        """Remember a completion that the client received as plain text."""
        self._record_turn(token_ids, {"role": "assistant", "content": text})

    def _record_turn(self, token_ids: Sequence[int], message: Message) -> None:
        turn = RenderedTurn(self.rendered, self.tools, tuple(token_ids), copy.deepcopy(message))
        self.conversations.record_turn(self.conversation_key, turn)


def _conversation_key(messages: Sequence[Message], tools: Sequence[Any]) -> str:
    """Return a digest of what no later turn changes: everything up to the first user message."""
    size = next((i for i, message in enumerate(messages) if message["role"] == "user"), len(messages) - 1) + 1
    text = json.dumps([list(messages[:size]), list(tools)], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _truncate_at_stop(text: str, stop: Sequence[str]) -> str:
    """Return the text before the first stop string."""
    ends = [position for position in map(text.find, stop) if position >= 0]
    return text[: min(ends)] if ends else text
