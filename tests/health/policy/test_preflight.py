"""Limits of a node: at each it joins, and just beyond it does not."""

from __future__ import annotations

import math
from dataclasses import fields, replace

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
LIMITS = Preflight()
WELL: tuple[Findings, ...] = (
    disk("run folder /runs", GIB, 1000, LIMITS),
    disk("run folder /btrfs", GIB, -1, LIMITS),
    memory(8 * GIB // 2, -1, 8, LIMITS),
    memory(8 * GIB // 2, 8 * GIB // 2, 8, LIMITS),
    shared_memory("/dev/shm", GIB, GIB // 4, LIMITS),
    port(29500),
    address("node1", ("10.0.0.1",)),
    clock(NOW, LIMITS, NOW + 60),
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
    (disk("run folder /runs", GIB - 1, 1000, LIMITS), "run folder /runs"),
    (disk("checkpoint folder /ckpt", GIB, 999, LIMITS), "room for 999 more files"),
    (disk("run folder /runs", GIB, 1000, LIMITS, "No space left on device"), "No space left"),
    (memory(8 * GIB // 2 - 1, -1, 8, LIMITS), "for 8 rank(s)"),
    (memory(8 * GIB // 2, 8 * GIB // 2 - 1, 8, LIMITS), "control group"),
    (memory(-1, -1, 1, LIMITS), "not known"),
    (shared_memory("/dev/shm", 64 * MIB, 64 * MIB, LIMITS), "64 MiB in size"),
    (shared_memory("/dev/shm", GIB, GIB // 4 - 1, LIMITS), "free"),
    (shared_memory("/dev/shm", GIB, GIB, LIMITS, "Read-only file system"), "Read-only"),
    (port(29500, "in use by another process"), "port 29500: in use by another process"),
    (address("nodeX", (), error="does not resolve"), "nodeX: does not resolve"),
    (address("node2", ("10.0.0.1",), ("10.0.0.2",)), "resolves to addresses of another host: 10.0.0.2"),
    (address("node2", ()), "no address"),
    (clock(NOW, LIMITS, NOW + 61), "61 s behind the newest file"),
    (clock(0.0, LIMITS), "days before torch 2.4"),
    (clock(NOW, LIMITS, stopped=("CLOCK_BOOTTIME",)), "CLOCK_BOOTTIME stand still"),
    (open_files(1023, LIMITS), "1023 per process"),
    (processes(8 * 64 - 1, 8, LIMITS), "511 more may be started"),
    (devices(7, 8), "7 GPU(s) for 8 rank(s)"),
    (devices(7, 7, 8), "7 GPU(s) (8 (--gpus) expected)"),
    (devices(8, 4, 4), "8 GPU(s)"),
    (devices(0, 0, error="no NVIDIA GPU is visible"), "no NVIDIA GPU"),
    (torch("", 1.0, "the import died of SIGSEGV"), "SIGSEGV"),
    (
        compute("cuda:3 (H100)", (100, 100, GIB), ("a product in float32 is wrong",), LIMITS),
        "cuda:3 (H100): a product",
    ),
    (compute("cuda:3 (H100)", (89, 100, GIB), (), LIMITS), "89% of"),
    (bandwidth("node2", 0.9e8, 1e8, LIMITS), "90 MB/s to node2"),
    (bandwidth("node2", 1e8, 0.9e8, LIMITS), "90 MB/s from node2"),
    (bandwidth("node2", 0, 0, LIMITS, "timed out"), "node2: timed out"),
    (no_answer(Check.DISK, "the run folder: no answer within 10.0 s"), "no answer within"),
)


@pytest.mark.parametrize("findings", WELL, ids=lambda one: one[0].found)
def test_a_node_at_its_limits_joins(findings: Findings) -> None:
    assert unfit(findings) == ""


@pytest.mark.parametrize(("findings", "reason"), BEYOND, ids=lambda value: str(value)[:60])
def test_a_node_beyond_a_limit_does_not_join(findings: Findings, reason: str) -> None:
    assert reason in unfit(findings)


def test_every_check_passes_and_fails() -> None:
    assert {one[0].check for one in WELL} == set(Check)
    assert {one[0].check for one, _ in BEYOND} == set(Check)


def test_the_sentence_names_every_failure_and_nothing_else() -> None:
    findings = [*open_files(10, LIMITS), *torch("2.9.1", 2.0), *port(1, "in use by another process")]
    assert unfit(findings) == (
        "open-files: 10 per process (at least 1024 (ulimit -n) expected);"
        " ports: port 1: in use by another process (a port that can be listened on expected)"
    )


@pytest.mark.parametrize(
    "findings",
    [clock(NOW, LIMITS, synchronised=False), address("vm", ("127.0.1.1",), (), True)],
    ids=lambda one: one[-1].check.value,
)
def test_a_warning_excludes_nobody(findings: Findings) -> None:
    assert [one.level for one in findings if not one.ok] == [Level.WARNING]
    assert unfit(findings) == ""


def test_a_finding_is_a_json_object() -> None:
    assert port(1)[0].to_json() == {
        "check": "ports",
        "ok": True,
        "found": "port 1: free",
        "expected": "a port that can be listened on",
        "seconds": 0.0,
        "level": "error",
    }


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
