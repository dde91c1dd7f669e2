"""Part of a run computed again, under ``outlast run`` in a run folder of its own; the run is only read."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from outlast.checkpoint.care import listing
from outlast.checkpoint.care.listing import Item, Target
from outlast.core.errors import UsageError
from outlast.core.events import COVERS, Compared
from outlast.core.manifest import parse_copy_name
from outlast.core.replay import Plan
from outlast.core.resolve import CopyState
from outlast.observe import recorder
from outlast.observe.run_folder import RunFolder

_LOOK = 0.2  # seconds between two looks at what the replay has written
_PATIENCE = 120.0  # from SIGTERM to SIGKILL: workers_stop_timeout, and the saver's last writes
_ALL = 1_000_000  # copies are kept


def copies_of(target: Target) -> dict[int, Item]:
    """Return a run's whole copies that are not in quarantine, by step; of several the newest generation's."""
    found: dict[int, Item] = {}
    for item in listing.items(target):
        name = parse_copy_name(item.name)
        if not item.aside and name is not None and listing.look(item).copy.state is CopyState.WHOLE:
            found.setdefault(name[0], item)
    return found


def records_of(folder: RunFolder | None) -> dict[int, Compared]:
    """Return what a run recorded of its parameters, by step; of several the latest."""
    found: dict[int, Compared] = {}
    for path in () if folder is None else (folder.events, *folder.node_events().values()):
        with contextlib.suppress(FileNotFoundError):
            for one in recorder.read(path).records:
                if isinstance(one, Compared) and one.digest:
                    found[one.step] = one
    return found


class Rerun:
    """Computes again what a plan says.

    Args:
        root: folder for all that it writes; made.
        run_id: of the run, so that its copies are taken for one's own.
        begin: the copy to begin with; None: none.
        planned: what is compared.
        covers: what the run's own comparisons covered.
    """

    def __init__(self, root: Path, run_id: str, begin: Item | None, planned: Plan, covers: str) -> None:
        self._planned = planned
        self._console = root / "console.log"
        self._config = root / "config.toml"
        self.folder = RunFolder(root / "run")
        root.mkdir(parents=True)
        self.folder.claim(run_id)
        self.folder.release()
        if begin is not None:
            _link(begin.tier.folder / begin.name, self.folder.checkpoints / begin.name)
        lines = ["[checkpoints]", f"save_interval = {planned.save_interval}", f"keep_last_n = {_ALL}"]
        if planned.records:
            lines += ["[tripwire]", f"tripwire_interval = {planned.compare_interval}"]
            lines += [f"tripwire_optimizer = {str(covers == COVERS[1]).lower()}"]
        self._config.write_text("\n".join(lines) + "\n")

    def carry_out(self, ranks: int, script: Sequence[str], environment: Mapping[str, str]) -> None:
        """Run until all that is to be compared is there.

        Args:
            ranks: how many.
            script: options of ``outlast run``, the script and its arguments.
            environment: of the launcher.

        Raises:
            UsageError: the script failed, so nothing can be said.
        """
        options = ["--run-dir", str(self.folder.root), "--config", str(self._config), "--max-restarts", "0"]
        options += ["--nproc-per-node", str(ranks), "--node-name", f"replay-{os.getpid()}"]
        command = [sys.executable, "-m", "outlast", "run", *options, *script]
        with open(self._console, "wb") as console:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=console, stderr=console, env=dict(environment)
            )
            try:
                while process.poll() is None and not self._complete():
                    time.sleep(_LOOK)
            finally:
                _end(process)
        if not self.steps():
            tail = self._console.read_text(errors="replace").strip().splitlines()[-12:]
            raise UsageError(
                f"the replay ended with exit code {process.returncode} before anything could be compared;"
                f" all of its output is in {self._console}, the end of it:\n" + "\n".join(tail)
            )

    def copies(self) -> dict[int, Item]:
        """Return the copies that the replay has written."""
        if not self.folder.checkpoints.is_dir():
            return {}
        found = copies_of(listing.find(str(self.folder.root)))
        return {step: item for step, item in found.items() if step in self._planned.copies}

    def records(self) -> dict[int, Compared]:
        """Return the digests that the replay has recorded."""
        found = records_of(self.folder)
        return {step: one for step, one in found.items() if step in self._planned.records}

    def steps(self) -> tuple[int, ...]:
        """Return the steps at which something can be compared, ascending."""
        return tuple(sorted({*self.copies(), *self.records()}))

    def _complete(self) -> bool:
        """Say whether what is compared last is there."""
        planned = self._planned
        copies = not planned.copies or planned.copies[-1] in self.copies()
        return copies and (not planned.records or planned.records[-1] in self.records())


def _link(source: Path, target: Path) -> None:
    """Make a copy of a committed copy; its files are never written into again, so links do."""
    target.mkdir(parents=True)
    for file in source.iterdir():
        try:
            os.link(file, target / file.name)
        except OSError:
            shutil.copyfile(file, target / file.name)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(_PATIENCE)
