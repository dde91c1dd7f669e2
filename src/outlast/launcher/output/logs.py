"""Per-rank logs: where the streams go, what the console shows of them, what a failure left there."""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import Template
from typing import Any

from outlast import files, settings
from outlast.errors import ReplicasDiffer, RunFolderUnusable
from outlast.launcher.command.options import LogSpec, folder_name
from outlast.launcher.output.file_thread import PATIENCE, Errand, FileThread
from outlast.launcher.output.screen import Screen, descriptor_of
from outlast.launcher.output.terminals import Terminals
from outlast.recovery.policy.events import FaultKind

STDOUT, STDERR = 1, 2
_CHUNK = 1 << 16
_LOOKS = 8  # chunks of a long line that are looked at, or shown, at a time
_MESSAGE_CHARACTERS = 2000  # of an exception's text; the rest is in the rank's log and error file
_LINE_CHARACTERS = 500
_TRACEBACK_LINES = 60
_MOST_CODE = 255
_ERROR_BYTES = 8 << 20
_MOST_RANKS = 4096  # that an error file may accuse
_FAR = 1e9  # seconds, 30 years
_MOST = 1 << 53  # of a step or a rank
_TAIL_BYTES = 1 << 15
_LINES = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")  # a progress bar ends its lines with \r
# A terminal obeys these: colours, titles, moves of the cursor. Tabs and line breaks are kept.
_CONTROLS = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[ -/]*[0-~]"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)
_RANK_PREFIX = re.compile(r"\[rank\d+\]: ?")  # torch.distributed's excepthook writes it before each line
_NOT_FINITE = ("NonFinite", "FloatingPointError")
_AGREED = re.compile(r"\(they agreed after step (\d+)\)")
_HEADER = "Traceback (most recent call last):"
_MESSAGE = re.compile(r"[\w.]+(:|$)")
_SYNTAX_PLACE = re.compile(r'  File ".*", line \d+$')
_SYNTAX_MESSAGE = re.compile(r"(Syntax|Indentation|Tab)Error\b")


@dataclass(frozen=True)
class Copy:
    """Shown lines of one stream that hold one of some texts, of all ranks of a node, in one file.

    Args:
        stream: STDOUT or STDERR.
        path: of the file.
        texts: a line with one of them is copied.
    """

    stream: int
    path: Path
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Destination:
    """Where one rank's streams go.

    Args:
        stdout, stderr: files (/dev/null for what a filter hides); None: the console, inherited.
        shown: bits of the streams that the console shows besides.
        prefix: what each shown line begins with.
        terminals: bits of the streams that are terminals for the rank: shown as they come, without a prefix.
        error_file: where the rank leaves its exception.
        copies: which shown lines go to a file besides.
    """

    folder: Path
    stdout: Path | None
    stderr: Path | None
    shown: int
    prefix: str
    error_file: Path
    terminals: int = 0
    copies: tuple[Copy, ...] = ()

    @property
    def hides_errors(self) -> bool:
        """Whether the console does not show what the rank writes to stderr."""
        return self.stderr is not None and not self.shown & STDERR


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
    together, mine = _folders(spec, folder, (generation, rank, local))
    given = spec.redirects is not None or spec.tee is not None
    tee = _bits(spec.tee, local) if spec.tee is not None else (0 if given else STDOUT | STDERR)
    to_file = tee | (_bits(spec.redirects, local) if spec.redirects is not None else 0)
    hidden = bool(spec.only) and local not in spec.only
    if spec.template:
        prefix = Template(spec.template).safe_substitute(role_name=role, rank=rank, local_rank=local)
    elif spec.tee is not None:
        prefix = f"[{role}{local}]:"
    else:
        prefix = f"{rank}| " if world > 1 else ""
    elsewhere = Path(os.devnull) if hidden else None
    if spec.log_dir == os.devnull:  # torchrun: no files, the ranks have the console
        return Destination(mine, elsewhere, elsewhere, 0, "", mine / "error.json")
    return Destination(
        mine,
        mine / "stdout.log" if to_file & STDOUT else elsewhere,
        mine / "stderr.log" if to_file & STDERR else elsewhere,
        0 if hidden else tee,
        prefix,
        mine / "error.json",
        copies=tuple(
            Copy(stream, together / name, texts)
            for stream, name, texts in (
                (STDOUT, "filtered_stdout.log", spec.copied_stdout),
                (STDERR, "filtered_stderr.log", spec.copied_stderr),
            )
            if texts
        ),
    )


def terminals_for(spec: LogSpec, ranks: int, files: FileThread) -> Terminals:
    """Return the terminals of the one rank that the console shows; none where it shows several.

    Args:
        spec: the command line; who names streams or a prefix wants lines.
        ranks: of this node.
        files: writes the logs.
    """
    shown = [rank for rank in range(ranks) if not spec.only or rank in spec.only]
    if len(shown) != 1 or spec.redirects is not None or spec.tee is not None or spec.template:
        return Terminals()
    return Terminals(shown[0], descriptor_of(sys.stdout), descriptor_of(sys.stderr), files)


def _folders(spec: LogSpec, folder: Path, place: tuple[int, int, int]) -> tuple[Path, Path]:
    """Return the folder of a generation's ranks, and that of one of them.

    Under ``--log-dir`` they are called as torchrun calls them: ``attempt_<restarts>/<local rank>``.
    """
    generation, rank, local = place
    if spec.log_dir and spec.log_dir != os.devnull:
        together = Path(spec.log_dir).absolute() / f"attempt_{generation - 1}"
        return together, together / str(local)
    together = folder.absolute() / f"gen-{generation:04d}"
    return together, together / f"rank-{rank:05d}"


def with_folder_of_run(spec: LogSpec, run_id: str) -> LogSpec:
    """Return the spec with a new folder of this launch below ``--log-dir``, as torchrun makes one.

    Raises:
        RunFolderUnusable: it cannot be made, or a stranger could put another one in its place.
    """
    if not spec.log_dir or spec.log_dir == os.devnull:
        return spec
    prefix = f"{folder_name(run_id)}_"
    check = functools.partial(files.require_own_run_folder, in_pod=settings.in_pod(), called="log folder")
    try:
        check(os.path.join(spec.log_dir, prefix))
        os.makedirs(spec.log_dir, exist_ok=True)
        made = tempfile.mkdtemp(prefix=prefix, dir=spec.log_dir)
        check(made)
        return replace(spec, log_dir=made)
    except OSError as error:
        raise RunFolderUnusable(
            f"--log-dir={spec.log_dir}: {error.strerror}; nothing was started; choose another folder"
        ) from error


class _Filter:
    """Copies the shown lines that hold one of some texts to a file that the ranks of a node share."""

    def __init__(self, copy: Copy, files: FileThread) -> None:
        self._texts = [text.encode() for text in copy.texts]
        self._path = copy.path
        self._file = -1
        self._files = files
        self._users = 0

    def share(self) -> _Filter:
        """Count one more tail that uses it."""
        self._users += 1
        return self

    def take(self, lines: Sequence[bytes]) -> None:
        """Copy the lines that are to be copied; a full disk costs the copy, not the job."""
        found = b"".join(line for line in lines if any(text in line for text in self._texts))
        if found:
            self._files.hand(lambda: self._write(found))

    def _write(self, lines: bytes) -> None:
        if self._file < 0:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            self._file = files.open_regular(self._path, flags)
        os.write(self._file, lines)

    def leave(self) -> None:
        """Let go of the file, once the last tail has."""
        self._users -= 1
        if self._users == 0:
            self._files.hand(self._close)

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class _Tail:
    """Shows one file on one stream, whole lines at a time; the file's bytes stay as they are.

    The thread of the files reads, the loop shows. A line is read once its end is in the file. One that is
    longer than a chunk is read chunk by chunk; ``inside`` says that it is not complete yet. What waits is in
    the file, never in memory. What a rank writes to a terminal of its own (``prefix`` is None) is read as it
    comes.
    """

    def __init__(
        self, path: Path, prefix: str | None, descriptor: int, files: FileThread, copy: _Filter | None = None
    ) -> None:
        self.out = descriptor
        self.inside = False  # what was read last ends in the middle of a line
        self._files = files
        self._within = False  # what was shown last does
        self._path = path
        self._prefix = None if prefix is None else prefix.encode()
        self._copy = None if copy is None else copy.share()
        self._file = -1
        self._at = 0  # the first byte that was not read to be shown
        self._seen = 0  # the first byte in which no end of a line was looked for
        self._end = 0  # the end of the last complete line that is known
        self._after_return = False

    def unread(self) -> int:
        """Return the bytes of the file that were not read to be shown."""
        try:
            return os.stat(self._path).st_size - self._at
        except OSError:
            return 0

    def read(self, ended: bool) -> bytes | None:
        """Return what is to be shown next, at most a chunk; None: nothing is left to do.

        Args:
            ended: the file does not grow any more: what is left is a line, too.
        """
        if self._prefix is None:
            chunk = self._read(_CHUNK, self._at)
            self._at += len(chunk)
            return chunk or None
        if self._at == self._end and not self._look(ended):
            return None
        if self._at == self._end:
            return b""  # a long line, of which the end has not been found yet
        text = self._read(min(_CHUNK, self._end - self._at), self._at)
        if not text:  # somebody has cut the file off
            self._at = self._seen = self._end
            return None
        whole = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        if 0 < whole < len(text):
            text = text[:whole]
        self._at += len(text)
        self.inside = not text.endswith((b"\n", b"\r"))
        return text

    def grown(self) -> bool:
        """Say whether there is anything to show or to look at."""
        try:
            size = os.fstat(self._opened()).st_size
        except OSError:
            return False
        return size > self._seen or self._end > self._at if self._prefix is not None else size > self._at

    def _opened(self) -> int:
        if self._file < 0:
            self._file = files.open_regular(self._path, follow=True)
        return self._file

    def _read(self, size: int, at: int) -> bytes:
        """Return what is there; nothing: there is no such file yet."""
        try:
            return os.pread(self._opened(), size, at)
        except OSError:
            return b""

    def _look(self, ended: bool) -> bool:
        """Look for the end of a line in what has come; say whether anything has."""
        for looked in range(_LOOKS):
            chunk = self._read(_CHUNK, self._seen)
            if not chunk:
                self._end = self._seen if ended else self._end
                return looked > 0 or self._end > self._at
            found = max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1
            self._end = self._seen + found if found else self._end
            self._seen += len(chunk)
            if found:
                break
        return True

    def show(self, screen: Screen, text: bytes) -> None:
        """Show what was read."""
        if self._prefix is None:
            screen.show(self.out, text)
        elif text:
            self._show(screen, text, self._prefix)

    def _show(self, screen: Screen, text: bytes, prefix: bytes) -> None:
        shown: list[bytes] = []
        if self._after_return and text.startswith(b"\n"):
            shown, text = [b"\n"], text[1:]
        for line in _LINES.findall(text):
            # a progress bar begins its lines with \r: what ends there is an empty line, and has no prefix
            shown.append(line if self._within or line == b"\r" else prefix + line)
            self._within = not line.endswith((b"\n", b"\r"))
        if self._copy is not None:
            self._copy.take(shown)
        self._after_return = text.endswith(b"\r")
        screen.show(self.out, b"".join(shown))

    def finish(self, screen: Screen) -> None:
        """End a last line that has no end, and let go of the file."""
        if self._within:
            screen.show(self.out, b"\n")
            self._within = False
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        self._files.hand(self._let_go)
        if self._copy is not None:
            self._copy.leave()
            self._copy = None

    def _let_go(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


@dataclass
class _Read:
    """What the thread of the files has read in one round.

    Args:
        texts: for each tail what is to be shown of it, in this order.
        ended: tails of which nothing is left.
        first: of those that grow, the one whose turn comes first next time; None: each has had its turn.
    """

    texts: list[tuple[_Tail, bytes]] = field(default_factory=list)
    ended: list[_Tail] = field(default_factory=list)
    first: _Tail | None = None
    room: int = 0

    def add(self, tail: _Tail, ended: bool) -> bool:
        """Read from one file; say whether there is more to do."""
        text = tail.read(ended)
        if text:
            self.texts.append((tail, text))
            self.room -= len(text)
        return text is not None


def _rest_of(tails: Sequence[_Tail], closed: Sequence[_Tail], room: int) -> _Read:
    """Read all of files that have ended, one after the other, as far as there is room."""
    found = _Read(room=room)
    for tail in tails:
        while tail not in closed and found.room > 0 and found.add(tail, ended=True):
            pass
        if found.room <= 0:
            break
        found.ended.append(tail)
    return found


def _news_of(tails: Sequence[_Tail], room: int) -> _Read:
    """Read a chunk of each file that has grown; nothing else is shown inside of a line."""
    found = _Read(room=room)
    for tail in tails:
        if found.room <= 0:
            found.first = tail
            break
        if not tail.grown():
            continue
        found.add(tail, ended=False)
        for _ in range(_LOOKS):
            if not (tail.inside and found.room > 0 and found.add(tail, ended=False)):
                break
        if tail.inside:
            found.first = tail
            break
    return found


class Tails:
    """Shows the ranks' files while they grow, as fast as the screen takes them; the rest waits in the files.

    The thread of the files reads one round at a time. What it has not read within a moment is shown later.

    Args:
        screen: what shows them.
        files: reads them.
    """

    def __init__(self, screen: Screen, files: FileThread) -> None:
        self._screen = screen
        self._files = files
        self._growing: list[_Tail] = []
        self._leaving: list[_Tail] = []  # of those that grow
        self._ended: list[_Tail] = []
        self._round: Errand[_Read] | None = None  # that is under way

    @property
    def active(self) -> bool:
        """Say whether there is anything to look at now and then."""
        return bool(self._growing or self._ended)

    @property
    def waits(self) -> bool:
        """Say whether the rest of a file that ended waits for its file system."""
        return bool(self._ended) and (self._round is not None or self._files.hangs(PATIENCE))

    @property
    def unshown(self) -> int:
        """The bytes of all files that the screen has not been given."""
        tails = (*self._ended, *self._growing)
        return self._files.ask(lambda: sum(tail.unread() for tail in tails), 0)

    def follow(self, destinations: Sequence[Destination]) -> None:
        """Show the streams of a generation, after the rest of the one before."""
        filters = {
            copy: _Filter(copy, self._files) for copy in (destinations[0].copies if destinations else ())
        }
        for one in destinations:
            streams = ((STDOUT, one.stdout, sys.stdout), (STDERR, one.stderr, sys.stderr))
            for stream, path, console in streams:
                if one.shown & stream and path is not None:
                    copy = next((filters[each] for each in one.copies if each.stream == stream), None)
                    prefix = None if one.terminals & stream else one.prefix
                    self._growing.append(_Tail(path, prefix, descriptor_of(console), self._files, copy))

    def pump(self) -> None:
        """Show what has come: all of a file that ended, then a chunk of each that grows."""
        while self._ended and self._screen.has_room:
            tails = tuple(self._ended)
            closed = tuple(tail for tail in tails if self._screen.is_closed(tail.out))
            if not self._shown(functools.partial(_rest_of, tails, closed, self._screen.room)):
                return
        growing = tuple(tail for tail in self._growing if not self._screen.is_closed(tail.out))
        if growing and not self._ended and self._screen.has_room:
            self._shown(functools.partial(_news_of, growing, self._screen.room))

    def _shown(self, read: Callable[[], _Read]) -> bool:
        """Have a round read, unless one is under way; show it, and say whether it was read in time."""
        self._round = self._round or self._files.begin(read)
        if self._round is None or not self._files.wait(self._round):
            return False
        found, self._round = self._round.result(_Read()), None
        for tail, text in found.texts:
            tail.show(self._screen, text)
        for tail in found.ended:
            if tail in self._ended:
                self._ended.remove(tail)
                tail.finish(self._screen)
        if found.first in self._growing:
            place = self._growing.index(found.first)
            self._growing = self._growing[place:] + self._growing[:place]
        return bool(found.texts or found.ended)

    def finish(self) -> None:
        """Show the rest, now or in later calls: the files do not grow any more."""
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
        self._round = None


_WATCHDOG = "Watchdog caught collective operation timeout"


@dataclass(frozen=True)
class Failure:
    """What a failed rank left to read.

    Args:
        message: "RuntimeError: boom", on one line.
        traceback: the whole of it.
        clock: monotonic seconds at which it was raised, 0 when unknown.
        exit_code: the exit code that the exception asks for, 0 when unknown.
        kind: the fault that the exception names, empty when it names none.
        agreed: of replicas that differ, the step after which they last held the same; -1: none is known.
        ranks: that it accuses: those of replicas that are wrong, or of a convicted device; empty: not known.
        first_line: of the message as it was raised; empty: it is the message.
    """

    message: str
    traceback: str
    clock: float = 0.0
    exit_code: int = 0
    kind: str = ""
    agreed: int = -1
    ranks: tuple[int, ...] = ()
    first_line: str = ""

    @property
    def summary(self) -> str:
        """The first line of the message, shortened."""
        return _short(self.first_line or self.message, _LINE_CHARACTERS)

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
    """Return a rank's exception from its error file, else from the last traceback in its log.

    A script may write such a file itself: a field in it that is not as expected counts as missing.
    """
    document = error_document(error_file)
    if document is None:
        return None if stderr is None else _last_traceback(stderr)
    found = document["message"]
    inner = found if isinstance(found, dict) else {"message": found}
    message = _text(inner["message"])
    extra = inner.get("extraInfo")
    extra = extra if isinstance(extra, dict) else {}
    ranks = extra.get("ranks")
    ranks = ranks if isinstance(ranks, list) and len(ranks) <= _MOST_RANKS else []
    lines = [text for line in message.splitlines() if (text := _CONTROLS.sub("", line).strip())]
    return Failure(
        _short(" ".join(lines), _MESSAGE_CHARACTERS),
        _short_lines(_text(extra.get("py_callstack", message))),
        float(_number(extra.get("monotonic"), _FAR, 0.0)),
        int(_number(extra.get("exit_code"), _MOST_CODE, 0)),
        _text(extra.get("fault", "")),
        int(_number(extra.get("agreed"), _MOST, _agreed_in(message), least=-1)),
        tuple(int(one) for one in ranks if _number(one, _MOST, -1) >= 0),
        next(iter(lines), ""),
    )


def error_document(path: Path) -> dict[str, Any] | None:
    """Return an error file with a message; None: there is none."""
    try:
        found = json.loads(files.read_whole(path, _ERROR_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    message = found.get("message") if isinstance(found, dict) else None
    if message is None or (isinstance(message, dict) and "message" not in message):
        return None
    return found  # type: ignore[no-any-return]


def keep_error(path: Path, kept: Path) -> None:
    """Move an error file to the logs; what is too large or no file is removed.

    Raises:
        OSError: the file system refused.
    """
    try:
        content = files.read_whole(path, _ERROR_BYTES)
    finally:
        files.remove(path)
    with open(files.open_regular(kept, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        file.write(content)


def _text(found: object) -> str:
    """Return a value of an error file as text."""
    try:
        return str(found)
    except (ValueError, RecursionError):  # a number of thousands of digits, lists in lists
        return ""


def _number(found: object, most: float, otherwise: float, least: float = 0) -> float:
    """Return a number of an error file; another one where it is none, or not in its range."""
    if isinstance(found, str):
        try:
            found = float(found)
        except ValueError:
            return otherwise
    if not isinstance(found, (int, float)) or isinstance(found, bool) or not least <= found <= most:
        return otherwise
    return found


def _short(text: str, most: int) -> str:
    """Return a text that may be shown and kept: its beginning, and how much is left out; no controls."""
    text = _CONTROLS.sub("", text)
    return text if len(text) <= most else f"{text[:most]} [{len(text) - most} characters left out]"


def _short_lines(text: str) -> str:
    """Return the last lines of a traceback, each of them shortened."""
    return "\n".join(_short(line, _LINE_CHARACTERS) for line in text.splitlines()[-_TRACEBACK_LINES:])


def _agreed_in(message: str) -> int:
    """Return the step that a worker's text names where it has left no error file of ours; -1: none."""
    found = _AGREED.search(message)
    return int(found[1]) if found is not None else -1


def _last_traceback(path: Path) -> Failure | None:
    """Return the last exception in a log; a SyntaxError of the script itself comes without a header."""
    found: Failure | None = None
    start: int | None = None
    message = _MESSAGE
    lines = [_RANK_PREFIX.sub("", _CONTROLS.sub("", line), count=1) for line in last_lines(path, 200)]
    for place, line in enumerate(lines):
        if line.startswith(_HEADER):
            start, message = place, _MESSAGE
        elif start is None and _SYNTAX_PLACE.match(line):
            start, message = place, _SYNTAX_MESSAGE
        elif start is not None and line and not line[0].isspace():
            if message.match(line):
                found = Failure(
                    _short(line, _MESSAGE_CHARACTERS),
                    _short_lines("\n".join(lines[start : place + 1])),
                    agreed=_agreed_in(line),
                )
                start = None
            elif message is _SYNTAX_MESSAGE:
                start = None
    return found


def watchdog_in(stderr: Path) -> Failure | None:
    """Return why NCCL's watchdog has ended a rank, from its log; None: it has not.

    The line is that of torch's ProcessGroupNCCL.cpp: "Watchdog caught collective operation timeout".
    """
    for line in reversed(last_lines(stderr, 200)):
        at = line.find(_WATCHDOG)
        if at >= 0:
            return Failure(_short(line[at:], _LINE_CHARACTERS), "")
    return None


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last lines of a log, from its last 32 KiB."""
    try:
        with open(files.open_regular(path, follow=True), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return file.read(_TAIL_BYTES).decode(errors="replace").splitlines()[-count:]
    except OSError:
        return []
