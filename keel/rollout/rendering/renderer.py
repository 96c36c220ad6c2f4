"""Render messages to tokens turn by turn, so that sampled tokens are extended and never tokenized again.

Guarantees that a prompt returned by `extend` either starts with exactly the tokens of an earlier turn (its prompt and
completion), or has a `split_reason`: the environment changed its history ("compaction", "branch", "tools"), the model
family strips earlier thinking ("thinking"), or its format cannot be extended ("template"). Only text is supported, not
images.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keel.config.rollout import RendererSettings
from keel.inference.protocol import Message
from keel.rollout.rendering.family_renderer import FamilyRenderer, find_family
from keel.rollout.rendering.template_renderer import TemplateRenderer, UnrenderableReply

Tools = Sequence[Any] | None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered prompt."""

    ids: tuple[int, ...]
    messages: tuple[Message, ...] = ()
    """The rendered messages, with replies as they were sampled, including thinking."""
    split_reason: str | None = None
    """Why the tokens do not extend an earlier turn; None if they do, and for the first turn."""
    thinking_indices: frozenset[int] = frozenset()
    """Indices of the messages whose thinking is in the tokens."""


@dataclass(frozen=True, slots=True)
class RenderedTurn:
    """A finished turn that a later prompt may extend."""

    prompt: Prompt
    tools: Tools
    sampled: tuple[int, ...]
    reply: Message
    """The message that `parse` returned for `sampled`."""

    def is_prefix_of(self, messages: Sequence[Message]) -> bool:
        """Return whether the messages start with this turn's prompt and reply."""
        size = len(self.prompt.messages)
        return len(messages) > size and self.prompt_is_prefix_of(messages) and _same_message(messages[size], self.reply)

    def prompt_is_prefix_of(self, messages: Sequence[Message]) -> bool:
        """Return whether the messages start with those of this turn's prompt."""
        recorded = self.prompt.messages
        return len(messages) >= len(recorded) and all(map(_same_message, messages, recorded))


class Renderer:
    """Converts messages to tokens and back for one model."""

    def __init__(self, tokenizer: Any, settings: RendererSettings | None = None) -> None:
        self.settings = settings or RendererSettings()
        self._tokenizer = tokenizer
        self.family = find_family(tokenizer, self.settings)
        """The model family in the `renderers` library; None: the model's own chat template is used."""
        self._family_renderer = (
            FamilyRenderer(tokenizer, self.family, self.settings) if self.family is not None else None
        )
        self._template_renderer = TemplateRenderer(tokenizer) if self._family_renderer is None else None
        used = self._family_renderer or self._template_renderer
        assert used is not None
        self.stop_token_ids: tuple[int, ...] = used.stop_token_ids
        """Token ids that end a completion."""

    def render(self, messages: Sequence[Message], tools: Tools = None) -> list[int]:
        """Return the tokens of the whole conversation and of the start of the next reply."""
        return list(self._render_full(messages, tools, None).ids)

    def parse(self, token_ids: Sequence[int], *, prompt_ids: Sequence[int] = (), tools: Tools = None) -> Message:
        """Return the sampled assistant message: content and, if present, reasoning_content and tool_calls."""
        if self._family_renderer is not None:
            return self._family_renderer.parse(token_ids, prompt_ids, tools)
        assert self._template_renderer is not None
        return self._template_renderer.parse(token_ids, prompt_ids)

    def encode_reply(self, messages: Sequence[Message], tools: Tools = None) -> list[int]:
        """Return the tokens of the last message, an assistant's, as the policy would sample them after its prompt.

        The last token ends the turn. Raises `UnrenderableReply` if the policy could not have sampled the message.
        """
        used = self._family_renderer or self._template_renderer
        assert used is not None
        ids = used.encode_reply(messages, tools)
        stops = set(self.stop_token_ids)
        if any(token in stops for token in ids[:-1]):
            raise UnrenderableReply("it contains a token that ends the turn")
        if ids and ids[-1] in stops:
            return ids
        if not self.stop_token_ids:
            raise UnrenderableReply("the tokenizer has no token that ends a turn")
        return [*ids, self.stop_token_ids[0]]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a completion, including thinking and tool calls, without the tokens that ended it."""
        size = len(token_ids)
        while size and token_ids[size - 1] in self.stop_token_ids:
            size -= 1
        return str(self._tokenizer.decode(list(token_ids[:size])))

    def extend(self, turns_so_far: Sequence[RenderedTurn], messages: Sequence[Message], tools: Tools = None) -> Prompt:
        """Return the prompt for these messages, extending the tokens of the longest matching turn where possible."""
        if not turns_so_far:
            return self._render_full(messages, tools, None)
        last = max(
            (turn for turn in turns_so_far if turn.is_prefix_of(messages)),
            key=lambda turn: len(turn.prompt.messages),
            default=None,
        )
        if last is None:
            branches = any(turn.prompt_is_prefix_of(messages) for turn in turns_so_far)
            return self._render_full(messages, tools, "branch" if branches else "compaction")
        recorded = last.prompt.messages
        messages = [*recorded, last.reply, *messages[len(recorded) + 1 :]]
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
        full = self._family_renderer.render(messages, last.tools)
        before = [*last.prompt.ids, *last.sampled]
        extends = full[: len(before)] == before
        reason = None if extends else "thinking" if thinking else "template"
        return Prompt(tuple(full), tuple(messages), reason)

    def _bridge_template(self, last: RenderedTurn, messages: list[Message]) -> Prompt:
        """Return the tokens so far followed by what the chat template puts after the reply."""
        assert self._template_renderer is not None
        reply_index = len(last.prompt.messages)
        reply_thinks = reply_index in _thinking_indices(messages)
        present = last.prompt.thinking_indices | ({reply_index} if reply_thinks else frozenset())
        if not present <= self._kept_thinking(messages, last.tools):
            return self._render_full(messages, last.tools, "thinking")
        tail_and_closing = self._template_renderer.tail_after_reply(messages, last.tools, reply_index)
        if tail_and_closing is None:
            return self._render_full(messages, last.tools, "template")
        tail, closing = tail_and_closing
        # the policy may have sampled some of the tokens that close the turn
        overlap = next((n for n in range(closing, 0, -1) if tuple(tail[:n]) == last.sampled[-n:]), 0)
        return Prompt((*last.prompt.ids, *last.sampled, *tail[overlap:]), tuple(messages), None, frozenset(present))

    def _render_full(self, messages: Sequence[Message], tools: Tools, split_reason: str | None) -> Prompt:
        if self._family_renderer is not None:
            return Prompt(tuple(self._family_renderer.render(messages, tools)), tuple(messages), split_reason)
        assert self._template_renderer is not None
        kept = self._kept_thinking(messages, tools)
        kept_by_template = self._template_renderer.kept_thinking(messages, tools, _thinking_indices(messages))
        text = self._template_renderer.render_text(messages, tools, kept_thinking=sorted(kept - kept_by_template))
        return Prompt(tuple(self._template_renderer.encode(text)), tuple(messages), split_reason, frozenset(kept))

    def _kept_thinking(self, messages: Sequence[Message], tools: Tools) -> set[int]:
        """Return the indices of messages whose thinking the settings or the template keep in a prompt."""
        assert self._template_renderer is not None
        thinking = _thinking_indices(messages)
        if self.settings.preserve_all_thinking:
            return set(thinking)
        kept_by_template = self._template_renderer.kept_thinking(messages, tools, thinking)
        if self.settings.preserve_thinking_between_tool_calls:
            last_user = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
            return kept_by_template | {index for index in thinking if index > last_user}
        return kept_by_template


def _thinking_indices(messages: Sequence[Message]) -> list[int]:
    """Return the indices of messages with thinking."""
    return [i for i, m in enumerate(messages) if m["role"] == "assistant" and m.get("reasoning_content")]


def _same_message(candidate: Message, recorded: Message) -> bool:
    """Return whether a message of the environment is the recorded one.

    An environment may leave out parts of an assistant message: thinking, tool calls or surrounding whitespace.
    """
    if candidate.get("role") != recorded["role"]:
        return False
    if recorded["role"] == "assistant":
        texts = [message.get("content") or "" for message in (candidate, recorded)]
        stripped = [text.strip() if isinstance(text, str) else text for text in texts]
        return stripped[0] == stripped[1] and all(
            recorded.get(key) == candidate[key] for key in candidate if key != "content" and candidate[key]
        )
    return all((candidate.get(key) or None) == (recorded.get(key) or None) for key in {*candidate, *recorded})


def _as_list(tools: Tools) -> list[Any]:
    return list(tools or [])
