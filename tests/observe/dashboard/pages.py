"""Pages of runs for tests: made from records, served by a real process, checked to be well-formed."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from outlast.observe.dashboard.document import Shown
from outlast.observe.policy.now import NowFold
from outlast.observe.policy.page import History
from outlast.recovery.policy.events import Record

DATA = Path(__file__).parent.parent / "data"
EVENTFUL = DATA / "eventful.jsonl"
LINES = EVENTFUL.read_bytes().splitlines(keepends=True)
HEALTHY = LINES[:10]  # up to the first fault
FAULT = LINES[10:12]
WITHIN = 60.0


def shown(*records: Record, node: str = "", wall: float = 1795000200.0) -> Shown:
    history, now = History(), NowFold()
    for record in records:
        history.take(record, node)
        now.take(record, node)
    return Shown("outlast-runs/train", now.now(), history.view(), wall)


def parsed(page: str) -> ElementTree.Element:
    """Return a page as a tree; style and script are left out, since they are no XML."""
    without = re.sub(r"<(script|style)>.*?</\1>", "", page, flags=re.DOTALL)
    return ElementTree.fromstring(without.removeprefix("<!DOCTYPE html>"))


def ids(tree: ElementTree.Element) -> list[str]:
    return [one.attrib["id"] for one in tree.iter() if "id" in one.attrib]


@dataclass
class Server:
    """A dashboard in a process of its own."""

    port: int
    process: subprocess.Popen[str]

    def ask(self, path: str, method: str = "GET", body: str = "", **headers: str) -> tuple[int, str]:
        """Return the status and the body of an answer; a name of a header has underscores."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WITHIN)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body or None, headers=named)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()


@contextmanager
def served(*arguments: object) -> Iterator[Server]:
    command = [sys.executable, "-m", "outlast", "dashboard", "--port", "0", *map(str, arguments)]
    environment = {**os.environ, "PYTHONWARNINGS": "error"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r":(\d+)/", line)
        assert found, line
        yield Server(int(found[1]), process)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(WITHIN)
        finally:
            process.kill()
            process.wait(WITHIN)
            assert process.stdout is not None
            process.stdout.close()


def append(path: Path, lines: list[bytes]) -> None:
    with open(path, "ab", buffering=0) as file:
        for line in lines:
            file.write(line)
