"""Limits of a node: at each it joins, and just beyond it does not."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outlast.errors import UsageError
from outlast.health.policy import (
    CHECK_OF_LIMIT,
    GIB,
    MIB,
    OLDEST_CLOCK,
    Address,
    Bandwidth,
    Check,
    Clock,
    Compute,
    Devices,
    Folder,
    Level,
    Measurement,
    Memory,
    NoAnswer,
    OpenFiles,
    Port,
    Preflight,
    Processes,
    SharedMemory,
    Torch,
    in_bytes,
    judge,
    unfit,
    with_limit,
)

NOW = OLDEST_CLOCK + 1e7
WELL: tuple[Measurement, ...] = (
    Folder("run folder", "/runs", GIB, 1000, False),
    Folder("run folder", "/btrfs", GIB, -1, False),
    Memory(8 * GIB // 2, -1, 8),
    Memory(8 * GIB // 2, 8 * GIB // 2, 8),
    SharedMemory("/dev/shm", GIB, GIB // 4),
    Port(29500),
    Address("node1", ("10.0.0.1",)),
    Clock(NOW, NOW + 60),
    Clock(NOW, 0.0, (), True),
    OpenFiles(1024),
    OpenFiles(math.inf),
    Processes(8 * 64, 8),
    Processes(math.inf, 8),
    Devices(8, 8),
    Devices(0, 2),
    Devices(8, 8, 8),
    Devices(0, 4, 0),
    Torch("2.9.1"),
    Compute("cpu", "", 0, 0, 16 * MIB),
    Compute("cuda:0", "H100", 90, 100, GIB),
    Bandwidth("node2", 1e8, 1e8),
)
BEYOND: tuple[tuple[Measurement, str], ...] = (
    (Folder("run folder", "/runs", GIB - 1, 1000, False), "run folder /runs"),
    (Folder("checkpoint folder", "/ckpt", GIB, 999, False), "room for 999 more files"),
    (Folder("run folder", "/runs", GIB, 1000, True), "a read-only file system"),
    (Folder("run folder", "/runs", GIB, 1000, False, "No space left on device"), "No space left"),
    (Memory(8 * GIB // 2 - 1, -1, 8), "for 8 rank(s)"),
    (Memory(8 * GIB // 2, 8 * GIB // 2 - 1, 8), "control group"),
    (Memory(-1, -1, 1), "not known"),
    (SharedMemory("/dev/shm", 64 * MIB, 64 * MIB), "64 MiB in size"),
    (SharedMemory("/dev/shm", GIB, GIB // 4 - 1), "free"),
    (SharedMemory("/dev/shm", GIB, GIB, "Read-only file system"), "Read-only"),
    (Port(29500, "another process has it"), "port 29500: another process has it"),
    (Address("nodeX", error="does not resolve"), "nodeX: does not resolve"),
    (Address("node2", ("10.0.0.1",), ("10.0.0.2",)), "leads elsewhere, to 10.0.0.2"),
    (Address("node2"), "no address"),
    (Clock(NOW, NOW + 61), "61 s behind the newest file"),
    (Clock(0.0), "days before torch 2.4"),
    (Clock(NOW, stopped=("CLOCK_BOOTTIME",)), "CLOCK_BOOTTIME stand still"),
    (OpenFiles(1023), "1023 a process"),
    (Processes(8 * 64 - 1, 8), "511 more may be started"),
    (Devices(7, 8), "7 GPU(s) for 8 rank(s)"),
    (Devices(7, 7, 8), "7 GPU(s) (8 (--gpus) expected)"),
    (Devices(8, 4, 4), "8 GPU(s)"),
    (Devices(0, 0, error="no NVIDIA GPU is visible"), "no NVIDIA GPU"),
    (Torch("", "the import died of SIGSEGV"), "SIGSEGV"),
    (
        Compute("cuda:3", "H100", 100, 100, GIB, ("a product in float32 is wrong",)),
        "cuda:3 (H100): a product",
    ),
    (Compute("cuda:3", "H100", 89, 100, GIB), "89% of"),
    (Bandwidth("node2", 0.9e8, 1e8), "90 MB/s to node2"),
    (Bandwidth("node2", 1e8, 0.9e8), "90 MB/s from node2"),
    (Bandwidth("node2", error="timed out"), "node2: timed out"),
    (NoAnswer(Check.DISK, "the run folder: no answer within 10.0 s"), "no answer within"),
)


@pytest.mark.parametrize("measured", WELL, ids=repr)
def test_a_node_at_its_limits_joins(measured: Measurement) -> None:
    assert unfit(judge([measured], Preflight())) == ""


@pytest.mark.parametrize(("measured", "reason"), BEYOND, ids=lambda value: str(value)[:60])
def test_a_node_beyond_a_limit_does_not_join(measured: Measurement, reason: str) -> None:
    assert reason in unfit(judge([measured], Preflight()))


def test_every_kind_of_measurement_is_judged_both_ways() -> None:
    kinds = set(Measurement.__args__)
    assert {type(one) for one in WELL} | {NoAnswer} == kinds
    assert {type(one) for one, _ in BEYOND} == kinds


def test_the_sentence_names_every_failure_and_nothing_else() -> None:
    measured = [OpenFiles(10), Torch("2.9.1"), Port(1, "another process has it")]
    assert unfit(judge(measured, Preflight())) == (
        "open-files: 10 a process (at least 1024 (ulimit -n) expected);"
        " ports: port 1: another process has it (a port that can be listened on expected)"
    )


@pytest.mark.parametrize(
    "measured", [Clock(NOW, synchronised=False), Address("vm", ("127.0.1.1",), (), True)]
)
def test_a_warning_excludes_nobody(measured: Measurement) -> None:
    findings = judge([measured], Preflight())
    assert [one.level for one in findings if not one.ok] == [Level.WARNING]
    assert unfit(findings) == ""


def test_findings_keep_the_order_and_the_seconds() -> None:
    findings = judge([SharedMemory("/dev/shm", 0, 0, seconds=0.5), Port(1, seconds=0.25)], Preflight())
    assert [(one.check, one.seconds) for one in findings] == [
        (Check.SHARED_MEMORY, 0.5),
        (Check.SHARED_MEMORY, 0.5),
        (Check.PORTS, 0.25),
    ]
    assert findings[-1].to_json()["check"] == "ports"


def test_every_limit_belongs_to_a_check() -> None:
    assert set(CHECK_OF_LIMIT) == {spec.name for spec in fields(Preflight)}


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("shm_size=512MiB", "shm_size", 512 * MIB),
        ("shm-size = 64 mib", "shm_size", 64 * MIB),
        ("disk_free=1.5GiB", "disk_free", 3 * GIB // 2),
        ("bandwidth=10G", "bandwidth", 1e10),
        ("open_files=65536", "open_files", 65536),
        ("device_free=0.5", "device_free", 0.5),
        ("clock_tolerance=0", "clock_tolerance", 0.0),
    ],
)
def test_a_limit_is_given_as_a_text(text: str, name: str, value: float) -> None:
    assert with_limit(Preflight(), text) == replace(Preflight(), **{name: value})


@pytest.mark.parametrize(
    "text",
    [
        *(
            "shm=1GiB",
            "shm_size",
            "shm_size=",
            "shm_size=-1",
            "shm_size=1 parsec",
            "device_free=2",
            "x=1",
            "=",
        ),
        *("", "bandwidth=nan", "bandwidth=inf", "disk_free=1e999"),
    ],
)
def test_a_limit_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        with_limit(Preflight(), text)


@given(st.integers(0, 1 << 62))
@example(int(999.7 * MIB))
def test_bytes_are_read_back_to_three_digits(count: int) -> None:
    number, unit = in_bytes(count).split()
    size = {"bytes": 1, "KiB": 1 << 10, "MiB": MIB, "GiB": GIB, "TiB": 1 << 40}[unit]
    assert math.isclose(float(number) * size, count, rel_tol=0.005)
    assert "e" not in number
