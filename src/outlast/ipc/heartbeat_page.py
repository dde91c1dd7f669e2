"""The heartbeat page: one rank's heartbeat in shared memory.

A worker writes its page with plain stores: no system call, no lock, nothing to wait for,
and what was written stays readable after SIGKILL. The agent reads the same file
(:mod:`outlast.ipc.page_file`), and checks each number that it reads: a rank may write anything.
All but the agreement has one writer (the rank's main thread) and any number of readers. The beat carries
the same number before and after its fields; a reader that sees two different numbers
caught the writer in the middle and looks again.

Layout, in 8-byte words unless said (little-endian host order; a page never leaves its host)::

    word 0      magic and version        word 1  generation    word 2  rank    word 3  pid
    word 4..10  marks (float): spawned, started, session, group, loaded, first_step, announced
    word 11     the step that follows those with which the script began, where it announced steps
    word 12     1: this rank gives itself back, as a notice asked it to (exit code 75)
    word 13     the thread that tells of collectives, 0: there is none
    word 14     1: a framework reported the steps with which it began; 0: it is the first step announced
    word 16..20 beat: number, time (float), completed steps, state, number again
    word 21     when the rank will have exited, since a notice came (float; infinite: no limit); 0: none came
    word 24     depth of open sections   word 25  when the last one closed (float)
    word 32..47  pairs: slot, opened (float)
    byte 512    32 section slots of 48 bytes: name (32 bytes, NUL-padded), longest (float), spare
    byte 2048   the agreement on a step, see :mod:`outlast.ipc.step_words`; some of it the agent writes
    byte 4096   32 histograms of BUCKETS unsigned 32-bit counts
    byte 65536  windows of measured times, see :mod:`outlast.ipc.timing_words`
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from time import monotonic
from types import TracebackType

from outlast import files
from outlast.errors import RunFolderUnusable, UsageError
from outlast.hang.policy.timeouts import (
    BUCKETS,
    NAME_BYTES,
    OTHER_SECTIONS,
    OUT_OF_SECTION,
    Durations,
    bucket_of,
    stored_name,
    summarise,
)
from outlast.ipc.control import map_shared
from outlast.ipc.page_file import PageDamaged, PageFile, count, limit, moment
from outlast.ipc.step_words import AgentWords, RankWords
from outlast.ipc.timing_words import TIMING_BYTES, RankTimes, TimesReader

MAGIC = 0x4F55_544C_4153_5401  # "OUTLAST", layout 1
SLOTS = 32
DEPTH = 8
_TIMING_AT = 4096 + SLOTS * BUCKETS * 4
PAGE_BYTES = _TIMING_AT + TIMING_BYTES
_SLOT_OFFSET = 512
_SLOT_BYTES = 48
_HISTOGRAMS = 4096 // 4
_BEGAN = 11
_GIVEN_BACK = 12
_LISTENER = 13
_RESUMED = 14
_BEAT = 16
_LEAVES = 21
_DEPTH = 24
_CLOSED = 25
_OPEN = 32
_OPENED = 33
_READ_ATTEMPTS = 64
_FIRST_WORDS = 2048 // 8  # up to the agreement
_MOST_PID = 1 << 22
_MOST_TAKEN = 1024  # durations of a section that wait for the end of the step

MARKS = ("spawned", "started", "session", "group", "loaded", "first_step", "announced")


class RankState(IntEnum):
    """How far a rank's script is, as the page tells it."""

    STARTING = 0  # no heartbeat is owed but the first
    RUNNING = 1  # steps are under way
    DONE = 2  # the script says that no more heartbeats come


@dataclass(frozen=True)
class RankHeartbeat:
    """What one page says at one moment; times are the host's monotonic seconds."""

    rank: int
    generation: int
    pid: int
    beats: int
    beat: float
    step: int
    state: RankState
    sections: tuple[tuple[str, float], ...]
    closed: float
    marks: dict[str, float]
    began: int = -1  # the step that follows those with which the script began; -1: it announced none
    listener: int = 0
    resumed: bool = False  # a framework reported the steps with which it began


class Section:
    """A named span of the step, reusable; entering it again while it is open nests.

    The clock of a section stands still while an inner one is open, so that a long inner
    section (an evaluation inside a step) is held against its own timeout only.
    """

    __slots__ = ("_doubles", "_page", "_words", "histogram", "longest", "name", "slot", "taken")

    def __init__(self, page: HeartbeatPage, name: str, slot: int) -> None:
        self.name = name
        self.slot = slot
        self.histogram = _HISTOGRAMS + slot * BUCKETS
        self.longest = _longest_at(slot)
        self.taken: list[float] = []  # durations since the page was settled
        self._page = page
        self._words = page.words
        self._doubles = page.doubles

    def __enter__(self) -> Section:
        page = self._page
        depth = page.depth
        words = self._words
        if not depth:  # the outermost one, as most are: the arithmetic below costs 0.1 us
            words[_OPEN] = self.slot
            self._doubles[_OPENED] = monotonic()
        elif depth < DEPTH:
            at = _OPEN + 2 * depth
            words[at] = self.slot
            self._doubles[at + 1] = monotonic()
        page.depth = words[_DEPTH] = depth + 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        page = self._page
        depth = page.depth - 1
        if depth < DEPTH:
            doubles = self._doubles
            now = monotonic()
            if not depth:
                taken = now - doubles[_OPENED]
            elif depth == 1:  # as in a step; the loop costs 0.1 us
                taken = now - doubles[_OPENED + 2]
                doubles[_OPENED] += taken
            else:
                taken = now - doubles[_OPENED + 2 * depth]
                for outer in range(_OPENED, _OPENED + 2 * depth, 2):
                    doubles[outer] += taken
            kept = self.taken
            if not kept:
                page.used.append(self)
            kept.append(taken)
            if len(kept) >= _MOST_TAKEN:
                page.settle()
            page.closed = doubles[_CLOSED] = now
        page.depth = self._words[_DEPTH] = depth  # last: a reader must never see the outer ones unmoved


def _longest_at(slot: int) -> int:
    return (_SLOT_OFFSET + slot * _SLOT_BYTES + NAME_BYTES) // 8


class HeartbeatPage:
    """The writer's side of a page.

    Args:
        memory: a writable buffer of PAGE_BYTES; a page that nobody reads is a plain bytearray.
    """

    def __init__(self, memory: bytearray | memoryview) -> None:
        view = memoryview(memory)
        self.words = view.cast("q")
        self.doubles = view.cast("d")
        self.counts = view.cast("I")
        self._bytes = view
        self.agreement = RankWords(self.words, self.doubles)
        self.times = RankTimes(self.words, self.doubles, _TIMING_AT // 8)
        self.used: list[Section] = []  # sections with durations that wait for the end of the step
        self.measured: Callable[[Section, list[float]], None] | None = None  # takes them
        self.stepped: Callable[[int], None] | None = None  # called after each heartbeat
        self.early: Callable[[int], None] | None = None  # called with the number of each heartbeat
        self.depth = 0
        self.closed = monotonic()
        self.learning = False
        self._number = self.words[_BEAT]
        self._sections: dict[str, Section] = {}
        self._outside = self.section(OUT_OF_SECTION)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> HeartbeatPage:
        """Map the page that an agent made at ``path``.

        Raises:
            UsageError: another version of outlast made it, whose layout differs.
        """
        size = os.stat(path).st_size
        if size != PAGE_BYTES:
            raise UsageError(
                f"{path}: found a heartbeat page of {size} bytes, expected {PAGE_BYTES};"
                " launcher and ranks must have the same version of outlast; this rank ends"
            )
        page = cls(map_shared(path, PAGE_BYTES))
        if page.words[0] != MAGIC:
            raise UsageError(
                f"{path}: found a heartbeat page of layout {page.words[0] & 0xFF}, expected {MAGIC & 0xFF};"
                " launcher and ranks must have the same version of outlast; this rank ends"
            )
        return page

    def heartbeat(self, step: int) -> None:
        """Say that the rank is alive and has completed ``step`` steps."""
        number = self._number = self._number + 1
        words = self.words
        words[_BEAT] = number
        self.doubles[_BEAT + 1] = monotonic()
        words[_BEAT + 2] = step
        words[_BEAT + 4] = number
        if self.used:
            self.settle()
        if self.stepped is not None:
            self.stepped(step)
        if self.early is not None:
            self.early(number)

    def settle(self) -> None:
        """Count the durations of the sections that closed since the last call."""
        used, self.used = self.used, []
        for section in used:
            taken = section.taken
            if self.learning:
                self._learn(section, taken)
            if self.measured is not None:
                self.measured(section, taken)
            taken.clear()

    def _learn(self, section: Section, taken: list[float]) -> None:
        counts, histogram = self.counts, section.histogram
        for one in taken:
            counts[histogram + bucket_of(one)] += 1
        most = max(taken) if len(taken) > 1 else taken[0]
        if most > self.doubles[section.longest]:  # noqa: PLR1730 - a store costs more than the comparison
            self.doubles[section.longest] = most

    @property
    def innermost(self) -> int:
        """The slot of the innermost open section; -1: none is open."""
        depth = min(self.depth, DEPTH)
        return self.words[_OPEN + 2 * depth - 2] if depth else -1

    def repeat(self) -> None:
        """Say that the rank is alive, at the step that was told last."""
        self.heartbeat(self.words[_BEAT + 2])

    @property
    def beats(self) -> int:
        """How often the rank has said that it is alive."""
        return self._number

    def give_back(self) -> None:
        """Say that this process ends because a notice asked for it."""
        self.words[_GIVEN_BACK] = 1

    def set_listener(self, thread: int) -> None:
        """Say which thread tells of this rank's collectives; 0: there is none."""
        self.words[_LISTENER] = thread

    def set_state(self, state: RankState) -> None:
        """Say how far the script is."""
        self.words[_BEAT + 3] = int(state)

    def leave(self, until: float) -> None:
        """Say that a notice came: the rank saves, and exits by itself before this time."""
        self.doubles[_LEAVES] = until

    def mark(self, name: str, at: float | None = None) -> None:
        """Note when a phase of the start was reached; the first time counts."""
        index = 4 + MARKS.index(name)
        if not self.doubles[index]:
            self.doubles[index] = monotonic() if at is None else at

    def begin_announcing(self, step: int, resumed: bool = False) -> None:
        """Note the first step that the script announces: it has completed it, or it has resumed from it."""
        self.words[_BEGAN], self.words[_RESUMED] = step + resumed, int(resumed)
        self.mark("announced")

    def section(self, name: str) -> Section:
        """Return the section of that name; the last slot serves all names beyond the 31st."""
        found = self._sections.get(name)
        if found is None:
            slot = min(len(self._sections), SLOTS - 1)
            encoded = stored_name(name if slot < SLOTS - 1 else OTHER_SECTIONS).encode()
            at = _SLOT_OFFSET + slot * _SLOT_BYTES
            self._bytes[at : at + NAME_BYTES] = encoded.ljust(NAME_BYTES, b"\0")
            found = self._sections[name] = Section(self, name, slot)
        return found

    def touch(self) -> None:
        """Begin a new span out of every section."""
        self.closed = self.doubles[_CLOSED] = monotonic()

    def outside(self) -> None:
        """Count the time since the last section closed as spent out of every section."""
        taken = monotonic() - self.closed
        if self.learning and self.depth == 0:
            self._learn(self._outside, [taken])


class HeartbeatReader:
    """The agent's side: makes the page's file and reads it.

    A page with something in it that no rank writes says nothing new: what was read before is returned again,
    so its rank counts as silent.

    Raises:
        RunFolderUnusable: there is no room for the page.
    """

    def __init__(self, path: Path, *, rank: int, generation: int, spawned: float) -> None:
        self.path = path
        try:
            self._file = PageFile(path, PAGE_BYTES)
        except OSError as error:
            raise RunFolderUnusable(
                f"{path}: {error.strerror}; rank {rank} needs {PAGE_BYTES >> 10} KiB there for its"
                " heartbeats; no worker was started; make room, then start the same command again"
            ) from error
        self.agreement = AgentWords(self._file, rank)
        self.times = TimesReader(self._file, _TIMING_AT // 8)
        self._file.write(0, MAGIC, generation, rank)
        self._file.write(_BEAT + 2, -1)
        self._file.write(4, spawned)
        self._last = RankHeartbeat(
            *(rank, generation, 0, 0, 0.0, -1, RankState.STARTING, (), 0.0, {"spawned": spawned})
        )

    @property
    def given_back(self) -> bool:
        """Whether the rank has said that it ends because a notice asked for it."""
        try:
            return bool(self._file.words(_GIVEN_BACK, 1)[0])
        except PageDamaged:
            return False

    def read(self) -> RankHeartbeat:
        """Return what the page says now."""
        with contextlib.suppress(PageDamaged):
            self._last = self._decoded(self._steady())
        return self._last

    def _steady(self) -> bytes:
        """Return the first words, as they are in two reads: in the middle of a change they differ."""
        before = self._file.bytes(0, _FIRST_WORDS)
        for _ in range(_READ_ATTEMPTS):
            found = self._file.bytes(0, _FIRST_WORDS)
            whole = found[8 * _BEAT : 8 * _BEAT + 8] == found[8 * _BEAT + 32 : 8 * _BEAT + 40]
            if whole and found[8 * _BEAT : _SLOT_OFFSET] == before[8 * _BEAT : _SLOT_OFFSET]:
                return found
            before = found
        return before

    def _decoded(self, found: bytes) -> RankHeartbeat:
        """Return what the first words of the page say.

        Raises:
            PageDamaged: one of them is nothing that a rank writes.
        """
        words, doubles = memoryview(found).cast("q"), memoryview(found).cast("d")
        marks = {name: moment(doubles[4 + at]) for at, name in enumerate(MARKS) if doubles[4 + at]}
        try:
            state = RankState(words[_BEAT + 3])
        except ValueError as error:
            raise PageDamaged(str(error)) from error
        return RankHeartbeat(
            rank=self._last.rank,
            generation=self._last.generation,
            pid=count(words[3]),
            beats=count(words[_BEAT]),
            beat=moment(doubles[_BEAT + 1]),
            step=count(words[_BEAT + 2], least=-1),
            state=state,
            sections=tuple(_open_sections(found, monotonic())),
            closed=moment(doubles[_CLOSED]),
            marks=marks | {"spawned": self._last.marks["spawned"]},
            began=count(words[_BEGAN], least=-1) if "announced" in marks else -1,
            listener=count(words[_LISTENER], _MOST_PID),
            resumed=bool(words[_RESUMED]),
        )

    def leaves(self) -> float:
        """Return when the rank will have exited by itself, since a notice came to it; 0: none came."""
        try:
            return limit(memoryview(self._file.bytes(_LEAVES, 1)).cast("d")[0])
        except PageDamaged:
            return 0.0

    def _slots(self) -> bytes:
        try:
            return self._file.bytes(0, _FIRST_WORDS)
        except PageDamaged:
            return bytes(8 * _FIRST_WORDS)

    def name(self, slot: int) -> str:
        """Return the name of the section of a slot; "": it has none."""
        return _name_in(self._slots(), slot) if 0 <= slot < SLOTS else ""

    def names(self) -> set[str]:
        """Return the names of the sections that the rank has."""
        found = self._slots()
        return {name for slot in range(SLOTS) if (name := _name_in(found, slot))}

    def durations(self) -> dict[str, Durations]:
        """Return what the rank has measured of its sections, by name.

        None is longer than the page is old.
        """
        found: dict[str, Durations] = {}
        slots, age = self._slots(), max(0.0, monotonic() - self._last.marks["spawned"])
        for slot in range(SLOTS):
            name = _name_in(slots, slot)
            if not name:
                break
            longest = memoryview(slots).cast("d")[_longest_at(slot)]
            try:
                counts = self._file.bytes((_HISTOGRAMS + slot * BUCKETS) // 2, BUCKETS // 2)
            except PageDamaged:
                break
            observed = summarise(memoryview(counts).cast("I").tolist(), longest)
            if observed.count and 0.0 <= longest <= age:
                found[name] = observed
        return found

    def close(self) -> None:
        """Close the page and remove its file."""
        self._file.close()
        files.remove(self.path)


def _open_sections(found: bytes, now: float) -> Iterator[tuple[str, float]]:
    """Yield name and opening of each open section, an outer one's moved by what its inner ones took."""
    words, doubles = memoryview(found).cast("q"), memoryview(found).cast("d")
    depth = min(count(words[_DEPTH]), DEPTH)
    openings = [moment(doubles[at]) for at in range(_OPENED, _OPENED + 2 * depth, 2)]
    for level in range(depth):
        inner = now - openings[level + 1] if level + 1 < depth else 0.0
        slot = count(words[_OPEN + 2 * level], SLOTS - 1)
        yield _name_in(found, slot), openings[level] + inner


def _name_in(found: bytes, slot: int) -> str:
    at = _SLOT_OFFSET + slot * _SLOT_BYTES
    return found[at : at + NAME_BYTES].rstrip(b"\0").decode(errors="replace")
