"""An engine behind the OpenAI protocol in its own thread, on loopback only and with a random key.

The thread has its own event loop, so requests are answered whatever the caller's code does, even if it blocks its own
event loop. All access to the engine goes through that loop.
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
from keel.inference.server.uvicorn_server import make_server
from keel.rollout.rendering.renderer import Renderer
from keel.training import Model

SHUTDOWN_TIMEOUT = 10
"""Seconds for requests in flight to finish when the server stops."""
START_TIMEOUT = 60.0
"""Seconds the start may take; the model is already loaded."""

ResultT = TypeVar("ResultT")


class ModelEndpoint:
    """The endpoint of one model."""

    def __init__(self, model: Model, name: str, settings: EngineSettings, renderer: RendererSettings) -> None:
        """`model` belongs to the engine from now on and must not have an adapter."""
        self.api_key = secrets.token_urlsafe(32)
        conversations = Conversations(Renderer(model.tokenizer, renderer))  # may raise, so before the socket
        self.engine = LocalEngine(model.network, model.tokenizer, settings)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        self.base_url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"
        app = build_app(
            self.engine,
            model.tokenizer,
            model=name,
            api_key=self.api_key,
            # every client with the key is in this process: there is nobody to limit
            limits=Limits(max_in_flight=2**20, max_tokens=2**20, rate_limit=None),
            vocab_size=model.head.out_features,
            training_fields=True,
            open_session=conversations.open_session,
        )
        self._server = make_server(app, shutdown_timeout=SHUTDOWN_TIMEOUT)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._start_error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="keel-server", daemon=True)

    def start(self) -> None:
        """Start the server; block until it accepts requests."""
        self._thread.start()
        if not self._ready.wait(START_TIMEOUT) or self._start_error is not None:
            raise EngineError(
                f"the server at {self.base_url} did not start: {self._start_error or f'{START_TIMEOUT:.0f} s passed'}"
            )

    def stop(self) -> None:
        """Stop the server and its engine; block until they have ended."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join()
        self._listener.close()

    async def run_coroutine(self, coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Await a coroutine of the engine in the server's event loop."""
        if self._loop is None or not self._thread.is_alive():
            coroutine.close()
            raise EngineError(f"the server at {self.base_url} is not running")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - raised by start()
            self._start_error = error
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
