"""From the stand-in for the driver to a checkpoint: a lost device, a driver that hangs, a healthy one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.agents import Agents, agents
from tests.support.launching import Run, running, until
from tests.support.nvml_library import StandIn

HEALTH = """\
[health]
telemetry = "nvml"
telemetry_interval = 0.3
call_timeout = {timeout}
kernel_log = "{log}"
mode = "act"
save_cost = 0.01
"""


class Chain:
    """A job of two ranks without planned saves, above the stand-in."""

    def __init__(self, folder: Path, timeout: float) -> None:
        self.driver = StandIn(folder)
        self.log = folder / "kernel.log"
        self.log.touch()
        (folder / "trace").mkdir()
        config = folder / "outlast.toml"
        config.write_text(HEALTH.format(log=self.log, timeout=timeout))
        options = ("--standalone", "--nproc-per-node", "2", "--config", str(config))
        words = (str(folder / "trace"), "100000", "100000")
        self.run = Run(folder / "run", "agreeing.py", *words, options=options)

    def trains(self) -> None:
        until(lambda: self.run.records("first_step"), lambda: f"the first step\n{self.run.console()}")
        until(lambda: self.read("device"), "a record of a device")

    def read(self, what: str) -> list[dict[str, Any]]:
        return [one for one in self.run.records("telemetry") if one["what"] == what]

    def saves(self) -> None:
        """Wait for a save that was not planned."""
        until(lambda: self.run.records("saved"), lambda: f"a save\n{self.run.console()}")


@pytest.fixture
def chain(tmp_path: Path, request: pytest.FixtureRequest) -> Chain:
    return Chain(tmp_path, getattr(request, "param", 20.0))


def test_an_xid_in_the_kernel_log_leads_to_a_save(chain: Chain) -> None:
    with running(chain.run, **chain.driver.environment):
        chain.trains()
        assert chain.run.records("saved") == []
        chain.driver.put(1, lost=1)
        with chain.log.open("a") as file:
            file.write("NVRM: Xid (PCI:0000:11:00): 79, pid=7, GPU has fallen off the bus.\n")
        chain.saves()
        assert chain.run.records("fault_seen") == []


@pytest.mark.parametrize("chain", [2.0], indirect=True)
def test_a_driver_that_hangs_leads_to_a_save(chain: Chain) -> None:
    with running(chain.run, **chain.driver.environment):
        chain.trains()
        chain.driver.put(1, hang=1)
        chain.saves()
        assert chain.read("silence")
        assert chain.run.records("fault_seen") == []


@pytest.mark.long
def test_a_healthy_device_leads_to_none(chain: Chain) -> None:
    with running(chain.run, **chain.driver.environment):
        chain.trains()
        chain.driver.put(0, temperature=62)
        until(lambda: chain.run.records("progress")[3:], "some progress")
        assert chain.run.records("saved") == []


def steps_of(job: Agents, rank: int) -> list[int]:
    """Return the steps that a rank has begun, in order."""
    return [int(line) for line in (job.trace / f"steps-{rank}").read_text().splitlines()]


@pytest.mark.long
@pytest.mark.parametrize("sign", ["XID 79", "a hung driver"])
def test_a_spare_takes_over_and_no_step_is_done_twice(tmp_path: Path, sign: str) -> None:
    driver, log, config = StandIn(tmp_path), tmp_path / "kernel.log", tmp_path / "outlast.toml"
    log.touch()
    hangs = sign == "a hung driver"
    given_up_early = "drain_at = 0.0005\n" if hangs else ""  # else after 45 s of silence
    config.write_text(HEALTH.format(log=log, timeout=2.0 if hangs else 20.0) + given_up_early)
    with agents(tmp_path / "job", "2:2", 1, ("agreeing.py", "100000", "100000")) as job:
        job.start("n1")
        job.start("n2", options=("--config", str(config)), environment=driver.environment)
        job.until_runs(2)
        job.start("n3")
        job.until_said("n3", "spare")
        job.until(
            lambda: [one for one in job.records("n2", "telemetry") if one["what"] == "device"], "a device"
        )
        if not hangs:
            with log.open("a") as file:
                file.write("NVRM: Xid (PCI:0000:11:00): 79, pid=7, GPU has fallen off the bus.\n")
        else:
            driver.put(1, hang=1)
        assert job.until_runs(2, after=1) == 2
        (saved,) = (one["step"] for one in job.records("n1", "saved"))
        (loaded,) = job.until(lambda: job.records("n1", "loaded"), "a checkpoint that is loaded")
        assert loaded["step"] == saved
        for rank in range(2):
            done = steps_of(job, rank)
            assert done == list(range(len(done))), "a step was done twice"
            assert len(done) > saved
        actions = [one for name in ("n1", "n2") for one in job.records(name, "action_taken")]
        assert [one["action"] for one in actions] == ["replace-node"]
