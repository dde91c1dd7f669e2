"""A node with something wrong is found unfit: real mounts, limits and ports, a stopped device check."""

from __future__ import annotations

import json
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from outlast import cli
from outlast.errors import ExitCode, NodeUnfit, UsageError
from outlast.health.agent import devices, preflight
from outlast.health.agent.preflight import PreflightOptions
from outlast.health.agent.probe import DeviceProbe
from outlast.health.policy.preflight import Check, Finding, Findings, Preflight, unfit
from outlast.ipc.processes import is_alive, state_of
from tests.support.launching import until

PATIENCE = 120.0
QUICK = ("--skip", "torch", "--limit", "memory_per_rank=1MiB")
NOBODY = 65534


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "outlast", "preflight", "--json", *map(str, arguments)]


def answer(words: list[str], prepare: Callable[[], None] | None = None) -> tuple[int, str]:
    """Run a preflight and return its exit code and the sentence of its last line."""
    run = subprocess.run(
        words, capture_output=True, text=True, timeout=PATIENCE, check=False, preexec_fn=prepare
    )
    assert run.stdout, run.stderr
    return run.returncode, json.loads(run.stdout.splitlines()[-1])["unfit"]


def mounted(*script: str) -> list[str]:
    """Return a command that runs after these shell lines, which mount things that nobody else sees."""
    return [
        "unshare",
        "--mount",
        "--propagation",
        "private",
        "sh",
        "-ec",
        "; ".join((*script, 'exec "$@"')),
        "sh",
    ]


@pytest.fixture(scope="module")
def may_mount() -> None:
    try:
        run = subprocess.run(
            [*mounted("mount -t tmpfs none /mnt"), "true"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except OSError as error:
        pytest.skip(f"unshare: {error}")
    if run.returncode:
        pytest.skip(f"nothing can be mounted here: {run.stderr.strip()}")


def quick(run_dir: Path, **options: object) -> str:
    """Return what the checks without torch say of this node."""
    made = PreflightOptions(run_dir, skip=frozenset({Check.TORCH}), environment=dict(os.environ), **options)  # type: ignore[arg-type]
    return unfit(preflight.quick(made, time.monotonic() + PATIENCE))


def test_a_good_node_is_fit_and_nothing_stays_behind(tmp_path: Path) -> None:
    code, why = answer(command("--run-dir", tmp_path, "--checkpoint-dir", tmp_path / "not" / "there", *QUICK))
    assert (code, why) == (ExitCode.OK, "")
    assert list(tmp_path.iterdir()) == []


def test_a_containers_shared_memory_is_too_small(may_mount: None, tmp_path: Path) -> None:
    small = mounted("mount -t tmpfs -o size=64m none /dev/shm")
    code, why = answer([*small, *command("--run-dir", tmp_path, *QUICK)])
    assert code == ExitCode.NODE_UNFIT
    assert re.match("shm: /dev/shm.*64 MiB.*1 GiB", why)


@pytest.mark.parametrize(
    ("option", "mount", "reason"),
    [
        ("--run-dir", "size=1m none {0}; cat /dev/zero > {0}/full 2>&- || true", "No space left on device"),
        ("--checkpoint-dir", "ro none {0}", "read-only"),
        ("--run-dir", "size=2g,nr_inodes=1 none {0}", "No space left on device"),
        ("--checkpoint-dir", "size=2g,nr_inodes=9 none {0}", " 8 "),
        ("--run-dir", "size=2m none {0}", "2 MiB"),
    ],
)
def test_a_file_system_that_is_of_no_use(
    may_mount: None, tmp_path: Path, option: str, mount: str, reason: str
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    other = ("--run-dir", tmp_path) if option == "--checkpoint-dir" else ()
    shell = mounted(f"mount -t tmpfs -o {mount.format(folder)}")
    code, why = answer([*shell, *command(option, folder, *other, *QUICK)])
    assert code == ExitCode.NODE_UNFIT
    assert why.startswith("disk: ")
    assert all(word in why for word in (reason, str(folder)))


def test_a_check_that_does_not_answer_costs_nothing_but_itself() -> None:
    goes_on = threading.Event()

    def blocked() -> Findings:
        goes_on.wait(PATIENCE)
        return []

    passed = Finding(Check.OPEN_FILES, True, "4096", "1024")
    tasks = [
        (Check.DISK, "the run folder", blocked),
        (Check.OPEN_FILES, "the limit", lambda: [passed]),
    ]
    try:
        first, second = preflight.in_parallel(tasks, time.monotonic() + 0.5)
    finally:
        goes_on.set()
    assert first.check is Check.DISK
    assert first.excludes
    assert "the run folder" in first.found
    assert second == replace(passed, seconds=second.seconds)


def test_a_port_that_another_process_has(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert re.match(f"ports: .*{port}", quick(tmp_path, ports=(port,)))
    assert quick(tmp_path, ports=(port,)) == ""


def test_names_that_do_not_lead_here(tmp_path: Path) -> None:
    for name in ("no-such-node.invalid", "192.0.2.1"):  # RFC 5737
        assert re.match(f"address: .*{name}", quick(tmp_path, address=name))
    assert quick(tmp_path, address="localhost") == ""


def test_a_clock_that_is_behind_the_run_folder(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    log.touch()
    assert quick(tmp_path) == ""
    os.utime(log, times=(time.time() + 3600,) * 2)
    assert quick(tmp_path).startswith("clock: ")


def test_fewer_open_files_than_linux_gives(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

    code, why = answer(command("--run-dir", tmp_path, *QUICK), limit)
    assert code == ExitCode.NODE_UNFIT
    assert re.match("open-files: 256.*1024", why)


def test_too_few_processes(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("another user's limit can only be set by root")

    script = f"""
import encodings.idna, os, resource, shutil, sys
from outlast import cli
from outlast.health.agent import command as preflight_command
resource.setrlimit(resource.RLIMIT_NPROC, (40, 40))
os.setuid({NOBODY})
sys.exit(cli.main(sys.argv[1:]))"""
    words = command("--run-dir", "/tmp", *QUICK)[3:]
    code, why = answer([sys.executable, "-c", script, *words])
    assert code == ExitCode.NODE_UNFIT
    assert why.startswith("processes: ")
    assert "64" in why


def test_the_memory_of_a_control_group(tmp_path: Path) -> None:
    group = Path("/sys/fs/cgroup/memory") / f"outlast-test-{os.getpid()}"
    most, bytes_of_limit = "memory.limit_in_bytes", 256 << 20
    if not group.parent.is_dir():
        group, most = Path("/sys/fs/cgroup") / group.name, "memory.max"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        if not (group / most).exists():
            pytest.skip("the memory controller is not on for new control groups")
        (group / most).write_text(str(bytes_of_limit))
        join = f'echo $$ > {group}/cgroup.procs; exec "$@"'
        words = ["sh", "-ec", join, "sh", *command("--run-dir", tmp_path, "--skip", "torch")]
        code, why = answer(words)
        assert code == ExitCode.NODE_UNFIT
        assert why.startswith("memory: 2")
        assert "512 MiB" in why
    finally:
        until(lambda: (group / "cgroup.procs").read_text() == "", "the control group to be empty")
        group.rmdir()


def test_another_number_of_gpus(tmp_path: Path) -> None:
    there = devices.gpu_count(dict(os.environ))
    why = quick(tmp_path, gpus=there + 1)
    assert re.match(f"devices: {there} .*{there + 1}", why)
    assert quick(tmp_path, gpus=there) == ""
    if not there:
        assert quick(tmp_path, nproc_per_node="gpu").startswith("devices: ")


def test_the_device_check_of_this_node(tmp_path: Path) -> None:
    options = PreflightOptions(
        tmp_path,
        nproc_per_node="cpu",
        skip=frozenset(Check) - {Check.TORCH, Check.COMPUTE},
        environment=dict(os.environ),
    )
    assert preflight.examine(options, time.monotonic() + PATIENCE) == ""
    findings = preflight.finish(options, preflight.begin(options), time.monotonic() + PATIENCE)
    assert [one.check for one in findings] == [Check.TORCH, Check.COMPUTE]
    assert findings[1].ok


def test_a_gpu_is_asked_for_and_torch_sees_none(tmp_path: Path) -> None:
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    options = PreflightOptions(tmp_path, gpus=1, environment=hidden)
    why = unfit(preflight.finish(options, preflight.begin(options), time.monotonic() + PATIENCE))
    assert why.startswith("compute: cuda: torch ")


@pytest.mark.parametrize("stopped_in", ["its start", "the import"])
def test_a_device_check_that_is_stopped_is_killed_and_named(stopped_in: str) -> None:
    probe = DeviceProbe("cpu", dict(os.environ))
    if stopped_in == "the import":
        until(lambda: b"torch" in Path(f"/proc/{probe.pid}/maps").read_bytes(), "the import of torch")
    os.kill(probe.pid, signal.SIGSTOP)
    until(lambda: state_of(probe.pid) == "T", "the child to be stopped")
    (finding,) = probe.result(time.monotonic() + 1, Preflight())
    assert finding.excludes
    assert not is_alive(probe.pid)


def test_a_device_check_can_be_waited_for_or_given_up() -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    probe = DeviceProbe("none", dict(os.environ))
    assert select.select([probe], [], [], PATIENCE)[0] == [probe]
    (finding,) = probe.result(time.monotonic(), Preflight())
    assert finding.check is Check.TORCH
    assert finding.ok
    given_up = DeviceProbe("cpu", dict(os.environ))
    given_up.close()
    assert not is_alive(given_up.pid)
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_a_device_check_that_dies_of_a_signal_is_a_finding(tmp_path: Path) -> None:
    options = PreflightOptions(tmp_path, environment=dict(os.environ))
    probe = preflight.begin(options)
    assert isinstance(probe, DeviceProbe)
    os.kill(probe.pid, signal.SIGSEGV)
    why = unfit(preflight.finish(options, probe, time.monotonic() + PATIENCE))
    assert re.match("torch: .*SIGSEGV", why)


def test_a_torch_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "raise ImportError('libcudart.so.12: cannot open shared object file')\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    options = PreflightOptions(tmp_path, environment={**os.environ, "PYTHONPATH": path})
    why = unfit(preflight.finish(options, preflight.begin(options), time.monotonic() + PATIENCE))
    assert re.match(r"torch: .*1.*ImportError: libcudart\.so\.12: cannot open", why)


def test_the_device_check_dies_with_who_started_it(tmp_path: Path) -> None:
    script = (
        "import os, signal; from outlast.health.agent.probe import DeviceProbe;"
        "p = DeviceProbe('cpu', dict(os.environ)); print(p.pid, flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        starter.kill()
        until(lambda: not is_alive(pid), "the device check to end with its parent")


@pytest.mark.parametrize(
    "words",
    [
        ["--skip", "shm", "--limit", "shm_size=1MiB"],
        ["--skip", "torch", "--limit", "device_free=0.5"],
        ["--skip", "ports", "--port", "29500"],
        ["--skip", "address", "--address", "localhost"],
        ["--skip", "devices", "--gpus", "1"],
        ["--skip", "disk", "--checkpoint-dir", "x"],
        ["--limit", "bandwidth=1"],
        ["--limit", "speed=1"],
        ["--port", "70000"],
        ["--token-file", "x"],
        ["--bandwidth-mib", "1"],
        ["--bandwidth-to", ":5000"],
        ["--bandwidth-to", "127.0.0.1:5000", "--bandwidth-mib", "0"],
        ["--bandwidth-to", "127.0.0.1:5000", "--token-file", "/no/such/file"],
    ],
    ids=" ".join,
)
def test_an_option_that_cannot_take_effect_is_refused(words: list[str]) -> None:
    assert cli.main(["preflight", *words]) == ExitCode.USAGE
    with pytest.raises(UsageError):
        cli.COMMANDS["preflight"](words)


def test_people_get_a_table_and_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--run-dir", str(tmp_path), *QUICK, "--limit", "open_files=1e9"]
    with pytest.raises(NodeUnfit, match=r"open-files: \d+"):
        cli.COMMANDS["preflight"](words)
    shown = capsys.readouterr().out
    assert "FAILED" in shown
    assert "disk" in shown
