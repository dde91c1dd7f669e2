"""NVRx's RankMonitorClient on a heartbeat page that an agent made: what a rank says, and what it is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.compat.test_nvrx import INSTALL, python

PAGE = f"""{INSTALL}
import json, os, pathlib, sys, types
from outlast.ipc.heartbeat_page import HeartbeatReader
from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient, RankMonitorClientError

reader = HeartbeatReader(pathlib.Path("page").absolute(), rank=0, generation=1, spawned=1.0)
os.environ["OUTLAST_HEARTBEAT_PAGE"] = str(reader.path)
os.environ["OUTLAST_RUN_DIR"] = os.getcwd()
client = RankMonitorClient()

def sections():
    return [name for name, _ in reader.read().sections]
"""


def answer(code: str, folder: Path, **options: object) -> Any:
    """Run code with a client and a page, and return what it writes last."""
    told = f"import os; os.environ['OUTLAST_FAULT_TOLERANCE'] = {json.dumps(options)!r}\n"
    run = python(told + PAGE + code, folder)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_sections_are_seen_by_the_agent_also_where_they_overlap(tmp_path: Path) -> None:
    code = """
client.init_workload_monitoring(num_warmup_iters=0)
found = []
client.start_section("setup"); found.append((sections(), reader.read().beats))
client.end_section("setup"); found.append((sections(), reader.read().beats))
for name in ("step", "io", "inner"):
    client.start_section(name)
found.append(sections())
client.end_section("io"); found.append(sections())
client.end_section("step"); found.append(sections())
client.start_section("outlast.mine")
client.end_all_sections(); found.append((sections(), sorted(reader.durations())))
client.end_all_sections()
client.shutdown_workload_monitoring(); found.append(reader.read().state.name)
client.init_workload_monitoring(); found.append(reader.read().state.name)
print(json.dumps(found))
"""
    assert answer(code, tmp_path) == [
        [["setup"], 0],  # the launcher's timeout of the start counts until it ends
        [[], 1],
        ["step", "io", "inner"],
        ["step", "inner"],
        ["inner"],
        # "io" ended before the first step did, so it taught nothing
        [[], ["inner", "step", "user.outlast.mine"]],
        "DONE",
        "RUNNING",
    ]


def test_heartbeats_teach_a_timeout_after_those_that_warm_up(tmp_path: Path) -> None:
    code = """
client.init_workload_monitoring(num_warmup_iters=2)
found = []
for _ in range(5):
    client.send_heartbeat()
    found.append(sum(one.count for one in reader.durations().values()))
print(json.dumps([found, reader.read().beats, reader.read().state.name]))
"""
    assert answer(code, tmp_path) == [[0, 0, 0, 1, 2], 5, "RUNNING"]


def test_iterations_of_megatron_are_completed_steps(tmp_path: Path) -> None:
    code = """
arguments = types.SimpleNamespace(iteration=100)
sys.modules["megatron.training.global_vars"] = types.SimpleNamespace(_GLOBAL_ARGS=arguments)
client.init_workload_monitoring()
client.start_section("setup")
client.end_section("setup")
steps = [reader.read().step]
for arguments.curr_iteration in (100, 101):
    for name in ("checkpointing", "step"):
        client.start_section(name)
        client.end_section(name)
        steps.append(reader.read().step)
print(json.dumps([steps, reader.read().began]))
"""
    assert answer(code, tmp_path) == [[100, 100, 101, 101, 102], 100]


def test_what_does_not_fit_is_an_error_by_their_name_and_changes_nothing(tmp_path: Path) -> None:
    code = """
found = []
def refused(call, *given):
    try:
        call(*given)
    except RankMonitorClientError as error:
        found.append(str(error))
refused(client.send_heartbeat)
refused(client.state_dict)
client.init_workload_monitoring()
refused(client.init_workload_monitoring)
refused(client.end_section, "x")
client.start_section("x")
refused(client.start_section, "x")
refused(client.load_state_dict, {"current_timeouts": {"heartbeat": {"initial": 1.0}, "section": {"x": 1}}})
refused(client.load_state_dict, [])
print(json.dumps([found, client.loaded_hb_timeouts, client.loaded_section_timeouts]))
"""
    errors, *loaded = answer(code, tmp_path)
    assert loaded == [None, None]
    named = ["RankMonitorClient", "RankMonitorClient", "RankMonitorClient", "'x'", "'x'", "x", "state_dict"]
    assert [name in error for name, error in zip(named, errors, strict=True)] == [True] * 7


def kept(folder: Path, **learned: float) -> None:
    """Write what an agent has learned, in the shape of NVRx's ``ft_state.json``."""
    outside = learned.pop("outside", None)
    section = {
        "section": learned,
        "out_of_section": outside,
        "calculated_sections": sorted(learned),
        "is_out_of_section_calculated": outside is not None,
    }
    heartbeat = {"initial": None, "subsequent": outside, "were_calculated": outside is not None}
    state = {"current_timeouts": {"heartbeat": heartbeat, "section": section}}
    (folder / "ft_state.json").write_text(json.dumps(state))


def test_the_timeouts_are_those_in_force(tmp_path: Path) -> None:
    kept(tmp_path, step=4.0, checkpointing=40.0, outside=7.0)
    code = """
client.init_workload_monitoring()
sections = client.section_timeouts
found = [sections.section, sections.out_of_section, sorted(sections.calculated_sections)]
found += [client.hb_timeouts.initial, client.hb_timeouts.subsequent, client.hb_timeouts.were_calculated]
print(json.dumps(found))
"""
    options = {"rank_section_timeouts": {"setup": 600.0, "checkpointing": 420.0}}
    assert answer(code, tmp_path, **options) == [
        {"checkpointing": 420.0, "setup": 600.0, "step": 4.0},
        7.0,
        ["step"],
        1800.0,
        7.0,
        True,
    ]


def test_what_the_agent_has_learned_is_read_when_they_are_calculated(tmp_path: Path) -> None:
    kept(tmp_path, step=4.0)
    code = """
client.init_workload_monitoring()
found = [client.calculate_and_set_section_timeouts(["step"], calc_out_of_section=False)]
found += [client.calculate_and_set_section_timeouts(["step"]), client.calculate_and_set_hb_timeouts()]
pathlib.Path("ft_state.json").write_text(pathlib.Path("ft_state.json").read_text().replace("4.0", "5.0"))
client.calculate_and_set_section_timeouts(["step"], calc_out_of_section=False)
state = json.loads(json.dumps(client.state_dict()))
other = RankMonitorClient()
other.load_state_dict(state)
found += [state, sorted(other.loaded_section_timeouts.calculated_sections), other.loaded_hb_timeouts is None]
print(json.dumps(found))
"""
    section = {
        "section": {"step": 5.0},
        "out_of_section": 300.0,
        "calculated_sections": ["step"],
        "is_out_of_section_calculated": False,
    }
    expected = [True, False, False, {"current_timeouts": {"section": section}}, ["step"], True]
    assert answer(code, tmp_path) == expected


def test_without_learning_nothing_is_calculated(tmp_path: Path) -> None:
    code = """
client.init_workload_monitoring()
print(json.dumps([client.calculate_and_set_section_timeouts(), client.calculate_and_set_hb_timeouts()]))
"""
    assert answer(code, tmp_path, calc_ft_timeouts=False) == [False, False]


def test_without_an_agent_it_does_nothing_and_rank_0_logs_one_line(tmp_path: Path) -> None:
    code = f"""{INSTALL}
from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient
for _ in range(2):
    client = RankMonitorClient()
    client.init_workload_monitoring()
    client.start_section("step")
    client.end_section("step")
    client.send_heartbeat()
    assert not client.calculate_and_set_hb_timeouts()
    client.load_state_dict(client.state_dict())
    client.shutdown_workload_monitoring()
"""
    for rank in ("0", "1"):
        run = python(f"import os; os.environ['RANK'] = '{rank}'\n{code}", tmp_path)
        assert run.returncode == 0, run.stderr
        assert run.stderr.count("RankMonitorClient") == (rank == "0"), run.stderr
