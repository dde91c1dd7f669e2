"""Runs the example of NeMo's callbacks in docs/how-to/lightning.md; rank 0 is killed after six steps, once.

argument: a folder of results. The intervals of the example are made smaller.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: F401 - of the example

folder = Path(sys.argv[1])
rank = int(os.environ.get("RANK", "0"))


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, index):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_start(self):
        with open(folder / f"began-{rank}", "a") as file:
            print(self.trainer.global_step, file=file)

    def on_train_batch_start(self, batch, index):
        if self.trainer.global_step == 6 and rank == 0 and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)


page = Path(__file__).parents[3] / "docs" / "how-to" / "lightning.md"
(example,) = (one for one in re.findall(r"```py\n(.*?)```", page.read_text(), re.DOTALL) if "NeMo" not in one)
for found, put in (
    ("every_n_train_steps=100", "every_n_train_steps=4"),
    ("every_n_train_steps=10)", "every_n_train_steps=1)"),
    ('"kept"', repr(str(folder / "kept"))),
    ('"/local/disk"', repr(str(folder))),
):
    assert example.count(found) == 1, found
    example = example.replace(found, put)
Trainer = functools.partial(
    pl.Trainer,
    accelerator="cpu",
    devices=2,
    max_steps=10,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
model, data = Model(), torch.utils.data.DataLoader(torch.ones(100, 2))
exec(compile(example, str(page), "exec"))
(folder / f"ended-{rank}").write_text(str(model.trainer.global_step))
