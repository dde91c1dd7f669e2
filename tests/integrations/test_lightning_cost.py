"""The random states are captured where they are needed, not with each batch of a fit."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.frameworks import needs

pytestmark = needs("lightning")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("options", "validations"),
    [({"val_check_interval": 10}, 4), ({"check_val_every_n_epoch": 2}, 1), ({"limit_val_batches": 0}, 0)],
)
def test_states_are_captured_before_each_validation_and_once_an_epoch(
    options: dict[str, Any], validations: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lightning = importlib.import_module("lightning.pytorch")
    ours = importlib.import_module("outlast.integrations.lightning")
    captured: list[str] = []
    for name in ("callback", "place"):
        module = importlib.import_module(f"outlast.integrations.lightning.{name}")
        capture = module.capture_random
        monkeypatch.setattr(
            module, "capture_random", lambda at=name, do=capture: (captured.append(at), do())[1]
        )

    class Model(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: Any, _: int) -> Any:
            return self.layer(batch).square().mean()

        def validation_step(self, batch: Any, _: int) -> None:
            self.layer(batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        callbacks=[ours.OutlastCallback()],
        plugins=[ours.OutlastCheckpointIO()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        num_sanity_val_steps=0,
        **options,
    )
    data = torch.utils.data.DataLoader(torch.ones(20, 2))
    trainer.fit(Model(), data, data)
    assert captured.count("callback") == validations
    assert captured.count("place") <= 2 * 2
