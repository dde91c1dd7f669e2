"""Train with a child process that outlives this one, as a DataLoader's worker may; forked.py RUN PID-FILE."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

import outlast

run_dir, child = sys.argv[1], Path(sys.argv[2])
with outlast.start(run_dir, save_interval=1) as session:
    restored = session.restore(state=torch.zeros(1))
    print(f"restored {restored}", flush=True)
    if not child.exists():
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
        child.write_text(str(pid))
    for step in session.steps(6):
        if step == 4 and restored == 0:
            while not list(Path(run_dir).glob("checkpoints/step-*")):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
