"""A run's last numbers for Prometheus, on this machine unless there is a key: an observer, and a server in a thread.

It serves what it was told last and asks nothing of the run. It ends with the run: that a process is gone is seen by its
port not answering, and how a run ended is in its folder.
"""

import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from keel.errors import KeelError
from keel.inference.server.access import AccessControl, RateLimit
from keel.inference.server.middleware import AccessMiddleware
from keel.inference.server.prometheus import CONTENT_TYPE, MetricFamily, render_metrics, single_value_family
from keel.inference.server.uvicorn_server import make_server
from keel.run.evaluate import EvaluationResult
from keel.run.monitor.callbacks import NullCallback

STAGES = ("loading", "sampling", "training", "publishing", "saving", "evaluating")
"""The first word of what an observer hears about waiting; what is none of these is "other"."""
START_TIMEOUT = 10.0
"""Seconds for the server to answer."""
RATE_LIMIT = RateLimit(per_second=20, burst=100)
"""Prometheus asks every few seconds."""


class Exporter(NullCallback):
    """Remembers what it was told last. `page` may be called from another thread."""

    def __init__(self) -> None:
        self._run, self._steps, self._step = "", 0, 0
        self._stage = "loading"
        self._step_time = 0.0
        # replaced whole, never changed: the server's thread may be reading them
        self._metrics: Mapping[str, float] = {}
        self._evaluations: Mapping[tuple[str, str], float] = {}

    def started(self, name: str, folder: Path, steps: int, start_step: int) -> None:
        del folder
        self._run, self._steps, self._step = name, steps, start_step

    def waiting(self, status: str) -> None:
        stage = status.replace(":", " ").partition(" ")[0]
        self._stage = stage if stage in STAGES else "other"

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step, self._metrics, self._step_time = step, dict(metrics), time.time()

    def evaluated(self, step: int, evaluation: EvaluationResult) -> None:
        found = {(evaluation.environment, name): value for name, value in evaluation.scalars().items()}
        self._evaluations = {**self._evaluations, **found, (evaluation.environment, "step"): float(step)}

    def render(self) -> str:
        """What Prometheus reads."""
        stages = [({"stage": stage}, float(stage == self._stage)) for stage in (*STAGES, "other")]
        return render_metrics(
            [
                single_value_family("keel_run_info", "gauge", "The run in this process.", 1, run=self._run),
                single_value_family("keel_run_steps", "gauge", "The step that the run ends with.", self._steps),
                single_value_family("keel_run_step", "gauge", "The last step that was trained.", self._step),
                single_value_family(
                    "keel_run_step_time_seconds", "gauge", "When it was, in Unix time; 0: not yet.", self._step_time
                ),
                MetricFamily("keel_run_stage", "gauge", "1 for what is being done just now.", stages),
                MetricFamily(
                    "keel_run_metric",
                    "gauge",
                    "Numbers of the last step, by their names in the ledger.",
                    [({"name": name}, value) for name, value in self._metrics.items()],
                ),
                MetricFamily(
                    "keel_run_evaluation",
                    "gauge",
                    "Numbers of each environment's last evaluation.",
                    [({"environment": env, "name": name}, value) for (env, name), value in self._evaluations.items()],
                ),
            ]
        )


class ExporterServer:
    """Answers GET /metrics with an exporter's page from `start` to `stop`, to holders of the key or this machine."""

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
        """Returns when it answers."""
        self._thread.start()
        deadline = time.monotonic() + START_TIMEOUT
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise KeelError(f"--metrics-port {self._listener.getsockname()[1]}: the server did not start")
            time.sleep(0.005)

    def stop(self) -> None:
        """Returns when the port is free again."""
        self._server.should_exit = True
        self._thread.join(START_TIMEOUT)
        self._listener.close()
