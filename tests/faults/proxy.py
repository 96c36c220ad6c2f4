"""An HTTP proxy in front of a real engine server that damages some of its responses.

It runs in a thread, speaks HTTP/1.1 with one request per connection, and forwards everything unchanged except the
responses it corrupts. These are drawn from a seed and counted.
"""

import asyncio
import json
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any, Self

Corruption = Callable[[dict[str, Any]], None]
"""Changes the only choice of a response."""


def _short(choice: dict[str, Any]) -> None:
    choice["logprobs"]["token_logprobs"] = choice["logprobs"]["token_logprobs"][:-1]


def _long(choice: dict[str, Any]) -> None:
    for values in (choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["versions"]):
        values += values * 9


def _unknown(choice: dict[str, Any]) -> None:
    choice["token_ids"] = [10**6 for _ in choice["token_ids"]]


def _not_a_number(choice: dict[str, Any]) -> None:
    choice["logprobs"]["token_logprobs"] = [float("nan") for _ in choice["token_ids"]]


def _above_zero(choice: dict[str, Any]) -> None:
    choice["logprobs"]["token_logprobs"] = [0.7 for _ in choice["token_ids"]]


def _shifted(choice: dict[str, Any]) -> None:
    choice["logprobs"]["token_logprobs"] = [value - 0.5 for value in choice["logprobs"]["token_logprobs"]]


def _old(choice: dict[str, Any]) -> None:
    choice["versions"] = [version - 5 for version in choice["versions"]]


CORRUPTIONS: dict[str, Corruption] = {
    "fewer log-probs than tokens": _short,
    "more tokens than asked for": _long,
    "token ids that the model does not know": _unknown,
    "log-probs that are NaN": _not_a_number,
    "log-probs above zero": _above_zero,
    "log-probs that do not match": _shifted,
    "tokens of another version": _old,
}
TRANSPORT_FAULTS = ("hang", "slow", "dropped connection", "cut-off JSON", "no JSON", "error 500", "error 503")
"""Faults of the connection or the response as a whole."""
SLOW_SECONDS, HANG_SECONDS = 1.5, 3600.0


class Proxy:
    """Proxies `upstream` for the duration of the block."""

    def __init__(self, upstream: str, faults: Sequence[str], share: float, path: str = "/v1/completions") -> None:
        """A fraction `share` of the responses at `path` has one of the faults."""
        if unknown := set(faults) - {*CORRUPTIONS, *TRANSPORT_FAULTS}:
            raise ValueError(f"unknown fault {', '.join(unknown)}")
        host, _, port = upstream.removeprefix("http://").partition(":")
        self._upstream = (host, int(port))
        self._faults, self._share, self._rng = list(faults), share, random.Random(0)
        self._path = path.encode()
        self.injected, self.url = 0, ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        starting = asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result()
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0.05)  # lets connections close

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head, body = await _read_message(reader)
            inject = self._path in head.split(b"\r\n")[0] and self._rng.random() < self._share
            fault = self._rng.choice(self._faults) if inject else ""
            self.injected += inject
            if fault == "dropped connection":
                return
            if fault in ("hang", "slow"):
                await asyncio.sleep(HANG_SECONDS if fault == "hang" else SLOW_SECONDS)
            response = await self._forward(head, body)
            writer.write(_corrupt(response, fault) if fault else response)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            return  # one side has disconnected, or the proxy is closing
        finally:
            writer.close()

    async def _forward(self, head: bytes, body: bytes) -> bytes:
        """Return the complete response of the server."""
        reader, writer = await asyncio.open_connection(*self._upstream)
        try:
            lines = [line for line in head.split(b"\r\n") if line and not line.lower().startswith(b"connection:")]
            writer.write(b"\r\n".join([*lines, b"connection: close", b"", b""]) + body)
            await writer.drain()
            return await reader.read(-1)
        finally:
            writer.close()


def _corrupt(response: bytes, fault: str) -> bytes:
    if fault in ("error 500", "error 503"):
        code = fault.removeprefix("error ")
        return f"HTTP/1.1 {code} Trouble\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode()
    head, _, body = response.partition(b"\r\n\r\n")
    if fault == "cut-off JSON":  # with a matching content-length
        body = body[: len(body) // 2]
    elif fault == "no JSON":
        body = b"<html>gateway</html>"
    elif fault in CORRUPTIONS:
        payload = json.loads(body)
        CORRUPTIONS[fault](payload["choices"][0])
        body = json.dumps(payload).encode()
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith((b"content-length:", b"connection:"))]
    return b"\r\n".join([*lines, b"content-length: %d" % len(body), b"connection: close", b"", b""]) + body


async def _read_message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = 0
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-length:"):
            length = int(line.partition(b":")[2])
    return head, await reader.readexactly(length)
