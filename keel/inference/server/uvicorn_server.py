"""How every HTTP server of Keel is run: by uvicorn on asyncio, silent about requests, trusting no forwarded header."""

from typing import Any, Literal

import uvicorn

KEEP_ALIVE_SECONDS = 75
"""Seconds that an idle connection stays open: longer than in clients, so that none is closed under a request."""


def make_server(
    app: Any, *, shutdown_timeout: int, lifespan: Literal["on", "off"] = "on", log_level: str = "warning"
) -> uvicorn.Server:
    """A server that is not started yet; when told to stop it answers what is under way for `patience` seconds."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan=lifespan,
            log_level=log_level,
            access_log=False,
            # a client is who connects, not who a header says it is
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=shutdown_timeout,
        )
    )
