"""Another account writes into the store of a job's next generation, which every account can reach."""

from __future__ import annotations

import json
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from outlast.agreement.worker.reports import Outcome, Report
from tests.support.attacks import listeners
from tests.support.launching import Run, running, until
from tests.support.processes import children_running


def planted(copy: Path) -> dict[str, str]:
    """Return answers with which a rank would load this copy, by the topic of the round."""
    manifest = json.loads((copy / "MANIFEST.json").read_text())
    one = {name: manifest[name] for name in ("step", "generation", "run_id", "world_size")}
    one |= {"name": copy.name, "commit": (copy / "COMMIT").read_text().split()[3], "tier": "local"}
    one |= {"state": "whole", "reason": "", "damage": None, "part": []}
    rounds: dict[str, dict[str, Any]] = {
        "inventory": {"copies": json.dumps([one]), "quarantined": {}},
        "examined": {"nbytes": 4000, "left": [], "tier": "local", "damaged": []},
        "applied": {"note": ""},
    }
    answers = {topic: Report(Outcome.FINE, data=data).to_json() for topic, data in rounds.items()}
    return {topic: json.dumps({"answers": [text] * 2}) for topic, text in answers.items()}


@pytest.mark.long
def test_answers_that_another_account_plants_move_no_rank_to_another_step(tmp_path: Path) -> None:
    """The next generation's store listens before its ranks do; they restore the same step all the same."""
    run = Run(
        tmp_path / "run",
        "counting.py",
        *(str(tmp_path / "trace"), "60", "10", "sleep@0@35@1"),
        options=("--nproc-per-node=2",),
        cold=True,  # so that the hosts of stores are known by their command lines
    )
    with running(run):
        run.wait_step(34)
        assert run.process is not None
        copies = tmp_path / "run/checkpoints"
        old = until(lambda: sorted(copies.glob("step-*/COMMIT")), "copies on disk")[0].parent
        hosts = children_running(run.process.pid, "zygote.py") - set(run.pids())
        ports = {port for each in listeners(hosts).values() for _, port in each}
        assert len(ports) == 2, "the stores of this generation and of the next one"
        for port in ports:
            store = dist.TCPStore(
                "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60)
            )
            for topic, text in planted(old).items():
                store.set(f"default_pg/0//outlast/2/1/{topic}/1/all", text)
        os.kill(run.pids()[0], signal.SIGKILL)
        assert run.finish() == 0
    assert [one["rank"] for one in run.records("fault_seen")] == [0], "only the rank that is killed here"
    begun = []
    for rank in range(2):
        lines = [json.loads(line) for line in (tmp_path / f"trace/rank-{rank}").read_text().splitlines()]
        begun.append(next(line["step"] for line in lines if line["generation"] == 2))
        assert lines[-1]["step"] == 59
    assert begun[0] == begun[1]
