"""``outlast replay``: computes part of a run again and says at which step the run first differs.

The replay runs under ``outlast run`` in a run folder of its own; the run itself is only read.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from outlast import settings
from outlast.checkpoint.policy.manifest import parse_copy_name
from outlast.checkpoint.policy.replay import Bracket, Plan, bisect, plan
from outlast.checkpoint.policy.resolve import CopyState
from outlast.checkpoint.tools import listing, upkeep
from outlast.checkpoint.tools.listing import Item, Target, differences
from outlast.errors import ExitCode, UsageError
from outlast.fields import DamagedCopy
from outlast.observe import recorder
from outlast.observe.run_folder import RunFolder
from outlast.recovery.policy.events import COVERS, Compared, RunStarted

_LOOK = 0.2  # seconds between two looks at what the replay has written
_PATIENCE = 120.0  # from SIGTERM to SIGKILL: workers_stop_timeout, and the writer's last writes
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

    def carry_out(self, ranks: int, script: Sequence[str], environment: Mapping[str, str], hint: str) -> None:
        """Run until all that is to be compared is there.

        Args:
            ranks: how many.
            script: options of ``outlast run``, the script and its arguments.
            environment: of the launcher.
            hint: what may be wrong with the script's arguments.

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
                f"{hint} all of its output is in {self._console}, the end of it:\n" + "\n".join(tail)
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


DIFFERS = 1
_SHOWN = 8
_DESCRIPTION = """\
Compute part of a run again, from one of its checkpoints, and compare it with what the run left. The run is
only read. Exit code 0: equal. 1: it differs, and it is said where it began. 2: nothing can be said.
"""


def main(arguments: Sequence[str]) -> int:
    """Carry out ``outlast replay ...`` and return its exit code.

    Raises:
        UsageError: it cannot be said whether the run was right.
    """
    at = list(arguments).index("--") if "--" in arguments else len(arguments)
    options = _parser().parse_args(arguments[:at])
    script = arguments[at + 1 :]
    if not script:
        raise UsageError("after -- the training script and its arguments are expected, as the run had them")
    target = listing.find(options.run)
    if target.folder is None or not target.run_id:
        raise UsageError(f"{options.run} is no run folder: no run.json is in it")
    run = _Run(target)
    planned = plan(run.standing(), run.records, options.start, options.end)
    if isinstance(planned, str):
        raise UsageError(f"{options.run}: {planned}")
    scratch = Path(options.scratch or tempfile.mkdtemp(prefix="outlast-replay-"))
    try:
        code = _Replay(run, planned, script, scratch).carry_out()
    except UsageError:
        _say(f"what was written is left in {scratch}")
        raise
    if options.scratch:
        _say(f"what was written is in {scratch}")
    else:
        shutil.rmtree(scratch)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="outlast replay",
        description=_DESCRIPTION,
        usage="outlast replay [-h] [--from STEP] [--to STEP] [--scratch FOLDER] RUN -- SCRIPT ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", help="a run folder")
    text = "begin with the copy of that step, 0: with none (default: the newest that is proven)"
    parser.add_argument("--from", dest="start", type=int, metavar="STEP", help=text)
    parser.add_argument("--to", dest="end", type=int, metavar="STEP", help="compare no step beyond it")
    parser.add_argument(
        "--scratch", metavar="FOLDER", help="where the replay writes; kept (default: a temporary one)"
    )
    return parser


def _say(text: str) -> None:
    sys.stdout.write(listing.printable(text) + "\n")
    sys.stdout.flush()


class _Run:
    """What a run left."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.run_id = target.run_id
        self.copies = copies_of(target)
        self.records = records_of(target.folder)

    def standing(self) -> dict[int, str]:
        """Return how far the run believes each copy."""
        entries = upkeep.look_over(self.target, self.copies.values())
        return {entry.copy.step: entry.trust[0] if entry.trust else "" for entry in entries}

    def ranks(self) -> int:
        """Return how many ranks it had."""
        for item in self.copies.values():
            manifest = listing.look(item).manifest
            if manifest is not None:
                return manifest.world_size
        started = self._started()
        return 1 if started is None else started.world_size

    def arguments(self) -> tuple[str, ...]:
        """Return what its script got."""
        started = self._started()
        return () if started is None else started.command[1:]

    def _started(self) -> RunStarted | None:
        """Return the newest launch."""
        assert self.target.folder is not None
        found: list[RunStarted] = []
        for path in (self.target.folder.events, *self.target.folder.node_events().values()):
            with contextlib.suppress(FileNotFoundError):
                found += (one for one in recorder.read(path).records if isinstance(one, RunStarted))
        return max(found, key=lambda one: one.time, default=None)

    def covers(self, steps: Sequence[int]) -> str:
        """Return what the recorded digests of some steps covered.

        Raises:
            UsageError: not always the same.
        """
        found = sorted({self.records[step].covers for step in steps})
        if len(found) > 1:
            raise UsageError(
                f"the recorded digests cover {' and '.join(found)} at different steps; choose with --from"
                " and --to steps at which they cover the same"
            )
        return found[0] if found else ""


class _Replay:
    """One run computed again, twice where it differs.

    Args:
        run: what it left.
        planned: what is compared.
        script: the script and its arguments.
        scratch: folder for all that is written.
    """

    def __init__(self, run: _Run, planned: Plan, script: Sequence[str], scratch: Path) -> None:
        self._run, self._planned, self._script, self._scratch = run, planned, script, scratch
        self._found: dict[int, list[str]] = {}

    def carry_out(self) -> int:
        """Return the exit code."""
        run, planned = self._run, self._planned
        ranks = run.ranks()
        _say(
            f"replay of {ranks} rank(s) from step {planned.start} ({planned.reason}) to {planned.steps[-1]};"
            f" {len(planned.copies)} copies and {len(planned.records)} recorded digests to compare with"
        )
        first = self._rerun("first", planned, ranks)
        bracket = self._compare(first)
        missing = [step for step in planned.steps if step not in first.steps()]
        if bracket.wrong is None:
            if bracket.right < planned.steps[-1]:
                raise UsageError(
                    f"the replay reached step {bracket.right} of {planned.steps[-1]}; so far it is equal"
                )
            _say(f"equal up to step {bracket.right}; looked at {_list(bracket.probes)}")
            return ExitCode.OK
        for phrase in self._found[bracket.wrong][:_SHOWN]:
            _say(f"step {bracket.wrong}: {phrase}")
        if missing and missing[0] < bracket.wrong:
            _say(f"the replay left nothing to compare at step {_list(missing)}")
        self._confirm(first, bracket.wrong, ranks)
        span = f"{bracket.right} and {bracket.wrong}"
        _say(f"first wrong step between {span}: equal after the one, not after the other")
        return DIFFERS

    def _rerun(self, name: str, planned: Plan, ranks: int) -> Rerun:
        begin = self._run.copies[planned.start] if planned.start else None
        covers = self._run.covers(planned.records)
        rerun = Rerun(self._scratch / name, self._run.run_id, begin, planned, covers)
        had, hint = self._run.arguments(), ""
        if had and tuple(self._script[-len(had) :]) != had:
            hint = f" the run had the arguments {shlex.join(had)} after its script, the replay had others;"
        rerun.carry_out(ranks, self._script, settings.inherited(), hint)
        return rerun

    def _compare(self, rerun: Rerun) -> Bracket:
        copies, records = rerun.copies(), rerun.records()
        known: dict[int, bool] = {}
        for step, record in records.items():
            expected = self._run.records[step].digest
            if record.digest != expected:
                self._found[step] = [
                    f"the digest of the {record.covers} is {expected}, in the replay {record.digest}"
                ]
            if record.digest != expected or step not in copies:
                known[step] = record.digest == expected

        def equal(step: int) -> bool:
            phrases = differing(self._run.copies[step], copies[step])
            if phrases:
                self._found[step] = phrases
            return not phrases

        bracket = bisect(self._planned.start, rerun.steps(), known, equal)
        wrong = bracket.wrong
        if wrong is not None and wrong in copies and not known.get(wrong, True):
            self._found[wrong] += differing(self._run.copies[wrong], copies[wrong])
        return bracket

    def _confirm(self, first: Rerun, wrong: int, ranks: int) -> None:
        """Replay once more: what differs between two replays says nothing of the run.

        Raises:
            UsageError: the script does not compute the same twice, or the copy in question is damaged.
        """
        if wrong in self._run.copies:
            read = upkeep.read_all(self._run.copies[wrong], lambda _: None)
            if read.copy.state is not CopyState.WHOLE:
                raise UsageError(f"the copy of step {wrong} is not as it was written: {read.copy.reason}")
        planned = plan(
            {step: "" for step in (self._planned.start, *self._planned.copies)},
            self._planned.records,
            self._planned.start,
            wrong,
        )
        assert isinstance(planned, Plan), "the wrong step is in it"
        second = self._rerun("second", planned, ranks)
        phrases = _between(first, second, wrong)
        if phrases:
            raise UsageError(
                f"two replays differ from each other at step {wrong} ({phrases[0]}): the script does not"
                " compute the same twice, so nothing is said of the run"
            )
        _say(f"a second replay gave the same as the first at step {wrong}")


def _between(first: Rerun, second: Rerun, step: int) -> list[str]:
    """Return what differs between two replays at a step."""
    digests: list[Mapping[int, Compared]] = [first.records(), second.records()]
    copies = [first.copies(), second.copies()]
    found: list[str] = []
    if all(step in one for one in digests) and digests[0][step].digest != digests[1][step].digest:
        found.append(f"digests {digests[0][step].digest} and {digests[1][step].digest}")
    if all(step in one for one in copies):
        found += differing(copies[0][step], copies[1][step])
    if not any(all(step in one for one in each) for each in (digests, copies)):
        found.append("the second one did not get there")
    return found


def differing(one: Item, other: Item) -> list[str]:
    """Return what differs between two copies.

    Raises:
        UsageError: one of them is damaged.
    """
    try:
        return list(differences(one, other))
    except DamagedCopy as error:
        raise UsageError(f"a copy of step {listing.look(one).copy.step} cannot be read: {error}") from error


def _list(steps: Sequence[int]) -> str:
    more = f" and {len(steps) - _SHOWN} more" if len(steps) > _SHOWN else ""
    return f"step {', '.join(map(str, steps[:_SHOWN]))}{more}" if steps else "no copy"
