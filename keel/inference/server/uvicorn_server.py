"""The uvicorn configuration of every Keel HTTP server: asyncio, no access log, forwarding headers ignored."""

from typing import Any, Literal

import uvicorn

KEEP_ALIVE_SECONDS = 75
"""Seconds that an idle connection stays open: longer than in clients, so that none is closed during a request."""


def make_server(
    app: Any, *, shutdown_timeout: int, lifespan: Literal["on", "off"] = "on", log_level: str = "warning"
) -> uvicorn.Server:
    """Return a server, not started; on shutdown it finishes requests in flight for up to `shutdown_timeout` seconds."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan=lifespan,
            log_level=log_level,
            access_log=False,
            # a client is identified by its connection, never by a header
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=shutdown_timeout,
        )
    )
