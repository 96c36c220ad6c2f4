"""Rendering with the `renderers` library, which has a hand-written renderer for many model families.

The library is optional: without it, or for a model that it does not know, the model's own chat template is used. Its
output is verified: a prompt counts as an extension of earlier tokens only if it starts with exactly those tokens.
"""

import importlib
import json
import re
from collections.abc import Sequence
from typing import Any

from keel.common.settings import suggest_name
from keel.config.rollout import RendererSettings
from keel.errors import ConfigError
from keel.inference.protocol import Message
from keel.rollout.rendering.template_renderer import UnrenderableReply

_HUB_SNAPSHOT = re.compile(r"models--([^/\\]+)--([^/\\]+)[/\\]snapshots[/\\]")


def find_family(tokenizer: Any, settings: RendererSettings) -> str | None:
    """Return the library's name for the model's family, or None to use the chat template."""
    if settings.family == "template":
        return None
    try:
        library = importlib.import_module("renderers.base")
    except ImportError as error:
        if settings.family == "auto":
            return None
        raise ConfigError(
            f'renderer.family = "{settings.family}" needs the renderers library: pip install renderers'
        ) from error
    if settings.family == "auto":
        name = str(getattr(tokenizer, "name_or_path", ""))
        if match := _HUB_SNAPSHOT.search(name):
            name = f"{match[1]}/{match[2]}"
        family = library.MODEL_RENDERER_MAP.get(name)
        return None if family is None else str(family)
    library._populate_registry()
    if settings.family not in library.RENDERER_REGISTRY:
        known = set(library.RENDERER_REGISTRY) - {"default"} | {"auto", "template"}
        raise ConfigError(f'renderer.family = "{settings.family}" is not known; {suggest_name(settings.family, known)}')
    return settings.family


class FamilyRenderer:
    """Converts messages to tokens with the library's renderer of one family."""

    def __init__(self, tokenizer: Any, family: str, settings: RendererSettings) -> None:
        retention = None
        if settings.preserve_all_thinking:
            retention = "all"
        elif settings.preserve_thinking_between_tool_calls:
            retention = "tool_cycle"
        self._renderer = _create_renderer(tokenizer, family, retention)
        self._keep_all_renderer = self._renderer if retention == "all" else _create_renderer(tokenizer, family, "all")
        self._tokenizer = tokenizer
        self.stop_token_ids: tuple[int, ...] = tuple(self._renderer.get_stop_token_ids())

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> list[int]:
        ids = self._renderer.render_ids(list(messages), tools=_tool_specs(tools), add_generation_prompt=True)
        return list(ids)

    def encode_reply(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> list[int]:
        """Return the tokens of the last message after its prompt, up to the token that ends the turn."""
        prompt = self.render(messages[:-1], tools)
        full = self._renderer.render_ids(list(messages), tools=_tool_specs(tools), add_generation_prompt=False)
        if list(full[: len(prompt)]) != prompt:
            raise UnrenderableReply("the model family does not render it as a continuation of the prompt of its turn")
        ids = list(full[len(prompt) :])
        last_stop = max((index for index, token in enumerate(ids) if token in self.stop_token_ids), default=-1)
        return ids[: last_stop + 1] if last_stop >= 0 else ids

    def bridge(
        self,
        prompt: Sequence[int],
        sampled: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[Any] | None,
        *,
        has_thinking: bool,
    ) -> list[int] | None:
        """Return the next prompt as an extension of these tokens, or None if the family's format does not allow it.

        `has_thinking`: whether the messages contain thinking that the family may strip.
        """
        # without thinking there is nothing to strip, so the family's policy to strip must not prevent an extension
        renderer = self._renderer if has_thinking else self._keep_all_renderer
        rendered = renderer.bridge_to_next_turn(
            list(prompt), list(sampled), list(new_messages), tools=_tool_specs(tools)
        )
        if rendered is None:
            return None
        ids, before = list(rendered.token_ids), [*prompt, *sampled]
        return ids if ids[: len(before)] == before else None

    def parse(self, token_ids: Sequence[int], prompt_ids: Sequence[int], tools: Sequence[Any] | None) -> Message:
        parsed = self._renderer.parse_response(
            list(token_ids), tools=_tool_specs(tools), prompt_ids=list(prompt_ids) or None
        )
        message: Message = {"role": "assistant", "content": parsed.content or ""}
        if parsed.reasoning_content is not None:
            message["reasoning_content"] = parsed.reasoning_content
        calls = [call for call in parsed.tool_calls if str(call.status) == "ok"]
        if calls:
            message["tool_calls"] = [
                {
                    "id": call.id or f"call_{number}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": _encode_arguments(call.arguments)},
                }
                for number, call in enumerate(calls)
            ]
        return message


def _create_renderer(tokenizer: Any, family: str, retention: str | None) -> Any:
    library = importlib.import_module("renderers")
    config = library.config_from_name(family)
    if retention is not None:
        config = type(config).model_validate({**config.model_dump(exclude_unset=True), "thinking_retention": retention})
    try:
        return library.create_renderer(tokenizer, config)
    except AssertionError as error:
        # the library asserts that the tokenizer has the family's special tokens
        raise ConfigError(f'renderer.family = "{family}" does not fit the tokenizer: {error}') from error


def _tool_specs(tools: Sequence[Any] | None) -> list[Any] | None:
    """Return the tools in the library's flat format."""
    return [tool.get("function", tool) for tool in tools] if tools else None


def _encode_arguments(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
