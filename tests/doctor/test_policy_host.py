"""What the doctor says of a host: processors, core files, network, memory, GPUs, and the script's modules."""

from __future__ import annotations

import pytest

from outlast.doctor import policy
from outlast.doctor.policy import Diagnosis
from outlast.health.policy.preflight import Level

GIB, MIB = 1 << 30, 1 << 20
UP = ("eth0", "eth1", "lo")
NCCL, GLOO = "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"

# A judgement, whether it is ok, and what it says.
ROWS: list[tuple[Diagnosis, bool, str]] = [
    (policy.processors(2, 2.0, 0), True, "2 processors for 2 ranks"),
    (policy.processors(2, 1.5, 0), False, "1.5 processors for 2 ranks"),
    (policy.processors(2, 2.0, 1), True, "2 processors for 2 ranks"),
    (policy.processors(2, 4.0, 2), True, "4 processors for 2 ranks of 2 threads (OMP_NUM_THREADS)"),
    (policy.processors(2, 3.0, 2), False, "3 processors for 2 ranks of 2 threads (OMP_NUM_THREADS)"),
    (policy.core_files(0, "/cores", 0, 8), True, "none is written"),
    (policy.core_files(-1, "", 0, 8), True, "a program takes them"),
    (policy.core_files(-1, "/cores", 8 * GIB, 2), True, "/cores: 8 GiB free for the core files of 2 ranks"),
    (policy.core_files(-1, "/cores", 7 * GIB, 2), False, "/cores: 7 GiB free for the core files of 2 ranks"),
    (policy.core_files(1, "/cores", 2, 2), True, "/cores: 2 bytes free for the core files of 2 ranks"),
    (policy.core_files(1, "/cores", 1, 2), False, "/cores: 1 bytes free for the core files of 2 ranks"),
    (policy.core_files(9 * GIB, "/c", 4 * GIB, 1), True, "/c: 4 GiB free for the core files of 1 ranks"),
    (policy.locked_memory(0, ()), True, "0 bytes of locked memory, 0 InfiniBand adapter(s)"),
    (policy.locked_memory(-1, ["mlx5_0"]), True, "no limit of locked memory, 1 InfiniBand adapter(s)"),
    (policy.locked_memory(0, ["mlx5_0"]), False, "0 bytes of locked memory, 1 InfiniBand adapter(s)"),
    (policy.locked_memory(64 * MIB, ["a", "b"]), True, "64 MiB of locked memory, 2 InfiniBand adapter(s)"),
    (policy.locked_memory(63 * MIB, ["a", "b"]), False, "63 MiB of locked memory, 2 InfiniBand adapter(s)"),
    (policy.overcommit(0), True, "vm.overcommit_memory is 0"),
    (policy.overcommit(1), True, "vm.overcommit_memory is 1"),
    (policy.overcommit(2), False, "vm.overcommit_memory is 2"),
    (policy.driver(8, ())[0], True, "8 GPU(s) without errors"),
    (policy.driver(8, ["GPU 3: lost", "GPU 4: lost"])[1], False, "GPU 4: lost"),
    (policy.buckets("train.py", ()), True, "train.py: no DistributedDataParallel that rebuilds its buckets"),
    (policy.buckets("train.py", [3, 9]), False, "train.py: DDP in line 3, 9 rebuilds its buckets"),
    (policy.modules("/code", ()), True, "/code: none has the name of a module that others import"),
    (
        policy.modules("/code", ["queue.py", "torch.py"]),
        False,
        "/code: queue.py, torch.py has the name of a module that others import",
    ),
]
FAILS = {"locked-memory", "interfaces", "driver"}  # the job would; the others make it slow


@pytest.mark.parametrize(("one", "ok", "found"), ROWS, ids=lambda one: getattr(one, "check", None))
def test_a_host_is_judged(one: Diagnosis, ok: bool, found: str) -> None:
    assert (one.ok, one.found, one.cure) == (ok, found, "" if ok else policy.CURES[one.check])
    assert one.fails == (not ok and one.check in FAILS)


@pytest.mark.parametrize(
    ("variable", "names", "ok"),
    [
        (NCCL, "eth1", True),
        (NCCL, "eth", True),  # a prefix
        (NCCL, "ib,eth", True),  # one of them is enough
        (NCCL, "ib,", False),  # an empty name is none
        (NCCL, "h0", False),
        (NCCL, "=eth0", True),
        (NCCL, "=eth", False),
        (NCCL, "=ib0,eth1", True),
        (NCCL, "^docker", True),  # all others
        (GLOO, "eth0", True),
        (GLOO, "eth", False),
        (GLOO, "eth0,lo", True),
        (GLOO, "eth0,ib0", False),  # it opens each of them
        (GLOO, "eth0,", True),
        (GLOO, "=eth0", False),  # the signs are NCCL's
        (GLOO, "^docker", False),
        ("TP_SOCKET_IFNAME", "lo", True),
        ("TP_SOCKET_IFNAME", "l", False),
    ],
)
def test_interfaces_are_named_as_their_library_reads_them(variable: str, names: str, ok: bool) -> None:
    found = f"{variable}={names}: {'is there' if ok else 'no such interface is up'}"
    cure = "" if ok else policy.CURES["interfaces"]
    assert policy.interfaces(variable, names, UP) == Diagnosis(
        "interfaces", ok, found, "one of eth0, eth1, lo", cure, Level.ERROR
    )


def test_a_host_without_interfaces_has_none_to_name() -> None:
    assert policy.interfaces(NCCL, "eth0", ()).expected == "one of none"


def test_each_gpu_with_a_problem_is_named() -> None:
    assert [(one.ok, one.found) for one in policy.driver(8, ["GPU 3: lost", "GPU 4: lost"])] == [
        (False, "GPU 3: lost"),
        (False, "GPU 4: lost"),
    ]
