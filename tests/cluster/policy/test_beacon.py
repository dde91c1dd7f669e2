"""Two jobs of one name: none is founded while another runs, and of two that meet one gives way."""

from __future__ import annotations

import pytest

from tests.simulation.fencing import overlaps
from tests.simulation.fleet import Fleet


def _split(shared: bool) -> Fleet:
    """Cut off the bootstrap node and a spare, whose agents begin anew, so both sides could run the job."""
    fleet = Fleet(4, 2, 3, spares=1)
    fleet.shared = shared
    assert fleet.run_until(lambda: fleet.steps.get(1, 0) > 20, 30)
    spare = next(name for name in fleet.nodes if name not in fleet.active())
    for name in ("n0", spare):
        fleet.kill(name, power=True)
    fleet.cut("n0", spare)
    for name in ("n0", spare):
        fleet.start(name)
    fleet.run(fleet.now + 60)
    return fleet


def test_agents_that_begin_anew_found_no_second_job_while_the_first_writes_notices() -> None:
    fleet = _split(shared=True)
    assert len(fleet.leaders()) == 1, "\n".join(fleet.log)
    assert not overlaps(fleet.commits)
    assert fleet.generation() == 2
    fleet.heal()
    fleet.run(fleet.now + 20)
    assert len(fleet.leaders()) == 1, "\n".join(fleet.log)
    assert {node.running for node in fleet.nodes.values()} == {fleet.generation()}
    assert not overlaps(fleet.commits)


def test_of_two_jobs_of_one_name_one_gives_way_when_they_meet() -> None:
    fleet = _split(shared=False)
    assert overlaps(fleet.commits)  # without a shared folder nobody can know
    fleet.heal()
    fleet.run(fleet.now + 40)
    assert len(fleet.leaders()) == 1, "\n".join(fleet.log)
    assert {node.running for node in fleet.nodes.values()} == {fleet.generation()}


@pytest.mark.parametrize("away", [2.0, 3.0, 4.0, 5.0, 8.0])
def test_a_founder_that_is_all_that_a_job_needs_founds_none_while_a_spare_runs_it(away: float) -> None:
    fleet = Fleet(3, 1, 1, spares=2)
    assert fleet.run_until(lambda: fleet.steps.get(1, 0) > 20, 30)
    fleet.kill("n0")
    fleet.run(fleet.now + away)
    fleet.start("n0")
    fleet.run(fleet.now + 30)
    assert len(fleet.leaders()) == 1, "\n".join(fleet.log)
    assert not overlaps(fleet.commits), "\n".join(fleet.log)
