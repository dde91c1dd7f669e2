"""A framework with a loop of its own: a real job of it is killed, restored and finished."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.launching import Run, running
from tests.support.plugging import documented, install

TINYFIT = """
import torch

class Trainer:
    def __init__(self):
        self.model, self.step, self.stop, self.callbacks = torch.nn.Linear(2, 2), 0, False, []
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def fit(self, steps):
        while self.step < steps and not self.stop:
            self.model(torch.ones(2)).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            for callback in self.callbacks:
                callback()
"""
SCRIPT = """
import json, os, signal, sys, tinyfit
from outlast.integrations.frameworks import follow

def die_at_7():
    if trainer.step == 7 and session.save(wait=True):
        os.kill(os.getpid(), signal.SIGKILL)

trainer = tinyfit.Trainer()
trainer.model.weight.data.zero_()
with follow(trainer, save_interval=2) as session:
    if trainer.step == 0:
        trainer.callbacks.append(die_at_7)
    print(json.dumps([trainer.step, trainer.model.weight[0, 0].item()]), file=open(sys.argv[1], "a"))
    trainer.fit(10)
print(json.dumps([trainer.step, trainer.model.weight[0, 0].item()]), file=open(sys.argv[1], "a"))
"""


def test_a_registered_framework_is_restored_and_goes_on(tmp_path: Path) -> None:
    source = documented("add-a-framework.md", "TinyFit")
    path = install(tmp_path, "outlast.frameworks", "tinyfit", source, "TinyFit")
    (tmp_path / "tinyfit.py").write_text(TINYFIT)
    (tmp_path / "train.py").write_text(SCRIPT)
    job = Run(tmp_path / "run", str(tmp_path / "train.py"), str(tmp_path / "said"))
    with running(job, PYTHONPATH=path) as run:
        assert run.finish() == 0, run.console()
    said = [json.loads(line) for line in (tmp_path / "said").read_text().splitlines()]
    assert [step for step, _ in said] == [0, 7, 10]
    assert [weight for _, weight in said] == pytest.approx([0.0, -0.7, -1.0])
    assert run.records("first_step")[0]["source"] == "session"
