"""Client of the chat completions of any OpenAI-compatible endpoint: messages in, text out.

Such an endpoint returns neither token ids nor the sampler's log-probs, so nothing it writes can be trained on; it is
not an `Engine`. Evaluations use it. Failures that may pass (429, 5xx, a lost connection) are retried with a growing
delay, or the one that the endpoint asks for. The key is never part of an error.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from keel.config import Sampling
from keel.errors import ConfigError
from keel.inference.pool.http_engine import RETRYABLE_STATUSES, describe_error, error_message, parse_json_object
from keel.inference.protocol import EngineError, Message

MAX_RETRIES = 5
MAX_RETRY_DELAY = 60.0
"""Highest number of seconds between two attempts."""


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """One completion of an endpoint."""

    message: Message
    """The assistant message: content and, if present, reasoning_content and tool_calls."""
    finish_reason: str
    completion_tokens: int | None
    """Length as the endpoint counted it; None if it does not say."""


class ChatEndpoint:
    """One model of an endpoint. The constructor sends nothing."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout: float = 600.0,
        retry_delay: float = 1.0,
    ) -> None:
        """`url` is a server (`http://127.0.0.1:8000`, for its `/v1`) or the base of an API (`https://host/v1`).

        Without `model`, the first that the endpoint lists is used. `retry_delay` is the delay before the first retry in
        seconds; it doubles with every further one.
        """
        parsed = httpx.URL(url.rstrip("/"))
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ConfigError(f"url = {url} is not a URL such as http://127.0.0.1:8000")
        self.url = str(parsed).rstrip("/") + ("/v1" if parsed.path in ("", "/") else "")
        self.model = model
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=None)  # the caller limits requests
        self._client = httpx.AsyncClient(
            headers=headers, timeout=httpx.Timeout(timeout, connect=min(timeout, 10.0)), limits=unlimited
        )
        self._retry_delay = retry_delay

    async def find_model(self) -> str:
        """Return the model's name: the one given, or the first that the endpoint lists."""
        if self.model is None:
            models = (await self._request("GET", "/models")).get("data")
            names = [model["id"] for model in models or () if isinstance(model, dict) and "id" in model]
            if not names:
                raise EngineError(f"endpoint {self.url} lists no model; name one", retryable=False)
            self.model = str(names[0])
        return self.model

    async def complete(
        self, messages: Sequence[Message], sampling: Sampling, *, tools: Sequence[Any] | None = None
    ) -> ChatCompletion:
        """Return the next message of a conversation."""
        body: dict[str, Any] = {
            "model": await self.find_model(),
            # some endpoints reject the thinking of earlier turns that they have returned themselves
            "messages": [
                {name: value for name, value in message.items() if name != "reasoning_content"} for message in messages
            ],
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "n": 1,
        }
        # only if set: an endpoint may reject fields that it does not know
        optional: dict[str, Any] = {
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "stop": list(sampling.stop),
            "tools": list(tools or ()),
        }
        body |= {name: value for name, value in optional.items() if value}
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        return self._parse(await self._request("POST", "/chat/completions", json=body))

    async def close(self) -> None:
        await self._client.aclose()

    def _parse(self, payload: dict[str, Any]) -> ChatCompletion:
        choices = payload.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        message = choice.get("message") if isinstance(choice, dict) else None
        if not isinstance(choice, dict) or not isinstance(message, dict):
            raise EngineError(f"endpoint {self.url} returned {str(choices)[:200]} instead of a message")
        content = message.get("content")
        if not isinstance(content, str | None):
            raise EngineError(f"endpoint {self.url} returned content of type {type(content).__name__}, not text")
        reply: Message = {"role": "assistant", "content": content or ""}
        thinking = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(thinking, str) and thinking:
            reply["reasoning_content"] = thinking
        if isinstance(message.get("tool_calls"), list) and message["tool_calls"]:
            reply["tool_calls"] = message["tool_calls"]
        usage = payload.get("usage")
        tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
        counted = tokens if isinstance(tokens, int) and not isinstance(tokens, bool) and tokens >= 0 else None
        return ChatCompletion(reply, str(choice.get("finish_reason") or "stop"), counted)

    async def _request(self, method: str, path: str, **body: Any) -> dict[str, Any]:
        for attempt in range(MAX_RETRIES + 1):
            delay = self._retry_delay * 2**attempt
            try:
                response = await self._client.request(method, self.url + path, **body)
            except (httpx.HTTPError, RuntimeError) as raised:
                error = EngineError(f"endpoint {self.url} cannot be reached: {describe_error(raised)}")
            else:
                if response.status_code == 200:
                    return parse_json_object(response)
                retryable = response.status_code in RETRYABLE_STATUSES
                text = f"endpoint {self.url}{path} returned status {response.status_code}: {error_message(response)}"
                error = EngineError(text, retryable=retryable)
                retry_after = response.headers.get("retry-after", "")
                delay = float(retry_after) if retry_after.isdecimal() and len(retry_after) < 6 else delay
            if not error.retryable or attempt == MAX_RETRIES:
                raise error
            await asyncio.sleep(min(delay, MAX_RETRY_DELAY))
        raise AssertionError("unreachable")
