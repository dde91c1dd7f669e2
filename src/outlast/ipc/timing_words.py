"""The part of a heartbeat page through which a rank tells its agent what its steps were spent on.

The rank writes one window of steps after another into a ring of WINDOWS places. A window carries its
number before and after its fields, so an agent that finds two different ones caught the rank in the middle.
The agent writes only how many steps a part of a window has, before the rank starts. A window that is
overwritten before it was read is lost; nobody waits.

Layout, in 8-byte words from the part's begin on::

    word 0      steps of a part of a window; 0: nothing is measured
    word 1      windows written so far
    word 2..7   spare
    then WINDOWS places: number, first part, part after the last, rows, three spare, number again,
    then ROWS rows: place (times 256) and kind, count; as float median, p90, longest, total, waiting; spare
"""

from __future__ import annotations

from collections.abc import Sequence

from outlast.ipc.page_file import PageDamaged, PageFile, count
from outlast.stragglers.policy.measuring import Times, Window
from outlast.stragglers.policy.rows import Kind

WINDOWS = 8
ROWS = 36
_HEAD, _WIDTH = 8, 8
_WINDOW = _HEAD + ROWS * _WIDTH
_FIGURES = 5
TIMING_BYTES = -(-8 * (_HEAD + WINDOWS * _WINDOW) // 4096) * 4096


_KINDS = tuple(Kind)


class RankTimes:
    """The rank's side.

    Args:
        words: of the page.
        doubles: the same memory.
        at: word at which the part begins.
    """

    def __init__(self, words: memoryview[int], doubles: memoryview[float], at: int) -> None:
        self._words = words
        self._doubles = doubles
        self._at = at

    @property
    def steps(self) -> int:
        """Steps of one part of a window; 0: nothing is to be measured."""
        return self._words[self._at]

    def write(self, window: Window) -> None:
        """Leave a window for the agent."""
        words, doubles = self._words, self._doubles
        number = words[self._at + 1] + 1
        at = self._at + _HEAD + number % WINDOWS * _WINDOW
        rows = window.rows[:ROWS]
        words[at] = number
        words[at + 1], words[at + 2], words[at + 3] = window.first, window.end, len(rows)
        for row, start in zip(rows, range(at + _HEAD, at + _WINDOW, _WIDTH), strict=False):
            words[start], words[start + 1] = row.place << 8 | _KINDS.index(row.kind), row.count
            figures = (row.median, row.p90, row.longest, row.total, row.waiting)
            for place, figure in enumerate(figures, start + 2):
                doubles[place] = figure
        words[at + 7] = number
        words[self._at + 1] = number


class TimesReader:
    """The agent's side, of a page that was just made.

    Args:
        file: of the page.
        at: word at which the part begins.
    """

    def __init__(self, file: PageFile, at: int) -> None:
        self._file = file
        self._at = at
        self._read = 0  # number of the newest window that was looked at

    def ask(self, steps: int) -> None:
        """Have the rank measure windows of so many steps, or a multiple; before it is started."""
        self._file.write(self._at, steps)

    def new(self) -> Sequence[Window]:
        """Return the windows that were written since the last call, without those that are overwritten."""
        try:
            written = count(self._file.words(self._at + 1, 1)[0])
            first = max(self._read + 1, written - WINDOWS + 2)
            found = [self._window(number) for number in range(first, written + 1)]
        except PageDamaged:
            return ()
        self._read = max(self._read, written)
        return [one for one in found if one is not None]

    def _window(self, number: int) -> Window | None:
        at = self._at + _HEAD + number % WINDOWS * _WINDOW
        found = self._file.bytes(at, _WINDOW)
        words, doubles = memoryview(found).cast("q"), memoryview(found).cast("d")
        if words[7] != number:
            return None
        rows = []
        for start in range(_HEAD, _HEAD + _WIDTH * max(0, min(words[3], ROWS)), _WIDTH):
            place, kind = divmod(words[start], 256)
            figures = doubles[start + 2 : start + 2 + _FIGURES]
            rows.append(Times(place, _KINDS[kind % len(_KINDS)], words[start + 1], *figures))
        window = Window(words[1], words[2], tuple(rows))
        return window if words[0] == number == self._file.words(at, 1)[0] else None
