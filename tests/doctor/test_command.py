"""Twenty and more misconfigurations that are really there: the command finds each."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from outlast.doctor import host
from outlast.doctor.policy import CURES
from outlast.ipc.limits import processor_limit
from outlast.observe.policy import codec
from outlast.observe.run_folder import RunFolder
from outlast.recovery.policy.events import FirstStep, Progress, Record, Saved
from tests.health.jobs.test_preflight import mounted
from tests.integrations.kubernetes.test_lint import GOOD as MANIFEST
from tests.integrations.slurm.test_lint import GOOD as BATCH
from tests.support import nvml_library
from tests.support.launching import until

WITHIN = 100.0
SLOW = ("torch", "compute", "write", "saving", "timeouts", "bandwidth")
REHEARSED = ("start", "preemption", "damaged-copy", "crash", "hang", "leftovers")
THIS_MACHINE = {"address", "clock", "ptrace"}  # warnings here that say something true: its host name, no NTP
FAST = [name for name in CURES if name not in (*SLOW, *REHEARSED)]


class Doctor:
    """Runs ``outlast doctor`` in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"

    def file(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        return path

    def log(self, *records: Record) -> None:
        """Leave an event log of an earlier run."""
        self.run_dir.mkdir()
        lines = "".join(f"{codec.encode(one)}\n" for one in records)
        RunFolder(self.run_dir).events.write_text("half a line\n" + lines)

    def command(self, checks: Sequence[str], *words: object) -> list[str]:
        chosen = [word for name in checks for word in ("--check", name)]
        options = ["--json", "--no-rehearsal", "--run-dir", str(self.run_dir), *chosen, *map(str, words)]
        return [sys.executable, "-m", "outlast", "doctor", *options]

    def found(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> list[dict[str, Any]]:
        """Return what is wrong; the exit code has to agree."""
        variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        done = subprocess.run(
            command,
            cwd=self.folder,
            env={**variables, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=WITHIN,
            check=False,
        )
        assert done.returncode in (0, 69), done.stderr
        wrong = [one for one in map(json.loads, done.stdout.splitlines()) if not one["ok"]]
        assert done.returncode == (69 if any(one["level"] == "error" for one in wrong) else 0)
        assert all(one["cure"] and one["expected"] for one in wrong)
        return wrong

    def only(
        self, check: str, *words: object, environment: Mapping[str, str] | None = None, by: Sequence[str] = ()
    ) -> str:
        """Return the one thing that is wrong in a check."""
        [one] = self.found([*by, *self.command([check], *words)], environment)
        assert one["check"] == check
        return str(one["found"])


@pytest.fixture
def doctor(tmp_path: Path) -> Doctor:
    return Doctor(tmp_path)


@pytest.fixture(scope="module")
def may_mount() -> None:
    done = subprocess.run([*mounted("true"), "true"], capture_output=True, timeout=WITHIN, check=False)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.decode(errors='replace')}")


def shell(line: str) -> list[str]:
    return ["bash", "-c", f'{line}; exec "$@"', "bash"]


def test_nothing_is_reported_where_nothing_is_wrong(doctor: Doctor) -> None:
    script = doctor.file("train.py", "import torch\nmodel = DDP(net, find_unused_parameters=True)\n")
    files = ("--job-file", doctor.file("job.sh", BATCH), "--job-file", doctor.file("job.yaml", MANIFEST))
    config = ("--config", doctor.file("outlast.toml", "[fault_tolerance]\nrank_heartbeat_timeout = 60.0\n"))
    wrong = doctor.found(doctor.command(FAST, *files, *config, script))
    assert [one for one in wrong if one["check"] not in THIS_MACHINE] == []


VARIABLES = {
    "NCCL_DEUBG": ("INFO", "environment", "NCCL_DEBUG"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("0", "environment", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    "GLOO_SOCKET_IFNAME": ("eth97", "interfaces", "GLOO_SOCKET_IFNAME=eth97"),
    "NCCL_SOCKET_IFNAME": ("=l", "interfaces", "NCCL_SOCKET_IFNAME==l"),
    "TMPDIR": ("/nowhere/tmp", "scratch", "/nowhere/tmp"),
    "HF_HOME": ("/dev/null", "caches", "/dev/null"),
    "OMP_NUM_THREADS": ("4096", "processors", "4096"),
}


def test_variables(doctor: Doctor) -> None:
    checks = sorted({check for _, check, _ in VARIABLES.values()})
    wrong = doctor.found(doctor.command(checks), {name: value for name, (value, *_) in VARIABLES.items()})
    for _, check, named in VARIABLES.values():
        assert [one for one in wrong if one["check"] == check and named in one["found"]], named
    assert len(wrong) == len(VARIABLES)


def test_a_limit(doctor: Doctor) -> None:
    assert "256" in doctor.only("open-files", by=shell("ulimit -Sn 256"))
    one = shell('exec taskset -c 0 $0 -c \'exec "$@"\' bash "$@"')
    assert doctor.only("processors", "--nproc-per-node", "2", by=one).startswith("1 ")


@pytest.mark.parametrize(
    ("check", "mount", "named", "variable"),
    [
        ("disk", "mount -t tmpfs -o size=1m none {0}; cat /dev/zero > {0}/full 2>&- || true", "No space", ""),
        ("rename", "mount -t tmpfs -o ro none {0}", "Read-only file system", ""),
        ("shm", "mount -t tmpfs -o size=64m none /dev/shm", "64 MiB", ""),
        ("scratch", "mount -t tmpfs -o noexec none {0}", "noexec", "TMPDIR"),
        ("caches", "mount -t tmpfs -o ro none {0}", "Read-only file system", "HF_HOME"),
    ],
)
def test_a_file_system(
    may_mount: None, doctor: Doctor, check: str, mount: str, named: str, variable: str
) -> None:
    doctor.run_dir.mkdir()
    command = [*mounted(mount.format(doctor.run_dir)), *doctor.command([check])]
    wrong = doctor.found(command, {variable: str(doctor.run_dir)} if variable else {})
    assert {one["check"] for one in wrong} == {check}
    assert any(named in one["found"] for one in wrong)


def test_core_files_without_room(may_mount: None, doctor: Doctor) -> None:
    if Path("/proc/sys/kernel/core_pattern").read_text().startswith(("|", "/")):
        pytest.skip("core files of this machine do not go to the working directory")
    small = f"mount -t tmpfs -o size=1m none {doctor.folder}; cd {doctor.folder}; ulimit -c unlimited"
    assert str(doctor.folder) in doctor.only("core-files", by=mounted(small))


@pytest.fixture
def half_a_processor() -> Iterator[Path]:
    folder = Path("/sys/fs/cgroup/cpu") / f"doctor-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "cpu.cfs_quota_us").write_text("50000")
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no control group of version 1 can be made: {error}")
    yield folder
    until(lambda: (folder / "cgroup.procs").read_text() == "", "the control group to be empty")
    folder.rmdir()


def test_a_cpu_limit_below_the_ranks(doctor: Doctor, half_a_processor: Path) -> None:
    line = f"echo $$ > {half_a_processor}/cgroup.procs"
    assert doctor.only("processors", "--nproc-per-node", "1", by=shell(line)).startswith("0.5 ")


def test_a_taken_port_and_a_folder_in_use(doctor: Doctor) -> None:
    folder = RunFolder(doctor.run_dir)
    folder.claim()
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        wrong = doctor.found(doctor.command(["ports", "run-folder"], "--port", port))
    folder.release()
    assert {one["check"] for one in wrong} == {"ports", "run-folder"}
    assert str(os.getpid()) in next(one["found"] for one in wrong if one["check"] == "run-folder")


@pytest.mark.parametrize(
    ("check", "text", "line"),
    [
        ("script", "for step in range(3)\n    pass\n", "line 1"),
        ("ddp", "\nmodel = nn.parallel.DistributedDataParallel(net)\n", "line 2"),
        ("ddp", "model = DDP(net, find_unused_parameters=True, static_graph=True)\n", "line 1"),
    ],
)
def test_a_script(doctor: Doctor, check: str, text: str, line: str) -> None:
    assert line in doctor.only(check, doctor.file("train.py", text))


def test_a_file_beside_the_script_that_hides_a_module(doctor: Doctor) -> None:
    (doctor.folder / "code").mkdir()
    doctor.file("code/queue.py", "")
    assert "queue.py" in doctor.only("modules", doctor.file("code/train.py", "import queue\n"))


TOO_SHORT = """\
[fault_tolerance]
rank_heartbeat_timeout = 3.0
rank_section_timeouts = {checkpointing = 2.0}
[checkpoints]
save_interval_seconds = 1.0
"""


def test_a_configuration_and_what_the_run_before_measured(doctor: Doctor) -> None:
    wrong_key = doctor.file("wrong.toml", "[fault_tolerance]\nmax_restart = 3\n")
    assert "max_restart" in doctor.only("config", "--config", wrong_key)
    saved = Saved(0.0, 120.0, 1, 11, "step-000000011.g1", 1 << 40, 1.5, "due")
    steps = [Progress(0.0, clock, 1, number) for clock, number in ((110.0, 6), (130.0, 16))]
    doctor.log(FirstStep(0.0, 100.0, 1, 1, {}), steps[0], saved, steps[1])
    config = doctor.file("outlast.toml", TOO_SHORT)
    wrong = doctor.found(doctor.command(["timeouts", "saving"], "--config", config))
    for check, named in (("timeouts", " 2 s"), ("timeouts", " 1.5 s"), ("saving", "1 TiB")):
        assert any(named in one["found"] and one["check"] == check for one in wrong), named


@pytest.mark.parametrize(
    ("check", "text", "old", "new", "named"),
    [
        ("slurm", BATCH, "#SBATCH --signal=TERM@300\n", "", "--signal"),
        ("slurm", BATCH, "--requeue\n", "--no-requeue\n", "--no-requeue"),
        ("kubernetes", MANIFEST, "terminationGracePeriodSeconds: 180", "hostname: x", "30 s"),
    ],
)
def test_a_file_of_the_scheduler(
    doctor: Doctor, check: str, text: str, old: str, new: str, named: str
) -> None:
    assert old in text
    assert named in doctor.only(check, "--job-file", doctor.file("job", text.replace(old, new)))


def test_the_batch_file_of_this_slurm_job_is_looked_at(doctor: Doctor) -> None:
    doctor.file("batch", BATCH.replace("--requeue\n", "--no-requeue\n"))
    scontrol = doctor.file("scontrol", "#!/bin/sh\n[ \"$*\" = 'write batch_script 7 -' ] && cat batch\n")
    scontrol.chmod(0o755)
    found = {"PATH": f"{doctor.folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    assert doctor.only("slurm", environment=found).startswith("job 7:5: ")


def test_a_job_that_the_scheduler_kills_before_its_own_deadline(doctor: Doctor) -> None:
    config = doctor.file("outlast.toml", "[preemption]\npreempt_time = 600.0\n")
    words = ("timeouts", "--config", config)
    assert " 300 s" in doctor.only(*words, "--job-file", doctor.file("job.sh", BATCH))
    assert " 30 s" in doctor.only(*words, environment={"OUTLAST_GRACE_PERIOD": "30"})


def test_a_gpu_with_errors(doctor: Doctor) -> None:
    driver = nvml_library.StandIn(doctor.folder)
    driver.put(-1, count=1)
    driver.put(0, ecc_uncorrected=3, remap_pending=1)
    wrong = doctor.found(doctor.command(["driver"]), driver.environment)
    assert [one["found"].startswith("GPU 0: ") for one in wrong] == [True, True]
    assert " 3 " in wrong[0]["found"]


def test_what_cannot_be_changed_here_is_read_from_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "overcommit").write_text("2\n")
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(host.resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    assert not host.overcommit(tmp_path / "overcommit")[0].ok
    assert host.overcommit(tmp_path / "none")[0].ok
    assert host.locked_memory(tmp_path)[0].fails
    assert host.locked_memory(tmp_path / "none")[0].ok


def test_a_cpu_limit_of_version_2_and_the_one_above_it(tmp_path: Path) -> None:
    process, unified = tmp_path / "proc", tmp_path / "unified"
    (unified / "job/step").mkdir(parents=True)
    process.mkdir()
    (process / "mountinfo").write_text(f"30 25 0:26 / {unified} rw - cgroup2 cgroup2 rw\n")
    (process / "cgroup").write_text("0::/job/step\n")
    (unified / "job/step/cpu.max").write_text("max 100000\n")
    assert processor_limit(process) == 0
    (unified / "job/cpu.max").write_text("150000 100000\n")
    assert processor_limit(process) == 1.5


def test_a_check_that_is_not_known_is_refused(doctor: Doctor) -> None:
    done = subprocess.run(doctor.command(["shmem"]), capture_output=True, timeout=WITHIN, check=False)
    assert done.returncode == 2
