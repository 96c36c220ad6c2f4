"""Parse thinking, tool calls and content from a completion, and write them back as text.

Used when a model's own chat template does the rendering. The format is the common one: `<think>...</think>` before the
content, `<tool_call>{"name": ..., "arguments": ...}</tool_call>` within it. Text that does not parse stays in the
content unchanged.
"""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from keel.inference.protocol import Message

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
_TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def parse_completion(text: str, *, inside_thinking: bool = False) -> Message:
    """Return the assistant message of a completion. `inside_thinking`: the prompt ended with an open `<think>`."""
    reasoning, content = _split_thinking(text, inside_thinking)
    message: Message = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    calls: list[Message] = []

    def extract_call(match: re.Match[str]) -> str:
        call = _parse_tool_call(match[1], len(calls))
        if call is None:
            return match[0]
        calls.append(call)
        return ""

    rest = _TOOL_CALL.sub(extract_call, content)
    if calls:
        message["content"], message["tool_calls"] = rest.strip(), calls
    return message


def format_thinking(reasoning: str, content: str) -> str:
    """Return thinking and content as one text, in the form that reasoning models write."""
    return f"{THINK_OPEN}\n{reasoning}\n{THINK_CLOSE}\n\n{content}"


def inline_tool_calls(message: Message) -> str:
    """Return the content of a message with its tool calls as text, for templates without support for tool calls."""
    content = message.get("content") or ""
    lines = [
        "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) + "\n</tool_call>"
        for name, arguments in map(_name_and_arguments, message.get("tool_calls") or [])
    ]
    return "\n".join([content, *lines] if content else lines)


def with_decoded_arguments(message: Message) -> Message:
    """Return the message with the arguments of its tool calls as dicts: some templates iterate over them."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {"name": name, "arguments": arguments}}
        for call, (name, arguments) in ((call, _name_and_arguments(call)) for call in message["tool_calls"])
    ]
    return {**message, "tool_calls": calls}


def _split_thinking(text: str, inside_thinking: bool) -> tuple[str | None, str]:
    started = inside_thinking or text.lstrip().startswith(THINK_OPEN)
    if not started:
        return None, text
    body = text if inside_thinking else text.lstrip()[len(THINK_OPEN) :]
    thought, closed, content = body.partition(THINK_CLOSE)
    return thought.strip(), content.lstrip("\n") if closed else ""


def _parse_tool_call(text: str, number: int) -> Message | None:
    try:
        call = json.loads(text)
    except ValueError:
        return None
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
        return None
    arguments = json.dumps(call.get("arguments", {}), ensure_ascii=False)
    return {"id": f"call_{number}", "type": "function", "function": {"name": call["name"], "arguments": arguments}}


def _name_and_arguments(call: Mapping[str, Any]) -> tuple[str, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        # arguments that are not JSON stay text, for templates that print them unchanged
        with suppress(ValueError):
            arguments = json.loads(arguments)
    return function["name"], arguments
