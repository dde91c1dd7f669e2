"""XIDs in a kernel log: lines of several drivers, logs that grow, are cut, replaced or not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from outlast.health.agent.telemetry.kernel_log import KMSG, KernelLog, catalogue
from outlast.health.policy.telemetry import Notice, XidEvent

LOST = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus."


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "kernel.log"
    path.write_text(f"[0.1] {LOST} (before the start)\n")
    return path


def append(path: Path, *lines: str) -> None:
    with path.open("a") as file:
        file.write("".join(line + "\n" for line in lines))


def xids(reader: KernelLog) -> list[tuple[int, int, str]]:
    found = [one for one in reader.sample(5.0) if isinstance(one, XidEvent)]
    assert all((one.time, one.node) == (5.0, "n") for one in found)
    return [(one.xid, one.index, one.pci) for one in found]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (LOST, (79, 3, "0000:3b:00")),
        (f"<3>[ 1234.5678] {LOST}", (79, 3, "0000:3b:00")),
        ("kernel: NVRM: Xid (PCI:0000:3B:00.0): 48, pid='<unknown>', DBE", (48, 3, "0000:3b:00")),
        ("NVRM: Xid (0000:3b:00): 31, Ch 00000010", (31, 3, "0000:3b:00")),
        ("NVRM: Xid (PCI:0001:af:00): 154, GPU recovery action changed", (154, -1, "0001:af:00")),
        ("NVRM: Xid (PCI:0000:3b:00): 13", (13, 3, "0000:3b:00")),
    ],
)
def test_lines_of_the_driver_are_understood(log: Path, line: str, expected: tuple[int, int, str]) -> None:
    reader = KernelLog(str(log), "n", {"0000:3b:00": 3})
    assert xids(reader) == []
    append(log, "eth0: link up", line)
    assert xids(reader) == [expected]
    assert xids(reader) == []


@pytest.mark.parametrize(
    "line",
    ["NVRM: loading NVIDIA UNIX", "NVRM: Xid (PCI:0000:3b:00): x79", f"Xid 79 {'9' * 5000}", "\x00\xff", ""],
)
def test_other_lines_are_passed_over(log: Path, line: str) -> None:
    reader = KernelLog(str(log), "n", {})
    assert xids(reader) == []
    append(log, line)
    assert xids(reader) == []


def test_half_a_line_waits_for_the_rest(log: Path) -> None:
    reader = KernelLog(str(log), "n", {})
    assert xids(reader) == []
    with log.open("a") as file:
        file.write(LOST[:20])
        file.flush()
        assert xids(reader) == []
        file.write(LOST[20:] + "\n")
    assert len(xids(reader)) == 1


def test_a_log_that_is_cut_or_replaced_is_read_from_its_start(log: Path) -> None:
    reader = KernelLog(str(log), "n", {})
    assert xids(reader) == []
    log.write_text(f"{LOST}\n")
    assert len(xids(reader)) == 1
    other = log.with_suffix(".new")
    other.write_text("".join(f"line {at}\n" for at in range(100)) + LOST + "\n")
    os.replace(other, log)
    assert len(xids(reader)) == 1


def test_a_log_that_is_not_there_is_said_once_and_read_when_it_appears(tmp_path: Path) -> None:
    path = tmp_path / "kernel.log"
    reader = KernelLog(str(path), "n", {})
    first = reader.sample(1.0)
    assert [type(one) for one in first] == [Notice]
    assert reader.sample(2.0) == []
    path.write_text(LOST + "\n")
    assert len(xids(reader)) == 1


def test_another_reader_goes_on_where_one_ended(log: Path) -> None:
    first = KernelLog(str(log), "n", {})
    assert xids(first) == []
    append(log, LOST.replace("79", "48"))
    second = KernelLog(str(log), "n", {}, first.position)
    assert [xid for xid, _, _ in xids(second)] == [48]
    assert xids(KernelLog(str(log), "n", {}, second.position)) == []
    assert [xid for xid, _, _ in xids(KernelLog(str(log), "n", {}, -2))] == [79, 48]


@pytest.mark.skipif(not os.access(KMSG, os.R_OK), reason="/dev/kmsg cannot be read")
def test_the_kernels_own_log_is_read_without_waiting() -> None:
    reader = KernelLog(KMSG, "n", {})
    assert all(isinstance(one, (XidEvent, Notice)) for one in reader.sample(1.0))
    assert reader.position >= -1


def test_the_catalogue_has_every_code_once() -> None:
    entries = catalogue()
    assert len(entries) == 172
    assert entries[79]["immediate"] == "RESTART_BM"
    assert all(entry["mnemonic"] for entry in entries.values())
