"""Ranks without a launcher: processes with torchrun's variables, each signalled by itself."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.launching import DEADLINE, SCRIPTS, until
from tests.support.ports import free_port
from tests.support.warm import Warm, start


class Ranks:
    """Some ranks of one job and what they write; ``cold``: each imports torch on its own."""

    def __init__(
        self,
        folder: Path,
        *words: str,
        steps: int = 100_000,
        script: str = "preempted.py",
        world: int = 2,
        cold: bool = False,
    ) -> None:
        self.trace, self.run = folder / "trace", folder / "run"
        self.outputs = [folder / f"output-{rank}" for rank in range(world)]
        folder.mkdir(exist_ok=True)
        port = free_port()
        self.processes: list[Warm | subprocess.Popen[bytes]] = []
        for rank, path in enumerate(self.outputs):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
            variables = {name: str(value) for name, value in place.items()}
            variables |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
            command = [str(SCRIPTS / script), str(self.trace), str(self.run), str(steps), *words]
            with open(path, "ab") as output:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-u", *command],
                        stdout=output,
                        stderr=output,
                        env={**os.environ, **variables},
                        start_new_session=True,
                    )
                    if cold
                    else start(command, output, output, variables)
                )

    def output(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text(errors='replace')}" for path in self.outputs)

    def send(self, *ranks: int, number: int = signal.SIGTERM) -> None:
        for rank in ranks:
            self.processes[rank].send_signal(number)

    def send_to_all(self, number: int = signal.SIGTERM) -> None:
        """Signal every process of the ranks, as a scheduler does: forks and all."""
        for process in self.processes:
            os.killpg(process.pid, number)

    def lines(self, rank: int = 0) -> list[dict[str, Any]]:
        return lines(self.trace / f"rank-{rank}")

    def reach(self, step: int) -> None:
        def there() -> bool:
            return all(
                any(one.get("step", -1) >= step for one in self.lines(rank))
                for rank in range(len(self.processes))
            )

        until(there, f"step {step}; output:\n{self.output()}")

    def finish(self) -> list[int]:
        try:
            return [process.wait(DEADLINE) for process in self.processes]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running; output:\n{self.output()}") from None

    def stop(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def lines(path: Path) -> list[dict[str, Any]]:
    found = []
    if path.exists():
        for text in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(text))
    return found


@contextlib.contextmanager
def ranks(
    folder: Path, *words: str, steps: int = 100_000, script: str = "preempted.py", **how: Any
) -> Iterator[Ranks]:
    """Start ranks and make sure that they are gone afterwards."""
    started = Ranks(folder, *words, steps=steps, script=script, **how)
    try:
        yield started
    finally:
        started.stop()


def copies(run: Path) -> list[int]:
    """Return the steps of the copies on disk."""
    return sorted(int(path.name[5:14]) for path in (run / "checkpoints").glob("step-*"))
