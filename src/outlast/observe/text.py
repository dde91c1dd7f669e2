"""Text for people: on a terminal, of values that may be anything."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterator, Sequence


def clean(text: str) -> str:
    """Remove terminal control characters: a reason may be the text of any exception."""
    return "".join(
        one if one.isprintable() or one == "\n" else "\N{REPLACEMENT CHARACTER}" for one in text.expandtabs()
    )


def say(*lines: str, at_once: bool = False) -> None:
    """Print lines; with ``at_once`` they are not kept in a buffer."""
    sys.stdout.writelines(f"{clean(line)}\n" for line in lines)
    if at_once:
        sys.stdout.flush()


def table(rows: Sequence[Sequence[object]], numbers: Collection[str] = ()) -> Iterator[str]:
    """Yield the lines of a table.

    Args:
        rows: of which the first names the columns.
        numbers: the columns that are aligned at the right.
    """
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(*texts, strict=True)]
    for row in texts:
        cells = zip(texts[0], row, widths, strict=True)
        sides = (text.rjust(width) if name in numbers else text.ljust(width) for name, text, width in cells)
        yield "  ".join(sides).rstrip()


def moment(seconds: float | None) -> str:
    """Return a wall time as a person here writes it; "-": not known."""
    if seconds is None:
        return "-"
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return f"{seconds:g}"


def size(nbytes: int | None) -> str:
    """Return bytes for people: ``812 B``, ``1.21 GiB``; "-": not known."""
    if nbytes is None:
        return "-"
    if nbytes < 1024:
        return f"{nbytes} B"
    amount, unit = nbytes / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if amount < 999.5:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.3g} {unit}"
