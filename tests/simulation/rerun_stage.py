"""Incidents of rejected results in transcripts: the rerun machine, played by lines of text.

Begin with ``begin rerun GPU-a GPU-b [key=value ...]``: devices by rank, options of ``[rerun]``. Events::

    at 0 load replica/step-000000080.g1 step 80     at 0 load nothing
    at 5 step 83 on rank 1: loss is nan [; peers 1-3; another copy; spare]
    at 6 rerun rejected on rank 1                   at 6 rerun clean [; others on rank 0]
    at 6 swap rejected on rank 3                    at 6 swap clean [; parameters differ]
    at 7 started on GPU-a GPU-b                     another generation runs
    at 8 step 83 passed
    at 9 process ended                              another one goes on with what was written down
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from outlast.config import RerunOptions
from outlast.rerun.policy.events import Event, Found, Loaded, Means, Order, Passed, Reran, Started, Swapped
from outlast.rerun.policy.machine import RerunMachine


class RerunStage:
    """A rerun machine and the devices that it is told of.

    Args:
        line: that begins the transcript.
    """

    def __init__(self, line: str) -> None:
        words = line.split()[2:]
        self._devices = tuple(word for word in words if "=" not in word)
        given = dict(word.split("=") for word in words if "=" in word)
        kinds = {name: type(value) for name, value in vars(RerunOptions()).items()}
        values: dict[str, Any] = {
            name: text == "True" if kinds[name] is bool else kinds[name](text) for name, text in given.items()
        }
        self._options = RerunOptions(**values)
        self._machine = RerunMachine(self._options)
        self._machine.handle(Started(self._devices), 0.0)

    def take(self, line: str) -> Iterator[str]:
        """Yield the answers to a line.

        Raises:
            ValueError: it is no event.
        """
        match = re.fullmatch(r"at (\S+) (.*)", line)
        if match is None:
            raise ValueError(f"transcript: {line!r} is no event")
        if match[2] == "process ended":
            records = json.loads(json.dumps(self._machine.records()))
            self._machine = RerunMachine(self._options)
            self._machine.restore(records)
            return
        yield from _said(self._machine.handle(self._event(line, match[2]), float(match[1])))

    def _event(self, line: str, text: str) -> Event:
        if found := re.fullmatch(r"load (?:nothing|(\S+)/(\S+) step (\d+))", text):
            return Loaded(int(found[3] or 0), found[1] or "", found[2] or "")
        if found := re.fullmatch(r"started on (.*)", text):
            self._devices = tuple(found[1].split())
            return Started(self._devices)
        if found := re.fullmatch(r"step (\d+) passed", text):
            return Passed(int(found[1]))
        if found := re.fullmatch(r"step (\d+)(?: on ranks? ([\d, ]+))?: (\S+) is ([^;]+)(.*)", text):
            ranks = _ranks(found[2])
            return Found(int(found[1]), found[3], found[4], ranks, self._digests(ranks), _means(found[5]))
        if found := re.fullmatch(r"rerun (?:clean|rejected on ranks? ([\d, ]+))(?:; others on (.*))?", text):
            ranks = _ranks(found[1])
            return Reran(ranks, self._digests(ranks, _ranks((found[2] or "").removeprefix("rank "))))
        if found := re.fullmatch(r"swap (?:clean|rejected on ranks? ([\d, ]+))(; parameters differ)?", text):
            return Swapped(_ranks(found[1]), not found[2])
        raise ValueError(f"transcript: {line!r} is no event")

    def _digests(self, rejected: tuple[int, ...], others: tuple[int, ...] = ()) -> tuple[str, ...]:
        """Return by rank what stands for its result: good, bad, or another good one."""
        return tuple(
            f"{rank} {'bad' if rank in rejected else 'other' if rank in others else 'good'}"
            for rank in range(len(self._devices))
        )


def _ranks(text: str | None) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text or "")))


def _means(text: str) -> Means:
    peers = {int(one): int(other) for one, other in re.findall(r"(\d+)-(\d+)", text)}
    return Means(peers, "another copy" in text, "spare" in text)


def _said(order: Order) -> Iterator[str]:
    if not order.reason:
        return
    verdict = f" [{order.verdict.value}{_about(order)}]" if order.verdict else ""
    code = f" with exit code {order.exit_code}" if order.exit_code else ""
    pairs = "".join(f" {one} and {other}" for one, other in order.pairs)
    yield f"{order.remedy.value}{pairs}{code}{verdict}: {order.reason}"


def _about(order: Order) -> str:
    culprit = order.device or order.place
    return f": {culprit}" if culprit else ""
