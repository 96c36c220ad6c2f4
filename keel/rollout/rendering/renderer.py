"""From messages to tokens, turn by turn, so that what was sampled is extended and never rebuilt.

Guarantees that a prompt made by `extend` either begins with exactly the tokens of an earlier turn (its prompt and what
was sampled), or comes with the reason why not: the environment changed its history ("compaction", "branch", "tools"),
the model's family strips earlier thinking ("thinking"), or the family's format cannot be continued ("template"). It
renders text only: images are not for here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keel.config.rollout import RendererSettings
from keel.inference.protocol import Message
from keel.rollout.rendering.family_renderer import FamilyRenderer, find_family
from keel.rollout.rendering.template_renderer import TemplateRenderer

Tools = Sequence[Any] | None


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens to sample after."""

    ids: tuple[int, ...]
    messages: tuple[Message, ...] = ()
    """What they say: as given, with the replies as they were sampled, thinking included."""
    reason: str | None = None
    """Why they do not extend an earlier turn; none when they do, and for the first turn."""
    thinking: frozenset[int] = frozenset()
    """The messages whose thinking is in the tokens."""


@dataclass(frozen=True, slots=True)
class Spoken:
    """A turn as the renderer needs it to go on from."""

    prompt: Prompt
    tools: Tools
    sampled: tuple[int, ...]
    reply: Message
    """What `parse` made of `sampled`."""

    def continued_by(self, messages: Sequence[Message]) -> bool:
        """Whether the messages begin with this turn, prompt and reply."""
        size = len(self.prompt.messages)
        return len(messages) > size and self.repeated_by(messages) and _same(messages[size], self.reply)

    def repeated_by(self, messages: Sequence[Message]) -> bool:
        """Whether the messages begin with those of this turn's prompt."""
        said = self.prompt.messages
        return len(messages) >= len(said) and all(map(_same, messages, said))


class Renderer:
    """Messages to tokens and back, for one model."""

    def __init__(self, tokenizer: Any, settings: RendererSettings | None = None) -> None:
        self.settings = settings or RendererSettings()
        self.family = find_family(tokenizer, self.settings)
        """As the `renderers` library calls it; none: the model's own chat template is used."""
        self._library = FamilyRenderer(tokenizer, self.family, self.settings) if self.family is not None else None
        self._template = TemplateRenderer(tokenizer) if self._library is None else None
        used = self._library or self._template
        assert used is not None
        self.stop_token_ids: tuple[int, ...] = used.stop_token_ids
        """The ids that end an answer."""

    def render(self, messages: Sequence[Message], tools: Tools = None) -> list[int]:
        """The whole conversation and the opening of the next answer."""
        return list(self._whole(messages, tools, None).ids)

    def parse(self, token_ids: Sequence[int], *, prompt_ids: Sequence[int] = (), tools: Tools = None) -> Message:
        """The assistant message that was sampled: content, and where there are any reasoning_content and tool_calls."""
        if self._library is not None:
            return self._library.parse(token_ids, prompt_ids, tools)
        assert self._template is not None
        return self._template.parse(token_ids, prompt_ids)

    def extend(self, turns_so_far: Sequence[Spoken], messages: Sequence[Message], tools: Tools = None) -> Prompt:
        """The prompt for these messages: where possible the tokens of the turn they go on from, and what is new."""
        if not turns_so_far:
            return self._whole(messages, tools, None)
        last = max(
            (turn for turn in turns_so_far if turn.continued_by(messages)),
            key=lambda turn: len(turn.prompt.messages),
            default=None,
        )
        if last is None:
            again = any(turn.repeated_by(messages) for turn in turns_so_far)
            return self._whole(messages, tools, "branch" if again else "compaction")
        said = last.prompt.messages
        messages = [*said, last.reply, *messages[len(said) + 1 :]]
        if _list(tools) != _list(last.tools):
            return self._whole(messages, tools, "tools")
        return self._bridge_family(last, messages) if self._library is not None else self._bridge(last, messages)

    def _bridge_family(self, last: Spoken, messages: list[Message]) -> Prompt:
        assert self._library is not None
        thinking = bool(_thinking(messages))
        new = messages[len(last.prompt.messages) + 1 :]
        ids = self._library.bridge(last.prompt.ids, last.sampled, new, last.tools, thinking=thinking)
        if ids is not None:
            return Prompt(tuple(ids), tuple(messages))
        whole = self._library.render(messages, last.tools)
        before = [*last.prompt.ids, *last.sampled]
        extends = whole[: len(before)] == before
        reason = None if extends else "thinking" if thinking else "template"
        return Prompt(tuple(whole), tuple(messages), reason)

    def _bridge(self, last: Spoken, messages: list[Message]) -> Prompt:
        """By the chat template: the tokens so far, and what it puts after the reply."""
        assert self._template is not None
        reply = len(last.prompt.messages)
        present = last.prompt.thinking | ({reply} if reply in _thinking(messages) else frozenset())
        if not present <= self._kept(messages, last.tools):
            return self._whole(messages, last.tools, "thinking")
        found = self._template.tail(messages, last.tools, reply)
        if found is None:
            return self._whole(messages, last.tools, "template")
        tail, closing = found
        done = next((n for n in range(closing, 0, -1) if tuple(tail[:n]) == last.sampled[-n:]), 0)
        return Prompt((*last.prompt.ids, *last.sampled, *tail[done:]), tuple(messages), None, frozenset(present))

    def _whole(self, messages: Sequence[Message], tools: Tools, reason: str | None) -> Prompt:
        if self._library is not None:
            return Prompt(tuple(self._library.render(messages, tools)), tuple(messages), reason)
        assert self._template is not None
        kept = self._kept(messages, tools)
        habit = self._template.surviving(messages, tools, _thinking(messages))
        text = self._template.text(messages, tools, kept=sorted(kept - habit))
        return Prompt(tuple(self._template.encode(text)), tuple(messages), reason, frozenset(kept))

    def _kept(self, messages: Sequence[Message], tools: Tools) -> set[int]:
        """The messages whose thinking belongs in a prompt: by the settings, or by the template's habit."""
        assert self._template is not None
        thoughts = _thinking(messages)
        if self.settings.preserve_all_thinking:
            return set(thoughts)
        habit = self._template.surviving(messages, tools, thoughts)
        if self.settings.preserve_thinking_between_tool_calls:
            asked = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
            return habit | {index for index in thoughts if index > asked}
        return habit


def _thinking(messages: Sequence[Message]) -> list[int]:
    """The messages that hold thinking."""
    return [i for i, m in enumerate(messages) if m["role"] == "assistant" and m.get("reasoning_content")]


def _same(given: Message, said: Message) -> bool:
    """Whether a message is one said before.

    Of an assistant's message an environment may give less than was sampled: without thinking, calls or space around it.
    """
    if given.get("role") != said["role"]:
        return False
    if said["role"] == "assistant":
        texts = [message.get("content") or "" for message in (given, said)]
        same = [text.strip() if isinstance(text, str) else text for text in texts]
        return same[0] == same[1] and all(
            said.get(key) == given[key] for key in given if key != "content" and given[key]
        )
    return all((given.get(key) or None) == (said.get(key) or None) for key in {*given, *said})


def _list(tools: Tools) -> list[Any]:
    return list(tools or [])
