"""Drive headless Chromium over WebDriver with plain HTTP, for tests, screenshots and the benchmark of the lens.

Starts `chromedriver` on a free port with a fresh profile, and stops it. The browser reaches only 127.0.0.1: no other
host name is resolved.
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
    """Return why no browser is available, or an empty string."""
    for name in ("chromium", "chromedriver"):
        if shutil.which(name) is None:
            return f"{name} is not installed (Debian: apt-get install chromium chromium-driver)"
    return ""


class Browser:
    """One browser window."""

    def __init__(self, client: httpx.Client, session: str) -> None:
        self._client, self._session = client, session

    def command(self, path: str, **body: Any) -> Any:
        """Send a WebDriver command; an error of the browser is raised."""
        value = self._client.post(f"/session/{self._session}/{path}", json=body).json()["value"]
        if isinstance(value, dict) and "error" in value:
            raise RuntimeError(f"{path}: {value['error']}: {value.get('message', '')[:500]}")
        return value

    def devtools(self, method: str, **parameters: Any) -> Any:
        return self.command("goog/cdp/execute", cmd=method, params=parameters)

    def open(self, address: str) -> None:
        self.command("url", url=address)

    def run(self, script: str, *arguments: Any) -> Any:
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

    def text(self) -> str:
        return str(self.run("return document.body.innerText"))

    def press(self, *keys: str) -> None:
        """Press keys one after another."""
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
        """Set the preferred colour scheme, light or dark."""
        self.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def size(self, width: int, height: int) -> None:
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    def picture(self, path: Path) -> None:
        """Save a screenshot of the window as PNG."""
        shot = self.devtools("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(shot))

    def log(self) -> list[str]:
        """Return the browser's log messages since the last call."""
        return [entry["message"] for entry in self.command("se/log", type="browser")]


@contextmanager
def browser(width: int = 1440, height: int = 900) -> Iterator[Browser]:
    """Start a fresh browser that is closed at the end of the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        driver = subprocess.Popen(
            ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
                _wait_until_ready(client)
                chrome = {"args": [*FLAGS, f"--user-data-dir={profile}"], "binary": shutil.which("chromium")}
                capabilities = {"goog:chromeOptions": chrome, "goog:loggingPrefs": {"browser": "ALL"}}
                session = client.post("/session", json={"capabilities": {"alwaysMatch": capabilities}}).json()["value"]
                if "sessionId" not in session:
                    raise RuntimeError(f"chromium did not start: {session.get('message', session)}")
                window = Browser(client, session["sessionId"])
                window.size(width, height)
                try:
                    yield window
                finally:
                    client.delete(f"/session/{session['sessionId']}")
        finally:
            driver.terminate()
            driver.wait(10)


def _wait_until_ready(client: httpx.Client, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            if client.get("/status").json()["value"]["ready"]:
                return
        except httpx.TransportError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)
