"""Trains one step with Lightning in a Slurm job that is queued again; prints the signals that it handles."""

from __future__ import annotations

import faulthandler
import signal
import sys

import lightning.pytorch as pl
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.environments import SLURMEnvironment

faulthandler.dump_traceback_later(120)  # it did not end within 90 s once


class Looking(pl.Callback):
    def on_train_batch_end(self, trainer, *_):
        for number in (signal.SIGTERM, signal.SIGUSR1):
            handlers = getattr(signal.getsignal(number), "signal_handlers", ())
            if any(getattr(one, "__self__", None) is trainer._signal_connector for one in handlers):
                print("handles", number.name, file=sys.stderr)


trainer = pl.Trainer(
    accelerator="cpu",
    devices=1,
    max_steps=1,
    limit_val_batches=0,
    plugins=[SLURMEnvironment(auto_requeue=True)],
    callbacks=[Looking()],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir=sys.argv[1],
)
trainer.fit(BoringModel(), torch.utils.data.DataLoader(torch.randn(2, 32)))
