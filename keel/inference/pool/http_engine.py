"""An engine on the other side of HTTP: any OpenAI-compatible server that returns log-probs and token ids.

Guarantees that a generation is whole or an `EngineError` that says whether trying again can help: as many log-probs as
tokens, all of them finite and at the temperature that was asked for, the tokens as sampled and never from text.
Versions are the server's own where it gives them per token; otherwise the one that was live when the request was sent.
Weights can be loaded on Keel's own server; for vLLM see `keel.inference.pool.vllm_engine`.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

import httpx

from keel.config import Sampling
from keel.errors import ConfigError
from keel.inference.protocol import BroadcastSlot, EngineError, FinishReason, Generation, Health, WeightSource

RETRYABLE_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
"""Statuses after which the same request may succeed, here or elsewhere."""

FINISH_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}

TEMPERATURE_TOLERANCE = 0.05
"""By how much, relatively, the slopes of the temperature probe may be off: a server may compute in half precision."""

ServerKind = Literal["keel", "other"]


class HttpEngine:
    """One server. Made without talking to it; the first call finds out what it is."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout: float = 600.0,
        client: httpx.AsyncClient | None = None,
        version: int = 0,
    ) -> None:
        """`version` is that of the weights which a server that does not say starts with."""
        base = url.rstrip("/").removesuffix("/v1")
        if httpx.URL(base).scheme not in ("http", "https") or not httpx.URL(base).host:
            raise ConfigError(f"engine url = {url} is not an address like http://127.0.0.1:8000")
        self.url = base
        self.model = model
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._timeout = httpx.Timeout(timeout, connect=min(timeout, 10.0))
        self._owns_client = client is None
        # the number of requests at once is decided by whoever sends them
        unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx.AsyncClient(timeout=self._timeout, limits=unlimited) if client is None else client
        self._version = self._initial_version = version
        self._kind: ServerKind | None = None
        self._logprobs_scaled: bool | None = None
        self._max_model_len: int | None = None
        self._detect_lock = asyncio.Lock()
        self._in_flight: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._init_backend()

    def _init_backend(self) -> None:
        """What a particular kind of server needs beside this."""

    # --- the engine ---

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, group: str | None = None) -> Generation:
        """An answer to these tokens; cancelling the call closes its connection, which frees what the server held."""
        if self._closed:
            raise EngineError(f"engine {self.url} is closed")
        task = asyncio.ensure_future(self._generate(list(prompt), sampling, group))
        self._in_flight.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self._closed and caller is not None and not caller.cancelling():
                raise EngineError(f"engine {self.url} was closed before it answered") from None
            raise
        finally:
            self._in_flight.discard(task)

    async def load_weights(self, source: WeightSource, version: int, *, drain: bool = False) -> None:
        """Load weights or an adapter from a folder on the server's machine, or weights from a broadcast."""
        if source.kind == "folder":
            await self._post_load("/v1/load_weights", {"folder": str(source.path)}, version, drain)
        elif source.kind == "adapter":
            await self._post_load("/v1/load_lora_adapter", {"lora_path": str(source.path)}, version, drain)
        elif source.sender is not None:
            await source.sender.send_to(self, version, drain=drain)
        else:
            raise source.unsupported_by(f"the server at {self.url}")

    async def receive_weights(self, slot: BroadcastSlot, version: int, *, drain: bool = False) -> None:
        """Take all weights from a broadcast that this machine sends meanwhile. Returns when they are live."""
        await self._post_load("/v1/receive_weights", asdict(slot), version, drain)

    async def version(self) -> int:
        """Of the weights that are live: what the server says, or for one that does not say what was loaded last."""
        if await self._detect_server() == "keel":
            self._version = _check_integer("version", (await self._get_json("/version")).get("version"), self.url)
        return self._version

    async def health(self) -> Health:
        """How the server is doing; one that cannot be reached is not ready, and never an exception."""
        try:
            response = await self._send("GET", "/health", timeout=10.0)
            said = _parse_json(response)
            if response.status_code not in (200, 503):
                raise self._response_error(response)
            if "ready" not in said:
                error = "" if response.status_code == 200 else _error_message(response)
                return Health(not error, self._version, running=len(self._in_flight), error=error)
            self._version = _check_integer("version", said.get("version"), self.url)
            running, waiting = (_check_integer(name, said.get(name, 0), self.url) for name in ("running", "waiting"))
            return Health(bool(said["ready"]), self._version, running, waiting, str(said.get("error", "")))
        except EngineError as error:
            return Health(False, self._version, running=len(self._in_flight), error=str(error))

    async def close(self) -> None:
        """End requests in flight with an `EngineError` and close the connections. The server goes on."""
        self._closed = True
        for task in list(self._in_flight):
            task.cancel()
        await asyncio.gather(*self._in_flight, return_exceptions=True)
        if self._owns_client:
            await self._client.aclose()

    # --- generating ---

    async def _generate(self, prompt: list[int], sampling: Sampling, group: str | None) -> Generation:
        kind = await self._detect_server()
        await self._check_temperature(kind, sampling.temperature, prompt)
        live = self._version
        choice = await self._request_completion(self._request_body(prompt, sampling, group))
        return self._parse_choice(choice, sampling, live)

    def _request_body(self, prompt: list[int], sampling: Sampling, group: str | None) -> dict[str, Any]:
        """A request in which nothing that changes the distribution is left to the server's defaults."""
        # vLLM refuses to be asked for more than the model has room for; an answer that meets its end there is "length"
        room = sampling.max_tokens if self._max_model_len is None else max(self._max_model_len - len(prompt), 1)
        body: dict[str, Any] = {
            "model": self._model_name(),
            "prompt": prompt,
            "max_tokens": min(sampling.max_tokens, room),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "n": 1,
            "logprobs": 1,
            "return_token_ids": True,
            "frequency_penalty": 0,
            "presence_penalty": 0,
        }
        optional = {"top_k": sampling.top_k, "min_p": sampling.min_p}
        # sent only when they act: servers of plain OpenAI know neither
        body |= {name: value for name, value in optional.items() if value}
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if sampling.stop_token_ids:
            body["stop_token_ids"] = list(sampling.stop_token_ids)
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if group is not None and self._kind == "keel":
            body["group"] = group
        return body

    async def _request_completion(self, body: dict[str, Any]) -> dict[str, Any]:
        response = await self._send("POST", "/v1/completions", json=body)
        if response.status_code != 200:
            raise self._response_error(response)
        choices = _parse_json(response).get("choices")
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise EngineError(f"engine {self.url} was asked for one answer and gave {str(choices)[:200]}")
        return choices[0]

    def _parse_choice(self, choice: Mapping[str, Any], sampling: Sampling, live_version: int) -> Generation:
        """A choice as a generation, after checking that it can be trained on."""
        token_ids = choice.get("token_ids")
        if not isinstance(token_ids, list):
            raise EngineError(
                f"engine {self.url} gave no token_ids: it does not know return_token_ids (vLLM from 0.10.2 and"
                " keel serve do), and tokens cannot be had from text",
                retryable=False,
            )
        # an answer that was ended before its first token has no table of log-probs either
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs") if token_ids else []
        if not isinstance(logprobs, list):
            raise EngineError(
                f"engine {self.url} gave no log-probs: it does not know the option logprobs of /v1/completions",
                retryable=False,
            )
        versions = choice.get("versions")
        versions = [live_version] * len(token_ids) if versions is None else versions
        if not len(token_ids) == len(logprobs) == len(versions):
            raise EngineError(
                f"engine {self.url} gave {len(token_ids)} token ids, {len(logprobs)} log-probs and {len(versions)}"
                " versions for one answer"
            )
        for value in logprobs:
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise EngineError(f"engine {self.url} gave a log-prob of {value}")
        reason = str(choice.get("finish_reason"))
        if reason not in FINISH_REASONS:
            raise EngineError(f"engine {self.url} ended an answer for {reason}; known: {', '.join(FINISH_REASONS)}")
        return Generation(
            token_ids=tuple(_check_integer("token id", token, self.url) for token in token_ids),
            logprobs=tuple(float(value) for value in logprobs),
            versions=tuple(_check_integer("version", version, self.url) for version in versions),
            finish_reason=FINISH_REASONS[reason],
            temperature=sampling.temperature,
        )

    # --- what the server is ---

    async def _detect_server(self) -> ServerKind:
        """What kind of server it is, and the model's name on it; asked once."""
        async with self._detect_lock:
            if self._kind is None:
                response = await self._send("GET", "/version", timeout=10.0)
                if response.status_code in (401, 403) or response.status_code >= 500:
                    raise self._response_error(response)
                keel = response.status_code == 200 and _parse_json(response).get("server") == "keel"
                await self._find_model()
                self._kind = "keel" if keel else "other"
            return self._kind

    async def _find_model(self) -> None:
        """The model's name, unless it was given, and how many tokens it takes, if the server says so as vLLM does."""
        response = await self._send("GET", "/v1/models", timeout=10.0)
        if response.status_code != 200 and self.model is None:
            raise self._response_error(response)
        models = _parse_json(response).get("data") if response.status_code == 200 else None
        named = {model["id"]: model for model in models or () if isinstance(model, dict) and "id" in model}
        if self.model is None:
            if not named:
                raise EngineError(f"engine {self.url} serves no model")
            self.model = str(next(iter(named)))
        limit = named.get(self.model, {}).get("max_model_len")
        self._max_model_len = limit if isinstance(limit, int) else None

    def _model_name(self) -> str:
        """What requests ask for."""
        return str(self.model)

    async def _check_temperature(self, kind: ServerKind, temperature: float, prompt: list[int]) -> None:
        """Refuse a server whose log-probs are not at the temperature of its sampling, as vLLM's are by default.

        Halving the temperature doubles the difference of two log-probs; a server where it stays the same reports
        those of temperature 1, with which the trainer would compare another distribution.
        """
        if kind == "keel" or temperature in (0.0, 1.0):
            return
        async with self._detect_lock:
            if self._logprobs_scaled is None:
                first, second = [await self._top_logprob_gap(prompt, at) for at in (1.0, 0.5)]
                if first is not None and second is not None and abs(first) > 1e-3:
                    self._logprobs_scaled = abs(second / first - 2) < 2 * TEMPERATURE_TOLERANCE
        if not self._logprobs_scaled:
            raise EngineError(
                f"engine {self.url} reports log-probs of temperature 1 while sampling at {temperature}, or does not let"
                " it be seen; start vLLM with --logprobs-mode processed_logprobs",
                retryable=self._logprobs_scaled is None,
            )

    async def _top_logprob_gap(self, prompt: list[int], temperature: float) -> float | None:
        """By how much the likeliest first token is ahead of the second."""
        body = self._request_body(prompt, Sampling(temperature=temperature, max_tokens=1), None) | {"logprobs": 2}
        tops = ((await self._request_completion(body)).get("logprobs") or {}).get("top_logprobs")
        if not isinstance(tops, list) or not tops or not isinstance(tops[0], dict) or len(tops[0]) < 2:
            return None
        best, second, *_ = sorted(tops[0].values(), reverse=True)
        return float(best - second)

    # --- the wire ---

    async def _post_load(self, path: str, body: dict[str, Any], version: int, drain: bool) -> None:
        if await self._detect_server() != "keel":
            raise EngineError(
                f"engine {self.url} is no keel server, so it takes no weights from here; use kind vllm for vLLM",
                retryable=False,
            )
        how = {"drain": True} if drain else {}
        response = await self._send("POST", path, json=body | {"version": version} | how)
        if response.status_code != 200:
            raise self._response_error(response)
        self._version = version

    async def _get_json(self, path: str) -> dict[str, Any]:
        response = await self._send("GET", path, timeout=10.0)
        if response.status_code != 200:
            raise self._response_error(response)
        return _parse_json(response)

    async def _send(self, method: str, path: str, *, timeout: float | None = None, **body: Any) -> httpx.Response:
        try:
            return await self._client.request(
                method,
                self.url + path,
                headers=self._headers,
                timeout=self._timeout if timeout is None else timeout,
                **body,
            )
        except httpx.TimeoutException as error:
            waited = self._timeout.read if timeout is None else timeout
            raise EngineError(
                f"engine {self.url}{path} did not answer in {waited} s ({_describe_error(error)})"
            ) from error
        except (httpx.HTTPError, RuntimeError) as error:
            # RuntimeError: the client was closed under a request
            self._on_connection_lost()
            raise EngineError(f"engine {self.url} cannot be reached: {_describe_error(error)}") from error

    def _on_connection_lost(self) -> None:
        """The connection broke: whoever answers next may be another server, with other weights."""
        self._kind = None
        self._logprobs_scaled = None
        self._version = self._initial_version

    def _response_error(self, response: httpx.Response) -> EngineError:
        where = f"engine {self.url}{response.request.url.path}"
        retryable = response.status_code in RETRYABLE_STATUSES
        return EngineError(f"{where} answered {response.status_code}: {_error_message(response)}", retryable=retryable)


def _parse_json(response: httpx.Response) -> dict[str, Any]:
    try:
        said = response.json() if response.content else {}
    except ValueError:
        said = None
    if not isinstance(said, dict):
        raise EngineError(f"engine {response.request.url} did not answer with a JSON object: {response.text[:200]}")
    return said


def _error_message(response: httpx.Response) -> str:
    """What an error response says, in any of the usual shapes."""
    try:
        said = response.json()
    except ValueError:
        return response.text[:500]
    error = said.get("error", said.get("detail", said)) if isinstance(said, dict) else said
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500]


def _check_integer(name: str, value: Any, url: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise EngineError(f"engine {url} gave {value} as a {name}")
    return value


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
