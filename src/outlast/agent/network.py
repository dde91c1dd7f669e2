"""Addresses of this host, as other nodes see it."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator

from outlast.core.errors import UsageError

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
            f"--rdzv-endpoint: host {host!r} does not resolve on this node: {error.strerror};"
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


def interface_of(address: str) -> str:
    """Return the name of the interface that has an address; empty: none has."""
    return next((name for name, one in interfaces() if one == address), "")
