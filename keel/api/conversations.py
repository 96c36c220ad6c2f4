"""Conversations over HTTP, token by token: a server's memory of what it sampled, so that turns extend it.

A client sends messages, and text does not say which tokens it was sampled as. Each answer is remembered with the
messages it answered; a request that goes on from one gets its tokens as they were, with what is new behind them. The
memory is bounded: what was forgotten is rendered anew, which is still exact, and becomes a training sample of its own.
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
"""Answers that are remembered: more than are ever under way."""


class Conversations:
    """What was said, by how its conversation began."""

    def __init__(self, renderer: Renderer, max_turns: int = MAX_REMEMBERED_TURNS) -> None:
        self._renderer = renderer
        self._max_turns = max_turns
        self._turn_count = 0
        self._turns: OrderedDict[str, list[RenderedTurn]] = OrderedDict()

    def open_session(self, messages: list[Message], tools: list[dict[str, Any]]) -> "RecordedChatSession":
        """The prompt of a request. Implements `keel.inference.server.openai_responses.OpenTalk`."""
        # clients send back what they were given, with the fields that were empty
        given = [{key: value for key, value in message.items() if value is not None} for message in messages]
        key = _conversation_key(given, tools)
        goes_on = any(message["role"] == "assistant" for message in given)
        prompt = self._renderer.extend(self._turns.get(key, ()) if goes_on else (), given, tools or None)
        return RecordedChatSession(self, self._renderer, key, prompt, tools or None)

    def record_turn(self, key: str, turn: RenderedTurn) -> None:
        """Keep a turn, and forget the conversations that were not spoken in for longest."""
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
    """One request. Implements `keel.inference.server.openai_responses.Talk`."""

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
        """What was said, as the client gets it and may send it back."""
        message = self.renderer.parse(token_ids, prompt_ids=self.prompt, tools=self.tools)
        message["content"] = _truncate_at_stop(str(message["content"]), stop)
        for call in message.get("tool_calls", ()):
            # unique, so that the next turn finds exactly this answer among others that say the same
            call["id"] = f"call_{uuid.uuid4().hex}"
        self._record_turn(token_ids, message)
        return message

    def record_streamed(self, token_ids: Sequence[int], text: str) -> None:
        """The same for an answer that the client got as plain text."""
        self._record_turn(token_ids, {"role": "assistant", "content": text})

    def _record_turn(self, token_ids: Sequence[int], message: Message) -> None:
        turn = RenderedTurn(self.rendered, self.tools, tuple(token_ids), copy.deepcopy(message))
        self.conversations.record_turn(self.conversation_key, turn)


def _conversation_key(messages: Sequence[Message], tools: Sequence[Any]) -> str:
    """A digest of what no later turn changes: everything up to the first message of the user."""
    size = next((at for at, message in enumerate(messages) if message["role"] == "user"), len(messages) - 1) + 1
    text = json.dumps([list(messages[:size]), list(tools)], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _truncate_at_stop(text: str, stop: Sequence[str]) -> str:
    """Without what follows a stop text, as everywhere in the protocol."""
    ends = [at for at in (text.find(one) for one in stop) if at >= 0]
    return text[: min(ends)] if ends else text
