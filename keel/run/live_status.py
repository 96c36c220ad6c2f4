"""`live.json`: what a run is doing at this moment, for whoever looks at its folder while it goes on.

Written at most once a second, under a temporary name and renamed; removed when the run ends. Nothing reads it to decide
anything: a stale one means that the process was killed.
"""

import contextlib
import json
import time
from pathlib import Path

from keel.inference.local.local_engine import LocalEngine
from keel.inference.pool.pool import Pool
from keel.inference.protocol import Engine

WRITE_INTERVAL = 1.0


class LiveStatus:
    """Says what is being done, and how the engines are."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "live.json"
        self._last_write = 0.0
        self.engine_status = ""
        """How they were when last looked at."""

    async def write(self, activity: str, engine: Engine | None) -> None:
        """Write it down, unless that was done a moment ago."""
        if time.monotonic() - self._last_write < WRITE_INTERVAL:
            return
        self._last_write = time.monotonic()
        self.engine_status = "" if engine is None else await _describe_engine(engine)
        told = {"time": time.time(), "doing": activity, "engines": self.engine_status}
        temporary = self._path.with_suffix(".json.new")
        # a disk that is full stops the run where it matters, not here
        with contextlib.suppress(OSError):
            temporary.write_text(json.dumps(told))
            temporary.replace(self._path)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


async def _describe_engine(engine: Engine) -> str:
    """In a line for people."""
    if isinstance(engine, Pool):
        rows = [
            f"{row.url} {row.state}, version {row.version}, {row.running} running"
            + (f", {row.last_error}" if row.last_error and row.state != "ready" else "")
            for row in engine.status()
        ]
        return "; ".join(rows) or engine.discovery_error
    if not isinstance(engine, LocalEngine):
        return ""  # a server that is slow to answer must not hold the run up
    health = await engine.health()
    return f"version {health.version}, {health.running} running, {health.waiting} waiting {health.error}".strip()
