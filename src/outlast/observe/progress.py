"""A line on the terminal while a command works on something long."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def working(text: str, wanted: bool = True, nbytes: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show what is being done and for how long; nothing where standard error is no terminal.

    Args:
        text: what is being done.
        wanted: whether to show anything.
        nbytes: how many bytes it has to read; None: not known, and only the time is shown.

    Yields:
        Takes the number of bytes that were read since the last call.
    """
    if not wanted or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich import progress
    from rich.console import Console

    words = progress.TextColumn("{task.description}", markup=False)
    columns: tuple[progress.ProgressColumn, ...] = (
        (progress.SpinnerColumn(), words, progress.TimeElapsedColumn())
        if nbytes is None
        else (
            words,
            progress.BarColumn(),
            progress.DownloadColumn(binary_units=True),
            progress.TransferSpeedColumn(),
        )
    )
    console = Console(stderr=True)
    with progress.Progress(*columns, console=console, transient=True, redirect_stdout=False) as shown:
        task = shown.add_task(text, total=nbytes)
        yield lambda count: shown.advance(task, count)
