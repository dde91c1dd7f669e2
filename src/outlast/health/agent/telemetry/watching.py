"""Telemetry of a job's node: which source, what is recorded, what is said."""

from __future__ import annotations

import math
import selectors
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from outlast.errors import NodeUnfit, UsageError
from outlast.health.agent.telemetry import nvml, recorded
from outlast.health.agent.telemetry.collector import CollectorSettings
from outlast.health.agent.telemetry.process import CollectorProcess
from outlast.health.agent.telemetry.recording import Recording
from outlast.health.policy.device_memory import Ask, MemoryWait, Order
from outlast.health.policy.options import REPLAY, HealthOptions
from outlast.health.policy.telemetry import Notice, Sample
from outlast.ipc.processes import tree_of


class Telemetry:
    """The samples of this node; nothing is started where ``telemetry`` says so.

    Args:
        options: the table ``[health]``.
        node: name of the node.
        folder: on the disk to watch.
        library_path: LD_LIBRARY_PATH of the agent, which its collector inherits.
        record: takes the samples that belong into the event log.
        note: takes what a person should read.

    Raises:
        NodeUnfit: NVML is asked for and not installed.
        UsageError: the file of a replay cannot be used.
    """

    def __init__(
        self,
        options: HealthOptions,
        node: str,
        folder: Path,
        library_path: str,
        record: Callable[[Sample], None],
        note: Callable[[str], None],
    ) -> None:
        self._record = record
        self._note = note
        self._recording = Recording(options.record_interval)
        self._memory = MemoryWait(options.call_timeout)
        self._collector: CollectorProcess | None = None
        source = chosen(options.telemetry, library_path)
        if source:
            self._collector = CollectorProcess(
                CollectorSettings(
                    *(node, source, options.telemetry_interval, options.call_timeout),
                    kernel_log=options.kernel_log,
                    folder=str(folder),
                )
            )

    @property
    def pid(self) -> int:
        """The collector's process, 0 when there is none."""
        return 0 if self._collector is None else self._collector.pid

    @property
    def active(self) -> bool:
        """Whether there is a source; its collector may be about to start again."""
        return self._collector is not None

    def listen(self, selector: selectors.BaseSelector) -> None:
        """Have the selector wake when samples wait."""
        if self._collector is not None:
            selector.register(self._collector, selectors.EVENT_READ, self)

    def ignore(self, selector: selectors.BaseSelector) -> None:
        """Have the selector wake no more; nobody reads the samples from here on."""
        if self._collector is not None:
            selector.unregister(self._collector)

    def deadline(self) -> float:
        """Return the monotonic time of the next call at the latest."""
        return (
            math.inf if self._collector is None else min(self._collector.deadline(), self._memory.deadline())
        )

    def workers_end(self, pids: Collection[int], start_timeout: float) -> frozenset[int]:
        """Ask whether workers that end now hold memory of a device, or their children; return all of these.

        The next ones wait for half of ``start_timeout`` seconds at most, see :class:`MemoryWait`. Where no
        device was read, nothing is asked, and none is returned.
        """
        if self._collector is None or not self._collector.has_read_devices:
            return frozenset()
        trees = frozenset(one for pid in pids for one in tree_of(pid))
        self._carry_out(self._memory.begin(trees, time.monotonic(), start_timeout))
        return trees

    def memory_is_free(self) -> bool:
        """Whether the next workers may start; a later :meth:`tick` finds out."""
        return self._memory.over

    def _carry_out(self, orders: Iterable[Order]) -> None:
        for order in orders:
            if not isinstance(order, Ask):
                self._note(order.text)
            elif self._collector is None or not self._collector.ask(order.number):
                self._carry_out(self._memory.no_collector())

    def tick(self, now: float) -> list[Sample]:
        """Return what has arrived until ``now`` (monotonic), for a decider; record and say what is due."""
        if self._collector is None:
            return []
        found = self._collector.read(now)
        if (listing := self._collector.answer()) is not None:
            self._carry_out(self._memory.handle(listing, now))
        self._carry_out(self._memory.tick(now))
        for sample in found:
            if self._recording.admits(sample, now):
                if isinstance(sample, Notice):
                    self._note(f"telemetry: {sample.text}")
                else:
                    self._record(sample)
        return found

    def close(self) -> None:
        """End the collector."""
        if self._collector is not None:
            if self._recording.dropped:
                self._note(
                    f"telemetry: {self._recording.dropped} samples were not recorded: too many at once"
                )
            self._collector.close()


def chosen(telemetry: str, library_path: str) -> str:
    """Return the source of the collector for an option; empty: none is started.

    Raises:
        NodeUnfit: NVML is asked for and not installed.
        UsageError: the file of a replay cannot be used.
    """
    if telemetry == "off":
        return ""
    if telemetry == "auto":
        return "" if nvml.missing(library_path) else "nvml"
    if telemetry == "nvml" and (why := nvml.missing(library_path)):
        raise NodeUnfit(f'health.telemetry = "nvml": {why}; nothing was started')
    if telemetry.startswith(REPLAY):
        path = Path(telemetry.removeprefix(REPLAY)).absolute()
        if next(recorded.read(path), None) is None:
            raise UsageError(
                f'health.telemetry = "{telemetry}": there is no sample in it; nothing was started'
            )
        return f"{REPLAY}{path}"
    return telemetry
