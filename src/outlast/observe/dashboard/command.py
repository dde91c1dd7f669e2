"""``outlast dashboard``: runs in a browser, live."""

from __future__ import annotations

import argparse
import ipaddress
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from outlast import files
from outlast.errors import ExitCode, OutlastError, UsageError
from outlast.observe.dashboard.reading import Watch

PORT = 8265
_SHORTEST_TOKEN = 16  # characters
_CURE = "pip install 'outlast[dashboard]' (outlast report RUN --html FILE needs neither)"


def main(arguments: Sequence[str]) -> int:
    """Run ``outlast dashboard ...`` and return its exit code.

    Raises:
        UsageError: an option is wrong, there is no run, a package is missing, or the port is not free.
    """
    options = _parser().parse_args(arguments)
    local = _is_local(options.host)
    if not local and options.token_file is None:
        raise UsageError(
            f"--host {options.host}: others can reach it and would read logs; --token-file FILE is needed"
            " there; nothing was started"
        )
    if not local and options.act_token_file is not None:
        raise UsageError(
            f"--act-token-file with --host {options.host}: the token would cross the network in plain text;"
            " listen on 127.0.0.1 and use ssh -L; nothing was started"
        )
    read = "" if options.token_file is None else _token("--token-file", options.token_file)
    act = "" if options.act_token_file is None else _token("--act-token-file", options.act_token_file)
    if act and act == read:
        raise UsageError("--act-token-file: the same token as in --token-file; nothing was started")
    try:
        from outlast.observe.dashboard import guard, server
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is needed for the dashboard: {_CURE}") from error
    watch = Watch(options.run_dir)
    watch.poll(time.monotonic)
    hosts = frozenset() if local else frozenset({socket.gethostname().lower(), socket.getfqdn().lower()})
    with _listener(options.host, options.port) as listener:
        shown = f"[{options.host}]" if ":" in options.host else options.host
        ending = "/?token=..." if read or act else "/"
        address = f"http://{shown}:{listener.getsockname()[1]}{ending}"
        sys.stdout.write(f"{len(watch.readers)} run(s) at {address}; Ctrl-C ends it\n")
        sys.stdout.flush()
        try:
            server.serve(watch, listener, hosts, guard.Tokens(read, act))
        except KeyboardInterrupt:
            return ExitCode.OK
    return ExitCode.OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="outlast dashboard",
        description="Show runs in a browser, live: step, rate, nodes, timeline, incidents, where the time"
        " went, checkpoints, logs of failed ranks. It only reads, unless a token allows requests to jobs.",
    )
    add = parser.add_argument
    add("run_dir", type=Path, nargs="+", metavar="RUN", help="run folders, or folders of run folders")
    add("--port", type=_port, default=PORT, metavar="N", help=f"port; 0: any that is free (default {PORT})")
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default 127.0.0.1)")
    add("--token-file", type=Path, metavar="FILE", help="file with a token that every request has to have")
    add(
        "--act-token-file",
        type=Path,
        metavar="FILE",
        help="file with a token whose holder may also have a job save now, drain a node or stop",
    )
    return parser


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to 65535")
    return int(text)


def _is_local(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _token(option: str, path: Path) -> str:
    """Return the token in a file that nobody else can read.

    Raises:
        UsageError: it cannot be read, is another account's, or is too short.
    """
    try:
        content = files.read_private(path, files.TOKEN_BYTES)
        found = content.decode("ascii").strip()
    except (OSError, OutlastError, UnicodeDecodeError) as error:
        raise UsageError(f"{option} {path}: {error}; nothing was started") from error
    if path.stat().st_mode & 0o077:
        raise UsageError(f"{option} {path}: others may read it; chmod 600 {path}; nothing was started")
    if len(found) < _SHORTEST_TOKEN:
        raise UsageError(
            f"{option} {path}: the token has {len(found)} characters, at least {_SHORTEST_TOKEN} are"
            " expected; nothing was started"
        )
    return found


def _listener(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise UsageError(
            f"--host {host}: {getattr(error, 'strerror', None) or error}; nothing was started"
        ) from error
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen()  # from here on a browser may ask, and waits
        return found
    except OSError as error:
        found.close()
        raise UsageError(
            f"--port {port} on {host}: {error.strerror}; choose another one with --port; nothing was started"
        ) from error
