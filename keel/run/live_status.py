"""`live.json`: what a run is doing at the moment, for monitoring its folder.

Written at most once per second, under a temporary name and renamed; removed when the run ends. Keel never reads it to
decide anything: a stale file means that the process was killed.
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
    """Writes the current activity and the state of the engines."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "live.json"
        self._last_write = 0.0
        self.engine_status = ""
        """State of the engines at the last write."""

    async def write(self, activity: str, engine: Engine | None) -> None:
        """Write the status, at most once per `WRITE_INTERVAL`."""
        if time.monotonic() - self._last_write < WRITE_INTERVAL:
            return
        self._last_write = time.monotonic()
        self.engine_status = "" if engine is None else await _describe_engine(engine)
        content = {"time": time.time(), "doing": activity, "engines": self.engine_status}
        temporary = self._path.with_suffix(".json.new")
        # a full disk fails the run where it matters, not here
        with contextlib.suppress(OSError):
            temporary.write_text(json.dumps(content))
            temporary.replace(self._path)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


async def _describe_engine(engine: Engine) -> str:
    """Return the state of the engine as one line of text."""
    if isinstance(engine, Pool):
        rows = [
            f"{row.url} {row.state}, version {row.version}, {row.running} running"
            + (f", {row.last_error}" if row.last_error and row.state != "ready" else "")
            for row in engine.status()
        ]
        return "; ".join(rows) or engine.discovery_error
    if not isinstance(engine, LocalEngine):
        return ""  # a slow server must not delay the run
    health = await engine.health()
    return f"version {health.version}, {health.running} running, {health.waiting} waiting {health.error}".strip()
