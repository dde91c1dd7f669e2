"""Limits of a node: at each it joins, and just beyond it does not."""

from __future__ import annotations

import math
import re
from dataclasses import fields, replace
from datetime import datetime, timezone
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outlast.errors import UsageError
from outlast.health.policy.preflight import (
    CHECK_OF_LIMIT,
    GIB,
    MIB,
    OLDEST_CLOCK,
    Check,
    Findings,
    Level,
    Preflight,
    address,
    bandwidth,
    clock,
    compute,
    devices,
    disk,
    in_bytes,
    memory,
    no_answer,
    open_files,
    port,
    processes,
    shared_memory,
    torch,
    unfit,
    with_limit,
)

NOW = OLDEST_CLOCK + 1e7
DAY_OF_TORCH = datetime(2024, 7, 24, tzinfo=timezone.utc).timestamp()  # 2.4
LIMITS = Preflight()
WELL: tuple[Findings, ...] = (
    disk("run folder /runs", GIB, 1000, LIMITS),
    disk("run folder /btrfs", GIB, -1, LIMITS),
    memory(8 * GIB // 2, -1, 8, LIMITS),
    memory(0, -1, 1, replace(LIMITS, memory_per_rank=0)),
    memory(8 * GIB // 2, 8 * GIB // 2, 8, LIMITS),
    shared_memory("/dev/shm", GIB, GIB // 4, LIMITS),
    port(29500),
    address("node1", ("10.0.0.1",)),
    clock(NOW, LIMITS, NOW + 60),
    clock(DAY_OF_TORCH, LIMITS),
    clock(NOW, LIMITS, synchronised=True),
    open_files(1024, LIMITS),
    open_files(math.inf, LIMITS),
    processes(8 * 64, 8, LIMITS),
    processes(math.inf, 8, LIMITS),
    devices(8, 8),
    devices(0, 2),
    devices(8, 8, 8),
    devices(0, 4, 0),
    torch("2.9.1", 2.0),
    compute("cpu", (0, 0, 16 * MIB), (), LIMITS),
    compute("cuda:0 (H100)", (90, 100, GIB), (), LIMITS),
    bandwidth("node2", 1e8, 1e8, LIMITS),
)
BEYOND: tuple[tuple[Findings, str], ...] = (
    (disk("run folder /runs", GIB - 1, 1000, LIMITS), "/runs"),
    (disk("checkpoint folder /ckpt", GIB, 999, LIMITS), "/ckpt.*999.*1000"),
    (disk("run folder /runs", GIB, 1000, LIMITS, "No space left on device"), "No space left"),
    (memory(8 * GIB // 2 - 1, -1, 8, LIMITS), "4 GiB"),
    (memory(8 * GIB // 2, 8 * GIB // 2 - 1, 8, LIMITS), "4 GiB"),
    (disk("run folder /runs", GIB, 0, LIMITS), " 0 .*1000"),
    (memory(0, -1, 1, LIMITS), "0 bytes.*512 MiB"),
    (memory(GIB, 0, 2, LIMITS), "0 bytes.*1 GiB"),
    (memory(-1, -1, 1, LIMITS), "meminfo"),
    (memory(-1, -1, 1, replace(LIMITS, memory_per_rank=0)), "meminfo"),
    (shared_memory("/dev/shm", 64 * MIB, 64 * MIB, LIMITS), "/dev/shm.*64 MiB.*1 GiB"),
    (shared_memory("/dev/shm", GIB, GIB // 4 - 1, LIMITS), "/dev/shm.*256 MiB"),
    (shared_memory("/dev/shm", GIB, GIB, LIMITS, "Read-only file system"), "/dev/shm.*Read-only"),
    (port(29500, "in use by another process"), "29500.*in use by another process"),
    (address("nodeX", (), error="does not resolve"), "nodeX.*does not resolve"),
    (address("node2", ("10.0.0.1",), ("10.0.0.2",)), "node2.*10.0.0.2"),
    (address("node2", ()), "node2"),
    (clock(NOW, LIMITS, NOW + 61), "61 s.*60 s"),
    (clock(0.0, LIMITS), "torch 2.4"),
    (clock(DAY_OF_TORCH - 1, LIMITS), "torch 2.4"),
    (clock(NOW, LIMITS, stopped=("CLOCK_BOOTTIME",)), "CLOCK_BOOTTIME"),
    (open_files(1023, LIMITS), "1023.*1024"),
    (processes(8 * 64 - 1, 8, LIMITS), "511.*512"),
    (devices(7, 8), "7.*8"),
    (devices(1, 2), "1.*2"),
    (devices(7, 7, 8), "7.*8.*--gpus"),
    (devices(8, 4, 4), "8.*4.*--gpus"),
    (devices(1, 1, 0), "1.*0.*--gpus"),
    (devices(0, 0, error="no NVIDIA GPU is visible"), "no NVIDIA GPU"),
    (torch("", 1.0, "the import died of SIGSEGV"), "SIGSEGV"),
    (compute("cuda:3 (H100)", (100, 100, GIB), ("float32 is wrong",), LIMITS), "cuda:3 .*float32 is wrong"),
    (compute("cuda:3 (H100)", (89, 100, GIB), (), LIMITS), "cuda:3.*89%.*90%"),
    (bandwidth("node2", 0.9e8, 1e8, LIMITS), "90 MB/s.*node2.*100 MB/s"),
    (bandwidth("node2", 1e8, 0.9e8, LIMITS), "90 MB/s.*node2.*100 MB/s"),
    (bandwidth("node2", 0, 0, LIMITS, "timed out"), "node2.*timed out"),
    (no_answer(Check.DISK, "the run folder: late"), "the run folder: late"),
)


@pytest.mark.parametrize("findings", WELL, ids=range(len(WELL)))
def test_a_node_at_its_limits_joins(findings: Findings) -> None:
    assert unfit(findings) == ""


@pytest.mark.parametrize(("findings", "reason"), BEYOND, ids=[reason for _, reason in BEYOND])
def test_a_node_beyond_a_limit_does_not_join(findings: Findings, reason: str) -> None:
    assert re.search(reason, unfit(findings))


def test_every_check_passes_and_fails_and_every_limit_belongs_to_one() -> None:
    assert set(CHECK_OF_LIMIT) == {spec.name for spec in fields(Preflight)}
    assert {one[0].check for one in WELL} == set(Check)
    assert {one[0].check for one, _ in BEYOND} == set(Check)


@pytest.mark.parametrize(
    "findings",
    [clock(NOW, LIMITS, synchronised=False), address("vm", ("127.0.1.1",), (), True)],
    ids=lambda one: one[-1].check.value,
)
def test_a_warning_excludes_nobody(findings: Findings) -> None:
    assert [one.level for one in findings if not one.ok] == [Level.WARNING]
    assert unfit(findings) == ""


def test_a_finding_tells_how_long_it_took() -> None:
    assert [one.seconds for one in (*torch("2.9", 1.5), *no_answer(Check.DISK, "late", 10.0))] == [1.5, 10.0]
    assert (no_answer(Check.DISK, "late")[0].seconds, port(1)[0].seconds) == (0.0, 0.0)


def test_a_failed_check_is_an_error_unless_it_is_a_warning() -> None:
    unreachable = address("n", ("127.0.0.1",), loopback=True)[0]
    unknown = address("n", (), loopback=True)[0]
    assert (unreachable.ok, unreachable.level, unreachable.excludes) == (False, Level.WARNING, False)
    assert (unknown.ok, unknown.level, unknown.excludes) == (False, Level.ERROR, True)
    assert not port(1)[0].excludes


def with_value(name: str, value: float) -> Preflight:
    changed: dict[str, Any] = {name: value}
    return replace(LIMITS, **changed)


def test_a_finding_is_a_json_object() -> None:
    found = port(1)[0].to_json()
    assert (found["check"], found["ok"], found["level"]) == ("ports", True, "error")


@pytest.mark.parametrize("name", sorted(CHECK_OF_LIMIT))
@pytest.mark.parametrize("value", [-1, math.inf, math.nan])
def test_a_limit_is_a_number_of_at_least_0(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"{name}.*{value}"):
        with_value(name, value)
    assert getattr(with_value(name, 0), name) == 0


@pytest.mark.parametrize(
    ("unit", "size"),
    [
        *(("", 1), ("k", 1000), ("M", 10**6), ("G", 10**9), ("KiB", 1 << 10), ("mib", MIB), ("GiB", GIB)),
        *(("TIB", 1 << 40), (" kib ", 1 << 10), ("e3", 1000), ("e1k", 10**4)),
    ],
)
def test_each_unit_of_a_size(unit: str, size: int) -> None:
    assert with_limit(LIMITS, f"shm_size=3{unit}").shm_size == 3 * size


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("shm_size=512MiB", "shm_size", 512 * MIB),
        ("shm-size = 64 mib", "shm_size", 64 * MIB),
        ("disk_free=1.5GiB", "disk_free", 3 * GIB // 2),
        ("bandwidth=10G", "bandwidth", 1e10),
        ("open_files=65536", "open_files", 65536),
        ("open_files=1e3", "open_files", 1000),
        ("device_free=1", "device_free", 1.0),
        ("device_free=0.5", "device_free", 0.5),
        ("clock_tolerance=0", "clock_tolerance", 0.0),
    ],
)
def test_a_limit_is_given_as_a_text(text: str, name: str, value: float) -> None:
    assert with_limit(Preflight(), text) == with_value(name, value)


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
            "device_free=1.01",
            "x=1",
            "=",
        ),
        *("", "bandwidth=nan", "bandwidth=inf", "disk_free=1e999"),
    ],
)
def test_an_invalid_limit_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        with_limit(Preflight(), text)


@given(st.integers(0, 1 << 62))
@example(int(999.7 * MIB))
def test_bytes_are_read_back_to_three_digits(count: int) -> None:
    number, unit = in_bytes(count).split()
    size = {"bytes": 1, "KiB": 1 << 10, "MiB": MIB, "GiB": GIB, "TiB": 1 << 40}[unit]
    assert math.isclose(float(number) * size, count, rel_tol=0.005)
    assert "e" not in number
