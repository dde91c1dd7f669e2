"""The doctor on this machine, with faults that are really there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from outlast.doctor import agent, command
from outlast.observe.run_folder import RunFolder

WITHIN = 100.0


def examined(run_dir: Path, script: Path | None = None, **environment: str) -> dict[str, agent.Diagnosis]:
    wanted = agent.checks(agent.Disk.of(run_dir), run_dir, script, environment)
    return {one.check: one for one in agent.examine(wanted, time.monotonic() + WITHIN)}


def test_a_healthy_folder_and_script_need_no_cure_and_nothing_is_left(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("# -*- coding: latin-1 -*-\nprint('fit')\n", encoding="latin-1")
    (tmp_path / "link.py").symlink_to(script)
    found = examined(tmp_path / "run", tmp_path / "link.py", PATH="/bin", NCCL_DEBUG="WARN")
    found.pop("ptrace")  # the kernel's setting is this machine's
    found.pop("write")  # and so is its disk
    assert [name for name, one in found.items() if not one.ok] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.py", "train.py"]


def test_a_folder_of_a_living_launcher_is_named_and_its_lock_is_not_touched(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.claim()
    assert f"pid {os.getpid()}" in examined(tmp_path / "run")["run-folder"].found
    folder.release()
    (tmp_path / "run" / "lock").write_text(f"{os.getpid()}\n")  # of a killed launcher; the pid is used again
    assert examined(tmp_path / "run")["run-folder"].ok


def test_the_lock_of_this_node_and_of_the_folder_of_the_script_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "run", "n7")
    folder.claim()
    assert examined(tmp_path / "run", OUTLAST_NODE="n7")["run-folder"].fails
    unnamed = agent.checks(agent.Disk(tmp_path), tmp_path / "run", None, {"OUTLAST_NODE": "n7"}, named=False)
    found = {one.check: one for one in agent.examine(unnamed, time.monotonic() + WITHIN)}["run-folder"]
    assert (found.ok, found.fails) == (False, False)  # outlast run makes a folder beside it
    assert examined(tmp_path / "run", OUTLAST_NODE="n8")["run-folder"].ok
    folder.release()
    monkeypatch.chdir(tmp_path)
    assert command.default_folder(Path("code/train.py")) == Path("outlast-runs/train")
    assert command.default_folder(None) == Path("outlast-runs")


def test_a_file_system_that_takes_no_files_fails_every_check_of_it() -> None:
    found = examined(Path("/proc/run"))
    assert [name for name, one in found.items() if one.fails] == ["rename", "lock", "write"]


def test_a_torn_replacement_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copied(source: Path, target: Path) -> None:  # as a file system without atomic renames does it
        target.write_bytes(b"")
        time.sleep(0.01)
        target.write_bytes(source.read_bytes())

    monkeypatch.setattr(os, "replace", copied)
    torn = examined(tmp_path)["rename"]
    assert torn.fails
    assert "0 bytes" in torn.found


def test_misspelt_variables_are_named_with_what_is_meant_and_others_are_not() -> None:
    given = {"NCCL_DEUBG": "INFO", "OUTLAST_NODDE": "n1", "MASTER_ADDRESSES": "x", "HOME": "/"}
    found = agent.variables(given)
    pairs = [("OUTLAST_NODDE", "OUTLAST_NODE"), ("NCCL_DEUBG", "NCCL_DEBUG")]
    assert [set(re.findall(r"[A-Z]+_[A-Z]+", one.found)) for one in found] == [set(pair) for pair in pairs]
    others = (
        "NCCL_IB_TIMEOUT NCCL_ASYNC_ERROR_HANDLING NCCL_BLOCKING_WAIT PYTORCH_ALLOC_CONF MKL_NUM_THREADS"
        " NCCL_SHM_DISABLE NCCL_NET_GDR_LEVEL NCCL_SOCKET_FAMILY TP_SOCKET_IFNAME NCCL_DEBUG_FILE LOCAL_RANK"
        " NCCL_NVLS_ENABLE NCCL_IB_GID_INDEX TORCH_NCCL_DESYNC_DEBUG TORCH_SHOW_CPP_STACKTRACES WORLD_SIZE"
        " PYTORCH_HIP_ALLOC_CONF PYTORCH_NPU_ALLOC_CONF RCCL_DEBUG HCCL_SOCKET_IFNAME CCL_SOCKET_IFNAME"
        " TORCH_XCCL_BLOCKING_WAIT MUSA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES RCCL_IB_HCA"
    )
    assert [one.ok for one in agent.variables(dict.fromkeys(others.split(), "2"))] == [True]


def test_a_ptrace_scope_is_read_where_the_kernel_has_one(tmp_path: Path) -> None:
    (tmp_path / "scope").write_text("3\n")
    assert not agent.tracing(tmp_path / "scope")[0].ok
    assert agent.tracing(tmp_path / "none")[0].ok


def test_a_check_that_hangs_ends_the_others_in_time(tmp_path: Path) -> None:
    never = threading.Event()

    def hang() -> list[agent.Diagnosis]:
        never.wait(WITHIN)
        return []

    found = agent.examine([("lock", lambda: agent.lock(tmp_path)), ("disk", hang)], time.monotonic() + 2.0)
    never.set()
    assert [(one.check, one.ok) for one in found] == [("lock", True), ("disk", False)]


def test_a_check_that_is_interrupted_leaves_no_file(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from outlast.doctor import agent\n"
        "place = Path(sys.argv[1])\n"
        "agent._REPLACED = 10**9; agent._WRITTEN = 1 << 50\n"
        "wanted = agent.checks(agent.Disk(place), place, None, {})\n"
        "wanted = [one for one in wanted if one[0] == sys.argv[2]]\n"
        "agent.examine(wanted, time.monotonic() + 100)"
    )
    for name in ("rename", "write"):
        place = tmp_path / name
        place.mkdir()
        began = place.stat().st_mtime_ns
        with subprocess.Popen([sys.executable, "-c", code, place, name], stderr=subprocess.DEVNULL) as doctor:
            deadline = time.monotonic() + WITHIN
            while place.stat().st_mtime_ns == began and time.monotonic() < deadline:
                time.sleep(0.01)
            doctor.send_signal(signal.SIGINT)
            doctor.wait(WITHIN)
        assert list(place.iterdir()) == []
