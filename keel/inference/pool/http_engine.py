"""Client of an engine server: any OpenAI-compatible server that returns log-probs and token ids.

Guarantees that a generation is complete, or an `EngineError` says whether a retry can help: as many log-probs as
tokens, all finite and at the requested temperature, and token ids as sampled, never re-tokenized text. Versions are the
server's if it returns them per token, otherwise the version that was live when the request was sent. Weights can be
loaded on Keel's own server; for vLLM see `keel.inference.pool.vllm_engine`.
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
"""Statuses after which the same request may succeed, on this server or another."""

FINISH_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}

TEMPERATURE_TOLERANCE = 0.05
"""Relative tolerance of the temperature probe; a server may compute in half precision."""

ServerKind = Literal["keel", "other"]


class HttpEngine:
    """Client of one server. The constructor sends nothing; the first call detects what kind of server it is."""

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
        """Create a client; `version` is the initial version of a server that does not report one."""
        base = url.rstrip("/").removesuffix("/v1")
        if httpx.URL(base).scheme not in ("http", "https") or not httpx.URL(base).host:
            raise ConfigError(f"engine url = {url} is not a URL such as http://127.0.0.1:8000")
        self.url = base
        self.model = model
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._timeout = httpx.Timeout(timeout, connect=min(timeout, 10.0))
        self._owns_client = client is None
        # the caller decides how many requests are in flight
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
        """Initialize the state that a subclass adds."""

    # --- the engine ---

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, group: str | None = None) -> Generation:
        """Sample a completion; cancelling the call closes the connection, which cancels it on the server."""
        if self._closed:
            raise EngineError(f"engine {self.url} is closed")
        task = asyncio.ensure_future(self._generate(list(prompt), sampling, group))
        self._in_flight.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self._closed and caller is not None and not caller.cancelling():
                raise EngineError(f"engine {self.url} was closed before it responded") from None
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
        """Let the server receive a broadcast that this machine sends meanwhile. Returns when the weights are live."""
        await self._post_load("/v1/receive_weights", asdict(slot), version, drain)

    async def version(self) -> int:
        """Return the version of the live weights: the server's, or if it reports none the version last loaded."""
        if await self._detect_server() == "keel":
            self._version = _check_integer("version", (await self._get_json("/version")).get("version"), self.url)
        return self._version

    async def health(self) -> Health:
        """Return the server's health; an unreachable server is not ready and raises no exception."""
        try:
            response = await self._send("GET", "/health", timeout=10.0)
            payload = parse_json_object(response)
            if response.status_code not in (200, 503):
                raise self._response_error(response)
            if "ready" not in payload:
                error = "" if response.status_code == 200 else error_message(response)
                return Health(not error, self._version, running=len(self._in_flight), error=error)
            self._version = _check_integer("version", payload.get("version"), self.url)
            running, waiting = (_check_integer(name, payload.get(name, 0), self.url) for name in ("running", "waiting"))
            return Health(bool(payload["ready"]), self._version, running, waiting, str(payload.get("error", "")))
        except EngineError as error:
            return Health(False, self._version, running=len(self._in_flight), error=str(error))

    async def close(self) -> None:
        """End requests in flight with an `EngineError` and close the connections. The server keeps running."""
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
        """Return a request that leaves nothing that changes the distribution to the server's defaults."""
        # vLLM rejects a max_tokens beyond the context length; a completion that ends there has finish reason "length"
        available = sampling.max_tokens if self._max_model_len is None else max(self._max_model_len - len(prompt), 1)
        body: dict[str, Any] = {
            "model": self._model_name(),
            "prompt": prompt,
            "max_tokens": min(sampling.max_tokens, available),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "n": 1,
            "logprobs": 0,  # of the sampled tokens; alternatives would cost time
            "return_token_ids": True,
            "frequency_penalty": 0,
            "presence_penalty": 0,
        }
        optional = {"top_k": sampling.top_k, "min_p": sampling.min_p}
        # sent only if set: plain OpenAI servers know neither
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
        choices = parse_json_object(response).get("choices")
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise EngineError(f"engine {self.url} returned {str(choices)[:200]} instead of one choice")
        return choices[0]

    def _parse_choice(self, choice: Mapping[str, Any], sampling: Sampling, live_version: int) -> Generation:
        """Return a choice as a generation, after checking that it can be trained on."""
        token_ids = choice.get("token_ids")
        if not isinstance(token_ids, list):
            raise EngineError(
                f"engine {self.url} returned no token_ids: it does not support return_token_ids (vLLM from 0.10.2 and"
                " keel serve do), and token ids cannot be recovered from text",
                retryable=False,
            )
        # a completion aborted before its first token has no log-probs
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs") if token_ids else []
        if not isinstance(logprobs, list):
            raise EngineError(
                f"engine {self.url} returned no log-probs: it does not support logprobs of /v1/completions",
                retryable=False,
            )
        versions = choice.get("versions")
        versions = [live_version] * len(token_ids) if versions is None else versions
        if not len(token_ids) == len(logprobs) == len(versions):
            raise EngineError(
                f"engine {self.url} returned {len(token_ids)} token ids, {len(logprobs)} log-probs and {len(versions)}"
                " versions for one completion"
            )
        for value in logprobs:
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise EngineError(f"engine {self.url} returned a log-prob of {value}")
        reason = str(choice.get("finish_reason"))
        if reason not in FINISH_REASONS:
            raise EngineError(
                f"engine {self.url} returned finish_reason {reason}; expected one of {', '.join(FINISH_REASONS)}"
            )
        return Generation(
            token_ids=tuple(_check_integer("token id", token, self.url) for token in token_ids),
            logprobs=tuple(float(value) for value in logprobs),
            versions=tuple(_check_integer("version", version, self.url) for version in versions),
            finish_reason=FINISH_REASONS[reason],
            temperature=sampling.temperature,
        )

    # --- server detection ---

    async def _detect_server(self) -> ServerKind:
        """Return the kind of server, and find the model's name; cached after the first call."""
        async with self._detect_lock:
            if self._kind is None:
                response = await self._send("GET", "/version", timeout=10.0)
                if response.status_code in (401, 403) or response.status_code >= 500:
                    raise self._response_error(response)
                keel = response.status_code == 200 and parse_json_object(response).get("server") == "keel"
                await self._find_model()
                self._kind = "keel" if keel else "other"
            return self._kind

    async def _find_model(self) -> None:
        """Find the model's name, unless given, and its context length, if the server reports it as vLLM does."""
        response = await self._send("GET", "/v1/models", timeout=10.0)
        if response.status_code != 200 and self.model is None:
            raise self._response_error(response)
        models = parse_json_object(response).get("data") if response.status_code == 200 else None
        by_name = {model["id"]: model for model in models or () if isinstance(model, dict) and "id" in model}
        if self.model is None:
            if not by_name:
                raise EngineError(f"engine {self.url} serves no model")
            self.model = str(next(iter(by_name)))
        limit = by_name.get(self.model, {}).get("max_model_len")
        self._max_model_len = limit if isinstance(limit, int) else None

    def _model_name(self) -> str:
        """Return the model name of requests."""
        return str(self.model)

    async def _check_temperature(self, kind: ServerKind, temperature: float, prompt: list[int]) -> None:
        """Raise if the server's log-probs are not at the sampling temperature; by default vLLM's are not.

        Halving the temperature doubles the difference of two log-probs. If it does not change, the server reports
        log-probs at temperature 1, and the trainer would compare them with a different distribution.
        """
        if kind == "keel" or temperature in (0.0, 1.0):
            return
        async with self._detect_lock:
            if self._logprobs_scaled is None:
                first, second = [await self._top_logprob_gap(prompt, temperature) for temperature in (1.0, 0.5)]
                if first is not None and second is not None and abs(first) > 1e-3:
                    self._logprobs_scaled = abs(second / first - 2) < 2 * TEMPERATURE_TOLERANCE
        if not self._logprobs_scaled:
            raise EngineError(
                f"engine {self.url} reports log-probs at temperature 1 while sampling at {temperature}, or it cannot be"
                " determined; start vLLM with --logprobs-mode processed_logprobs",
                retryable=self._logprobs_scaled is None,
            )

    async def _top_logprob_gap(self, prompt: list[int], temperature: float) -> float | None:
        """Return the log-prob difference of the two most likely first tokens."""
        body = self._request_body(prompt, Sampling(temperature=temperature, max_tokens=1), None) | {"logprobs": 2}
        tops = ((await self._request_completion(body)).get("logprobs") or {}).get("top_logprobs")
        if not isinstance(tops, list) or not tops or not isinstance(tops[0], dict) or len(tops[0]) < 2:
            return None
        best, second, *_ = sorted(tops[0].values(), reverse=True)
        return float(best - second)

    # --- HTTP ---

    async def _post_load(self, path: str, body: dict[str, Any], version: int, drain: bool) -> None:
        if await self._detect_server() != "keel":
            raise EngineError(
                f'engine {self.url} is not a keel server and cannot load weights; set pool.backend = "vllm" for vLLM',
                retryable=False,
            )
        options = {"drain": True} if drain else {}
        response = await self._send("POST", path, json=body | {"version": version} | options)
        if response.status_code != 200:
            raise self._response_error(response)
        self._version = version

    async def _get_json(self, path: str) -> dict[str, Any]:
        response = await self._send("GET", path, timeout=10.0)
        if response.status_code != 200:
            raise self._response_error(response)
        return parse_json_object(response)

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
            limit = self._timeout.read if timeout is None else timeout
            raise EngineError(
                f"engine {self.url}{path} did not respond within {limit} s ({describe_error(error)})"
            ) from error
        except (httpx.HTTPError, RuntimeError) as error:
            # RuntimeError: the client was closed during a request
            self._on_connection_lost()
            raise EngineError(f"engine {self.url} cannot be reached: {describe_error(error)}") from error

    def _on_connection_lost(self) -> None:
        """Forget what is known of the server: after a lost connection another one may respond, with other weights."""
        self._kind = None
        self._logprobs_scaled = None
        self._version = self._initial_version

    def _response_error(self, response: httpx.Response) -> EngineError:
        endpoint = f"engine {self.url}{response.request.url.path}"
        retryable = response.status_code in RETRYABLE_STATUSES
        return EngineError(
            f"{endpoint} returned status {response.status_code}: {error_message(response)}", retryable=retryable
        )


def parse_json_object(response: httpx.Response) -> dict[str, Any]:
    """Return the JSON object that a server returned; anything else raises an `EngineError`."""
    try:
        payload = response.json() if response.content else {}
    except ValueError:
        payload = None
    if not isinstance(payload, dict):
        raise EngineError(f"engine {response.request.url} did not return a JSON object: {response.text[:200]}")
    return payload


def error_message(response: httpx.Response) -> str:
    """Return the message of an error response in any of the common formats."""
    try:
        payload = response.json()
    except ValueError:
        return response.text[:500]
    error = payload.get("error", payload.get("detail", payload)) if isinstance(payload, dict) else payload
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500]


def _check_integer(name: str, value: Any, url: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise EngineError(f"engine {url} returned {value} as {name}")
    return value


def describe_error(error: Exception) -> str:
    """Return the type and the message of an exception; those of httpx often have no message."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
