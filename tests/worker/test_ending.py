"""A rank's interpreter ends when gloo's threads have let go of the last collective."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# Stands for the thread of a group: it works without the interpreter, while the script ends.
SCRIPT = """
import hashlib, pathlib, sys, threading
import torch.distributed

def work():
    pathlib.Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_gloo_runloop")
    begun.set()
    hashlib.sha256(data)
    pathlib.Path(sys.argv[1]).touch()

data, begun = bytes(300_000_000), threading.Event()
threading.Thread(target=work, daemon=True).start()
begun.wait()
"""
RANK = """
import sys
from outlast import _torch_compat
from outlast.worker import bootstrap
_torch_compat._GLOO_PATIENCE = float(sys.argv.pop())
bootstrap.run("file", sys.argv[0])
"""


def finished(folder: Path, patience: float) -> bool:
    """Run the script as a rank; return whether the thread had the time to finish."""
    script, told = folder / "script.py", folder / "told"
    script.write_text(SCRIPT)
    line = f"import sys; sys.argv[:1] = []\n{RANK}"
    subprocess.run([sys.executable, "-c", line, script, told, str(patience)], check=True)
    return told.exists()


def test_a_script_without_a_session_ends_after_gloos_threads(tmp_path: Path) -> None:
    assert finished(tmp_path, 60.0)


def test_it_does_not_wait_for_ever(tmp_path: Path) -> None:
    assert not finished(tmp_path, 0.0)
