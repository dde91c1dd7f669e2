"""``outlast report RUN --html FILE``: the page of a run as one file that needs nothing else."""

from __future__ import annotations

import time
from pathlib import Path

from outlast import files
from outlast.errors import UsageError
from outlast.observe import report
from outlast.observe.dashboard import document, logs
from outlast.observe.dashboard.document import RankLog, Shown
from outlast.observe.following import RunFollower
from outlast.observe.policy.page import History, Numbered

_LOG_BYTES = 8192  # of the end of a rank's log
_MOST_LOGS = 10  # incidents of which the file has the end of the log


def write(run_dir: Path, path: Path) -> None:
    """Write the page of a run, also of a running job; a file that is there is replaced.

    Raises:
        UsageError: there is no event log, nothing can be read in it, or the file cannot be written.
    """
    log = report.read_log(run_dir)
    history = History(most=len(log.records) + 1)
    for record in log.records:  # of all nodes, as one job's
        history.take(record)
    view = history.view()
    shown = Shown(
        str(run_dir),
        RunFollower(run_dir).poll(),
        view,
        time.time(),
        logs={one.number: _logs(run_dir, one) for one in view.incidents[-_MOST_LOGS:]},
        skipped=log.skipped,
        unknown=len(log.unknown),
    )
    content = document.page(f"run {view.run_id or run_dir.name}", document.sections(shown))
    try:
        files.write_whole(path, content.encode())
    except OSError as error:
        raise UsageError(f"--html {path}: {error.strerror}; the page was not written") from error


def _logs(run_dir: Path, one: Numbered) -> list[RankLog]:
    folder = logs.place(run_dir, one.incident)
    found = []
    for name in logs.files(run_dir, folder).values() if folder else ():
        try:
            end = logs.end(run_dir, (*folder, name), _LOG_BYTES).decode("utf-8", "replace")
        except OSError as error:
            end = f"It cannot be read: {error.strerror or error}"
        found.append(RankLog("/".join((*folder, name)), end=end))
    return found
