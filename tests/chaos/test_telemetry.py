"""``outlast chaos telemetry``: a replay file that reads back, a stand-in driver that shows the scenario."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outlast.chaos import commands, telemetry
from outlast.errors import UsageError
from outlast.health.agent.telemetry.recorded import read
from outlast.health.policy.simulation import Kind
from outlast.health.policy.telemetry import DeviceSample, HostSample, Sample, Silence, XidEvent
from tests.health.collectors import Node
from tests.support.mounts import mounted, needs_root
from tests.support.nvml_library import StandIn, installed


def made(tmp_path: Path, *words: str, name: str = "replay.jsonl") -> list[Sample]:
    path = tmp_path / name
    assert commands.main(["telemetry", *words, "--replay-file", str(path)]) == 0
    return list(read(path))


class TestReplayFile:
    @pytest.mark.parametrize("name", ["replay.jsonl", "replay.csv"])
    @pytest.mark.parametrize(
        "kind", [*(kind.value for kind in Kind), "intense-load,xid", "intense-load,ecc-burst"]
    )
    def test_every_scenario_can_be_written_and_read(self, tmp_path: Path, kind: str, name: str) -> None:
        words = (f"{kind},devices=2,after=50", "--seconds", "100", "--interval", "10")
        found = made(tmp_path, *words, name=name)
        assert ((tmp_path / name).read_text()[0] == "{") == name.endswith("l")
        times = [one.time for one in found]
        assert times == sorted(times)
        assert times[-1] - times[0] == pytest.approx(100)
        if kind != "silence":
            assert sum(isinstance(one, HostSample) for one in found) == 11
        assert sum(isinstance(one, XidEvent) for one in found) == kind.endswith("xid")
        assert {type(one) for one in found} == {type(one) for one in made(tmp_path, *words)}

    def test_a_silence_grows(self, tmp_path: Path) -> None:
        found = made(tmp_path, "silence,device=3,after=15", "--seconds", "40")
        silences = [one for one in found if isinstance(one, Silence)]
        assert [one.seconds for one in silences] == [5, 15, 25]
        assert silences[0].what.startswith("NVML: device 3, ")

    def test_a_file_can_be_shortened(self, tmp_path: Path) -> None:
        long = made(tmp_path, "xid,devices=2,after=50", "--seconds", "100")
        (tmp_path / "replay.jsonl").rename(tmp_path / "long.jsonl")
        short = made(tmp_path, "--from", str(tmp_path / "long.jsonl"), "--seconds", "60")
        assert short == [one for one in long if one.time - long[0].time <= 60]
        assert sum(isinstance(one, XidEvent) for one in short) == 1


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["fire", "--replay-file", "x"], "fire"),
        (["--replay-file", "x"], "SCENARIO.*--from"),
        (["xid", "--from", "y", "--replay-file", "x"], "SCENARIO.*--from"),
        (["xid"], "--replay-file.*--state-file"),
        (["xid", "--replay-file", "x", "--kernel-log", "y"], "--kernel-log.*--state-file"),
        (["xid", "--replay-file", "x", "--seconds", "-1"], "--seconds -1.0.*86400"),
        (["xid", "--replay-file", "x", "--seconds", "1e18"], r"--seconds 1e\+18.*86400"),
        (["xid", "--replay-file", "x", "--interval", "1e-9"], "--interval 1e-09.*0.01.*86400"),
        (["xid", "--replay-file", "x", "--interval", "nan"], "--interval nan.*0.01.*86400"),
        (["xid", "--replay-file", "fifo"], "fifo"),
        (["xid", "--replay-file", "/dev/full"], "/dev/full"),
        (["xid", "--state-file", "x", "--kernel-log", "fifo"], "fifo"),
        (["xid,xid=-1", "--replay-file", "x"], "xid=-1.*1.*999"),
        (["xid", "--replay-file", "/nowhere/x"], "/nowhere/x"),
        (["--from", "/nowhere/x", "--replay-file", "y"], "/nowhere/x"),
    ],
)
def test_what_cannot_be_carried_out_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    with pytest.raises(UsageError, match=named):
        commands.main(["telemetry", *words])


@needs_root
@pytest.mark.parametrize("option", ["--replay-file", "--state-file"])
def test_a_full_disk_is_an_error_with_the_file(tmp_path: Path, option: str) -> None:
    full = mounted(tmp_path, "-t", "tmpfs", "-o", "size=4k", "tmpfs")
    with full, pytest.raises(UsageError, match=f"^{tmp_path}/x.*: No space left on device"):
        commands.main(["telemetry", "healthy,devices=64", option, str(tmp_path / "x")])


def test_lines_of_the_state_file() -> None:
    shown: dict[int, list[str]] = {}
    telemetry.update(shown, [DeviceSample(0.0, "n", 1, "GPU a", temperature=70.0, remap_pending=True)])
    assert shown[-1] == ["-1 count 2"]
    assert {"1 uuid GPU-a", "1 temperature 70.0", "1 remap_pending 1", "1 power na"} <= set(shown[1])
    telemetry.update(shown, [Silence(0.0, "n", 9.0, "NVML: device 1, power")])
    assert "1 hang 1" in shown[1]
    telemetry.update(shown, [DeviceSample(0.0, "n", 1, error="lost"), Silence(0.0, "n", 9.0, "disk: /x")])
    assert shown == {1: ["1 lost 1"], -1: ["-1 count 2"]}
    telemetry.update(shown, [Silence(0.0, "n", 9.0, "NVML: initialisation")])
    assert "-1 hang 1" in shown[-1]


class TestStandIn:
    @pytest.fixture
    def node(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Node, StandIn]]:
        driver = installed(StandIn(tmp_path), monkeypatch)
        driver.put(-1, count=2)
        one = Node(tmp_path)
        yield one, driver
        one.collector.close()

    @contextlib.contextmanager
    def driven(self, node: tuple[Node, StandIn], scenario: str) -> Iterator[Node]:
        one, driver = node
        files = ["--state-file", str(driver.path), "--kernel-log", str(one.kernel_log)]
        command = [sys.executable, "-m", "outlast", "chaos", "telemetry", scenario, *files]
        one.device(1)
        process = subprocess.Popen([*command, "--interval", "0.2", "--seconds", "120"])
        try:
            yield one
        finally:
            process.kill()
            process.wait()

    def test_an_xid_and_a_lost_device_reach_the_collector(self, node: tuple[Node, StandIn]) -> None:
        with self.driven(node, "xid,device=1,devices=2,after=1") as one:
            event = one.wait(lambda found: isinstance(found, XidEvent), "the XID")
            assert isinstance(event, XidEvent)
            assert (event.xid, event.index) == (79, 1)
            assert one.device(1, error=True).error
            assert one.fresh(0).error == ""

    def test_a_hung_driver_reaches_the_collector(self, node: tuple[Node, StandIn]) -> None:
        with self.driven(node, "silence,device=1,devices=2,after=1") as one:
            assert one.silence().what.startswith("NVML: device 1, ")
