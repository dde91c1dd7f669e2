"""What a script prints that has not set up logging, and what its own handlers get where it has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support import warm

# Bridge's loop on one rank: each step ends an interval.
REPORTING = """
from outlast.compat import NVRxStragglerDetectionConfig, NVRxStragglerDetectionManager

config = NVRxStragglerDetectionConfig(enabled=True, report_time_interval=1e-6, num_gpu_perf_scores_to_print=1)
manager = NVRxStragglerDetectionManager(config)
manager.initialize()
step = manager.wrap_train_step_function(lambda: sum(range(1000)))
for number in range(17):  # the first interval has so many
    step()
    manager.check_stragglers(0)
"""
LINES = (
    "NVRx straggler detection",
    "GPU relative performance:",
    "GPU individual performance:",
    "Straggler report processing",
)
HEALTH = """
from outlast.compat.kempnerforge import log_health_status, log_job_info

log_health_status()
log_job_info()
"""
SHOWN = """
from outlast.compat.shown import show
show(logging.getLogger("a.b"), "the line %d", 1)
"""


def printed(script: str, folder: Path) -> tuple[str, str]:
    (folder / "script.py").write_text(f"import logging, sys\n{script}")
    done = warm.run([folder / "script.py"], 120)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize("sets_up", [False, True])
@pytest.mark.parametrize(
    ("script", "lines"), [(REPORTING, LINES), (HEALTH, ("GPU 0 health:", "Not running under SLURM"))]
)
def test_its_lines_are_shown_once(
    script: str, lines: tuple[str, ...], sets_up: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    set_up = 'logging.basicConfig(level=logging.INFO, format="own: %(message)s", stream=sys.stdout)\n'
    out, err = printed((set_up if sets_up else "") + script, tmp_path)
    for line in lines:
        assert (out.count(f"own: {line}"), err.count(line)) == ((1, 0) if sets_up else (0, 1)), (out, err)


@pytest.mark.parametrize(
    ("set_up", "out", "err"),
    [
        ("", 0, 1),
        ("logging.getLogger('a').setLevel('WARNING')", 0, 0),
        ("logging.getLogger('a.b').disabled = True", 0, 0),
        ("logging.disable(logging.INFO)", 0, 0),
        ("logging.getLogger('a').addHandler(logging.NullHandler())", 0, 0),
        ("logging.getLogger('other').addHandler(logging.StreamHandler(sys.stdout))", 0, 1),
        ("logging.basicConfig(stream=sys.stdout)", 0, 0),  # at WARNING, which is the script's choice
        ("logging.basicConfig(stream=sys.stdout, level='INFO')", 1, 0),
    ],
)
def test_what_a_script_has_chosen_counts(set_up: str, out: int, err: int, tmp_path: Path) -> None:
    found = printed(f"{set_up}\n{SHOWN}", tmp_path)
    assert tuple(text.count("the line 1") for text in found) == (out, err), found
