"""Each mistake in a batch file is found in its line, and a file without mistakes is left alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outlast import cli
from outlast.integrations.findings import Level
from outlast.integrations.slurm.lint import lint

GOOD = """\
#!/bin/bash
#SBATCH --nodes=4 --ntasks-per-node=1
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append

export NCCL_DEBUG=WARN   # a comment | with a pipe
rc=0
srun outlast run --nproc-per-node=8 \\
    train.py --lr 1e-3 || rc=$?
if [ "${SLURM_RESTART_COUNT:-0}" -lt 10 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $rc
"""
STEP = "srun outlast run --nproc-per-node=8 \\\n    train.py --lr 1e-3 || rc=$?\n"
SIGNAL = "#SBATCH --signal=TERM@300\n"
REQUEUE = 'if [ "${SLURM_RESTART_COUNT:-0}" -lt 10 ]; then scontrol requeue "$SLURM_JOB_ID"; fi\n'

CASES = [
    ("#!/bin/bash\n", "", 1, "no-shebang"),
    ("#SBATCH --requeue\n", "", 5, "no-requeue"),
    ("--requeue\n", "--no-requeue\n", 5, "no-requeue"),
    ("#SBATCH --open-mode=append\n", "", 5, "no-append"),
    ("=append", "=truncate", 6, "no-append"),
    (SIGNAL, "", 5, "no-signal"),
    ("TERM@300", "TERM@45", 4, "short-lead"),
    ("TERM@300", "TERM", 4, "short-lead"),
    ("TERM@300", "TREM@300", 4, "unknown-signal"),
    ("24:00:00", "5:00", 4, "long-lead"),
    ("TERM@300", "B:TERM@300", 4, "signal-to-shell-only"),
    ("TERM@300", "B:SIGTERM@300", 4, "signal-to-shell-only"),
    ("--ntasks-per-node=1", "--ntasks-per-node=8", 2, "agents"),
    ("--ntasks-per-node=1", "--ntasks=32", 2, "agents"),
    ("--ntasks-per-node=1", "-n 32", 2, "agents"),
    ("srun outlast", "srun --ntasks-per-node=8 outlast", 2, "agents"),
    ("srun outlast run", "outlast run", 10, "no-srun"),
    ("|| rc=$?", "|| true", 10, "status-lost"),
    ("|| rc=$?", "| tee log", 10, "status-lost"),
    ("|| rc=$?", "&", 10, "no-wait"),
    (f"|| rc=$?\n{REQUEUE}exit $rc\n", "\necho done\n", 10, "status-lost"),
    (REQUEUE, "", 10, "never-requeued"),
    ('if [ "${SLURM_RESTART_COUNT:-0}" -lt 10 ]; then ', "if true; then ", 12, "unbounded-requeue"),
    ("rc=0\n", "#SBATCH --mem=1G\nrc=0\n", 9, "late-directive"),
    ("#SBATCH --requeue", "#SBATCH --requeue\n# SBATCH --mem=1G", 6, "no-directive"),
    ("--time=24:00:00", "--time=24:00:00 --output=$HOME/x", 3, "variable-in-directive"),
    ("rc=0", "CKPT_DIR=/scratch/$(date +%F)", 9, "moving-folder"),
    ("train.py --lr", "train.py --save-dir=run-$RANDOM --lr", 11, "moving-folder"),
    ("srun outlast", "srun --kill-on-bad-exit=1 outlast", 10, "kill-on-bad-exit"),
    ("srun outlast", "srun -K outlast", 10, "kill-on-bad-exit"),
    ("--time=24", "--cpus-per-task=8 --time=24", 10, "cpus-per-task"),
    ("\n", "\r\n", 1, "dos-lines"),
    ("outlast run", "torchrun", 10, "torchrun-kills"),
    ("outlast run", "python -m torch.distributed.run", 10, "torchrun-kills"),
]


def found(text: str) -> set[tuple[int, str]]:
    return {(one.line, one.rule) for one in lint(text)}


def test_nothing_is_found_in_a_good_file() -> None:
    assert lint(GOOD) == []


@pytest.mark.parametrize(("old", "new", "line", "rule"), CASES)
def test_a_planted_mistake_is_found(old: str, new: str, line: int, rule: str) -> None:
    assert old in GOOD
    assert (line, rule) in found(GOOD.replace(old, new))


def test_set_e_in_front_of_a_look_at_the_status_is_found() -> None:
    text = GOOD.replace("rc=0\n", "set -e\n").replace("|| rc=$?\n", "\nrc=$?\n")
    assert (12, "set-e") in found(text)
    assert "set-e" not in {rule for _, rule in found(GOOD.replace("rc=0\n", "set -e; rc=0\n"))}


def test_a_trap_with_the_command_in_the_background_is_right() -> None:
    text = GOOD.replace("TERM@300", "B:USR1@300").replace("|| rc=$?", "&\npid=$!\nwait $pid || rc=$?")
    text = text.replace("rc=0\n", "trap 'scancel --signal=TERM $SLURM_JOB_ID.0' USR1\n")
    assert found(text) == set()


def test_a_trap_with_the_command_in_the_foreground_comes_too_late() -> None:
    text = GOOD.replace("TERM@300", "B:USR1@300").replace("rc=0\n", "trap 'touch stop' SIGUSR1; rc=0\n")
    assert found(text) == {(9, "trap-too-late")}


def test_a_program_without_srun_and_exec_never_gets_the_shells_signal() -> None:
    text = GOOD.replace("--nodes=4", "--nodes=1").replace("TERM@300", "B:TERM@300")
    text = text.replace(STEP, "python train.py\n")
    assert (4, "no-exec") in found(text)
    assert (4, "no-exec") not in found(text.replace("python train.py", "exec python train.py"))


def test_exec_srun_is_killed_by_the_shells_sigterm() -> None:
    text = GOOD.replace("TERM@300", "B:TERM@300").replace(STEP, "exec srun outlast run train.py\n")
    assert (4, "signal-to-shell-only") in found(text)


def test_torchrun_dies_of_usr1() -> None:
    text = GOOD.replace("outlast run", "torchrun").replace("TERM@300", "USR1@300")
    assert (10, "torchrun-dies") in found(text)
    kept = text.replace("torchrun", "torchrun --signals-to-handle=SIGUSR1 --shutdown-timeout=280")
    assert found(kept) == set()


def test_text_in_a_here_document_is_no_command() -> None:
    body = "cat > x.sh <<'END'\nsrun train.py | tee log\n#SBATCH --mem=1\nEND\n"
    assert found(GOOD.replace("rc=0\n", f"{body}rc=0\n")) == set()


def test_a_supervised_file_needs_neither_srun_nor_requeue_call() -> None:
    text = GOOD[: GOOD.index("rc=0")] + "exec outlast slurm supervise --run-dir /x -- train.py\n"
    assert found(text) == set()


@pytest.mark.parametrize(
    "text", ["", "\n", "#!/bin/bash\n", "#!/bin/bash\nsrun 'x\n", "\0\\", "#SBATCH\n#SBATCH -\n"]
)
def test_no_text_makes_it_fail(text: str) -> None:
    assert all(one.because and one.fix for one in lint(text))


def test_every_finding_says_what_follows_and_what_to_write() -> None:
    found = [one for old, new, _, _ in CASES for one in lint(GOOD.replace(old, new))]
    assert all(one.what and one.because and one.fix for one in found)


def test_the_command_ends_with_1_on_errors_and_with_strict_on_warnings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, warned, bad = tmp_path / "good", tmp_path / "warned", tmp_path / "bad"
    good.write_text(GOOD)
    warned.write_text(GOOD.replace("srun outlast", "srun -K outlast"))
    bad.write_text(GOOD.replace("#SBATCH --requeue\n", ""))
    assert [cli.main(["slurm", "lint", str(file)]) for file in (good, warned, bad)] == [0, 0, 1]
    assert cli.main(["slurm", "lint", "--strict", str(warned)]) == 1
    capsys.readouterr()
    assert cli.main(["slurm", "lint", "--json", str(bad)]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert (shown["line"], shown["rule"], shown["level"]) == (5, "no-requeue", Level.ERROR.value)
    assert cli.main(["slurm", "lint", str(tmp_path / "absent")]) == 2
