"""The collector as a process, with the unmodified nvidia-ml-py on top of a stand-in for libnvidia-ml."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from outlast.health.agent.telemetry import process
from outlast.health.policy.telemetry import DeviceSample, HostSample, Notice, Silence, XidEvent
from outlast.ipc.processes import is_alive
from tests.health.collectors import TIMEOUT, Node
from tests.support.launching import until
from tests.support.nvml_library import StandIn, installed

GIB = 1 << 30
FIELDS = {spec.name for spec in fields(DeviceSample)} - {"time", "node", "index", "call_seconds", "error"}
VALUES: dict[str, object] = {
    "temperature": 71,
    "temperature_margin": -2,
    "power": 512.5,
    "power_limit": 650,
    "sm_clock": 1410,
    "max_sm_clock": 1980,
    "throttle_reasons": 0x48,
    "utilization": 0.5,
    "memory_used": 3 * GIB,
    "memory_total": 80 * GIB,
    "ecc_corrected": 54_700_000_000,
    "ecc_uncorrected": 3,
    "remapped_rows_correctable": 1,
    "remapped_rows_uncorrectable": 2,
    "remap_pending": 1,
    "remap_failed": 0,
    "recovery_action": 4,
    "pcie_width": 8,
    "pcie_max_width": 16,
    "pcie_generation": 4,
    "pcie_replays": 11,
    "nvlink_errors": 1 << 40,
}


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return installed(StandIn(tmp_path), monkeypatch)


@pytest.fixture
def node(tmp_path: Path, driver: StandIn) -> Iterator[Node]:
    one = Node(tmp_path)
    yield one
    one.collector.close()


class TestReading:
    def test_every_field_is_read(self, node: Node, driver: StandIn) -> None:
        driver.put(1, **VALUES)
        found = node.fresh(1)
        assert {name: getattr(found, name) for name in VALUES} == VALUES
        assert (found.uuid, found.model) == ("GPU-stand-in-1", "NVIDIA stand-in")
        assert VALUES.keys() | {"uuid", "model"} == FIELDS
        assert isinstance(found.remap_pending, bool)

    def test_a_field_that_is_not_supported_is_none_and_the_others_are_read(
        self, node: Node, driver: StandIn
    ) -> None:
        rows = {name for name in VALUES if name.startswith("remap")}
        memory = {"memory_used", "memory_total"}
        together: dict[str, set[str]] = {**dict.fromkeys(rows, rows), **dict.fromkeys(memory, memory)}
        together["temperature_margin"] = set()  # from the temperature at which the clocks are lowered
        for index, name in enumerate(VALUES):
            driver.put(index, **{**VALUES, name: "na"})
        driver.put(-1, count=len(VALUES))
        for index, name in enumerate(VALUES):
            found = node.device(index) if index > 1 else node.fresh(index)
            lost = {spec for spec in VALUES if getattr(found, spec) is None}
            assert lost == together.get(name, {name})

    def test_an_old_driver_lacks_functions_and_says_what_it_can(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        old = installed(StandIn(tmp_path, old_driver=True), monkeypatch)
        old.put(0, temperature=80, slowdown=85, throttle_reasons=8)
        one = Node(tmp_path)
        try:
            found = one.device(0)
        finally:
            one.collector.close()
        assert (found.temperature_margin, found.throttle_reasons) == (5, 8)
        assert (found.recovery_action, found.nvlink_errors) == (None, None)
        assert found.power == 300

    def test_counters_that_wrap_or_go_back_are_reported_as_they_are(
        self, node: Node, driver: StandIn
    ) -> None:
        driver.put(0, pcie_replays=2**32 - 1, ecc_corrected=2**53)
        first = node.fresh(0)
        driver.put(0, pcie_replays=3, ecc_corrected=0)
        second = node.fresh(0)
        assert (first.pcie_replays, first.ecc_corrected) == (2**32 - 1, 2**53)
        assert (second.pcie_replays, second.ecc_corrected) == (3, 0)

    def test_the_host_is_read_beside(self, node: Node, tmp_path: Path) -> None:
        found = node.wait(lambda one: isinstance(one, HostSample) and one.cpu_steal is not None, "the host")
        assert isinstance(found, HostSample)
        assert found.error == ""
        assert found.memory_total is not None
        assert found.disk_total == os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize


class TestWithoutNvml:
    def test_no_library_is_a_notice_and_the_host_is_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
        one = Node(tmp_path)
        try:
            said = one.wait(lambda one: isinstance(one, Notice), "a notice")
            one.wait(lambda one: isinstance(one, HostSample), "the host")
        finally:
            one.collector.close()
        if not any(isinstance(sample, DeviceSample) for sample in one.said):  # else this host has a GPU
            assert isinstance(said, Notice)

    def test_a_driver_that_is_not_loaded_is_said_once(self, tmp_path: Path, driver: StandIn) -> None:
        driver.put(-1, no_driver=1)
        one = Node(tmp_path)
        try:
            one.wait(lambda one: isinstance(one, Notice), "a notice")
            for _ in range(3):
                one.wait(lambda one: isinstance(one, HostSample), "the host")
            driver.put(-1, no_driver=None)
            one.device(0)
        finally:
            one.collector.close()
        (notice,) = (sample.text for sample in one.said if isinstance(sample, Notice))
        assert "Driver Not Loaded" in notice


class TestTrouble:
    def test_a_lost_gpu_is_an_error_of_its_own(self, node: Node, driver: StandIn) -> None:
        node.device(1)
        driver.put(1, lost=1)
        lost = node.device(1, error=True)
        assert lost.error
        assert (lost.uuid, lost.temperature) == ("GPU-stand-in-1", None)
        assert node.fresh(0).error == ""
        driver.put(1, lost=None)
        assert node.device(1).temperature == 45

    def test_a_gpu_that_vanishes_between_two_calls(self, tmp_path: Path, driver: StandIn) -> None:
        driver.put(0, lost_after=12)  # before the first call
        one = Node(tmp_path)
        try:
            lost = one.device(0, error=True)
        finally:
            one.collector.close()
        assert lost.error

    def test_fewer_devices_than_before(self, node: Node, driver: StandIn) -> None:
        node.device(1)
        driver.put(-1, count=1)
        node.wait(
            lambda one: isinstance(one, DeviceSample) and one.index == 1 and bool(one.error),
            "the missing device",
        )

    def test_a_device_that_is_gone_after_a_restart_is_reported_by_its_uuid(
        self, node: Node, driver: StandIn
    ) -> None:
        driver.put(-1, count=3)
        node.wait(lambda one: isinstance(one, DeviceSample) and one.index == 2, "three devices")
        driver.put(-1, count=2)
        driver.put(1, uuid="GPU-stand-in-2")  # those behind the lost one move up
        os.kill(node.collector.pid, signal.SIGKILL)
        node.wait(lambda one: isinstance(one, Notice), "the restart")
        lost = node.device(1, error=True)
        assert lost.uuid == "GPU-stand-in-1"

    def test_a_driver_that_fails_after_a_restart_is_an_error_of_every_device(
        self, node: Node, driver: StandIn
    ) -> None:
        node.device(1)
        driver.put(-1, no_driver=1)
        os.kill(node.collector.pid, signal.SIGKILL)
        node.wait(lambda one: isinstance(one, Notice), "the restart")
        assert node.device(0, error=True).uuid == "GPU-stand-in-0"
        assert "Driver Not Loaded" in node.device(1, error=True).error


class TestSilence:
    def test_a_hung_call_is_named_and_blocks_nothing_else(self, node: Node, driver: StandIn) -> None:
        node.device(1)
        first = node.collector.pid
        driver.put(1, hang=1)
        found = node.silence()
        assert "device 1" in found.what
        assert found.seconds >= TIMEOUT
        after = time.time()
        node.wait(lambda one: isinstance(one, HostSample) and one.time > after, "the host")
        until(lambda: node.look() is None or not is_alive(first), "the end of the collector")
        node.silence()  # of the next one, whose reading hangs as well
        driver.put(1, hang=None)
        node.device(1)

    def test_a_driver_that_hangs_from_the_start_has_longer(self, tmp_path: Path, driver: StandIn) -> None:
        driver.put(-1, hang=1)
        one = Node(tmp_path)
        try:
            found = one.silence()
        finally:
            one.collector.close()
        assert found.seconds >= 6 * TIMEOUT

    def test_a_stopped_collector_is_replaced_and_is_no_silence(
        self, node: Node, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(process, "_QUIET", 5.0)
        node.device(0)
        os.kill(node.collector.pid, signal.SIGSTOP)
        node.wait(lambda one: isinstance(one, Notice), "the stopped collector")
        node.device(0)
        assert not any(isinstance(sample, Silence) for sample in node.said)

    def test_a_pause_of_the_agent_is_no_silence(self, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(process, "_QUIET", 6.0)
        node.device(0)
        paused = time.monotonic() + 7.0
        until(lambda: time.monotonic() > paused, "a pause of the test itself")
        node.device(0)
        assert not any(isinstance(sample, (Silence, Notice)) for sample in node.said)


class TestXids:
    LINE = "[ 1.5] NVRM: Xid (PCI:0000:11:00): 79, pid=7, name=python, GPU has fallen off the bus."

    def reads(self, node: Node) -> None:
        """Wait until the collector has its place in the log: lines before that are not new."""
        node.device(1)
        until(lambda: node.look() is None or node.collector._settings.position >= 0, "its place in the log")

    def test_an_xid_is_told_with_the_index_of_its_device(self, node: Node) -> None:
        self.reads(node)
        node.log("usb 1-1: new device")
        node.log(self.LINE)
        found = node.wait(lambda one: isinstance(one, XidEvent), "an XID")
        assert isinstance(found, XidEvent)
        assert (found.xid, found.index, found.pci) == (79, 1, "0000:11:00")
        assert found.text.endswith("fallen off the bus.")

    def test_a_restart_neither_loses_nor_repeats_one(self, node: Node) -> None:
        self.reads(node)
        node.log(self.LINE)
        node.wait(lambda one: isinstance(one, XidEvent), "an XID")
        for _ in range(2):  # the second one names a place behind the line
            node.wait(lambda one: isinstance(one, HostSample), "the host")
        until(lambda: node.look() is None or node.collector._settings.position > 0, "its place in the log")
        os.kill(node.collector.pid, signal.SIGKILL)
        node.log(self.LINE.replace("79", "48"))
        found = node.wait(lambda one: isinstance(one, XidEvent), "the other XID")
        assert isinstance(found, XidEvent)
        assert found.xid == 48


class TestQuestions:
    @pytest.fixture(params=[False, True], ids=["driver", "old driver"])
    def driver(
        self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> StandIn:
        return installed(StandIn(tmp_path, old_driver=request.param), monkeypatch)

    @pytest.fixture
    def node(self, driver: StandIn, tmp_path: Path) -> Iterator[Node]:
        one = Node(tmp_path)
        assert not one.collector.ask(1), "there is no collector yet"
        one.device(0)
        yield one
        one.collector.close()

    def test_it_answers_the_newest_question(self, node: Node, driver: StandIn) -> None:
        assert node.collector.has_read_devices
        for device, pid in ((0, os.getpid()), (1, os.getppid()), (1, 1)):
            driver.computes(device, pid)
        for number in (4, 5):
            assert node.collector.ask(number)
        found = None
        while found is None or found.number < 5:
            found = until(lambda: (node.look() and None) or node.collector.answer(), "an answer")
        assert found.pids == tuple(sorted({1, os.getpid(), os.getppid()}))
        assert found.problem == ""
        assert node.collector.answer() is None

    def test_a_lost_device_is_named_and_the_others_are_listed(self, node: Node, driver: StandIn) -> None:
        driver.computes(0, os.getpid())
        driver.put(1, lost=1)
        assert node.collector.ask(1)
        found = until(lambda: (node.look() and None) or node.collector.answer(), "an answer")
        assert found.pids == (os.getpid(),)
        assert "device 1" in found.problem

    def test_a_question_that_hangs_is_a_silence_of_the_driver(self, node: Node, driver: StandIn) -> None:
        driver.put(1, hang=1)
        assert node.collector.ask(1)
        until(
            lambda: [one for one in node.look() if "device 1" in getattr(one, "what", "")],
            "the silence",
        )
        assert node.collector.answer() is None


def test_a_collector_ends_with_its_agent(tmp_path: Path, driver: StandIn) -> None:
    reader, writer = os.pipe()
    agent = os.fork()
    if agent == 0:
        one = Node(tmp_path)
        one.device(0)
        os.write(writer, f"{one.collector.pid}\n".encode())
        signal.pause()
    try:
        os.close(writer)
        pid = int(os.read(reader, 32))
        assert is_alive(pid)
    finally:
        os.close(reader)
        os.kill(agent, signal.SIGKILL)
        os.waitpid(agent, 0)
    until(lambda: not is_alive(pid), "the end of the collector")


def test_the_collector_imports_nothing_heavy() -> None:
    code = (
        "import sys, outlast.health.agent.telemetry.collector;"
        "print([m for m in ('torch', 'numpy', 'rich', 'pynvml') if m in sys.modules])"
    )
    import subprocess

    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
