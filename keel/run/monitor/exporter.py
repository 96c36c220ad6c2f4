"""Prometheus exporter of a training run: a callback that keeps the latest metrics, and a server in a thread.

The exporter serves what the run last reported and never queries the run. The server stops with the run: a failed scrape
means the process is gone, and the run's folder says how it ended. Without a key only this machine may read the metrics.
"""

import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from keel.errors import KeelError
from keel.inference.server.access import AccessControl, RateLimit
from keel.inference.server.middleware import AccessMiddleware
from keel.inference.server.prometheus import CONTENT_TYPE, label_text
from keel.inference.server.uvicorn_server import make_server
from keel.run.evaluation.evaluate import EvaluationResult
from keel.run.monitor.callbacks import NullCallback

STAGES = ("loading", "sampling", "training", "publishing", "saving", "evaluating")
"""Known stages: the first word of the status given to `RunCallback.waiting`. Any other stage is "other"."""
START_TIMEOUT = 10.0
"""Seconds for the server to start or stop."""
RATE_LIMIT = RateLimit(per_second=20, burst=100)
"""Requests per client; Prometheus scrapes once every few seconds."""


class Exporter(NullCallback, Collector):
    """Keep the latest metrics of a run. `render` may be called from another thread."""

    def __init__(self) -> None:
        self._run, self._steps, self._step = "", 0, 0
        self._stage = "loading"
        self._step_time = 0.0
        # the mappings are replaced, never changed: the server's thread may be reading them
        self._metrics: Mapping[str, float] = {}
        self._evaluations: Mapping[tuple[str, str], float] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def started(self, name: str, folder: Path, steps: int, start_step: int) -> None:
        del folder
        self._run, self._steps, self._step = name, steps, start_step

    def waiting(self, status: str) -> None:
        stage = status.replace(":", " ").partition(" ")[0]
        self._stage = stage if stage in STAGES else "other"

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step, self._metrics, self._step_time = step, dict(metrics), time.time()

    def evaluated(self, step: int, evaluation: EvaluationResult) -> None:
        self.loss_evaluated(step, evaluation.environment, evaluation.scalars())

    def loss_evaluated(self, step: int, name: str, metrics: Mapping[str, float]) -> None:
        scalars = {(name, metric): value for metric, value in metrics.items()}
        self._evaluations = {**self._evaluations, **scalars, (name, "step"): float(step)}

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics for the registry."""
        yield InfoMetricFamily("keel_run", "Run of this process.", {"run": label_text(self._run)})
        yield GaugeMetricFamily("keel_run_steps", "Step at which the run ends.", self._steps)
        yield GaugeMetricFamily("keel_run_step", "Last completed training step.", self._step)
        yield GaugeMetricFamily(
            "keel_run_step_time_seconds", "Unix time of the last completed step; 0 before the first.", self._step_time
        )
        stages = GaugeMetricFamily("keel_run_stage", "1 for the current stage of the run.", labels=["stage"])
        for stage in (*STAGES, "other"):
            stages.add_metric([stage], stage == self._stage)
        yield stages
        metrics = GaugeMetricFamily("keel_run_metric", "Metrics of the last step by name.", labels=["name"])
        for name, value in self._metrics.items():
            metrics.add_metric([label_text(name)], value)
        yield metrics
        evaluations = GaugeMetricFamily(
            "keel_run_evaluation", "Results of the last evaluation of each environment.", labels=["environment", "name"]
        )
        for (environment, name), value in self._evaluations.items():
            evaluations.add_metric([label_text(environment), label_text(name)], value)
        yield evaluations

    def render(self) -> bytes:
        """Return the metrics in the Prometheus text format."""
        return generate_latest(self._registry)


class ExporterServer:
    """Serve GET /metrics between `start` and `stop`: to clients with the key, or without one to this machine."""

    def __init__(self, exporter: Exporter, listener: socket.socket, api_key: str | None = None) -> None:
        async def metrics(_request: Request) -> Response:
            return Response(exporter.render(), media_type=CONTENT_TYPE)

        app = Starlette(
            routes=[Route("/metrics", metrics)],
            middleware=[Middleware(AccessMiddleware, access=AccessControl(api_key, RATE_LIMIT))],
        )
        self._listener = listener
        self._server = make_server(app, shutdown_timeout=1, lifespan="off", log_level="critical")
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listener]}, name="keel-metrics", daemon=True
        )

    def start(self) -> None:
        """Start the thread and return when the server accepts requests."""
        self._thread.start()
        deadline = time.monotonic() + START_TIMEOUT
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise KeelError(f"--metrics-port {self._listener.getsockname()[1]}: the metrics server did not start")
            time.sleep(0.005)

    def stop(self) -> None:
        """Stop the server and return when its port is free."""
        self._server.should_exit = True
        self._thread.join(START_TIMEOUT)
        self._listener.close()
