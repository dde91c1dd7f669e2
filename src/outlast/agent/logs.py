"""Per-rank logs: where the streams go, what the console shows of them, what a failure left there."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template

from outlast.agent.options import LogSpec, folder_name
from outlast.agent.screen import Screen, descriptor_of
from outlast.core.errors import ReplicasDiffer, RunFolderUnusable
from outlast.core.events import FaultKind

STDOUT, STDERR = 1, 2
_CHUNK = 1 << 16
_LINE_LIMIT = 1 << 16
_TAIL_BYTES = 1 << 15
_ENDED_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)")  # a progress bar ends its lines with \r
_RANK_PREFIX = re.compile(r"\[rank\d+\]: ?")  # torch.distributed's excepthook writes it before each line
_NOT_FINITE = ("NonFinite", "FloatingPointError")
_AGREED = re.compile(r"\(they agreed after step (\d+)\)")
_HEADER = "Traceback (most recent call last):"
_MESSAGE = re.compile(r"[\w.]+(:|$)")
_SYNTAX_PLACE = re.compile(r'  File ".*", line \d+$')
_SYNTAX_MESSAGE = re.compile(r"(Syntax|Indentation|Tab)Error\b")


@dataclass(frozen=True)
class Destination:
    """Where one rank's streams go.

    Args:
        stdout, stderr: files (/dev/null for what a filter hides); None: the console, inherited.
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


def plan(spec: LogSpec, folder: Path, place: tuple[int, int, int, int], role: str) -> Destination:
    """Return where a rank's streams go.

    Args:
        spec: the command line; nothing given: both streams to files and to the console.
        folder: the logs folder of the run.
        place: generation, rank, local rank and world size.
        role: the ranks' role, for torchrun's prefix.
    """
    generation, rank, local, world = place
    base = Path(spec.log_dir) if spec.log_dir else folder
    mine = base.absolute() / f"gen-{generation:04d}" / f"rank-{rank:05d}"
    given = spec.redirects is not None or spec.tee is not None
    tee = _bits(spec.tee, local) if spec.tee is not None else (0 if given else STDOUT | STDERR)
    to_file = tee | (_bits(spec.redirects, local) if spec.redirects is not None else 0)
    hidden = bool(spec.only) and local not in spec.only
    if spec.template:
        prefix = Template(spec.template).safe_substitute(role_name=role, rank=rank, local_rank=local)
    elif spec.tee is not None:
        prefix = f"[{role}{rank}]:"
    else:
        prefix = f"{rank}| " if world > 1 else ""
    elsewhere = Path(os.devnull) if hidden else None
    return Destination(
        mine,
        mine / "stdout.log" if to_file & STDOUT else elsewhere,
        mine / "stderr.log" if to_file & STDERR else elsewhere,
        0 if hidden else tee,
        prefix,
        mine / "error.json",
    )


def with_folder_of_run(spec: LogSpec, run_id: str) -> LogSpec:
    """Return the spec with a new folder of this launch below ``--log-dir``, as torchrun makes one.

    Raises:
        RunFolderUnusable: it cannot be made.
    """
    if not spec.log_dir:
        return spec
    try:
        os.makedirs(spec.log_dir, exist_ok=True)
        return replace(spec, log_dir=tempfile.mkdtemp(prefix=f"{folder_name(run_id)}_", dir=spec.log_dir))
    except OSError as error:
        raise RunFolderUnusable(
            f"--log-dir={spec.log_dir}: {error.strerror}; nothing was started; choose another folder"
        ) from error


class _Tail:
    """Shows one file on one stream, whole lines at a time; the file's bytes stay as they are."""

    def __init__(self, path: Path, prefix: str, descriptor: int) -> None:
        self.out = descriptor
        self._path = path
        self._prefix = prefix.encode()
        self._file = -1
        self._pending = b""
        self._after_return = False

    @property
    def unshown(self) -> int:
        """The bytes of the file that the screen has not been given."""
        try:
            size = os.stat(self._path).st_size
        except OSError:
            return 0
        read = os.lseek(self._file, 0, os.SEEK_CUR) if self._file >= 0 else 0
        return size - read + len(self._pending)

    def pump(self, screen: Screen) -> int:
        """Show one chunk; return its size, 0 at the end of the file."""
        if self._file < 0:
            try:
                self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return 0
        chunk = os.read(self._file, _CHUNK)
        if not chunk:
            return 0
        text = self._pending + chunk
        shown: list[bytes] = []
        if self._after_return and text.startswith(b"\n"):
            shown, text = [b"\n"], text[1:]
        end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        lines, self._pending = _ENDED_LINE.findall(text[:end]), text[end:]
        self._after_return = not self._pending and text.endswith(b"\r")
        if len(self._pending) > _LINE_LIMIT:
            lines.append(self._pending + b"\n")
            self._pending = b""
        shown += [self._prefix + line for line in lines]
        screen.show(self.out, b"".join(shown))
        return len(chunk)

    def finish(self, screen: Screen) -> None:
        """Show a last line that has no end, and let go of the file."""
        if self._pending:
            screen.show(self.out, self._prefix + self._pending + b"\n")
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class Tails:
    """Shows the ranks' files while they grow, as fast as the screen takes them; the rest waits in the files.

    Args:
        screen: what shows them.
    """

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._growing: list[_Tail] = []
        self._leaving: list[_Tail] = []  # of those that grow
        self._ended: list[_Tail] = []

    @property
    def active(self) -> bool:
        """Say whether there is anything to look at now and then."""
        return bool(self._growing or self._ended)

    @property
    def unshown(self) -> int:
        """The bytes of all files that the screen has not been given."""
        return sum(tail.unshown for tail in (*self._ended, *self._growing))

    def follow(self, destinations: Sequence[Destination]) -> None:
        """Show the streams of a generation, after the rest of the one before."""
        for one in destinations:
            if one.shown & STDOUT and one.stdout is not None:
                self._growing.append(_Tail(one.stdout, one.prefix, descriptor_of(sys.stdout)))
            if one.shown & STDERR and one.stderr is not None:
                self._growing.append(_Tail(one.stderr, one.prefix, descriptor_of(sys.stderr)))

    def pump(self) -> None:
        """Show what has come: all of a file that ended, then a chunk of each that grows."""
        while self._ended and self._screen.has_room:
            if self._screen.is_closed(self._ended[0].out) or not self._ended[0].pump(self._screen):
                self._ended.pop(0).finish(self._screen)
        if self._ended:
            return
        for place, tail in enumerate(self._growing):
            if not self._screen.has_room:
                self._growing = (
                    self._growing[place:] + self._growing[:place]
                )  # its turn comes first next time
                return
            if not self._screen.is_closed(tail.out):
                tail.pump(self._screen)

    def finish(self) -> None:
        """Show the rest, now or in later calls of :meth:`pump`: the files do not grow any more."""
        self._ended += self._growing
        self._growing.clear()
        self._leaving.clear()
        self.pump()

    def linger(self) -> None:
        """End a generation whose workers go on in the next: what they say on their way there is shown, too.

        Their files are let go of when the generation after that ends.
        """
        self._ended += self._leaving
        self._leaving = [tail for tail in self._growing if tail not in self._leaving]
        self._growing = list(self._leaving)
        self.pump()

    def give_up(self) -> None:
        """Let go of the files without showing the rest."""
        for tail in (*self._ended, *self._growing):
            tail.close()
        for tails in (self._ended, self._growing, self._leaving):
            tails.clear()


@dataclass(frozen=True)
class Failure:
    """What a failed rank left to read.

    Args:
        message: "RuntimeError: boom".
        traceback: the whole of it.
        clock: monotonic seconds at which it was raised, 0 when unknown.
        exit_code: the exit code that the exception asks for, 0 when unknown.
        kind: the fault that the exception names, empty when it names none.
        agreed: of replicas that differ, the step after which they last held the same; -1: none is known.
        ranks: that it accuses: those of replicas that are wrong, or of a convicted device; empty: not known.
    """

    message: str
    traceback: str
    clock: float = 0.0
    exit_code: int = 0
    kind: str = ""
    agreed: int = -1
    ranks: tuple[int, ...] = ()

    @property
    def not_finite(self) -> bool:
        """Whether it says that a number is not finite."""
        return self.kind == FaultKind.NON_FINITE.value or self._name in _NOT_FINITE

    @property
    def replicas_differ(self) -> bool:
        """Whether it says that ranks that should hold the same do not."""
        return self.kind == FaultKind.CORRUPT.value or self._name == ReplicasDiffer.__name__

    @property
    def _name(self) -> str:
        return self.message.partition(":")[0].strip().rpartition(".")[2]


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
            str(extra.get("fault", "")),
            int(extra.get("agreed", _agreed_in(message))),
            tuple(map(int, extra.get("ranks", ()))),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None if stderr is None else _last_traceback(stderr)


def _agreed_in(message: str) -> int:
    """Return the step that a worker's text names where it has left no error file of ours; -1: none."""
    found = _AGREED.search(message)
    return int(found[1]) if found is not None else -1


def _last_traceback(path: Path) -> Failure | None:
    """Return the last exception in a log; a SyntaxError of the script itself comes without a header."""
    found: Failure | None = None
    start: int | None = None
    message = _MESSAGE
    lines = [_RANK_PREFIX.sub("", line, count=1) for line in last_lines(path, 200)]
    for place, line in enumerate(lines):
        if line.startswith(_HEADER):
            start, message = place, _MESSAGE
        elif start is None and _SYNTAX_PLACE.match(line):
            start, message = place, _SYNTAX_MESSAGE
        elif start is not None and line and not line[0].isspace():
            if message.match(line):
                found = Failure(line, "\n".join(lines[start : place + 1]), agreed=_agreed_in(line))
                start = None
            elif message is _SYNTAX_MESSAGE:
                start = None
    return found


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last lines of a log, from its last 32 KiB."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-count:]
    except OSError:
        return []
