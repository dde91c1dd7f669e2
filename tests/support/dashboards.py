"""Dashboards of runs, each served by a process of its own; pages as trees; a log in pieces."""

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

EVENTFUL = Path(__file__).parents[1] / "observe" / "data" / "eventful.jsonl"
LINES = EVENTFUL.read_bytes().splitlines(keepends=True)
HEALTHY = LINES[:10]  # up to the first fault
FAULT = LINES[10:12]
WITHIN = 60.0


def parsed(page: str) -> ElementTree.Element:
    """Return a page as a tree; style and script are left out, since they are no XML."""
    without = re.sub(r"<(script|style)>.*?</\1>", "", page, flags=re.DOTALL)
    return ElementTree.fromstring(without.removeprefix("<!DOCTYPE html>"))


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
