"""Per-rank logs: where the streams go, what the console shows of them, what a failure left there."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from outlast.agent.options import LogSpec

STDOUT, STDERR = 1, 2
_CHUNK = 1 << 16
_LINE_LIMIT = 1 << 16
_TAIL_BYTES = 1 << 15


@dataclass(frozen=True)
class Destination:
    """Where one rank's streams go.

    Args:
        stdout, stderr: files; None: the console, inherited.
        shown: bits of the streams that the console shows besides.
        prefix: what each shown line begins with.
        error_file: where the rank leaves its exception.
    """

    folder: Path
    stdout: Path | None
    stderr: Path | None
    shown: int
    prefix: str
    error_file: Path


def _bits(text: str, rank: int) -> int:
    """Return the streams that torchrun's ``--redirects`` or ``--tee`` names for a rank."""
    if ":" not in text:
        return int(text)
    pairs = [entry.partition(":") for entry in text.split(",")]
    return {int(one): int(bits) for one, _, bits in pairs}.get(rank, 0)


def plan(spec: LogSpec, folder: Path, place: tuple[int, int, int], role: str) -> Destination:
    """Return where a rank's streams go.

    Args:
        spec: the command line; nothing given: both streams to files and to the console.
        folder: the logs folder of the run.
        place: generation, rank and world size.
        role: the ranks' role, for torchrun's prefix.
    """
    generation, rank, world = place
    base = Path(spec.log_dir) if spec.log_dir else folder
    mine = base.absolute() / f"gen-{generation:04d}" / f"rank-{rank:05d}"
    given = spec.redirects is not None or spec.tee is not None
    tee = _bits(spec.tee, rank) if spec.tee is not None else (0 if given else STDOUT | STDERR)
    to_file = tee | (_bits(spec.redirects, rank) if spec.redirects is not None else 0)
    shown = tee if not spec.only or rank in spec.only else 0
    if spec.template:
        prefix = Template(spec.template).safe_substitute(role_name=role, rank=rank, local_rank=rank)
    elif spec.tee is not None:
        prefix = f"[{role}{rank}]:"
    else:
        prefix = f"{rank}| " if world > 1 else ""
    return Destination(
        mine,
        mine / "stdout.log" if to_file & STDOUT else None,
        mine / "stderr.log" if to_file & STDERR else None,
        shown,
        prefix,
        mine / "error.json",
    )


class _Tail:
    """Shows one file on one stream, whole lines at a time."""

    def __init__(self, path: Path, prefix: str, descriptor: int) -> None:
        self._path = path
        self._prefix = prefix.encode()
        self._out = descriptor
        self._file = -1
        self._pending = b""

    def pump(self) -> int:
        if self._file < 0:
            try:
                self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return 0
        chunk = os.read(self._file, _CHUNK)
        if not chunk:
            return 0
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        if len(self._pending) > _LINE_LIMIT:
            lines.append(self._pending)
            self._pending = b""
        self._show(lines)
        return len(chunk)

    def _show(self, lines: Sequence[bytes]) -> None:
        text = b"".join(self._prefix + line + b"\n" for line in lines)
        try:
            while text:
                text = text[os.write(self._out, text) :]
        except OSError:
            self._out = -1
        if self._out < 0:
            self._pending = b""

    def finish(self) -> None:
        while self._out >= 0 and self.pump():
            pass
        if self._pending:
            self._show([self._pending])
            self._pending = b""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class Tails:
    """Shows the ranks' files on the console while they grow."""

    def __init__(self) -> None:
        self._tails: list[_Tail] = []

    @property
    def active(self) -> bool:
        """Say whether there is anything to look at now and then."""
        return bool(self._tails)

    def follow(self, destinations: Sequence[Destination]) -> None:
        """Show the streams of a generation."""
        for one in destinations:
            if one.shown & STDOUT and one.stdout is not None:
                self._tails.append(_Tail(one.stdout, one.prefix, sys.stdout.fileno()))
            if one.shown & STDERR and one.stderr is not None:
                self._tails.append(_Tail(one.stderr, one.prefix, sys.stderr.fileno()))

    def pump(self) -> None:
        """Show what has come since the last call, at most one chunk a file."""
        for tail in self._tails:
            tail.pump()

    def finish(self) -> None:
        """Show the rest and let go of the files."""
        for tail in self._tails:
            tail.finish()
        self._tails.clear()


@dataclass(frozen=True)
class Failure:
    """What a failed rank left to read.

    Args:
        message: "RuntimeError: boom".
        traceback: the whole of it.
        clock: monotonic seconds at which it was raised, 0 when unknown.
        exit_code: the exit code that the exception asks for, 0 when unknown.
    """

    message: str
    traceback: str
    clock: float = 0.0
    exit_code: int = 0


def failure_of(error_file: Path, stderr: Path | None) -> Failure | None:
    """Return a rank's exception from its error file, else from the last traceback in its log."""
    try:
        found = json.loads(error_file.read_text())["message"]
        extra = found.get("extraInfo", {}) if isinstance(found, dict) else {}
        message = str(found["message"] if isinstance(found, dict) else found)
        return Failure(
            message,
            str(extra.get("py_callstack", message)),
            float(extra.get("monotonic", 0.0)),
            int(extra.get("exit_code", 0)),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None if stderr is None else _last_traceback(stderr)


def _last_traceback(path: Path) -> Failure | None:
    text = "\n".join(last_lines(path, 200))
    start = text.rfind("Traceback (most recent call last):")
    if start < 0:
        return None
    lines = text[start:].splitlines()
    for place, line in enumerate(lines[1:], 1):
        if line and not line[0].isspace() and re.match(r"[\w.]+(:|$)", line):
            return Failure(line, "\n".join(lines[: place + 1]))
    return None


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last lines of a log, from its last 32 KiB."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-count:]
    except OSError:
        return []
