"""A tier of another package takes the copies of a real job, and a killed job goes on from them elsewhere."""

from __future__ import annotations

from pathlib import Path

from tests.support.launching import Run, running, until
from tests.support.plugging import documented, install

SCRIPT = """
import sys, time, outlast, torch

model = torch.nn.Linear(2, 2)
with outlast.start(save_interval=5) as session:
    first = session.restore(model=model)
    print(first, model.weight[0, 0].item(), file=open(sys.argv[1], "a"))
    for step in session.steps(first + int(sys.argv[2])):
        model.weight.data.fill_(step + 1)
        time.sleep(0.01)
"""


def test_copies_go_to_a_registered_tier_and_come_back(tmp_path: Path) -> None:
    path = install(tmp_path / "site", "outlast.tiers", "vault", documented("add-a-tier.md", "Vault"), "Vault")
    vault, said = tmp_path / "vault", tmp_path / "said"
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "config.toml").write_text(f'[checkpoints]\nglobal_url = "vault://{vault}"\n')
    options = ("--rdzv-id=gpt", "--config", str(tmp_path / "config.toml"))
    here, elsewhere = (
        Run(tmp_path / name, str(tmp_path / "train.py"), str(said), steps, options=options)
        for name, steps in (("here", "1000000"), ("elsewhere", "1"))
    )
    with running(here, PYTHONPATH=path):
        until(lambda: list(vault.glob("*.zip")), here.console)
    with running(elsewhere, PYTHONPATH=path):
        assert elsewhere.finish() == 0, elsewhere.console()
    began, again = (line.split() for line in said.read_text().splitlines())
    assert began[0] == "0"
    assert int(again[0]) >= 5
    assert float(again[1]) == float(again[0])
