"""Limits of a node: at each it joins, and just beyond it does not."""

from __future__ import annotations

import math
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
    (devices(1, 2), "1 GPU(s) for 2 rank(s)"),
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


SAID: tuple[tuple[Findings, list[tuple[str, str]]], ...] = (
    (
        disk("run /r", 3 * GIB, 0, LIMITS),
        [("run /r: 3 GiB free", "at least 1 GiB"), ("run /r: room for 0 more files", "at least 1000")],
    ),
    (disk("run /r", 0, -1, LIMITS, "EIO"), [("run /r: EIO", "a file that can be written, synced and read")]),
    (
        memory(GIB, 0, 2, LIMITS),
        [
            ("1 GiB free", "at least 1 GiB for 2 rank(s)"),
            ("0 bytes below the limit of a control group", "at least 1 GiB for 2 rank(s)"),
        ],
    ),
    (
        memory(-1, -1, 1, LIMITS),
        [("free memory is not known (/proc/meminfo)", "at least 512 MiB for 1 rank(s)")],
    ),
    (memory(0, -1, 0, LIMITS), [("0 bytes free", "at least 0 bytes for 0 rank(s)")]),
    (
        shared_memory("/s", GIB, MIB, LIMITS),
        [
            ("/s: 1 GiB in size", "at least 1 GiB; a container gets it with --shm-size"),
            ("/s: 1 MiB free", "at least 256 MiB"),
        ],
    ),
    (shared_memory("/s", 0, 0, LIMITS, "EIO"), [("/s: EIO", "a file system in memory that can be written")]),
    (port(7), [("port 7: free", "a port that can be listened on")]),
    (address("n", ("1.2.3.4", "::1")), [("n: 1.2.3.4, ::1", "a name whose addresses are this node's")]),
    (
        address("n", ("127.0.0.1",), loopback=True),
        [("n: 127.0.0.1, which no other node reaches", "a name whose addresses are this node's")],
    ),
    (
        address("n", (), ("5.6.7.8", "5.6.7.9")),
        [
            (
                "n: resolves to addresses of another host: 5.6.7.8, 5.6.7.9",
                "a name whose addresses are this node's",
            )
        ],
    ),
    (
        address("n", (), ("5.6.7.8",), loopback=True, error="EAI"),
        [("n: EAI", "a name whose addresses are this node's")],
    ),
    (
        clock(NOW, LIMITS),
        [("the clock is not behind the files of the run folder", "no more than 60 s behind")],
    ),
    (
        clock(OLDEST_CLOCK, LIMITS),
        [("the clock is not behind the files of the run folder", "no more than 60 s behind")],
    ),
    (
        clock(OLDEST_CLOCK - 2 * 86400, LIMITS, NOW),
        [("the clock is 2 days before torch 2.4", "no more than 60 s behind")],
    ),
    (
        clock(OLDEST_CLOCK - 1.5 * 86400 - 1, LIMITS),
        [("the clock is 2 days before torch 2.4", "no more than 60 s behind")],
    ),
    (
        clock(NOW, LIMITS, NOW + 3600),
        [("the clock is 3600 s behind the newest file of the run folder", "no more than 60 s behind")],
    ),
    (clock(NOW, LIMITS, 0.0, ("A", "B"), True)[:1], [("A, B stand still", "clocks that advance")]),
    (clock(NOW, LIMITS, synchronised=True)[1:], [("the kernel's clock follows a reference", "NTP or PTP")]),
    (clock(NOW, LIMITS, synchronised=False)[1:], [("the kernel's clock follows no reference", "NTP or PTP")]),
    (open_files(2048, LIMITS), [("2048 per process", "at least 1024 (ulimit -n)")]),
    (
        processes(128, 2, LIMITS),
        [("128 more may be started", "at least 128 for 2 rank(s) (ulimit -u, pids.max)")],
    ),
    (processes(math.inf, 1, LIMITS), [("any number", "at least 64 for 1 rank(s) (ulimit -u, pids.max)")]),
    (devices(1, 1), [("1 GPU(s) for 1 rank(s)", "one for each rank, or none at all")]),
    (devices(0, 1, 0), [("0 GPU(s)", "0 (--gpus)")]),
    (devices(0, 1, error="none"), [("none", "as many ranks as --nproc-per-node asks for")]),
    (torch("2.9", 1.25), [("torch 2.9, imported in 1.2 s", "an import of torch that succeeds")]),
    (
        compute("cpu", (0, 0, GIB), (), LIMITS),
        [
            (
                "cpu: right products, 1 GiB kept their patterns",
                "the known products, and memory that keeps what was written",
            )
        ],
    ),
    (
        compute("cuda:0", (GIB // 2, GIB, 0), ("a", "b"), LIMITS),
        [
            ("cuda:0: a; b", "the known products, and memory that keeps what was written"),
            ("cuda:0: 50% of 1 GiB free", "at least 90%; another process holds the rest"),
        ],
    ),
    (
        compute("cuda:0", (1, 1, 0), (), LIMITS)[1:],
        [("cuda:0: 100% of 1 bytes free", "at least 90%; another process holds the rest")],
    ),
    (
        bandwidth("n", 2e8, 3e6, LIMITS),
        [("200 MB/s to n", "at least 100 MB/s"), ("3 MB/s from n", "at least 100 MB/s")],
    ),
    (
        bandwidth("n", 1e12, 2e12, replace(LIMITS, bandwidth=1e12)),
        [("1000000 MB/s to n", "at least 1000000 MB/s"), ("2000000 MB/s from n", "at least 1000000 MB/s")],
    ),
    (bandwidth("n", 0, 0, LIMITS, "EIO"), [("n: EIO", "at least 100 MB/s")]),
    (no_answer(Check.DISK, "late"), [("late", "an answer in time")]),
)


@pytest.mark.parametrize(("findings", "said"), SAID, ids=lambda value: str(value)[:60])
def test_a_finding_says_what_was_found_and_what_was_expected(
    findings: Findings, said: list[tuple[str, str]]
) -> None:
    assert [(one.found, one.expected) for one in findings] == said


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


@pytest.mark.parametrize("name", sorted(CHECK_OF_LIMIT))
@pytest.mark.parametrize("value", [-1, math.inf, math.nan])
def test_a_limit_is_a_number_of_at_least_0(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"limit {name}: a number of at least 0 expected, {value} found"):
        with_value(name, value)
    assert getattr(with_value(name, 0), name) == 0


def test_a_share_is_1_at_most() -> None:
    assert Preflight(device_free=1.0).device_free == 1.0
    with pytest.raises(UsageError, match=r"device_free: a share from 0 to 1 expected, 1\.01 found"):
        Preflight(device_free=1.01)


@pytest.mark.parametrize(
    ("count", "words"),
    [
        *(
            (0, "0 bytes"),
            (1023, "1023 bytes"),
            (1024, "1 KiB"),
            (1536, "1.5 KiB"),
            (999 * 1024 - 1, "999 KiB"),
        ),
        *(
            (999 * 1024, "999 KiB"),
            (1023 * 1024, "1023 KiB"),
            (MIB, "1 MiB"),
            (GIB - MIB, "1023 MiB"),
            (GIB, "1 GiB"),
        ),
        *((1 << 40, "1 TiB"), (5000 << 40, "5000 TiB")),
    ],
)
def test_bytes_in_words(count: int, words: str) -> None:
    assert in_bytes(count) == words


@pytest.mark.parametrize(
    ("unit", "size"),
    [
        *(("", 1), ("k", 1000), ("M", 10**6), ("G", 10**9), ("KiB", 1 << 10), ("mib", MIB), ("GiB", GIB)),
        *(("TIB", 1 << 40), (" kib ", 1 << 10), ("e3", 1000), ("e1k", 10**4)),
    ],
)
def test_each_unit_of_a_size(unit: str, size: int) -> None:
    assert with_limit(LIMITS, f"shm_size=3{unit}").shm_size == 3 * size


def test_a_refused_limit_says_what_is_known() -> None:
    with pytest.raises(UsageError) as caught:
        with_limit(LIMITS, "ram=1")
    known = ", ".join(CHECK_OF_LIMIT)
    assert str(caught.value) == f"--limit ram=1: known limits are {known}; nothing was checked"
    with pytest.raises(UsageError) as caught:
        with_limit(LIMITS, "shm_size=1 parsec")
    assert str(caught.value) == (
        "--limit shm_size=1 parsec: expected NAME=VALUE, as in shm_size=512MiB; nothing was checked"
    )


def test_a_limit_that_counts_is_a_whole_number_whatever_way_it_is_written() -> None:
    limits = with_limit(LIMITS, "open_files=1e3")
    assert open_files(1, limits)[0].expected == "at least 1000 (ulimit -n)"


@pytest.mark.parametrize(("before", "joins"), [(0, True), (1, False)])
def test_a_clock_is_not_before_the_day_of_torch_2_4(before: float, joins: bool) -> None:
    day = datetime(2024, 7, 24, tzinfo=timezone.utc).timestamp()
    assert (unfit(clock(day - before, LIMITS)) == "") == joins


def test_memory_that_is_not_known_is_unfit_even_if_none_is_needed() -> None:
    limits = replace(LIMITS, memory_per_rank=0)
    assert [memory(free, -1, 1, limits)[0].ok for free in (-1, 0)] == [False, True]


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
