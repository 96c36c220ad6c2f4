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
    split_reason: str | None = None
    """Why they do not extend an earlier turn; none when they do, and for the first turn."""
    thinking_indices: frozenset[int] = frozenset()
    """The messages whose thinking is in the tokens."""


@dataclass(frozen=True, slots=True)
class RenderedTurn:
    """A turn as the renderer needs it to go on from."""

    prompt: Prompt
    tools: Tools
    sampled: tuple[int, ...]
    reply: Message
    """What `parse` made of `sampled`."""

    def is_prefix_of(self, messages: Sequence[Message]) -> bool:
        """Whether the messages begin with this turn, prompt and reply."""
        size = len(self.prompt.messages)
        return len(messages) > size and self.prompt_is_prefix_of(messages) and _same_message(messages[size], self.reply)

    def prompt_is_prefix_of(self, messages: Sequence[Message]) -> bool:
        """Whether the messages begin with those of this turn's prompt."""
        said = self.prompt.messages
        return len(messages) >= len(said) and all(map(_same_message, messages, said))


class Renderer:
    """Messages to tokens and back, for one model."""

    def __init__(self, tokenizer: Any, settings: RendererSettings | None = None) -> None:
        self.settings = settings or RendererSettings()
        self.family = find_family(tokenizer, self.settings)
        """As the `renderers` library calls it; none: the model's own chat template is used."""
        self._family_renderer = (
            FamilyRenderer(tokenizer, self.family, self.settings) if self.family is not None else None
        )
        self._template_renderer = TemplateRenderer(tokenizer) if self._family_renderer is None else None
        used = self._family_renderer or self._template_renderer
        assert used is not None
        self.stop_token_ids: tuple[int, ...] = used.stop_token_ids
        """The ids that end an answer."""

    def render(self, messages: Sequence[Message], tools: Tools = None) -> list[int]:
        """The whole conversation and the opening of the next answer."""
        return list(self._render_full(messages, tools, None).ids)

    def parse(self, token_ids: Sequence[int], *, prompt_ids: Sequence[int] = (), tools: Tools = None) -> Message:
        """The assistant message that was sampled: content, and where there are any reasoning_content and tool_calls."""
        if self._family_renderer is not None:
            return self._family_renderer.parse(token_ids, prompt_ids, tools)
        assert self._template_renderer is not None
        return self._template_renderer.parse(token_ids, prompt_ids)

    def extend(self, turns_so_far: Sequence[RenderedTurn], messages: Sequence[Message], tools: Tools = None) -> Prompt:
        """The prompt for these messages: where possible the tokens of the turn they go on from, and what is new."""
        if not turns_so_far:
            return self._render_full(messages, tools, None)
        last = max(
            (turn for turn in turns_so_far if turn.is_prefix_of(messages)),
            key=lambda turn: len(turn.prompt.messages),
            default=None,
        )
        if last is None:
            again = any(turn.prompt_is_prefix_of(messages) for turn in turns_so_far)
            return self._render_full(messages, tools, "branch" if again else "compaction")
        said = last.prompt.messages
        messages = [*said, last.reply, *messages[len(said) + 1 :]]
        if _as_list(tools) != _as_list(last.tools):
            return self._render_full(messages, tools, "tools")
        return (
            self._bridge_family(last, messages)
            if self._family_renderer is not None
            else self._bridge_template(last, messages)
        )

    def _bridge_family(self, last: RenderedTurn, messages: list[Message]) -> Prompt:
        assert self._family_renderer is not None
        thinking = bool(_thinking_indices(messages))
        new = messages[len(last.prompt.messages) + 1 :]
        ids = self._family_renderer.bridge(last.prompt.ids, last.sampled, new, last.tools, has_thinking=thinking)
        if ids is not None:
            return Prompt(tuple(ids), tuple(messages))
        whole = self._family_renderer.render(messages, last.tools)
        before = [*last.prompt.ids, *last.sampled]
        extends = whole[: len(before)] == before
        reason = None if extends else "thinking" if thinking else "template"
        return Prompt(tuple(whole), tuple(messages), reason)

    def _bridge_template(self, last: RenderedTurn, messages: list[Message]) -> Prompt:
        """By the chat template: the tokens so far, and what it puts after the reply."""
        assert self._template_renderer is not None
        reply = len(last.prompt.messages)
        present = last.prompt.thinking_indices | ({reply} if reply in _thinking_indices(messages) else frozenset())
        if not present <= self._kept_thinking(messages, last.tools):
            return self._render_full(messages, last.tools, "thinking")
        found = self._template_renderer.tail_after_reply(messages, last.tools, reply)
        if found is None:
            return self._render_full(messages, last.tools, "template")
        tail, closing = found
        done = next((n for n in range(closing, 0, -1) if tuple(tail[:n]) == last.sampled[-n:]), 0)
        return Prompt((*last.prompt.ids, *last.sampled, *tail[done:]), tuple(messages), None, frozenset(present))

    def _render_full(self, messages: Sequence[Message], tools: Tools, split_reason: str | None) -> Prompt:
        if self._family_renderer is not None:
            return Prompt(tuple(self._family_renderer.render(messages, tools)), tuple(messages), split_reason)
        assert self._template_renderer is not None
        kept = self._kept_thinking(messages, tools)
        habit = self._template_renderer.kept_thinking(messages, tools, _thinking_indices(messages))
        text = self._template_renderer.render_text(messages, tools, kept_thinking=sorted(kept - habit))
        return Prompt(tuple(self._template_renderer.encode(text)), tuple(messages), split_reason, frozenset(kept))

    def _kept_thinking(self, messages: Sequence[Message], tools: Tools) -> set[int]:
        """The messages whose thinking belongs in a prompt: by the settings, or by the template's habit."""
        assert self._template_renderer is not None
        thoughts = _thinking_indices(messages)
        if self.settings.preserve_all_thinking:
            return set(thoughts)
        habit = self._template_renderer.kept_thinking(messages, tools, thoughts)
        if self.settings.preserve_thinking_between_tool_calls:
            asked = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
            return habit | {index for index in thoughts if index > asked}
        return habit


def _thinking_indices(messages: Sequence[Message]) -> list[int]:
    """The messages that hold thinking."""
    return [i for i, m in enumerate(messages) if m["role"] == "assistant" and m.get("reasoning_content")]


def _same_message(candidate: Message, recorded: Message) -> bool:
    """Whether a message is one said before.

    Of an assistant's message an environment may give less than was sampled: without thinking, calls or space around it.
    """
    if candidate.get("role") != recorded["role"]:
        return False
    if recorded["role"] == "assistant":
        texts = [message.get("content") or "" for message in (candidate, recorded)]
        same = [text.strip() if isinstance(text, str) else text for text in texts]
        return same[0] == same[1] and all(
            recorded.get(key) == candidate[key] for key in candidate if key != "content" and candidate[key]
        )
    return all((candidate.get(key) or None) == (recorded.get(key) or None) for key in {*candidate, *recorded})


def _as_list(tools: Tools) -> list[Any]:
    return list(tools or [])
