"""Rendering with a model's own chat template, which is opaque: its behaviour is probed by rendering marked messages.

A reply is replaced by a marker. The text that the template puts after the marker is what the next prompt adds to the
sampled tokens: the end of the assistant's turn, the new messages and the start of the next reply. Markers also reveal
whether a template keeps earlier thinking. Nothing is assumed about the model family.
"""

import re
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from keel.errors import ConfigError
from keel.inference.protocol import Message
from keel.rollout.rendering.chat_format import (
    THINK_CLOSE,
    THINK_OPEN,
    format_thinking,
    inline_tool_calls,
    parse_completion,
    with_decoded_arguments,
)

_MARK = "kq7Keel{}Mark9zk"
"""The marker: letters and digits only, so that no template trims, escapes or splits it."""
_EMPTY_THINKING = re.compile(r"<think>\s*</think>\s*")


class UnrenderableReply(Exception):
    """An assistant message that cannot follow the prompt of its turn; the message says why."""


class TemplateRenderer:
    """Converts messages to tokens with `tokenizer.chat_template`."""

    def __init__(self, tokenizer: Any) -> None:
        template = getattr(tokenizer, "chat_template", None)
        if not template:
            raise ConfigError(
                f"the tokenizer of {getattr(tokenizer, 'name_or_path', '') or 'the model'} has no chat template; use an"
                " instruction-tuned model, or set tokenizer.chat_template"
            )
        self._tokenizer = tokenizer
        text = template if isinstance(template, str) else "".join(map(str, dict(template).values()))
        self._template_supports = {field: field in text for field in ("reasoning_content", "tool_calls", "tools")}
        self._special_tokens = [
            token for token in tokenizer.all_special_tokens if token not in (THINK_OPEN, THINK_CLOSE)
        ]
        self.stop_token_ids = self._find_stop_ids()

    # ---- text

    def render_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        *,
        kept_thinking: Sequence[int] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        """Render the messages, with the thinking of those in `kept_thinking` even if the template would strip it."""
        if tools and not self._template_supports["tools"]:
            raise ConfigError(
                "the model's chat template does not support tools; describe them in a system message and omit `tools`"
            )
        plain = [self._normalise_message(message) for message in messages]
        replacements = {}
        for index in kept_thinking:
            bare = self._normalise_message({**messages[index], "reasoning_content": None})
            replacements[_MARK.format(index)] = format_thinking(messages[index]["reasoning_content"], bare["content"])
            plain[index] = {**bare, "content": _MARK.format(index)}
        text: str = self._tokenizer.apply_chat_template(
            plain, tools=list(tools) if tools else None, add_generation_prompt=add_generation_prompt, tokenize=False
        )
        for mark, replacement in replacements.items():
            text = text.replace(mark, replacement)
        return text

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _normalise_message(self, message: Message) -> Message:
        """Return the message with only the fields that this template supports."""
        message = dict(message)
        if isinstance(message.get("content"), list):
            other_types = {str(part.get("type")) for part in message["content"]} - {"text"}
            if other_types:
                raise ConfigError(
                    f"a message has content of type {', '.join(sorted(other_types))}; only text can be rendered"
                )
            message["content"] = "".join(part["text"] for part in message["content"])
        message["content"] = message.get("content") or ""
        if message["role"] == "assistant":
            message = with_decoded_arguments(message)
            if message.get("tool_calls") and not self._template_supports["tool_calls"]:
                message["content"] = inline_tool_calls(message)
                del message["tool_calls"]
            reasoning = message.pop("reasoning_content", None)
            if reasoning is not None and self._template_supports["reasoning_content"]:
                message["reasoning_content"] = reasoning
            elif reasoning is not None:
                message["content"] = format_thinking(reasoning, message["content"])
        return message

    # ---- probing the template

    def kept_thinking(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, indices: Sequence[int]
    ) -> set[int]:
        """Return which of `indices` have thinking that the template renders, given the whole conversation."""
        if not indices:
            return set()
        marked = [
            {**message, "reasoning_content": _MARK.format(index)} if index in indices else message
            for index, message in enumerate(messages)
        ]
        text = self.render_text(marked, tools)
        return {index for index in indices if _MARK.format(index) in text}

    def tail_after_reply(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, reply_index: int
    ) -> tuple[list[int], int] | None:
        """Return the tokens that follow the reply at `reply_index`, and how many of them close the reply's turn.

        Return None if the template now renders the messages before the reply differently than when it was sampled.
        """
        plain = [{key: value for key, value in m.items() if key != "reasoning_content"} for m in messages]
        mark = _MARK.format("")
        plain[reply_index] = {"role": "assistant", "content": mark}
        try:
            before = self.render_text(plain[:reply_index], tools)
            through_reply = self.render_text(plain[: reply_index + 1], tools, add_generation_prompt=False)
            full = self.render_text(plain, tools)
        except TemplateError:
            return None
        head, mark_found, tail = full.partition(mark)
        close = through_reply.partition(mark)[2]
        # the start of a reply may contain text that the template does not render later, such as an open <think>
        if (
            not mark_found
            or not _strip_empty_thinking(before).startswith(_strip_empty_thinking(head))
            or not tail.startswith(close)
        ):
            return None
        return self.encode(tail), len(self.encode(close))

    def encode_reply(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> list[int]:
        """Return the tokens of the last message after its prompt, up to the token that ends the turn."""
        prompt = self.render_text(messages[:-1], tools)
        full = self.render_text(messages, tools, add_generation_prompt=False)
        mark = _MARK.format("")
        marked = [*messages[:-1], {"role": "assistant", "content": mark}]
        close = self.render_text(marked, tools, add_generation_prompt=False).partition(mark)[2]
        text = full[len(prompt) :] if full.startswith(prompt) else self._opened_thinking(prompt, messages[-1]) + close
        body = text.removesuffix(close)
        # tokens as in one text where possible: some tokenizers put a space before the first word of a text
        prompt_ids, ids = self.encode(prompt), self.encode(prompt + body)
        ids = ids[len(prompt_ids) :] if ids[: len(prompt_ids)] == prompt_ids else self.encode(body)
        if body != text:
            ending = self.encode(close)
            stop = next((index for index, token in enumerate(ending) if token in self.stop_token_ids), -1)
            return [*ids, *ending[: stop + 1]]
        # this message is closed in another way than plain text is
        stop = max((index for index, token in enumerate(ids) if token in self.stop_token_ids), default=len(ids))
        return ids[: stop + 1]

    def _opened_thinking(self, prompt: str, message: Message) -> str:
        """Return the text of a reply to a prompt that opens the thinking, which the template removes from messages."""
        reasoning = message.get("reasoning_content")
        if reasoning is None or not prompt.rstrip().endswith(THINK_OPEN):
            raise UnrenderableReply(
                "the chat template does not render a reply as a continuation of the prompt of its turn; a model whose"
                " prompt opens the thinking needs `reasoning_content` in every reply that is trained"
            )
        plain = self._normalise_message({**message, "reasoning_content": None})
        return format_thinking(reasoning, plain["content"]).removeprefix(THINK_OPEN).lstrip("\n")

    def _find_stop_ids(self) -> tuple[int, ...]:
        """Return the end-of-text id and the special token with which the template ends an assistant turn."""
        stops = [self._tokenizer.eos_token_id] if self._tokenizer.eos_token_id is not None else []
        try:
            example = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
            text = self.render_text(example, None, add_generation_prompt=False)
        except TemplateError:
            return tuple(stops)
        close = self.encode(text.partition(_MARK)[2])
        if close and close[0] in self._tokenizer.all_special_ids:
            stops.append(close[0])
        return tuple(dict.fromkeys(stops))

    # ---- completions

    def parse(self, token_ids: Sequence[int], prompt_ids: Sequence[int] = ()) -> Message:
        """Return the assistant message of a completion."""
        ids = list(token_ids)
        while ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        ending = self._tokenizer.decode(list(prompt_ids)[-16:]).rstrip() if prompt_ids else ""
        text = self._tokenizer.decode(ids)
        for token in self._special_tokens:
            text = text.replace(token, "")
        return parse_completion(text, inside_thinking=ending.endswith(THINK_OPEN))


def _strip_empty_thinking(text: str) -> str:
    """Remove empty thinking blocks, which some templates render only in some positions."""
    return _EMPTY_THINKING.sub("", text)
