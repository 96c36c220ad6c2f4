"""An engine behind the OpenAI protocol in a thread of its own, on this machine only and with a random key.

The thread has its own event loop, so that answers come whatever the caller's code is doing: also a client that blocks
the caller's loop gets them. Everything that reaches the engine goes through that loop.
"""

import asyncio
import secrets
import socket
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from keel.api.conversations import Conversations
from keel.config import EngineSettings, RendererSettings
from keel.inference.local.local_engine import LocalEngine
from keel.inference.protocol import EngineError
from keel.inference.server.app import build_app
from keel.inference.server.openai_requests import Limits
from keel.inference.server.uvicorn_server import server_of
from keel.rollout.rendering.renderer import Renderer
from keel.training import Model

PATIENCE = 10
"""Seconds in which what is under way may end when the server stops."""
START = 60.0
"""Seconds that starting may take; the model is loaded before."""

Value = TypeVar("Value")


class Server:
    """The endpoint of one model."""

    def __init__(self, model: Model, name: str, settings: EngineSettings) -> None:
        """`model` is the engine's own from now on, and has no adapter."""
        self.api_key = secrets.token_urlsafe(32)
        self.engine = LocalEngine(model.network, model.tokenizer, settings)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        self.base_url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"
        app = build_app(
            self.engine,
            model.tokenizer,
            model=name,
            api_key=self.api_key,
            # whoever holds the key is in this process: there is nobody to send away
            limits=Limits(requests=2**20, max_tokens=2**20, rate=None),
            vocabulary=model.head.out_features,
            exact=True,
            talk=Conversations(Renderer(model.tokenizer, RendererSettings())).open,
        )
        self._server = server_of(app, patience=PATIENCE)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="keel-server", daemon=True)

    def start(self) -> None:
        """Returns when requests are answered. Blocks."""
        self._thread.start()
        if not self._ready.wait(START) or self._failed is not None:
            raise EngineError(f"the server at {self.base_url} did not start: {self._failed or f'{START:.0f} s passed'}")

    def stop(self) -> None:
        """Returns when it has ended, and its engine with it. Blocks."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join()
        self._listener.close()

    async def call(self, work: Coroutine[Any, Any, Value]) -> Value:
        """Await something of the engine's, in the server's event loop."""
        if self._loop is None or not self._thread.is_alive():
            work.close()
            raise EngineError(f"the server at {self.base_url} is not running")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - told to whoever waits for the start
            self._failed = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        serving = asyncio.ensure_future(self._server.serve(sockets=[self._listener]))
        while not self._server.started and not serving.done():
            await asyncio.sleep(0.005)
        if self._server.started:
            self._ready.set()
        await serving
