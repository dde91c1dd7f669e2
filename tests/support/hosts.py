"""Several hosts on one machine, with a network between them that can be cut, and power that can fail.

A host is a set of Linux namespaces: its own processes, network, host name, ``/dev/shm`` and
``/etc/hosts``; the rest of the file system is shared, as a network file system would be. A bridge in a
namespace of its own joins them; each host hangs on it by a veth pair. In the machine's own network
there is nothing. Root, Linux and some programs are needed; :func:`why_not` says what lacks.

Nothing of them stays, however this process ends.

    with Hosts(3, folder) as hosts:
        server = hosts[0].start(["python3", "-m", "http.server"])
        hosts[1].cut()
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from tests.support.namespaces import (
    NAMESPACES,
    PATIENCE,
    HostsUnusable,
    Keeper,
    Process,
    every_pid,
    pid_namespace,
    run,
    until,
)
from tests.support.processes import command_line, state_of

PROGRAMS = ("unshare", "nsenter", "ip", "mount", "env", "cat")
NETWORK = "10.77.0"
DEVICE = "eth0"
SHARED_MEMORY = "512m"  # of each host's /dev/shm; taken only when it is written

# A shell's builtin reads /proc/self before /proc is that of the new namespace: the pid as it is outside.
# The first process of a pid namespace inherits every orphan; where SIGCHLD is ignored the kernel reaps them.
BOOT = f"""
set -e
read pid rest < /proc/self/stat
mount -t proc proc /proc
mount -t tmpfs -o mode=1777,size={SHARED_MEMORY} tmpfs /dev/shm
mount --bind "$2" /etc/hosts
echo "$1" > /proc/sys/kernel/hostname
for file in /proc/sys/net/ipv6/conf/*/disable_ipv6; do test ! -w "$file" || echo 1 > "$file"; done
ip link set lo up
echo "$pid"
exec env --ignore-signal=CHLD cat > /dev/null
"""
BRIDGE = """
set -e
ip link add bridge type bridge
ip link set bridge up
echo $$
exec cat > /dev/null
"""
TRIAL = """
set -e
mount -t tmpfs tmpfs /dev/shm
ip link add trial type bridge
ip link add one type veth peer name other
"""
LOSS = """
table ip loss {{
    chain incoming {{ type filter hook input priority 0; iifname "{device}" {share} drop; }}
    chain outgoing {{ type filter hook output priority 0; oifname "{device}" {share} drop; }}
}}
"""


@functools.cache
def why_not() -> str:
    """Return why no hosts can be started here; empty when they can."""
    if os.geteuid() != 0:
        return "namespaces, links and mounts need root"
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"no {', '.join(absent)}: install util-linux, iproute2 and coreutils"
    pre_vote = subprocess.run(
        ["unshare", *NAMESPACES, "--fork", "sh", "-c", TRIAL],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    if pre_vote.returncode:
        return f"the kernel refuses namespaces, bridges or veth pairs: {pre_vote.stderr.strip()}"
    return ""


class Host:
    """One of the hosts.

    Attributes:
        name: its host name, which all of them resolve.
        address: its IPv4 address.
    """

    def __init__(self, number: int, folder: Path, bridge: Keeper) -> None:
        self.name = f"n{number}"
        self.address = f"{NETWORK}.{number + 1}"
        self._port = f"port{number}"
        self._hardware = f"02:00:00:00:00:{number + 1:02x}"  # the same after a boot: neighbours remember it
        self._folder = folder / self.name
        self._names = folder / "hosts"
        self._bridge = bridge
        self._keeper: Keeper | None = None
        self._commands: list[Process] = []
        self._paused: list[int] = []

    @property
    def _inside(self) -> Keeper:
        if self._keeper is None:
            raise HostsUnusable(f"{self.name} has no power; boot() it first")
        return self._keeper

    def boot(self) -> None:
        """Give the host power: an empty ``/dev/shm``, no process, the link up."""
        if self._keeper is not None:
            raise HostsUnusable(f"{self.name} runs already; kill() it first")
        (self._folder / "tmp").mkdir(parents=True, exist_ok=True)
        keeper = Keeper(
            (*NAMESPACES, "--fork"), BOOT, (self.name, str(self._names)), self._folder / "boot.log"
        )
        self._keeper = keeper
        peer = ["peer", "name", DEVICE, "address", self._hardware, "netns", str(keeper.pid)]
        run(self._bridge.inside(["ip", "link", "add", self._port, "type", "veth", *peer]))
        run(self._bridge.inside(["ip", "link", "set", self._port, "master", "bridge", "up"]))
        run(keeper.inside(["ip", "address", "add", f"{self.address}/24", "dev", DEVICE]))
        run(keeper.inside(["ip", "link", "set", DEVICE, "up"]))

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        folder: Path | None = None,
    ) -> Process:
        """Start a command on the host.

        Args:
            command: program and arguments.
            environment: variables on top of this process's; ``TMPDIR`` is the host's own folder.
            log: file that output and errors are appended to; default: one for each host.
            folder: where it starts; default: the current one.
        """
        log = log or self._folder / "output.log"
        variables = {"TMPDIR": str(self._folder / "tmp"), **(environment or {})}
        words = [f"{name}={value}" for name, value in variables.items()]
        wanted = ["env", f"--chdir={folder or Path.cwd()}", *words, *command]
        # nsenter's own fork would stop itself whenever the command is stopped; a shell without jobs waits on.
        shell = ["sh", "-c", '"$@"; exit $?', "sh", *wanted]
        with log.open("ab") as output:
            entering = subprocess.Popen(
                self._inside.inside(shell, (*NAMESPACES, "--no-fork")),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._commands.append(Process(entering, log))
        return self._commands[-1]

    def processes(self) -> dict[int, str]:
        """Return the command lines of the host's processes by process id, as this process sees them."""
        space = pid_namespace(self._inside.pid)
        inside = [pid for pid in every_pid() if pid != self._inside.pid and pid_namespace(pid) == space]
        return {pid: command_line(pid) for pid in inside}

    def kill(self) -> None:
        """Cut the power: the link goes first, so that no connection is closed, then every process at once."""
        self.cut()
        self._inside.kill()
        self._gone()

    def close(self) -> None:
        """End the host, if it runs."""
        if self._keeper is not None:
            self._keeper.close()
            self._gone()

    def _gone(self) -> None:
        self._keeper = None
        self._paused = []
        for command in self._commands:
            command.wait(PATIENCE)
        self._commands = []
        # The kernel keeps a dead host's network, and so its link, until the last closed connection timed out.
        until(self._port_deleted, f"the link of {self.name} to go")

    def _port_deleted(self) -> bool:
        command = self._bridge.inside(["ip", "link", "delete", self._port])
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
        return "Cannot find device" in done.stderr

    def cut(self) -> None:
        """Pull the cable out: the host sees no carrier, keeps its address, and nobody is told."""
        run(self._bridge.inside(["ip", "link", "set", self._port, "down"]))

    def heal(self) -> None:
        """Put the cable back."""
        run(self._bridge.inside(["ip", "link", "set", self._port, "up"]))

    def flap(self, seconds: float) -> None:
        """Pull the cable out for that long."""
        self.cut()
        try:
            time.sleep(seconds)
        finally:
            self.heal()

    def lossy(self, percent: float) -> None:
        """Drop that share of the packets in and out, drawn at random; 0 ends it.

        Raises:
            HostsUnusable: there is no ``nft``, or ``percent`` is not between 0 and 100.
        """
        if not 0 <= percent <= 100:
            raise HostsUnusable(f"a loss of {percent} per cent: expected 0 to 100; nothing was changed")
        if shutil.which("nft") is None:
            raise HostsUnusable("no nft to drop packets with: install nftables")
        rules = "table ip loss {}\ndelete table ip loss\n"
        if percent:
            share = "" if percent == 100 else f"numgen random mod 10000 < {round(percent * 100)}"
            rules += LOSS.format(device=DEVICE, share=share)
        run(self._inside.inside(["nft", "-f", "-"]), rules)

    def pause(self) -> None:
        """Stop every process of the host with SIGSTOP; its kernel still answers the network."""
        stopped: set[int] = set()

        def still() -> bool:
            running = [pid for pid in self.processes() if state_of(pid) not in ("", "T", "t", "Z", "X")]
            for pid in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            stopped.update(running)
            return not running

        until(still, f"the processes of {self.name} to stop")
        self._paused = sorted(stopped)

    def resume(self) -> None:
        """Continue what :meth:`pause` has stopped."""
        for pid in self._paused:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._paused = []


class Hosts:
    """Hosts ``n0`` to ``n<count - 1>`` that reach each other; a context manager.

    Args:
        count: how many, 1 to 200.
        folder: for their logs and temporary files; nothing of it is removed.

    Raises:
        HostsUnusable: they cannot be started here; :func:`why_not` says so beforehand.
    """

    def __init__(self, count: int, folder: Path) -> None:
        if not 1 <= count <= 200:
            raise HostsUnusable(f"{count} hosts: expected 1 to 200; none is started")
        self._count = count
        self._folder = folder
        self._hosts: list[Host] = []
        self._bridge: Keeper | None = None

    def __enter__(self) -> Hosts:
        reason = why_not()
        if reason:
            raise HostsUnusable(f"no hosts can be started on this machine: {reason}")
        try:
            self._start()
        except BaseException:  # raised again: Ctrl-C, too, leaves no namespace behind
            self._stop()
            raise
        return self

    def _start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._bridge = Keeper(("--net",), BRIDGE, (), self._folder / "bridge.log")
        self._hosts = [Host(number, self._folder, self._bridge) for number in range(self._count)]
        names = [f"{host.address} {host.name}" for host in self._hosts]
        (self._folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names]) + "\n")
        for host in self._hosts:
            host.boot()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        with contextlib.ExitStack() as every:
            if self._bridge is not None:
                every.callback(self._bridge.close)
            for host in self._hosts:
                every.callback(host.close)
        self._bridge, self._hosts = None, []

    def __getitem__(self, number: int) -> Host:
        return self._hosts[number]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def __len__(self) -> int:
        return self._count
