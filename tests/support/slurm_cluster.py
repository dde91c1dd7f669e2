"""A real Slurm of several virtual nodes on this machine, with daemons, keys and ports of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from tests.support.launching import until
from tests.support.ports import free_port

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "squeue", "scancel")
PACKAGES = "slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge"
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
NODES = 2

# A requeued job waits for cred_expire (5 is the least); SIGKILL comes KillWait after SIGTERM. A node that an
# administrator sets down stays down: back at once, it would still run the job that Slurm gives it again, and
# Slurm would hold that job ("Duplicate jobid").
CONFIGURATION = """
ClusterName=outlast
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
SwitchType=switch/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
StateSaveLocation={root}/state
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmdSpoolDir={root}/spool.%n
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.%n.log
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,sched_min_interval=0
ReturnToService=1
JobRequeue=0
KillWait=10
MinJobAge=600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""


def missing() -> str:
    """Return why no cluster can be started here; empty when one can."""
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    absent = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if absent:
        return f"no {', '.join(absent)}: apt-get install {PACKAGES}"
    try:
        socket.gethostbyname(socket.gethostname())
    except OSError:
        return f"the name of this host, {socket.gethostname()}, does not resolve"
    return ""


class SlurmCluster:
    """The daemons in the foreground, as children of the test; a context manager that ends exactly them."""

    def __init__(self, root: Path, nodes: int = NODES) -> None:
        self.root = root
        self.nodes = nodes
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
            "PATH": PATH,
            "SLURM_CONF": str(root / "slurm.conf"),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> SlurmCluster:
        try:
            self._configure()
            self._start_all()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if len(self._daemons) > 1:
            jobs = self.ask("squeue", "-h", "-o", "%A", check=False).split()
            for job in jobs:
                self.ask("scancel", "--full", job, check=False)
            until(lambda: not self.ask("squeue", "-h", check=False).strip(), "the jobs to end")
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(20)

    def _configure(self) -> None:
        controller, *ports = (free_port() for _ in range(self.nodes + 1))
        host = socket.gethostname().partition(".")[0]
        for name in ("state", "munge"):
            (self.root / name).mkdir(mode=0o755)
        key = self.root / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        lines = [CONFIGURATION.format(host=host, root=self.root, controller=controller)]
        for number, port in enumerate(ports, 1):
            lines.append(f"NodeName=node{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8")
        lines.append("PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=20 State=UP")
        lines.append("PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF State=UP")
        (self.root / "slurm.conf").write_text("\n".join(lines) + "\n")
        (self.root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")

    def _start_all(self) -> None:
        munge = self.root / "munge" / "socket"
        files = {"key-file": self.root / "munge.key", "socket": munge, "pid-file": self.root / "munged.pid"}
        files |= {"seed-file": self.root / "munge.seed", "log-file": self.root / "munged.log"}
        self._start(
            "munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in files.items())
        )
        until(munge.exists, "munged")
        self._start("slurmctld", "-D", "-c")
        for number in range(1, self.nodes + 1):
            self._start("slurmd", "-D", "-N", f"node{number}")
        idle = ("sinfo", "-h", "-p", "low", "-t", "idle", "-o", "%D")
        until(lambda: self.ask(*idle, check=False).strip() == str(self.nodes), f"{self.nodes} idle nodes")

    def _start(self, *command: str) -> None:
        with open(self.root / "daemons.log", "ab") as log:
            program = shutil.which(command[0], path=PATH) or command[0]
            started = subprocess.Popen([program, *command[1:]], stdout=log, stderr=log, env=self.environment)
        self._daemons.append(started)

    def ask(self, *command: str, check: bool = True) -> str:
        """Run a program with this cluster as its Slurm and return what it prints."""
        run = subprocess.run(
            command, capture_output=True, text=True, env=self.environment, timeout=60, check=False
        )
        assert run.returncode == 0 or not check, f"{command}: {run.stderr}"
        return run.stdout

    def job(self, job_id: str) -> dict[str, str]:
        """Return a job's fields as ``scontrol`` shows them."""
        shown = self.ask("scontrol", "show", "job", "-o", job_id).split()
        return dict(word.split("=", 1) for word in shown if "=" in word)
