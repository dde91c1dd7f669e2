"""``outlast replay``: computes part of a run again and says at which step the run first differs.

The replay runs under ``outlast run`` in a run folder of its own; the run itself is only read.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from outlast import settings
from outlast.checkpoint.content.rank_file import RankFile
from outlast.checkpoint.policy.manifest import place_of
from outlast.checkpoint.policy.resolve import CopyState
from outlast.checkpoint.tiers.inventory import read_manifest, read_rank_file
from outlast.checkpoint.tiers.tier import CopyFolder, digest_of
from outlast.checkpoint.tools import listing, upkeep
from outlast.checkpoint.tools.listing import Entry, Item, Target
from outlast.errors import ExitCode, UsageError
from outlast.fields import DamagedCopy
from outlast.observe import recorder
from outlast.observe.run_folder import RunFolder
from outlast.observe.text import say
from outlast.recovery.policy.events import COVERS, Compared, Record, RunStarted

_LOOK = 0.2  # seconds between two looks at what the replay has written
_PATIENCE = 120.0  # from SIGTERM to SIGKILL: workers_stop_timeout, and the writer's last writes
_ALL = 1_000_000  # copies are kept
DIFFERS = 1
_SHOWN = 8
_DESCRIPTION = """\
Compute part of a run again, from one of its checkpoints, and compare it with what the run left. The run is
only read. Exit code 0: equal. 1: they differ, and where that begins is printed. 2: no result.
"""


@dataclass(frozen=True)
class Left:
    """What a run left that another one can be compared with, by step.

    Args:
        copies: whole ones that are not in quarantine; of several the newest generation's.
        records: what was recorded of the parameters; of several the latest.
    """

    copies: dict[int, Entry]
    records: dict[int, Compared]

    @property
    def steps(self) -> tuple[int, ...]:
        """All steps at which something can be compared, ascending."""
        return tuple(sorted({*self.copies, *self.records}))

    def differing(self, other: Left, step: int) -> list[str]:
        """Return what differs at a step, as far as both have left it.

        Raises:
            UsageError: a copy is damaged.
        """
        found = []
        if step in self.records and step in other.records:
            one, another = self.records[step], other.records[step]
            if one.digest != another.digest:
                found.append(
                    f"the digest of the {another.covers} is {one.digest}, in the replay {another.digest}"
                )
        if step in self.copies and step in other.copies:
            found += differences(self.copies[step].item, other.copies[step].item)
        return found


def left_in(target: Target) -> Left:
    """Return what a run left."""
    there = [item for item in listing.items(target) if not item.aside]
    entries = [one for one in upkeep.look_over(target, there) if one.copy.state is CopyState.WHOLE]
    records = {one.step: one for one in _events(target) if isinstance(one, Compared) and one.digest}
    return Left({one.copy.step: one for one in reversed(entries)}, records)


def _events(target: Target) -> list[Record]:
    """Return what the nodes of a run have recorded, each in its order."""
    assert target.folder is not None
    found: list[Record] = []
    for path in (target.folder.events, *target.folder.node_events().values()):
        with contextlib.suppress(FileNotFoundError):
            found += recorder.read(path).records
    return found


def _link(source: Path, target: Path) -> None:
    """Make a copy of a committed copy; its files are never written into again, so links do."""
    target.mkdir(parents=True)
    for file in source.iterdir():
        try:
            os.link(file, target / file.name)
        except OSError:
            shutil.copyfile(file, target / file.name)


def _watched(command: Sequence[str], console: Path, done: Callable[[], bool]) -> int:
    """Run a command until it ends, or has done what it is to do, and return its exit code."""
    with open(console, "wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=dict(settings.inherited())
        )
        try:
            while process.poll() is None and not done():
                time.sleep(_LOOK)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_PATIENCE)
    return process.returncode


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
    run = left_in(target)
    standing = {step: entry.trust[0] if entry.trust else "" for step, entry in run.copies.items()}
    planned = plan(standing, run.records, options.start, options.end)
    if isinstance(planned, str):
        raise UsageError(f"{options.run}: {planned}")
    scratch = Path(options.scratch or tempfile.mkdtemp(prefix="outlast-replay-"))
    try:
        code = _Replay(target, run, planned, script, scratch).carry_out()
    except UsageError:
        say(f"what was written is left in {scratch}")
        raise
    if options.scratch:
        say(f"what was written is in {scratch}")
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


class _Replay:
    """One run computed again, twice where it differs.

    Args:
        target: the run.
        run: what it left.
        planned: what is compared.
        script: the script and its arguments.
        scratch: folder for all that is written.
    """

    def __init__(
        self, target: Target, run: Left, planned: Plan, script: Sequence[str], scratch: Path
    ) -> None:
        self._target, self._run, self._planned = target, run, planned
        self._script, self._scratch = script, scratch
        started = [one for one in _events(target) if isinstance(one, RunStarted)]
        self._started = max(started, key=lambda one: one.time, default=None)
        ranks = [run.copies[step].copy.world_size for step in sorted(run.copies)]  # the newest last
        self._ranks = (ranks or [1 if self._started is None else self._started.world_size])[-1]

    def carry_out(self) -> int:
        """Return the exit code."""
        run, planned = self._run, self._planned
        say(
            f"replay of {self._ranks} rank(s) from step {planned.start} ({planned.reason})"
            f" to {planned.steps[-1]}; {len(planned.copies)} copies and {len(planned.records)} recorded"
            " digests to compare with",
            at_once=True,
        )
        first = self._rerun("first", planned)
        bracket = self._compare(first)
        if bracket.wrong is None:
            if bracket.right < planned.steps[-1]:
                raise UsageError(
                    f"the replay reached step {bracket.right} of {planned.steps[-1]}; so far it is equal"
                )
            say(f"equal up to step {bracket.right}; looked at {_list(bracket.probes)}")
            return ExitCode.OK
        for phrase in run.differing(first, bracket.wrong)[:_SHOWN]:
            say(f"step {bracket.wrong}: {phrase}", at_once=True)
        missing = [step for step in planned.steps if step not in first.steps]
        if missing and missing[0] < bracket.wrong:
            say(f"the replay left nothing to compare at step {_list(missing)}")
        self._confirm(first, bracket.wrong)
        span = f"{bracket.right} and {bracket.wrong}"
        say(f"first wrong step between {span}: equal after the one, not after the other")
        return DIFFERS

    def _rerun(self, name: str, planned: Plan) -> Left:
        """Compute again what a plan says until all that is to be compared is there, and return that.

        Raises:
            UsageError: what was recorded covers not always the same, or the script left nothing to compare.
        """
        covers = sorted({self._run.records[step].covers for step in planned.records})
        if len(covers) > 1:
            raise UsageError(
                f"the recorded digests cover {' and '.join(covers)} at different steps; choose with --from"
                " and --to steps at which they cover the same"
            )
        root = self._scratch / name
        root.mkdir(parents=True)
        folder, config, console = RunFolder(root / "run"), root / "config.toml", root / "console.log"
        folder.claim(self._target.run_id)  # so that the run's copies are taken for its own
        folder.release()
        if planned.start:
            begin = self._run.copies[planned.start].item
            _link(begin.tier.folder / begin.name, folder.checkpoints / begin.name)
        lines = ["[checkpoints]", f"save_interval = {planned.save_interval}", f"keep_last_n = {_ALL}"]
        if planned.records:
            lines += ["[tripwire]", f"tripwire_interval = {planned.compare_interval}"]
            lines += [f"tripwire_optimizer = {str(covers == [COVERS[1]]).lower()}"]
        config.write_text("\n".join(lines) + "\n")
        command = [sys.executable, "-m", "outlast", "run", "--run-dir", str(folder.root)]
        command += ["--config", str(config), "--max-restarts", "0", "--nproc-per-node", str(self._ranks)]
        command += ["--node-name", f"replay-{os.getpid()}", *self._script]

        def left() -> Left:
            found = left_in(listing.find(str(folder.root)))
            copies = {step: one for step, one in found.copies.items() if step in planned.copies}
            records = {step: one for step, one in found.records.items() if step in planned.records}
            return Left(copies, records)

        def is_done() -> bool:
            found = left()
            copied = {*planned.copies[-1:]} <= found.copies.keys()
            return copied and {*planned.records[-1:]} <= found.records.keys()

        code = _watched(command, console, is_done)
        found = left()
        if not found.steps:
            had, hint = () if self._started is None else self._started.command[1:], ""
            if had and tuple(self._script[-len(had) :]) != had:
                hint = (
                    f" the run had the arguments {shlex.join(had)} after its script, the replay had others;"
                )
            tail = console.read_text(errors="replace").strip().splitlines()[-12:]
            raise UsageError(
                f"the replay ended with exit code {code} before anything could be compared;"
                f"{hint} all of its output is in {console}, the end of it:\n" + "\n".join(tail)
            )
        return found

    def _compare(self, rerun: Left) -> Bracket:
        run, known = self._run, {}
        for step, record in rerun.records.items():
            is_equal = record.digest == run.records[step].digest
            if not is_equal or step not in rerun.copies:
                known[step] = is_equal
        return bisect(self._planned.start, rerun.steps, known, lambda step: not run.differing(rerun, step))

    def _confirm(self, first: Left, wrong: int) -> None:
        """Replay once more: what differs between two replays says nothing of the run.

        Raises:
            UsageError: the script does not compute the same twice, or the copy in question is damaged.
        """
        if wrong in self._run.copies:
            read = upkeep.read_all(self._run.copies[wrong].item)
            if read.copy.state is not CopyState.WHOLE:
                raise UsageError(f"the copy of step {wrong} is not as it was written: {read.copy.reason}")
        within = [
            tuple(step for step in steps if step <= wrong)
            for steps in (self._planned.copies, self._planned.records)
        ]
        second = self._rerun("second", replace(self._planned, copies=within[0], records=within[1]))
        both = first.copies.keys() & second.copies.keys() | first.records.keys() & second.records.keys()
        phrases = first.differing(second, wrong) if wrong in both else ["the second one did not get there"]
        if phrases:
            raise UsageError(
                f"two replays differ from each other at step {wrong} ({phrases[0]}): the script does not"
                " compute the same twice, so nothing is said of the run"
            )
        say(f"a second replay gave the same as the first at step {wrong}")


def differences(one: Item, other: Item) -> list[str]:
    """Return what differs between two copies, a phrase each; random states aside.

    Raises:
        UsageError: one of them is damaged.
        OSError: the file system refused.
    """
    try:
        with one.tier.open(one.name) as left, other.tier.open(other.name) as right:
            mine, others = read_manifest(left, one.name)[0], read_manifest(right, other.name)[0]
            if mine.world_size != others.world_size:
                return [f"{mine.world_size} and {others.world_size} ranks"]
            return [
                f"rank {rank}: {phrase}"
                for rank in range(mine.world_size)
                for phrase in _of_rank(
                    (left, right), (read_rank_file(left, mine, rank), read_rank_file(right, others, rank))
                )
            ]
    except DamagedCopy as error:
        raise UsageError(f"a copy of step {place_of(one.name)[0]} cannot be read: {error}") from error


def _of_rank(folders: tuple[CopyFolder, CopyFolder], files: tuple[RankFile, RankFile]) -> Iterator[str]:
    left, right = files
    unlike = sorted(left.tensors.keys() ^ right.tensors.keys())
    if unlike:
        yield f"only one has {unlike[0]}"
    for key in sorted(left.tensors.keys() & right.tensors.keys()):
        forms = [
            (one.dtype, one.shape, one.global_shape, one.offsets)
            for one in (left.tensors[key], right.tensors[key])
        ]
        digests = [_digest(folder, file, key) for folder, file in zip(folders, files, strict=True)]
        if forms[0] != forms[1]:
            yield f"{key} is of another type, shape or place"
        elif digests[0] != digests[1]:
            yield f"{key} (digest {digests[0]}, in the replay {digests[1]})"
    values = left.values.keys() | right.values.keys()
    names = sorted(name for name in values if left.values.get(name) != right.values.get(name))
    if names:
        yield f"what is no tensor in {', '.join(names)}"


def _digest(folder: CopyFolder, rank_file: RankFile, key: str) -> str:
    """Return the digest of a tensor's bytes."""
    file, entry = next((one.file.name, one.tensors[key]) for one in rank_file.shards if key in one.tensors)
    with folder.open(file) as (descriptor, _):
        return digest_of(descriptor, entry.end, file, entry.begin)


def _list(steps: Sequence[int]) -> str:
    more = f" and {len(steps) - _SHOWN} more" if len(steps) > _SHOWN else ""
    return f"step {', '.join(map(str, steps[:_SHOWN]))}{more}" if steps else "no copy"


@dataclass(frozen=True)
class Plan:
    """What is computed again and compared.

    Args:
        start: completed steps that the replay begins with; 0 without a copy: from the script's own beginning.
        reason: why it begins there.
        copies: steps of the copies that are compared, ascending.
        records: steps of the recorded digests that are compared, ascending.
        save_interval: at which steps the replay saves: its multiples.
        compare_interval: at which steps the replay digests its parameters: its multiples.
    """

    start: int
    reason: str
    copies: tuple[int, ...]
    records: tuple[int, ...]
    save_interval: int
    compare_interval: int

    @property
    def steps(self) -> tuple[int, ...]:
        """All steps at which something is compared, ascending."""
        return tuple(sorted({*self.copies, *self.records}))


def plan(
    copies: Mapping[int, str], records: Collection[int], start: int | None, end: int | None
) -> Plan | str:
    """Return what to compute again, or why nothing can be compared.

    Args:
        copies: by step of each whole copy, how far the run trusts it ("proven", ...).
        records: steps with recorded digests.
        start: begin with the copy of this step, 0: with none; None: with the newest proven one that has
            something to compare behind it, else the oldest.
        end: compare no step beyond it; None: all that there is.
    """
    last = max((*copies, *records), default=0) if end is None else end
    newest = max((step for step in (*copies, *records) if step <= last), default=0)
    behind = [step for step, word in copies.items() if word == "proven" and step < newest]
    reason = "--from says so"
    if start and start not in copies:
        there = ", ".join(map(str, sorted(copies))) or "none"
        return f"there is no whole copy of step {start}; there are: {there}"
    if start is None and behind:
        start, reason = max(behind), "the newest proven copy with something to compare behind it"
    elif start is None and copies:
        start = min(copies)
        reason = "the oldest copy: none that is proven has something to compare behind it"
    elif start is None:
        start, reason = 0, "the beginning: there is no copy"
    within = tuple(step for step in sorted(copies) if start < step <= last)
    noted = tuple(step for step in sorted(records) if start < step <= last)
    if not within and not noted:
        return f"nothing to compare after step {start}: no copy and no recorded digest up to step {last}"
    return Plan(start, reason, within, noted, math.gcd(*within) or last, math.gcd(*noted) or last)


@dataclass(frozen=True)
class Bracket:
    """Where the replay and the run begin to differ.

    Args:
        right: the last step at which they were seen to be equal, or the start.
        wrong: the next step that was looked at, where they differ; None: they differ nowhere.
        probes: the steps that were looked at, in that order.
    """

    right: int
    wrong: int | None
    probes: tuple[int, ...]


def bisect(
    start: int, steps: Sequence[int], known: Mapping[int, bool], equal: Callable[[int], bool]
) -> Bracket:
    """Find two neighbouring steps between which the run went wrong, with few looks.

    What is wrong stays wrong, therefore of n steps at most log2(n) + 2 are looked at. Both ends of the answer
    were looked at: where a difference did heal, the answer is one of the places where it began.

    Args:
        start: where both begin with the same state.
        steps: at which they can be compared, ascending, all after the start.
        known: what is known without a look: whether they are equal.
        equal: compares at a step, which is expensive.
    """
    said = {step: known[step] for step in steps if step in known}
    probes: list[int] = []

    def look(at: int) -> bool:
        step = steps[at]
        if step not in said:
            said[step] = equal(step)
            probes.append(step)
        return said[step]

    known_wrong = [at for at, step in enumerate(steps) if said.get(step) is False]
    high = known_wrong[0] if known_wrong else len(steps) - 1
    if look(high):
        return Bracket(steps[high], None, tuple(probes))
    low = max((at for at in range(high) if said.get(steps[at])), default=-1)
    wrong = bisect_left(range(high), True, low + 1, key=lambda at: not look(at))
    return Bracket(steps[wrong - 1] if wrong else start, steps[wrong], tuple(probes))
