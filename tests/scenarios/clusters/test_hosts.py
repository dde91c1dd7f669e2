"""The hosts on one machine are apart, reach each other, and lose link, power and time as they are told."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import hosts as testbed
from tests.support.hosts import Host, Hosts
from tests.support.namespaces import PATIENCE, HostsUnusable, Process, until
from tests.support.processes import is_alive, state_of

pytestmark = pytest.mark.skipif(bool(testbed.why_not()), reason=testbed.why_not() or "hosts can be started")

COUNTING = "import time\nwhile True:\n    print(time.monotonic_ns(), flush=True)\n    time.sleep(0.01)\n"
# A datagram each 10 ms to the other host, and a line for each that comes from there.
TALKING = """
import socket, sys
mine = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
mine.bind(("0.0.0.0", 7000))
mine.settimeout(0.01)
while True:
    try:
        mine.sendto(b"x", (sys.argv[1], 7000))
    except OSError:
        pass
    try:
        print(mine.recvfrom(10)[1][0], flush=True)
    except OSError:
        pass
"""
# One connection, kept open; the line that follows says how it ended.
SERVER = """
import socket
connection, _ = socket.create_server(("0.0.0.0", 7001)).accept()
print("connected", flush=True)
connection.settimeout(4)
try:
    print("ended", repr(connection.recv(1)), flush=True)
except OSError as error:
    print("silence", type(error).__name__, flush=True)
"""
CLIENT = """
import socket, time
while True:
    try:
        connection = socket.create_connection(("n0", 7001))
        break
    except OSError:
        time.sleep(0.01)
time.sleep(1000)
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with Hosts(2, tmp_path_factory.mktemp("hosts")) as started:
        yield started


@pytest.fixture
def commands() -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for command in started:
        command.send(signal.SIGKILL)
        command.wait(PATIENCE)


def python(host: Host, script: str, *arguments: str, log: Path) -> Process:
    return host.start([sys.executable, "-c", script, *arguments], log=log)


def answer(host: Host, log: Path, *command: str) -> str:
    assert host.start(command, log=log).wait(PATIENCE) == 0, log.read_text()
    return log.read_text().strip()


def grows(log: Path, lines: int = 5) -> None:
    before = log.read_text().count("\n")
    until(lambda: log.read_text().count("\n") >= before + lines, f"{lines} more lines in {log}")


def hears_nothing(log: Path, ticks: Path) -> None:
    """Wait until what was on its way is there, and see that no more comes for 50 ticks."""

    def comes() -> bool:
        before = log.read_text()
        grows(ticks, 50)
        return log.read_text() != before

    until(lambda: not comes(), f"silence in {log}")
    assert not comes()


def talking(pair: Hosts, folder: Path) -> list[Process]:
    both = [python(pair[n], TALKING, pair[1 - n].name, log=folder / pair[n].name) for n in (0, 1)]
    for one in both:
        grows(one.log)
    return both


def test_each_host_has_a_name_processes_memory_and_devices_of_its_own(pair: Hosts, tmp_path: Path) -> None:
    for host in pair:
        answer(host, tmp_path / "touch", "touch", f"/dev/shm/of-{host.name}")
        assert answer(host, tmp_path / f"name-{host.name}", "uname", "-n") == host.name
        assert answer(host, tmp_path / f"shm-{host.name}", "ls", "/dev/shm") == f"of-{host.name}"
        seen = answer(host, tmp_path / f"proc-{host.name}", "sh", "-c", "ls -d /proc/[0-9]* | wc -l")
        assert int(seen) <= 4, "the first process, the shell, ls and wc"
        links = answer(host, tmp_path / f"links-{host.name}", "ip", "-o", "link")
        assert {line.split(":")[1].strip().partition("@")[0] for line in links.splitlines()} == {"lo", "eth0"}
    assert not list(Path("/dev/shm").glob("of-n*"))


def test_the_machine_gets_no_link_no_address_and_no_named_namespace(pair: Hosts) -> None:
    shown = subprocess.run(["ip", "-o", "address"], capture_output=True, text=True, check=True).stdout
    assert testbed.NETWORK not in shown
    assert not {"bridge", "port0", "port1"} & set(os.listdir("/sys/class/net"))


def test_nothing_passes_a_cut_link(pair: Hosts, commands: list[Process], tmp_path: Path) -> None:
    commands += talking(pair, tmp_path)
    pair[0].cut()
    try:
        commands.append(python(pair[1], COUNTING, log=tmp_path / "ticks"))
        hears_nothing(commands[1].log, tmp_path / "ticks")
    finally:
        pair[0].heal()


@pytest.mark.skipif(shutil.which("nft") is None, reason="no nft")
def test_loss_drops_its_share_and_ends(pair: Hosts, commands: list[Process], tmp_path: Path) -> None:
    commands += talking(pair, tmp_path)
    pair[0].lossy(100)
    commands.append(python(pair[1], COUNTING, log=tmp_path / "ticks"))
    hears_nothing(commands[1].log, tmp_path / "ticks")
    pair[0].lossy(50)
    grows(commands[1].log)
    pair[0].lossy(0)
    grows(commands[1].log)
    with pytest.raises(HostsUnusable, match="expected 0 to 100"):
        pair[0].lossy(101)


def test_a_power_cut_takes_every_process_and_closes_no_connection(tmp_path: Path) -> None:
    with Hosts(2, tmp_path / "hosts") as pair:
        server = python(pair[0], SERVER, log=tmp_path / "server")
        client = python(pair[1], CLIENT, log=tmp_path / "client")
        until(lambda: "connected" in server.log.read_text(), "a connection")
        pids = list(pair[1].processes())
        assert pids
        pair[1].kill()
        assert client.poll() == 128 + signal.SIGKILL
        assert not any(is_alive(pid) for pid in pids)
        assert server.wait(PATIENCE) == 0
        assert "silence TimeoutError" in server.log.read_text()
        with pytest.raises(HostsUnusable, match="no power"):
            pair[1].start(["true"])
        pair[1].boot()
        for one in talking(pair, tmp_path):
            one.send(signal.SIGKILL)


def test_a_paused_host_does_nothing_and_goes_on(pair: Hosts, commands: list[Process], tmp_path: Path) -> None:
    commands += [python(pair[n], COUNTING, log=tmp_path / f"ticks-{n}") for n in (0, 1)]
    for one in commands:
        grows(one.log)
    pair[0].pause()
    before = commands[0].log.read_text()
    assert {state_of(pid) for pid in pair[0].processes()} == {"T"}
    grows(commands[1].log, 50)
    assert commands[0].log.read_text() == before
    pair[0].resume()
    grows(commands[0].log)
    assert commands[0].poll() is None


LEAVING = """
import os, sys
from pathlib import Path
from tests.support.hosts import Hosts
with Hosts(2, Path(sys.argv[1])) as pair:
    pair[0].start(["sleep", "1000"]).pid()
    pair[1].start(["sleep", "1000"]).pid()
    pair[1].pause()
    inside = [pid for host in pair for pid in [host._inside.pid, *host.processes()]]
    print(pair._bridge.pid, *inside, flush=True)
    {end}
"""


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "raise KeyError('as planned')"])
def test_nothing_stays_however_the_test_ends(end: str, tmp_path: Path) -> None:
    script = LEAVING.format(end=end)
    ended = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode != 0
    pids = [int(word) for word in ended.stdout.split()]
    assert len(pids) == 5, ended.stderr
    until(lambda: not any(is_alive(pid) for pid in pids), "the hosts to go")


def test_a_host_that_cannot_be_started_says_why(tmp_path: Path) -> None:
    with pytest.raises(HostsUnusable, match="expected 1 to 200"):
        Hosts(0, tmp_path)
