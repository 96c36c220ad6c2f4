"""Prometheus metrics of an engine server, and the wrappers that count completions and requests.

Guarantees that every server has its own registry, that any text can be a label value, and that the path labels of
requests come from a closed list, so that clients cannot create new series. Counters start at zero with the server.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Info, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from keel.config import Sampling
from keel.inference.protocol import Engine, Generation, Health
from keel.inference.server.openai_responses import TokenChunk

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
OTHER_PATH = "other"
"""Path label of requests to paths that the server does not have."""


def label_text(text: str) -> str:
    """Return text that can be a label value.

    Lone surrogates cannot be encoded as UTF-8, and some parsers treat a carriage return as the end of a line.
    """
    return text.encode("utf-8", "replace").decode().replace("\r", " ")


class ServerMetrics:
    """Metrics of one server since its start."""

    def __init__(self, model: str) -> None:
        self._registry = registry = CollectorRegistry()
        Info("keel", "Served model.", registry=registry).info({"model": label_text(model)})
        self._ready = Gauge("keel_ready", "1 if the server accepts requests.", registry=registry)
        self._version = Gauge("keel_version", "Policy version of the live weights.", registry=registry)
        self._running = Gauge("keel_completions_running", "Completions being sampled.", registry=registry)
        self._waiting = Gauge("keel_completions_waiting", "Completions queued in the engine.", registry=registry)
        self._in_flight = Gauge("keel_completions_in_flight", "Completions clients wait for.", registry=registry)
        self.sampled_tokens = Counter(
            "keel_tokens_sampled", "Sampled tokens, including those of failed or cancelled streams.", registry=registry
        )
        self.completions = Counter(
            "keel_completions", "Finished completions by finish reason.", ["finish"], registry=registry
        )
        self.failed_completions = Counter(
            "keel_completions_failed", "Completions that failed in the engine.", registry=registry
        )
        self.requests = Counter(
            "keel_requests", "Requests by path and HTTP status.", ["path", "status"], registry=registry
        )

    def render(self, health: Health, in_flight: int) -> bytes:
        """Return all metrics in the Prometheus text format."""
        self._ready.set(health.ready)
        self._version.set(health.version)
        self._running.set(health.running)
        self._waiting.set(health.waiting)
        self._in_flight.set(in_flight)
        return generate_latest(self._registry)


class MeteredEngine:
    """An engine whose completions are counted."""

    def __init__(self, engine: Engine, metrics: ServerMetrics) -> None:
        self._engine, self._metrics = engine, metrics

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, group: str | None = None) -> Generation:
        try:
            generation = await self._engine.generate(prompt, sampling, group=group)
        except Exception:
            self._metrics.failed_completions.inc()
            raise
        self._metrics.sampled_tokens.inc(len(generation.token_ids))
        self._metrics.completions.labels(generation.finish_reason).inc()
        return generation


class MeteredStreamingEngine(MeteredEngine):
    """A streaming engine whose completions are counted."""

    async def stream(
        self, prompt: Sequence[int], sampling: Sampling, *, group: str | None = None
    ) -> AsyncIterator[TokenChunk]:
        source = cast(Any, self._engine).stream(prompt, sampling, group=group)
        try:
            async with aclosing(source) as chunks:
                async for chunk in chunks:
                    self._metrics.sampled_tokens.inc(len(chunk.token_ids))
                    if chunk.finish_reason is not None:
                        self._metrics.completions.labels(chunk.finish_reason).inc()
                    yield chunk
        except Exception:
            self._metrics.failed_completions.inc()
            raise


def meter_engine(engine: Engine, metrics: ServerMetrics) -> Engine:
    """Wrap an engine to count its completions; the wrapper has only `generate` and, if the engine has it, `stream`."""
    wrapper = MeteredStreamingEngine if hasattr(engine, "stream") else MeteredEngine
    return cast(Engine, wrapper(engine, metrics))


class RequestCounter:
    """ASGI middleware that counts responses, including denied requests."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, paths: frozenset[str]) -> None:
        self.app, self.metrics, self.paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request and count the status of its response."""

        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in self.paths else OTHER_PATH
                self.metrics.requests.labels(path, str(message["status"])).inc()
            await send(message)

        await self.app(scope, receive, counting_send if scope["type"] == "http" else send)
