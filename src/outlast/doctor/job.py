"""What ``outlast doctor`` reads of a job: its configuration, its earlier run, its scheduler's file."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from outlast import settings
from outlast.config import Config
from outlast.doctor import policy
from outlast.doctor.policy import Diagnosis, Measured
from outlast.errors import ConfigError, OutlastError
from outlast.files import open_regular, read_whole
from outlast.health.policy.preflight import Level
from outlast.integrations import findings
from outlast.integrations.kubernetes.lint import lint as lint_manifest
from outlast.integrations.slurm.lint import lint as lint_batch
from outlast.observe.policy import codec
from outlast.observe.run_folder import RunFolder
from outlast.recovery.policy.events import Record

_MOST_FILE = 16 << 20
_MOST_LOG = 8 << 20  # bytes of the end of an event log
_GRACES = (
    re.compile(r"terminationGracePeriodSeconds['\"]?\s*:\s*(\d+)"),
    re.compile(r"^#SBATCH\s.*--signal[= ](?:[RB]*:)?\w+@(\d+)", re.MULTILINE),
)
_PATIENCE = 10.0  # seconds for scontrol


def configuration(path: Path | None) -> tuple[Config, Sequence[Diagnosis]]:
    """Read a configuration as ``outlast run`` does; where it is wrong, defaults and what is wrong."""
    expected = "keys and values that outlast run takes"
    try:
        config = settings.load_config(path, {})
    except ConfigError as error:
        return Config(), [
            policy.judged("config", False, f"{path}: {one}", expected, Level.ERROR) for one in error.problems
        ]
    told = "defaults" if path is None else f"{path}: can be used"
    return config, [policy.judged("config", True, told, expected)]


def earlier(run_dir: Path) -> Measured:
    """Return what the run in a folder has measured so far, from the last 8 MiB of its event log."""
    try:
        descriptor = open_regular(RunFolder(run_dir).events)
    except OSError:
        return Measured("")
    with open(descriptor, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - _MOST_LOG))
        lines = file.read(_MOST_LOG).decode(errors="replace").split("\n")
    found = policy.measured(f"the run in {run_dir}", _records(lines))
    return found if found.step or found.nbytes or found.start else Measured("")


def _records(lines: Sequence[str]) -> Iterator[Record]:
    for line in lines:
        try:
            one = codec.decode(line)
        except codec.CodecError:  # cut at its begin, half written, or of a newer version
            continue
        if isinstance(one, Record):
            yield one


def of_the_scheduler(files: Sequence[Path], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the texts of the scheduler's files by name: those given, and the batch file of this Slurm job.

    Raises:
        OSError: a file cannot be read.
    """
    texts = {str(path): read_whole(path, _MOST_FILE, follow=True).decode(errors="replace") for path in files}
    number = environment.get("SLURM_JOB_ID", "")
    if not files and number.isdigit():
        try:
            done = subprocess.run(
                ["scontrol", "write", "batch_script", number, "-"],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_PATIENCE,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):  # an allocation without a batch file
            return texts
        texts[f"job {number}"] = done.stdout
    return texts


def grace_of(texts: Mapping[str, str], environment: Mapping[str, str]) -> float:
    """Return the shortest time from a notice to the kill that the files and the environment tell; 0: none."""
    told = [environment.get("OUTLAST_GRACE_PERIOD", "")]
    told += [found[1] for text in texts.values() for kind in _GRACES for found in kind.finditer(text)]
    return min((float(one) for one in told if one.isdigit() and int(one)), default=0.0)


def linted(name: str, text: str, save: float) -> Sequence[Diagnosis]:
    """Return the findings of the scheduler's lint as diagnoses.

    Args:
        save: seconds that a save takes.
    """
    batch = text.startswith("#!") or "#SBATCH" in text
    check, lint = ("slurm", lint_batch) if batch else ("kubernetes", lint_manifest)
    expected = f"a file without findings of outlast {'slurm' if batch else 'k8s'} lint"
    try:
        found = lint(text, save)
    except OutlastError as error:
        return [policy.judged(check, False, f"{name}: {error}", expected, Level.ERROR)]
    return [
        Diagnosis(
            check,
            False,
            f"{name}:{one.line}: {one.what} [{one.rule}]",
            f"otherwise {one.because}",
            one.fix,
            Level.ERROR if one.level is findings.Level.ERROR else Level.WARNING,
        )
        for one in found
    ] or [policy.judged(check, True, f"{name}: nothing found", expected)]
