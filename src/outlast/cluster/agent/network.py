"""Addresses of this host, as other nodes see it."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from outlast.errors import UsageError

if TYPE_CHECKING:
    from outlast.launcher.command.options import LaunchOptions

PORT_PATIENCE = 3.0  # for a port that the launch before may just be leaving
_SIOCGIFADDR = 0x8915


def interfaces() -> Iterator[tuple[str, str]]:
    """Yield name and IPv4 address of each interface that has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                yield name, socket.inet_ntoa(found[20:24])


def is_loopback(host: str) -> bool:
    """Say whether a host is written as this one's loopback."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def resolve(host: str) -> str:
    """Return an address of a host.

    Raises:
        UsageError: the name does not resolve.
    """
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise UsageError(
            f"host {host!r} does not resolve on this node: {error.strerror} (--rdzv-endpoint, --master-addr);"
            " nothing was started"
        ) from error


def is_ours(host: str) -> bool:
    """Say whether a host is this one.

    Raises:
        UsageError: the name does not resolve.
    """
    address = resolve(host)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def outward(host: str) -> str:
    """Return the address of this node by which nodes that know a host reach it.

    A host's own name often means its loopback (Debian's 127.0.1.1); then the first other address counts.

    Raises:
        UsageError: the name does not resolve.
    """
    address = resolve(host)
    if is_loopback(address) and not is_loopback(host):
        return next((one for _, one in interfaces() if not is_loopback(one)), address)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
        except OSError:
            return address


def listening(endpoint: str, address: str) -> tuple[str, ...]:
    """Return the addresses at which an agent listens: no more of them than others need to reach it.

    Args:
        endpoint: host at which agents meet.
        address: of this node, by which others reach it.

    Raises:
        UsageError: the endpoint's name does not resolve.
    """
    if is_loopback(endpoint):
        return (endpoint,)
    found = resolve(endpoint)
    if is_ours(endpoint) and not is_loopback(found) and found != address:
        return address, found
    return (address,)


def may_listen(endpoint: str, address: str, port: int) -> bool:
    """Return whether the endpoint is this host's and its port is free; arguments as of :func:`listening`."""
    if not is_ours(endpoint):
        return False
    with contextlib.ExitStack() as probes:
        try:
            for host in listening(endpoint, address):
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                probes.enter_context(socket.create_server((host, port), family=family))
        except (OSError, UsageError):
            return False
    return True


def store_host(options: LaunchOptions, address: str) -> str:
    """Return the address at which this node serves the ranks' store; empty: all of them.

    Ranks look for it at the given master address. Where that is another address of this node than the one by
    which others reach it (Debian's 127.0.1.1 for the host's own name), it has to listen at both.

    Raises:
        UsageError: the master's name does not resolve.
    """
    master, several = options.world.master_addr, options.nodes.several
    found = "127.0.0.1" if not master or master == "localhost" else resolve(master)
    if not several:
        return found
    return address if not master_port(options) or found == address else ""


def master_port(options: LaunchOptions) -> int:
    """Return the port at which this node serves the ranks' store, because the user said so; 0: any.

    Raises:
        UsageError: the master's name does not resolve.
    """
    world = options.world
    serves = world.master_port and world.node_rank <= 0 and is_ours(world.master_addr)
    return world.master_port if serves else 0


def check_master(options: LaunchOptions) -> None:
    """See to it that ranks can meet where the user wants them to.

    Raises:
        UsageError: they cannot.
    """
    world, single = options.world, not options.nodes.several
    if world.master_addr and single and not is_ours(world.master_addr):
        raise UsageError(
            f"--master-addr={world.master_addr}: no address of this host, and the job has one node"
            " (--nnodes); nothing was started"
        )
    port = master_port(options)
    deadline = time.monotonic() + PORT_PATIENCE
    while port:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
                probe.listen()
                return
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise UsageError(
                        f"--master-port={port}: {error.strerror} on this host; nothing was started;"
                        " choose another port, the same on each node"
                    ) from error
        time.sleep(0.1)


def interface_of(address: str) -> str:
    """Return the name of the interface that has an address; empty: none has."""
    return next((name for name, one in interfaces() if one == address), "")
