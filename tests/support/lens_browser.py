<<<<<<< HEAD
"""Drive headless Chromium over WebDriver with plain HTTP, for tests, screenshots and the benchmark of the lens.

Starts `chromedriver` on a free port with a fresh profile, and stops it. The browser reaches only 127.0.0.1: no other
host name is resolved.
=======
"""Headless Chromium, driven over WebDriver by plain HTTP: for tests of the page, its pictures and its benchmark.

Starts Debian's `chromedriver` on a free port with a fresh profile and ends it. No network but loopback is reachable
from the browser: every other name resolves to nothing.
>>>>>>> h4
"""

import base64
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)


def missing() -> str:
    """Why there is no browser to drive; empty when there is one."""
    for name in ("chromium", "chromedriver"):
        if shutil.which(name) is None:
            return f"{name} is not installed (Debian: apt-get install chromium chromium-driver)"
    return ""


class Browser:
    """One window."""

    def __init__(self, client: httpx.Client, session: str) -> None:
        self._client, self._session = client, session

    def command(self, path: str, **body: Any) -> Any:
<<<<<<< HEAD
        """Send a WebDriver command; an error of the browser is raised."""
        value = self._client.post(f"/session/{self._session}/{path}", json=body).json()["value"]
        if isinstance(value, dict) and "error" in value:
            raise RuntimeError(f"{path}: {value['error']}: {value.get('message', '')[:500]}")
        return value
=======
        """A WebDriver command; raises with what the browser said."""
        answer = self._client.post(f"/session/{self._session}/{path}", json=body).json()["value"]
        if isinstance(answer, dict) and "error" in answer:
            raise RuntimeError(f"{path}: {answer['error']}: {answer.get('message', '')[:500]}")
        return answer
>>>>>>> h4

    def devtools(self, method: str, **parameters: Any) -> Any:
        return self.command("goog/cdp/execute", cmd=method, params=parameters)

    def open(self, address: str) -> None:
        self.command("url", url=address)

    def run(self, script: str, *arguments: Any) -> Any:
<<<<<<< HEAD
        """Run a script with `arguments` and return its result."""
        return self.command("execute/sync", script=script, args=list(arguments))

    def wait(self, script: str, *arguments: Any, seconds: float = 60) -> Any:
        """Wait until a script returns a true value, and return it."""
        deadline = time.monotonic() + seconds
        while not (result := self.run(script, *arguments)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not true within {seconds:g} s: {script}; the page says: {self.text()[:800]}")
            time.sleep(0.05)
        return result
=======
        """What a script returns; `arguments` in it are these."""
        return self.command("execute/sync", script=script, args=list(arguments))

    def wait(self, script: str, *arguments: Any, seconds: float = 60) -> Any:
        """Until a script returns something true."""
        end = time.monotonic() + seconds
        while not (found := self.run(script, *arguments)):
            if time.monotonic() > end:
                raise TimeoutError(f"not true within {seconds:g} s: {script}; the page says: {self.text()[:800]}")
            time.sleep(0.05)
        return found
>>>>>>> h4

    def text(self) -> str:
        return str(self.run("return document.body.innerText"))

    def press(self, *keys: str) -> None:
<<<<<<< HEAD
        """Press keys one after another."""
=======
        """Keys, one after another, wherever the focus is."""
>>>>>>> h4
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self.command("actions", actions=[{"type": "key", "id": "keyboard", "actions": actions}])

    def point(self, selector: str) -> None:
        """Move the pointer over an element."""
        center = self.run(
            "const b = document.querySelector(arguments[0]).getBoundingClientRect();"
            "return [Math.round(b.x + b.width / 2), Math.round(b.y + b.height / 2)]",
            selector,
        )
        move = {"type": "pointerMove", "duration": 0, "x": center[0], "y": center[1]}
        self.command("actions", actions=[{"type": "pointer", "id": "mouse", "actions": [move]}])

    def scheme(self, name: str) -> None:
<<<<<<< HEAD
        """Set the preferred colour scheme, light or dark."""
=======
        """light or dark, as the user prefers."""
>>>>>>> h4
        self.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def size(self, width: int, height: int) -> None:
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    def picture(self, path: Path) -> None:
<<<<<<< HEAD
        """Save a screenshot of the window as PNG."""
=======
        """What is in the window, as PNG."""
>>>>>>> h4
        shot = self.devtools("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(shot))

    def log(self) -> list[str]:
        """What the browser complained about since the last time it was asked."""
        return [entry["message"] for entry in self.command("se/log", type="browser")]


@contextmanager
def browser(width: int = 1440, height: int = 900) -> Iterator[Browser]:
<<<<<<< HEAD
    """Start a fresh browser that is closed at the end of the block."""
=======
    """A fresh browser, ended with the block."""
>>>>>>> h4
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        driver = subprocess.Popen(
            ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
                _answering(client)
                chrome = {"args": [*FLAGS, f"--user-data-dir={profile}"], "binary": shutil.which("chromium")}
                wanted = {"goog:chromeOptions": chrome, "goog:loggingPrefs": {"browser": "ALL"}}
                made = client.post("/session", json={"capabilities": {"alwaysMatch": wanted}}).json()["value"]
                if "sessionId" not in made:
                    raise RuntimeError(f"chromium did not start: {made.get('message', made)}")
                window = Browser(client, made["sessionId"])
                window.size(width, height)
                try:
                    yield window
                finally:
                    client.delete(f"/session/{made['sessionId']}")
        finally:
            driver.terminate()
            driver.wait(10)


<<<<<<< HEAD
def _wait_until_ready(client: httpx.Client, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
=======
def _answering(client: httpx.Client, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
>>>>>>> h4
    while True:
        try:
            if client.get("/status").json()["value"]["ready"]:
                return
        except httpx.TransportError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)
