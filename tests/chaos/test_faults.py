"""Faults made from outside: real files and real processes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outlast.chaos import commands, faults
from outlast.errors import UsageError
from outlast.ipc.processes import boot_id
from outlast.observe.policy import codec
from outlast.recovery.policy.events import GenerationStarted, Record, RunEnded, RunStarted

PATIENCE = 60.0
WORKER = "import signal; signal.alarm(120); print('up', flush=True); signal.pause()"


@pytest.fixture
def checkpoint(tmp_path: Path, seed: int) -> Path:
    folder = tmp_path / "step-000000120.g7"
    folder.mkdir()
    for rank in range(3):
        (folder / f"rank-{rank:05d}.safetensors").write_bytes(random.Random(seed + rank).randbytes(20_000))
    (folder / "COMMIT").write_text("digest\n")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def damaged(checkpoint: Path, damage: Callable[[Path, random.Random], str], seed: int) -> tuple[bytes, bytes]:
    """Damage a checkpoint; return the one file that has changed, as it was and as it is."""
    before = contents(checkpoint)
    detail = damage(checkpoint, random.Random(seed))
    after = contents(checkpoint)
    (changed,) = [name for name in before if before[name] != after[name]]
    assert f"{checkpoint.name}/{changed}" in detail
    return before[changed], after[changed]


def test_exactly_one_bit_of_one_shard_is_flipped_and_a_seed_repeats_it(checkpoint: Path, seed: int) -> None:
    before, after = damaged(checkpoint, faults.flip_bit, seed)
    assert (int.from_bytes(before, "little") ^ int.from_bytes(after, "little")).bit_count() == 1
    assert damaged(checkpoint, faults.flip_bit, seed) == (after, before)


def test_one_page_is_zeroed_and_it_was_not_zero_before(checkpoint: Path, seed: int) -> None:
    shard = checkpoint / "rank-00001.safetensors"
    for other in (0, 2):
        (checkpoint / f"rank-{other:05d}.safetensors").unlink()
    shard.write_bytes(bytes(8192) + shard.read_bytes()[8192:])
    before, after = damaged(checkpoint, faults.zero_page, seed)
    assert len(after) == len(before)
    pages = [at for at in range(8192, len(before), 4096) if not after[at : at + 4096].strip(b"\0")]
    assert len(pages) == 1


def test_a_checkpoint_of_zeros_cannot_be_zeroed(checkpoint: Path, seed: int) -> None:
    for path in checkpoint.glob("*.safetensors"):
        path.write_bytes(bytes(9000))
    with pytest.raises(UsageError, match=checkpoint.name):
        faults.zero_page(checkpoint, random.Random(seed))


def test_a_file_loses_its_end(checkpoint: Path, seed: int) -> None:
    before, after = damaged(checkpoint, faults.truncate, seed)
    assert before.startswith(after)


class Run:
    """A run folder whose agent is this test's process and whose workers are children of it."""

    def __init__(self, root: Path, world_size: int, node: str = "") -> None:
        self.root = root
        self._folder = root / "nodes" / node if node else root
        self.workers = [
            subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE)
            for _ in range(world_size)
        ]
        for worker in self.workers:  # a signal while Python starts would end it in another way
            assert worker.stdout is not None
            assert worker.stdout.readline() == b"up\n"
        self._folder.mkdir(parents=True)
        self.log: list[Record] = []

    def started(self, **changes: object) -> Run:
        now = time.monotonic()
        fixed = {"time": time.time(), "clock": now, "generation": 0, "node": "n", "reason": "test"}
        launch = {
            **fixed,
            "run_id": "r",
            "pid": os.getpid(),
            "boot_id": boot_id(),
            "command": (),
            "world_size": 2,
        }
        self.log.append(RunStarted(**{**launch, **changes}))
        return self._write()

    def generation(self, *, clock: float | None = None, pids: tuple[int, ...] | None = None) -> Run:
        now = time.monotonic() if clock is None else clock
        known = tuple(worker.pid for worker in self.workers) if pids is None else pids
        self.log.append(GenerationStarted(time.time(), now, 1, len(known), known, "zygote", "test"))
        return self._write()

    def ended(self) -> Run:
        self.log.append(RunEnded(time.time(), time.monotonic(), 1, 300, 0, "done"))
        return self._write()

    def _write(self) -> Run:
        (self._folder / "events.jsonl").write_text(
            "".join(codec.encode(record) + "\n" for record in self.log)
        )
        return self

    def end(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.communicate()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path / "run", 2)
    yield made
    made.end()


@pytest.mark.parametrize(
    ("fault", "ends_with"),
    [("rank_killed", -9), ("SIGTERM", -15), ("SEGFAULT", -11), ("OS_ABORT", -6), ("SIGINT", -2)],
)
def test_a_signal_reaches_the_worker_of_that_rank_alone(run: Run, fault: str, ends_with: int) -> None:
    run.started().generation()
    made = faults.inject(faults.find(run.root), fault, 1, seed=0)
    assert str(run.workers[1].pid) in made.detail
    assert run.workers[1].wait(PATIENCE) == ends_with
    assert run.workers[0].poll() is None


@pytest.fixture
def two_nodes(tmp_path: Path) -> Iterator[tuple[Run, Run]]:
    made = Run(tmp_path / "job", 1, "a"), Run(tmp_path / "job", 2, "b")
    yield made
    for one in made:
        one.end()


def test_of_several_nodes_the_one_that_runs_on_this_host_is_meant(two_nodes: tuple[Run, Run]) -> None:
    a, b = two_nodes
    a.started(boot_id="another host's").generation()
    b.started().generation()
    run = faults.find(a.root)
    assert (run.node, run.ranks) == ("b", 2)
    faults.inject(run, "rank_killed", 1, seed=0)
    assert b.workers[1].wait(PATIENCE) == -9
    assert a.workers[0].poll() is None


def test_where_several_nodes_run_on_this_host_one_has_to_be_named(two_nodes: tuple[Run, Run]) -> None:
    a, b = two_nodes
    for one in (a, b):
        one.started().generation()
    with pytest.raises(UsageError, match=r"a, b.*--node"):
        faults.find(a.root)
    with pytest.raises(UsageError, match=r"--node c: .*a, b"):
        faults.find(a.root, "c")
    run = faults.find(a.root, "a")
    with pytest.raises(UsageError, match=r"a.*0"):
        faults.inject(run, "rank_killed", 1, seed=0)
    faults.inject(run, "rank_killed", 0, seed=0)
    assert a.workers[0].wait(PATIENCE) == -9
    b.ended()
    assert faults.find(a.root).node == "a"
    a.ended()
    with pytest.raises(UsageError, match="a, b"):
        faults.find(a.root)


def test_a_hung_rank_is_stopped(run: Run) -> None:
    run.started().generation()
    faults.inject(faults.find(run.root), "rank_hung", 0, seed=0)
    _, status = os.waitpid(run.workers[0].pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)


def test_a_process_that_is_no_child_of_the_agent_is_spared(run: Run) -> None:
    grandchild = (
        "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", grandchild], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        try:
            run.started().generation(pids=(pid,))
            with pytest.raises(UsageError, match=str(pid)):
                faults.inject(faults.find(run.root), "rank_killed", 0, seed=0)
        finally:
            os.kill(pid, signal.SIGKILL)
            parent.kill()


def test_an_ended_worker_is_named(run: Run) -> None:
    run.started().generation()
    run.workers[1].kill()
    os.waitid(os.P_PID, run.workers[1].pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(UsageError, match=r"rank 1.*generation 1"):
        faults.inject(faults.find(run.root), "rank_killed", 1, seed=0)


@pytest.mark.parametrize(
    ("begin", "fault", "rank", "named"),
    [
        (lambda run: run.started().generation(), "rank_killed", 2, "0.*1"),
        (lambda run: run.started().generation(), "LOCK_GIL", 0, "outlast.chaos.inprocess"),
        (lambda run: run.started().generation(), "GPU_SLEEP", 0, "GPU_SLEEP"),
        (lambda run: run.started().generation(), "bit_flipped", -1, "/run/checkpoints"),
        (
            lambda run: run.started().generation(clock=time.monotonic() - 3600.0),
            "rank_killed",
            0,
            "pid .*rank 0",
        ),
        (lambda run: run.started(boot_id="another").generation(), "rank_killed", 0, "/run"),
        (lambda run: run.started().generation().ended(), "rank_killed", 0, "/run"),
        (lambda run: run, "rank_killed", 0, "/run"),
    ],
    ids=["no rank", "inside", "gpu", "no copy", "another process", "another boot", "ended", "no run"],
)
def test_what_cannot_be_injected_is_refused_and_kills_nobody(
    run: Run, begin: Callable[[Run], Run], fault: str, rank: int, named: str
) -> None:
    if fault == "GPU_SLEEP" and pytest.importorskip("torch").cuda.is_available():
        pytest.skip("this host has a CUDA device")
    begin(run)
    with pytest.raises(UsageError, match=named):
        commands.main(["inject", str(run.root), "--fault", fault, "--rank", str(rank)])
    assert [worker.poll() for worker in run.workers] == [None, None]


def test_a_job_of_one_node_has_none_to_name(run: Run) -> None:
    with pytest.raises(UsageError):
        faults.find(run.started().generation().root, "a")


def test_the_newest_committed_checkpoint_is_the_target(run: Run) -> None:
    for name, committed in (
        ("step-000000020.g1", True),
        ("step-000000100.g2", True),
        ("step-000000100.g10", True),
        ("step-000000120.g3", False),
    ):
        folder = run.root / "checkpoints" / name
        folder.mkdir(parents=True)
        if committed:
            (folder / "COMMIT").write_text("digest\n")
    run.started().generation()
    assert faults.newest_checkpoint(faults.find(run.root)).name == "step-000000100.g10"


def test_the_command_prints_what_it_did(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.started().generation()
    assert (
        commands.main(["inject", str(run.root), "--fault", "rank_killed", "--rank", "1", "--seed", "1"]) == 0
    )
    assert run.workers[1].wait(PATIENCE) == -signal.SIGKILL
    assert json.loads(capsys.readouterr().out)["fault"] == "rank_killed"


def test_an_unknown_fault_is_refused_with_the_list(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        commands.main(["inject", str(run.root), "--fault", "rank_kiled"])
    assert end.value.code == 2
    assert "rank_killed" in capsys.readouterr().err
