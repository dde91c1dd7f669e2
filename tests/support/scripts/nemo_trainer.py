"""Trains the model of lightning_trainer.py with NeMo's callbacks in place of Lightning's own ways.

arguments: folder of results, "quiet" (sets up no logging), "killed" (by a simulated fault) or "local" (saves
           after each step), the step at which rank 0 of the first generation is killed (0: none), the seconds
           that a step takes
"""

from __future__ import annotations

import logging
import os
import runpy
import signal
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch

from outlast.compat.nemo import (
    FaultToleranceCallback,
    LocalCheckpointCallback,
    PreemptionCallback,
    update_trainer_local_checkpoint_io,
)

folder, way = Path(sys.argv[1]), sys.argv[2]
if way != "quiet":
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
fault = {"fault_type": "rank_killed", "base_delay": 1.0, "rand_delay": 0.5, "rank_to_fail": 1}


class Trainer(pl.Trainer):
    def __init__(self, *, callbacks, **options):
        added = [
            FaultToleranceCallback(
                "FAULT_TOL_FINISHED_FLAG_FILE" in os.environ,
                True,
                simulated_fault_params=fault if way == "killed" else None,
            ),
            PreemptionCallback(sig=signal.SIGUSR2),
            *([LocalCheckpointCallback(every_n_train_steps=1)] if way == "local" else []),
        ]
        super().__init__(callbacks=[*callbacks, *added], **options)
        update_trainer_local_checkpoint_io(
            self, str(folder), lambda path: torch.load(path, weights_only=False)["global_step"]
        )


pl.Trainer = Trainer
runpy.run_path(str(Path(__file__).with_name("lightning_trainer.py")), run_name="__main__")
