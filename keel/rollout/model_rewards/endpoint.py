"""One OpenAI-compatible endpoint for chat completions, as a judge uses it.

Guarantees a limit on requests in flight, a time limit and a size limit for every request, and errors that name the
setting and the URL and never the API key. It does not retry: an `EndpointError` says whether that may help.
"""

import asyncio
import json
import logging
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from keel.config.dataset import JudgeSettings
from keel.errors import ConfigError
from keel.rollout.environments.rewards.workers import RewardError

if TYPE_CHECKING:
    import httpx

MAX_REPLY_BYTES = 4 * 2**20
MAX_RETRY_AFTER = 60.0
"""Longest pause in seconds that an endpoint can impose by Retry-After."""
CHECK_TIMEOUT = 10.0
FORMATS = ("json_schema", "json_object", "none")
TRANSIENT_STATUS = (408, 409, 425, 429)

logger = logging.getLogger("keel")


class EndpointError(RewardError):
    """A request without a reply."""

    def __init__(self, message: str, *, transient: bool) -> None:
        super().__init__("exception", message)
        self.transient = transient
        """Whether the same request may succeed later."""


class EndpointReply(NamedTuple):
    """The text of a completion and the tokens it cost."""

    text: str
    prompt_tokens: int
    completion_tokens: int


class _StatusError(Exception):
    def __init__(self, status: int, body: str, retry_after: float) -> None:
        self.status, self.body, self.retry_after = status, body, retry_after


class JudgeEndpoint:
    """Sends requests of a judge. Use it in one event loop at a time; `close` before the next one."""

    def __init__(self, settings: JudgeSettings, timeout: float) -> None:
        self._settings, self._timeout = settings, timeout
        self._url = settings.url.rstrip("/").removesuffix("/chat/completions")
        self._key = _read_key(settings)
        self._format: str = settings.response_format
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots = asyncio.Semaphore(settings.max_concurrent)
        self._paused_until = 0.0
        if settings.check_at_start:
            self._check()

    async def complete(
        self, messages: Sequence[Mapping[str, str]], schema: Mapping[str, Any], seed: int
    ) -> EndpointReply:
        """Return the reply to messages; raise EndpointError if there is none."""
        client, body = self._open(), self._body(messages, seed)
        async with self._slots:
            if (pause := self._paused_until - asyncio.get_running_loop().time()) > 0:
                await asyncio.sleep(pause)
            try:
                return await self._complete_in_some_format(client, body, schema)
            except _StatusError as error:
                raise self._describe_status(error) from None

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def _complete_in_some_format(
        self, client: "httpx.AsyncClient", body: dict[str, Any], schema: Mapping[str, Any]
    ) -> EndpointReply:
        """Ask for JSON in the present format; if the endpoint does not accept it, in the simpler ones."""
        first: _StatusError | None = None
        for name in FORMATS[FORMATS.index(self._format) :]:
            try:
                reply = await self._post(client, body | _response_format(name, schema))
            except _StatusError as error:
                if error.status not in (400, 415, 422, 501):
                    raise
                first = first or error  # it may be about something else than the format
                continue
            if name != self._format:
                logger.warning(
                    'judge: %s does not accept options.response_format = "%s"; using "%s"',
                    self._url,
                    self._format,
                    name,
                )
                self._format = name
            return reply
        assert first is not None
        raise first

    async def _post(self, client: "httpx.AsyncClient", body: Mapping[str, Any]) -> EndpointReply:
        import httpx

        content = bytearray()
        try:
            async with (
                asyncio.timeout(self._timeout),
                client.stream("POST", f"{self._url}/chat/completions", json=body) as response,
            ):
                async for chunk in response.aiter_bytes():
                    content += chunk
                    if len(content) > MAX_REPLY_BYTES:
                        raise EndpointError(f"{self._url} sent more than {MAX_REPLY_BYTES} bytes", transient=True)
        except (TimeoutError, httpx.TimeoutException):
            message = f"{self._url} did not reply within timeout = {self._timeout:g} s"
            raise EndpointError(message, transient=True) from None
        except httpx.HTTPError as error:
            raise EndpointError(self._describe_connection(error), transient=True) from error
        if response.status_code != 200:
            retry_after = _retry_after(response.headers.get("retry-after", ""))
            raise _StatusError(response.status_code, content.decode(errors="replace"), retry_after)
        return _read_reply(bytes(content))

    def _open(self) -> "httpx.AsyncClient":
        """Return the client of the running event loop."""
        import httpx

        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            self._client, self._loop = httpx.AsyncClient(timeout=None, headers=self._headers()), loop
            self._slots, self._paused_until = asyncio.Semaphore(self._settings.max_concurrent), 0.0
        return self._client

    def _body(self, messages: Sequence[Mapping[str, str]], seed: int) -> dict[str, Any]:
        settings = self._settings
        length = {"max_tokens": settings.max_tokens} if settings.max_tokens else {}
        body = {"model": settings.model, "messages": list(messages), "temperature": settings.temperature, "seed": seed}
        return body | length | settings.body

    def _headers(self) -> dict[str, str]:
        return {} if self._key is None else {"authorization": f"Bearer {self._key}"}

    def _check(self) -> None:
        """Raise a ConfigError if the endpoint cannot be reached or does not accept the key."""
        import httpx

        try:
            response = httpx.get(f"{self._url}/models", headers=self._headers(), timeout=CHECK_TIMEOUT)
        except httpx.HTTPError as error:
            hint = "start it, fix the URL, or set options.check_at_start = false if it starts later"
            raise ConfigError(f"{self._describe_connection(error)}; {hint}") from error
        if response.status_code in (401, 403):
            raise ConfigError(f'reward "judge": {self._key_hint(response.status_code)}')

    def _describe_connection(self, error: Exception) -> str:
        reason = str(error) or type(error).__name__
        return f'reward "judge": options.url = "{self._settings.url}" cannot be reached: {self._redact(reason)}'

    def _describe_status(self, error: _StatusError) -> EndpointError:
        transient = error.status in TRANSIENT_STATUS or error.status >= 500
        if error.retry_after:
            loop = asyncio.get_running_loop()
            self._paused_until = max(self._paused_until, loop.time() + error.retry_after)
        if error.status in (401, 403):
            return EndpointError(self._key_hint(error.status), transient=False)
        text = " ".join(self._redact(error.body).split())[:200]
        return EndpointError(f"{self._url} returned status {error.status}: {text!r}", transient=transient)

    def _key_hint(self, status: int) -> str:
        name = self._settings.api_key_env
        used = "options.api_key_env is not set" if name is None else f"the key in the variable {name} is not accepted"
        return f"{self._url} returned status {status}: {used} (options.api_key_env)"

    def _redact(self, text: str) -> str:
        return text if self._key is None else text.replace(self._key, "[key]")


def _read_key(settings: JudgeSettings) -> str | None:
    if settings.api_key_env is None:
        return None
    key = os.environ.get(settings.api_key_env, "").strip()
    if not key:
        raise ConfigError(
            f'reward "judge": options.api_key_env = "{settings.api_key_env}", and this environment variable is not set'
        )
    return key


def _response_format(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    if name == "none":
        return {}
    if name == "json_object":
        return {"response_format": {"type": "json_object"}}
    wrapped = {"name": "verdict", "strict": True, "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": wrapped}}


def _read_reply(content: bytes) -> EndpointReply:
    """Return the text of a reply; a reply without a text, such as a refusal, has an empty one."""
    try:
        reply = json.loads(content)
        text = reply["choices"][0]["message"].get("content")
        usage = reply.get("usage") or {}
        tokens = [int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise EndpointError("the endpoint's reply is not a chat completion", transient=True) from None
    return EndpointReply(text if isinstance(text, str) else "", *tokens)


def _retry_after(value: str) -> float:
    """Return the seconds of a Retry-After header; 0 if there is none or it is a date."""
    try:
        return min(max(float(value), 0.0), MAX_RETRY_AFTER)
    except ValueError:
        return 0.0
