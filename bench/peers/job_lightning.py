"""A Lightning job for bench/frameworks.py: one linear layer, a checkpoint every 20 steps."""

import os
import sys
import time

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

FOLDER, RANK = sys.argv[1], os.environ["RANK"]


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        return torch.randn(16, generator=torch.Generator().manual_seed(index))


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)

    def training_step(self, batch, _):
        return self.layer(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

    def on_train_batch_end(self, *_):
        with open(f"{FOLDER}/trace-{RANK}", "a") as file:
            file.write(f"{os.getpid()} {self.trainer.global_step} {time.monotonic()}\n")


loader: torch.utils.data.DataLoader = torch.utils.data.DataLoader(Data(), batch_size=2)
checkpoints = ModelCheckpoint(dirpath=f"{FOLDER}/checkpoints", every_n_train_steps=20, save_last=True)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    max_steps=100_000,
    logger=False,
    enable_progress_bar=False,
    default_root_dir=FOLDER,
    callbacks=[checkpoints],
)
trainer.fit(Module(), loader, ckpt_path="last" if os.path.isdir(f"{FOLDER}/checkpoints") else None)
