"""An OpenAI-compatible endpoint over real HTTP that answers by a script and misbehaves on request."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Answer:
    """What the endpoint does with a request."""

    text: str = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0
    close: bool = False
    """Close the connection without a reply."""
    raw: bytes | None = None
    """The body of the reply, instead of a chat completion."""


class ScriptedEndpoint:
    """Answers each request by the next entry of the script, its last entry again and again, or `answer(document)`."""

    def __init__(self, *script: Answer | str, answer: Callable[[dict[str, Any]], str] | None = None) -> None:
        self.script, self.answer = list(script), answer
        self.requests: list[dict[str, Any]] = []
        self.authorization: list[str | None] = []
        self.in_flight = self.max_in_flight = 0
        self.url = ""
        self._lock = threading.Lock()

    def documents(self) -> list[dict[str, Any]]:
        """Return the JSON documents that a judge was shown."""
        return [document_of(request) for request in self.requests]

    def next_answer(self, request: dict[str, Any]) -> Answer:
        with self._lock:
            self.requests.append(request)
            if self.answer is not None:
                entry: Answer | str = self.answer(document_of(request))
            else:
                entry = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        return Answer(entry) if isinstance(entry, str) else entry

    def count(self, change: int) -> None:
        with self._lock:
            self.in_flight += change
            self.max_in_flight = max(self.max_in_flight, self.in_flight)


def document_of(request: dict[str, Any]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(
        request["messages"][-1]["content"].partition("The JSON document to judge:\n")[2]
    )
    return document


@contextmanager
def serve(endpoint: ScriptedEndpoint) -> Iterator[ScriptedEndpoint]:
    """Serve the endpoint on a free port for the duration of the block."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._reply(200, b'{"data": []}', {})

        def do_POST(self) -> None:
            endpoint.count(1)
            try:
                body = self.rfile.read(int(self.headers["content-length"]))
                endpoint.authorization.append(self.headers["authorization"])
                answer = endpoint.next_answer(json.loads(body))
                time.sleep(answer.delay)
            finally:
                endpoint.count(-1)  # before the reply, after which the client may send the next request
            self._act(answer)

        def _act(self, answer: Answer) -> None:
            if answer.close:
                self.close_connection = True
                self.connection.close()
                return
            message = {"role": "assistant", "content": answer.text}
            usage = {"prompt_tokens": 100, "completion_tokens": 10}
            content = json.dumps({"choices": [{"message": message}], "usage": usage}).encode()
            self._reply(answer.status, content if answer.raw is None else answer.raw, answer.headers)

        def _reply(self, status: int, content: bytes, headers: dict[str, str]) -> None:
            try:
                self.send_response(status)
                for name, value in (headers | {"content-length": str(len(content))}).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)
            except (ConnectionError, ValueError):
                pass  # the client gave up

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    endpoint.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield endpoint
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
