"""A headless Chromium, driven over its DevTools protocol with the websockets library."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome")
PROGRAM = next(filter(None, map(shutil.which, NAMES)), None)
WITHIN = 100.0
_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-extensions", "--disable-background-networking", "--remote-debugging-port=0"),
)


class Tab:
    """A tab: what it is told, and what it complained about."""

    def __init__(self, socket: ClientConnection) -> None:
        self.complaints: list[str] = []
        self._socket = socket
        self._numbers = itertools.count(1)
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Send a command and return its result."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            found = json.loads(self._socket.recv(timeout=WITHIN))
            if found.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(str(found["params"]["exceptionDetails"]))
            elif found.get("method") == "Log.entryAdded":
                self.complaints.append(str(found["params"]["entry"]["text"]))
            elif found.get("id") == number:
                assert "error" not in found, found
                result: dict[str, Any] = found["result"]
                return result

    def value(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + WITHIN
        while not self.value(expression):
            assert time.monotonic() < deadline, expression
            time.sleep(0.05)

    def open(self, address: str) -> None:
        """Open an address and wait until the page is there."""
        self.call("Page.navigate", url=address)
        self.wait(f"location.href.startsWith({json.dumps(address)}) && document.readyState === 'complete'")


@contextmanager
def opened(profile: Path) -> Iterator[Tab]:
    """Start Chromium with a profile folder of its own and yield its tab."""
    assert PROGRAM is not None
    command = [PROGRAM, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        place = profile / "DevToolsActivePort"
        deadline = time.monotonic() + WITHIN
        while not (place.exists() and place.read_text().count("\n")):
            assert time.monotonic() < deadline, "Chromium did not start"
            assert process.poll() is None, "Chromium ended"
            time.sleep(0.05)
        port = int(place.read_text().splitlines()[0])
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=WITHIN) as answer:
            pages = [one for one in json.load(answer) if one["type"] == "page"]
        with connect(pages[0]["webSocketDebuggerUrl"], max_size=None, open_timeout=WITHIN) as socket:
            yield Tab(socket)
    finally:
        process.terminate()
        try:
            process.wait(WITHIN)
        finally:
            process.kill()
