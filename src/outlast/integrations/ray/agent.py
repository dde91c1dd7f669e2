"""The Ray actor that runs one node's agent, as a process in a session of its own.

Ray sends this class to the nodes by its name, so outlast has to be installed there.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from outlast import settings
from outlast.errors import ExitCode
from outlast.ipc.processes import die_with_parent

TOKEN_MARK = "{token-file}"


def new_token() -> str:
    """Return what the agents of one job know each other by."""
    return secrets.token_hex(32)


class AgentActor:
    """Starts the agent, tells how it ended, passes signals on; when Ray ends the actor, the agent ends, too.

    Args:
        token: what the agents of the job know each other by; written to a file that only this user reads.
        cpus: that Ray gave the actor.
    """

    def __init__(self, token: str, cpus: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="outlast-ray-"))
        self._token_file = self._folder / "token"
        self._token_file.touch(mode=0o600)
        self._token_file.write_text(token)
        self._cpus = cpus
        self._process: subprocess.Popen[bytes] | None = None

    def address(self) -> tuple[str, int]:
        """Return this node's address, as Ray knows it, and a port that is free there."""
        host: str = importlib.import_module("ray").util.get_node_ip_address()
        with socket.socket() as free:
            free.bind((host, 0))
            port: int = free.getsockname()[1]
        return host, port

    def start(self, words: Sequence[str]) -> None:
        """Start the agent.

        Args:
            words: its command line; ``{token-file}`` stands for the file with the token.

        Raises:
            OSError: no process can be started.
        """
        command = [word.replace(TOKEN_MARK, str(self._token_file)) for word in words]
        keep = [sys.executable, "-m", __name__, str(os.getpid()), *command]
        environment = settings.inherited()
        if environment.get("OMP_NUM_THREADS") == str(self._cpus):
            del environment["OMP_NUM_THREADS"]  # Ray's, for one process; the agent chooses for several
        self._process = subprocess.Popen(keep, start_new_session=True, env=environment)

    def wait(self, seconds: float) -> int | None:
        """Return the agent's exit code, None if it still runs after so many seconds."""
        assert self._process is not None
        try:
            code = self._process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None
        shutil.rmtree(self._folder, ignore_errors=True)
        return ExitCode.SIGNAL_BASE - code if code < 0 else code

    def stop(self) -> None:
        """Send SIGTERM to the agent."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)


def main(arguments: Sequence[str]) -> int:
    """Become the agent, which the kernel kills when the actor ends."""
    die_with_parent(int(arguments[0]))
    try:
        os.execvp(arguments[1], list(arguments[1:]))
    except OSError as error:
        sys.stderr.write(f"{arguments[1]}: {error.strerror}; is outlast installed on this node?\n")
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
