"""The host as /proc and /sys describe it; what is missing there is None, and named."""

from __future__ import annotations

from pathlib import Path

import pytest

from outlast.health.agent.telemetry.host import Disk, Host
from outlast.health.policy.telemetry import HostSample, Port


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path / "proc/meminfo", "MemTotal:  1000 kB\nMemAvailable: 600 kB\nHugePages_Total: 0\n")
    write(tmp_path / "proc/stat", "cpu  100 0 100 700 0 0 0 100 50 0\ncpu0 1 2 3\n")
    write(tmp_path / "proc/loadavg", "3.50 2.00 1.00 2/300 4242\n")
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    write(port / "state", "4: ACTIVE\n")
    write(port / "counters/link_downed", "7\n")
    write(tmp_path / "sys/class/infiniband/mlx5_1/ports/1/state", "1: DOWN\n")
    for name, state in (("eth0", "up"), ("eth1", "down"), ("usb0", "unknown")):
        write(tmp_path / f"sys/devices/pci0/net/{name}/operstate", f"{state}\n")
    write(tmp_path / "sys/devices/pci0/net/eth0/carrier_down_count", "3\n")
    write(tmp_path / "sys/devices/virtual/net/lo/operstate", "unknown\n")
    folder = tmp_path / "sys/class/net"
    folder.mkdir()
    for name in ("eth0", "eth1", "usb0"):
        (folder / name).symlink_to(f"../../devices/pci0/net/{name}")
    (folder / "lo").symlink_to("../../devices/virtual/net/lo")
    return tmp_path


def read(host: Host) -> HostSample:
    (found,) = host.sample(9.0)
    assert isinstance(found, HostSample)
    return found


def test_everything_is_read(root: Path) -> None:
    disk = Disk(str(root))
    disk.sample(0.0)
    host = Host("n", disk, 10.0, root)
    found = read(host)
    assert (found.memory_available, found.memory_total, found.load) == (600 * 1024, 1000 * 1024, 3.5)
    assert found.disk_total is not None
    assert found.disk_free is not None
    assert found.disk_free <= found.disk_total
    assert found.ports == (
        Port("mlx5_0/1", True, 7),
        Port("mlx5_1/1", False, None),
        Port("eth0", True, 3),
        Port("eth1", False, None),
        Port("usb0", None, None),
    )
    assert (found.cpu_steal, found.error) == (None, "")


def test_steal_is_a_share_since_the_last_reading(root: Path) -> None:
    host = Host("n", Disk(str(root)), 10.0, root)
    assert read(host).cpu_steal is None
    write(root / "proc/stat", "cpu  130 0 100 740 0 0 0 130 50 0\n")
    assert read(host).cpu_steal == pytest.approx(0.3)
    write(root / "proc/stat", "cpu  1 0 1 7 0 0 0 1 0 0\n")  # counters that went back
    assert read(host).cpu_steal is None
    write(root / "proc/stat", "cpu  1 0 1 17 0 0 0 1 0 0\n")
    assert read(host).cpu_steal == 0


def test_what_cannot_be_read_is_named_and_the_rest_is_read(root: Path) -> None:
    (root / "proc/loadavg").unlink()
    write(root / "proc/stat", "nothing\n")
    write(root / "sys/class/infiniband/mlx5_0/ports/1/counters/link_downed", "many\n")
    found = read(Host("n", Disk(str(root)), 10.0, root))
    assert (found.load, found.cpu_steal, found.disk_free) == (None, None, None)
    assert found.memory_total == 1000 * 1024
    assert found.ports[0] == Port("mlx5_0/1", True, None)
    assert "load: " in found.error
    assert "processors: " in found.error


def test_a_disk_that_has_not_answered_for_long_is_not_known(root: Path) -> None:
    disk = Disk(str(root))
    disk.sample(0.0)
    assert disk.newest(within=-1.0) == (None, None)
    assert disk.newest(within=60.0) != (None, None)
