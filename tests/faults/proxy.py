"""A wire that goes wrong: an HTTP proxy before a real engine server, which damages some of its answers.

It stands in a thread, speaks HTTP/1.1 with one request a connection, and passes on everything but what it was told to
spoil. Which answers are spoilt is drawn from a seed; how many were is counted.
"""

import asyncio
import json
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any, Self

Spoil = Callable[[dict[str, Any]], None]
"""Changes the one choice of an answer."""


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


def _off(choice: dict[str, Any]) -> None:
    choice["logprobs"]["token_logprobs"] = [value - 0.5 for value in choice["logprobs"]["token_logprobs"]]


def _old(choice: dict[str, Any]) -> None:
    choice["versions"] = [version - 5 for version in choice["versions"]]


SPOILT: dict[str, Spoil] = {
    "fewer log-probs than tokens": _short,
    "more tokens than asked for": _long,
    "token ids that the model does not know": _unknown,
    "log-probs that are NaN": _not_a_number,
    "log-probs above zero": _above_zero,
    "log-probs that do not match": _off,
    "tokens of another version": _old,
}
LOST = ("hang", "slow", "dropped connection", "cut-off JSON", "no JSON", "error 500", "error 503")
"""What becomes of an answer that does not arrive as it was sent."""
SLOW, FOR_EVER = 1.5, 3600.0


class Proxy:
    """Stands before `upstream` for as long as the block lasts."""

    def __init__(self, upstream: str, faults: Sequence[str], share: float, path: str = "/v1/completions") -> None:
        """`share` of the answers at `path` meets one of the faults."""
        if unknown := set(faults) - {*SPOILT, *LOST}:
            raise ValueError(f"there is no fault called {', '.join(unknown)}")
        host, _, port = upstream.removeprefix("http://").partition(":")
        self._upstream = (host, int(port))
        self._faults, self._share, self._chance = list(faults), share, random.Random(0)
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
        await asyncio.sleep(0.05)  # for connections that are being closed

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head, body = await _message(reader)
            spoil = self._path in head.split(b"\r\n")[0] and self._chance.random() < self._share
            fault = self._chance.choice(self._faults) if spoil else ""
            self.injected += spoil
            if fault == "dropped connection":
                return
            if fault in ("hang", "slow"):
                await asyncio.sleep(FOR_EVER if fault == "hang" else SLOW)
            answer = await self._asked(head, body)
            writer.write(_spoilt(answer, fault) if fault else answer)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            return  # either side is gone, which the other will notice; or all is over
        finally:
            writer.close()

    async def _asked(self, head: bytes, body: bytes) -> bytes:
        """The whole answer of the server."""
        reader, writer = await asyncio.open_connection(*self._upstream)
        try:
            lines = [line for line in head.split(b"\r\n") if line and not line.lower().startswith(b"connection:")]
            writer.write(b"\r\n".join([*lines, b"connection: close", b"", b""]) + body)
            await writer.drain()
            return await reader.read(-1)
        finally:
            writer.close()


def _spoilt(answer: bytes, fault: str) -> bytes:
    if fault in ("error 500", "error 503"):
        code = fault.removeprefix("error ")
        return f"HTTP/1.1 {code} Trouble\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode()
    head, _, body = answer.partition(b"\r\n\r\n")
    if fault == "cut-off JSON":  # and says that it is whole
        body = body[: len(body) // 2]
    elif fault == "no JSON":
        body = b"<html>gateway</html>"
    elif fault in SPOILT:
        said = json.loads(body)
        SPOILT[fault](said["choices"][0])
        body = json.dumps(said).encode()
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith((b"content-length:", b"connection:"))]
    return b"\r\n".join([*lines, b"content-length: %d" % len(body), b"connection: close", b"", b""]) + body


async def _message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = 0
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-length:"):
            length = int(line.partition(b":")[2])
    return head, await reader.readexactly(length)
