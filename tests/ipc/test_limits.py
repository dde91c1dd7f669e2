"""Limits of the host and of control groups as the kernel shows them, version 1 and 2: the nearest counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from outlast.ipc.limits import available_memory, memory_room, oom_kills, process_room

MIB = 1 << 20


class Host:
    """A process folder and mounted hierarchies, as files."""

    def __init__(self, root: Path) -> None:
        self.process = root / "proc"
        self.process.mkdir()
        self.mounts: list[str] = []
        self.root = root

    def mount(self, name: str, kind: str, flags: str, root: str = "/") -> Path:
        place = self.root / name
        place.mkdir()
        self.mounts.append(f"30 25 0:26 {root} {place} rw,nosuid shared:9 - {kind} {kind} rw,{flags}")
        (self.process / "mountinfo").write_text(
            "\n".join(["22 1 8:1 / / rw - ext4 /dev/sda rw", *self.mounts])
        )
        return place

    def groups(self, *lines: str) -> None:
        (self.process / "cgroup").write_text("\n".join(lines) + "\n")


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_version_2_counts_the_nearest_limit_above_and_gives_cache_back(host: Host) -> None:
    unified = host.mount("unified", "cgroup2", "nsdelegate")
    host.groups("0::/job/step")
    write(unified / "job", memory__max=100 * MIB, memory__current=60 * MIB, pids__max="max", pids__current=5)
    write(unified / "job", memory__stat=f"anon 1\ninactive_file {20 * MIB}\nactive_file {5 * MIB}")
    write(unified / "job/step", memory__max="max", memory__current=30 * MIB, pids__max=100, pids__current=5)
    assert memory_room(host.process) == 65 * MIB
    assert process_room(host.process) == 95


def test_version_1_says_no_limit_with_a_large_number(host: Host) -> None:
    memory = host.mount("memory", "cgroup", "memory")
    host.mount("cpu", "cgroup", "cpu,cpuacct")
    host.groups("4:memory:/job", "3:cpu,cpuacct:/job", "0::/")
    used = {"memory__usage_in_bytes": 60 * MIB}
    write(memory, memory__limit_in_bytes=9223372036854771712, **used)
    write(memory / "job", memory__limit_in_bytes=9223372036854771712, **used)
    assert memory_room(host.process) == -1
    write(memory / "job", memory__limit_in_bytes=64 * MIB, memory__stat=f"total_inactive_file {MIB}")
    assert memory_room(host.process) == 5 * MIB
    assert process_room(host.process) == -1


def test_a_container_sees_its_own_group_at_the_mount_point(host: Host) -> None:
    unified = host.mount("unified", "cgroup2", "nsdelegate", root="/../..")
    host.groups("0::/")
    write(unified, memory__max=100 * MIB, memory__current=99 * MIB)
    assert memory_room(host.process) == MIB


def test_a_bind_of_a_group_of_the_host(host: Host) -> None:
    memory = host.mount("memory", "cgroup", "memory", root="/docker/abc")
    host.groups("4:memory:/docker/abc/step")
    write(memory, memory__limit_in_bytes=100 * MIB, memory__usage_in_bytes=10 * MIB)
    write(memory / "step", memory__limit_in_bytes=50 * MIB, memory__usage_in_bytes=10 * MIB)
    assert memory_room(host.process) == 40 * MIB


def test_more_used_than_allowed_is_no_room_and_nothing_mounted_no_limit(host: Host, tmp_path: Path) -> None:
    assert memory_room(tmp_path / "absent") == -1
    unified = host.mount("unified", "cgroup2", "rw")
    host.groups("0::/x")
    write(unified / "x", memory__max=MIB, memory__current=2 * MIB)
    assert memory_room(host.process) == 0


def test_memory_that_the_host_can_give_is_unknown_without_a_line_of_it(tmp_path: Path) -> None:
    write(tmp_path, meminfo="MemTotal:     4000 kB\nMemFree:      1000 kB\nMemAvailable: 3000 kB")
    assert available_memory(tmp_path / "meminfo") == 3000 << 10
    write(tmp_path, meminfo="MemTotal:     4000 kB")
    assert available_memory(tmp_path / "meminfo") == -1


def test_kills_for_want_of_memory_are_counted_by_the_nearest_group(host: Host) -> None:
    unified = host.mount("unified", "cgroup2", "nsdelegate")
    host.groups("0::/job/step")
    write(unified / "job", memory__events="low 0\noom 9\noom_kill 7")
    assert oom_kills(host.process) == 7
    write(unified / "job/step", memory__events="low 0\nhigh 3\nmax 5\noom 2\noom_kill 1\noom_group_kill 0")
    assert oom_kills(host.process) == 1


def test_version_1_counts_them_with_its_switches(host: Host) -> None:
    memory = host.mount("memory", "cgroup", "memory")
    host.groups("4:memory:/job")
    assert oom_kills(host.process) == 0, "nobody counts"
    write(memory / "job", memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 4")
    assert oom_kills(host.process) == 4
