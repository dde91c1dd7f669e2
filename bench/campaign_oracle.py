"""The oracle of a campaign: which copies exist, which are intact, and what may be restored."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from campaign_job import Setup

from outlast.checkpoint.policy.manifest import parse_copy_name

NONE = -1  # the step of no copy


class Wrong(Exception):
    """What must not happen."""


def place_of(name: str) -> tuple[int, int]:
    return parse_copy_name(name) or (NONE, NONE)


def age_of(name: str) -> tuple[int, int]:
    return place_of(name)[::-1]


def names_in(folder: Path) -> list[str]:
    """Return the copies in a folder, in the order in which they were made."""
    try:
        return sorted(filter(parse_copy_name, os.listdir(folder)), key=age_of)
    except FileNotFoundError:
        return []


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


@dataclass
class Survey:
    """The content of the folders while the checkpoint writer is stopped.

    Args:
        staged: names that all ranks have staged and that are not committed yet.
        memory: of the copies in memory, whole or not.
        disk: of the copies on disk, whole or not.
        sound: names with an intact copy that is on disk, or stays until it is.
        passing: names with an intact copy in memory that a newer one may replace at any time.
        traces: whether anything at all says that this run has saved, for certain and perhaps: what is being
            written to disk may come to nothing.
    """

    staged: list[str]
    memory: list[str]
    disk: list[str]
    sound: set[str]
    passing: set[str]
    traces: tuple[bool, bool]

    @property
    def newest(self) -> int:
        """The step that must be restored: that of the newest intact copy."""
        return max((place_of(name)[0] for name in self.sound), default=NONE)

    def told(self) -> dict[str, list[str]]:
        """Return the names, with ``!`` behind one without an intact copy."""
        whole = self.sound | self.passing
        return {
            tier: [name if name in whole else f"{name}!" for name in names]
            for tier, names in (("staged", self.staged), ("memory", self.memory), ("disk", self.disk))
            if names
        }


@dataclass
class Copies:
    """The copies of a campaign, and the damage to their files.

    Args:
        setup: of the campaign.
        before: digests of files before they were damaged, by copy and file.
        late: copies on disk that were damaged when the writer may have been about to remove memory.
    """

    setup: Setup
    before: dict[str, dict[str, str]] = field(default_factory=dict)
    late: set[str] = field(default_factory=set)

    @property
    def in_memory(self) -> Path:
        return self.setup.memory / "memory"

    def note(self, path: Path) -> None:
        """Record the digest of a file before its first damage."""
        self.before.setdefault(path.parent.name, {}).setdefault(path.name, _digest(path.read_bytes()))

    def in_parts(self, name: str) -> bool:
        """Say whether each rank finds its part intact in memory or on disk."""
        places = (self.in_memory / name, self.setup.disk / name)
        parts = [f"rank-{rank:05d}-" for rank in range(self.setup.world)]
        return all(any(self.is_whole(place, part) for place in places if place.exists()) for part in parts)

    def is_whole(self, folder: Path, part: str = "") -> bool:
        """Say whether every file that was damaged in any copy of that name is correct in this one.

        Args:
            folder: of the copy.
            part: beginning of a rank's files; those of the others do not count then.
        """
        for file, right in self.before.get(folder.name, {}).items():
            if file.startswith("rank-") and not file.startswith(part):
                continue
            try:
                if _digest((folder / file).read_bytes()) != right:
                    return False
            except FileNotFoundError:
                return False
        return True

    def _may_be_open(self, name: str) -> bool:
        """Say whether a copy in memory only lacks files: the writer may have them open, for the disk."""
        folder = self.in_memory / name
        if place_of(name)[0] % self.setup.every:
            return False
        there = [file for file in self.before.get(name, {}) if (folder / file).exists()]
        return all(_digest((folder / file).read_bytes()) == self.before[name][file] for file in there)

    def _complete(self) -> list[str]:
        """Return the names of what all ranks have staged."""
        found, staged = [], self.setup.memory / "staged"
        for path in staged.iterdir() if staged.exists() else ():
            files = set(
                os.listdir(path)
            )  # a process that removes the folder may take a buffer and leave its record
            records = sum(f"{one[:-7]}.safetensors" in files for one in files if one.endswith(".staged"))
            name = path.name.partition("~")[0]
            if records == self.setup.world and parse_copy_name(name):
                found.append(name)
        return sorted(found, key=age_of)

    def survey(self, draining: bool) -> Survey:
        """Examine all folders; the checkpoint writer must be stopped.

        Of the copies in memory, only the newest and those due on disk stay: the writer drops the others,
        because it cannot know that they are needed. A copy that is being written to disk may or may not be
        intact there.

        Args:
            draining: the owner has ended, so the writer removes from memory what is on disk.
        """
        staged, memory, disk = self._complete(), names_in(self.in_memory), names_in(self.setup.disk)
        whole = set(staged) | {name for name in memory if self.is_whole(self.in_memory / name)}
        sound = {name for name in disk if self.is_whole(self.setup.disk / name)}
        newest = sorted({*staged, *memory}, key=age_of)[-1:]
        going = self.late if draining else set()  # the saver may have seen them on disk before they were hit
        for name in whole - going:
            owed = place_of(name)[0] % self.setup.every == 0 and name not in disk
            if owed or name in newest:
                sound.add(name)
        written = {path.name.removeprefix(".tmp-")[:-9] for path in self.setup.disk.glob(".tmp-step-*")}
        written |= {name for name in memory if name not in disk and self._may_be_open(name)}
        whole |= written | {name for name in memory if self.in_parts(name)}
        quarantined = any((self.setup.disk / "quarantine").glob("*"))
        traces = bool(memory or disk or staged or quarantined)
        return Survey(staged, memory, disk, sound, whole - sound, (traces, traces or bool(written)))


class Oracle:
    """Knows the content of every step and what was staged, and checks what is restored.

    Args:
        copies: of the campaign.
        contents: the right content, by rank and step.
    """

    def __init__(self, copies: Copies, contents: list[list[str]]) -> None:
        self.copies = copies
        self.contents = contents
        self.floor = NONE  # this or a newer step is in some copy, unless that was hit
        self.staged = 0  # the newest step that all ranks have staged
        self.begun = 0
        self.was_hit = self._hit = False  # whether files were damaged or removed before the latest restore
        self.wiped = NONE  # what was begun up to here may have been in a memory folder that was removed

    def worked(self, begun: int, staged: int, certain: int) -> None:
        """Record the steps of the ranks of a generation.

        Args:
            begun: the newest step of any rank.
            staged: the newest step that all ranks have staged.
            certain: the newest one that must not be lost.
        """
        self.begun = max(self.begun, begun)
        if staged > 0:
            self.staged = staged
            if certain > max(self.wiped, 0):
                self.floor = max(self.floor, certain)

    def wipe(self, begun: int) -> None:
        """Record that the memory folder was removed when a step had begun."""
        self.wiped, self._hit = begun, True
        self.floor = NONE

    def begin(self) -> None:
        """Begin with a generation."""
        self.was_hit = self._hit
        self.wiped = NONE

    def require_floor(self, survey: Survey) -> None:
        """Check that nothing staged is lost.

        Raises:
            Wrong: more than the newest unsettled step is.
        """
        if survey.newest < self.floor:
            raise Wrong(
                f"lost: step {self.floor} was staged for certain, {survey.newest} is the newest that is left"
                f" of {survey.told()}"
            )

    def hit(self, survey: Survey) -> None:
        """Record what is left after damage."""
        self._hit = True
        self.floor = min(self.floor, survey.newest)

    def judge(self, rank: int, said: dict[str, Any], survey: Survey) -> None:
        """Check what a rank restored.

        Args:
            rank: which.
            said: its report.
            survey: of the copies before the restore.

        Raises:
            Wrong: with what was found and expected.
        """
        step, name, needed = said["restored"], said["name"], survey.newest
        where = f"rank {rank}: step {step} was restored as {name or 'a fresh start'} ({said['why']})"
        if said["content"] != self.contents[rank][step]:
            raise Wrong(f"wrong bytes: {where}")
        if not name and survey.traces[0]:
            raise Wrong(f"fresh start: {where}, though there is {survey.told()}")
        if name and said["cursor"] != {"next": step}:
            raise Wrong(f"wrong cursor: {where} with {said['cursor']}")
        if name and name not in survey.sound | survey.passing:
            raise Wrong(f"not whole: {where}; whole are {sorted(survey.sound | survey.passing)}")
        if max(step, 0) < needed:
            raise Wrong(f"too old: {where}; step {needed} was there: {survey.told()}")

    def refused(self, rank: int, text: str, survey: Survey) -> None:
        """Check a refusal.

        Raises:
            Wrong: there was an intact copy, or no copy at all.
        """
        if survey.newest > NONE:
            raise Wrong(f"refused: rank {rank}, though step {survey.newest} was there: {text}")
        if not survey.traces[1]:
            raise Wrong(f"refused: rank {rank}, though nothing was ever saved: {text}")

    def restored(self, step: int, stays: bool) -> int:
        """Count from the restored step; return the steps that must be repeated.

        Args:
            step: that was restored.
            stays: whether the copy stays; the writer of the generation before may be removing it.
        """
        lost = self.staged - step
        self._hit = self.wiped > NONE
        self.floor, self.staged, self.begun = step if step and stays and not self._hit else NONE, step, step
        return lost
