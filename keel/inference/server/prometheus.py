"""Numbers of a long-running process in Prometheus' text format, and what counts them on a server.

Guarantees that any text can be a label, that a family is written once with its help and type, and that labels of
requests come from a closed list, so that clients cannot make new series. It keeps nothing but sums since the start.
"""

import math
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from keel.config import Sampling
from keel.inference.protocol import Engine, Generation
from keel.inference.server.openai_responses import TokenChunk

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OTHER_PATH = "other"
"""The label of a path that is none of the server's."""


@dataclass(frozen=True)
class MetricFamily:
    """A metric: its name, what it is, and a value for each set of labels."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    values: Sequence[tuple[Mapping[str, str], float]]


def single_value_family(
    name: str, kind: Literal["gauge", "counter"], help: str, value: float, **labels: str
) -> MetricFamily:
    """A metric with one value."""
    return MetricFamily(name, kind, help, [(labels, value)])


def render_metrics(families: Iterable[MetricFamily]) -> str:
    """The page that Prometheus reads."""
    lines = []
    for one in families:
        lines += [f"# HELP {one.name} {_escape(one.help)}", f"# TYPE {one.name} {one.kind}"]
        for labels, value in one.values:
            inside = ",".join(f'{name}="{_escape_label(label)}"' for name, label in labels.items())
            lines.append(f"{one.name}{f'{{{inside}}}' if inside else ''} {_format_value(value)}")
    return "".join(f"{line}\n" for line in lines)


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _escape_label(label: str) -> str:
    # a lone surrogate has no bytes in UTF-8, and a carriage return ends a line for some readers
    whole = label.encode("utf-8", "replace").decode().replace("\r", " ")
    return _escape(whole).replace('"', '\\"')


def _format_value(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))


@dataclass
class ServerMetrics:
    """What a server has done since it started."""

    sampled_tokens: int = 0
    """Sampled and handed out, also of answers that then failed or were left."""
    completions: Counter[str] = field(default_factory=Counter)
    """That came to their end, by how they did."""
    failed_completions: int = 0
    """Answers that the engine could not finish."""
    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    """By path and status."""

    def families(self) -> list[MetricFamily]:
        return [
            single_value_family(
                "keel_tokens_sampled_total", "counter", "Tokens sampled for answers.", self.sampled_tokens
            ),
            MetricFamily(
                "keel_completions_total",
                "counter",
                "Answers that came to their end, by how.",
                [({"finish": finish}, count) for finish, count in sorted(self.completions.items())],
            ),
            single_value_family(
                "keel_completions_failed_total",
                "counter",
                "Answers that the engine could not finish.",
                self.failed_completions,
            ),
            MetricFamily(
                "keel_requests_total",
                "counter",
                "Requests by path and HTTP status; 400 and above are errors.",
                [({"path": path, "status": str(code)}, n) for (path, code), n in sorted(self.requests.items())],
            ),
        ]


class MeteredEngine:
    """An engine whose answers are counted."""

    def __init__(self, engine: Engine, metrics: ServerMetrics) -> None:
        self._engine, self._metrics = engine, metrics

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, group: str | None = None) -> Generation:
        try:
            answer = await self._engine.generate(prompt, sampling, group=group)
        except Exception:
            self._metrics.failed_completions += 1
            raise
        self._metrics.sampled_tokens += len(answer.token_ids)
        self._metrics.completions[answer.finish_reason] += 1
        return answer


class MeteredStreamingEngine(MeteredEngine):
    """The same for one that also streams."""

    async def stream(
        self, prompt: Sequence[int], sampling: Sampling, *, group: str | None = None
    ) -> AsyncIterator[TokenChunk]:
        source = cast(Any, self._engine).stream(prompt, sampling, group=group)
        try:
            async with aclosing(source) as pieces:
                async for piece in pieces:
                    self._metrics.sampled_tokens += len(piece.token_ids)
                    if piece.finish_reason is not None:
                        self._metrics.completions[piece.finish_reason] += 1
                    yield piece
        except Exception:
            self._metrics.failed_completions += 1
            raise


def meter_engine(engine: Engine, metrics: ServerMetrics) -> Engine:
    """An engine for answers, counted; weights and health stay with the engine itself."""
    counted = MeteredStreamingEngine if hasattr(engine, "stream") else MeteredEngine
    return cast(Engine, counted(engine, metrics))


class RequestCounter:
    """Middleware that counts responses, refusals included."""

    def __init__(self, app: ASGIApp, meter: ServerMetrics, paths: frozenset[str]) -> None:
        self.app, self.metrics, self.paths = app, meter, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on, and look at how the response begins."""

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in self.paths else OTHER_PATH
                self.metrics.requests[path, message["status"]] += 1
            await send(message)

        await self.app(scope, receive, counted if scope["type"] == "http" else send)
