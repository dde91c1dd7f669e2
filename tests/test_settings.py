"""Settings: one file, every problem of it at once; a rank's place in the job, there and back."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast import settings
from outlast.config import CheckpointOptions, Config
from outlast.errors import ConfigError, UsageError
from outlast.settings import WorkerContext, worker_context, worker_variables


def problems(path: Path, text: str) -> str:
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        settings.load_config(path, {})
    assert caught.value.exit_code == 2
    return "\n".join(caught.value.problems)


NVRX = """\
fault_tolerance:
  initial_rank_heartbeat_timeout: null
  rank_heartbeat_timeout: 90
  rank_section_timeouts:
    setup: 600
    step: 180.5
    checkpointing: null
  rank_out_of_section_timeout: .inf
  safety_factor: 4.0
  num_warmup_iterations: 3
"""
# Each line is ten times the one before it, where aliases are written out.
ALIASES = "a0: &a0 [x, x]\n" + "".join(
    f"a{at}: &a{at} [{', '.join([f'*a{at - 1}'] * 10)}]\n" for at in range(1, 12)
)


@pytest.mark.parametrize("name", ["ft.yaml", "ft.yml", "ft.cfg"])
def test_the_keys_of_nvrxs_file_are_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(NVRX)
    found = settings.load_config(tmp_path / name, {"safety_factor": 6.0}).fault_tolerance
    assert (found.initial_rank_heartbeat_timeout, found.rank_heartbeat_timeout) == (None, 90)
    assert found.rank_section_timeouts == {"setup": 600, "step": 180.5}
    assert found.rank_out_of_section_timeout == math.inf
    assert (found.safety_factor, found.num_warmup_iterations) == (6.0, 3)


def test_without_pyyaml_the_extra_that_brings_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert "'outlast[nvrx]'" in problems(tmp_path / "ft.yaml", NVRX)


@pytest.mark.parametrize("name", ["c.toml", "c.cfg"])
def test_both_tables_of_toml_are_read_and_without_a_file_the_defaults_hold(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(
        "[fault_tolerance]\nrank_heartbeat_timeout = inf\nrank_section_timeouts = { step = 4.5 }\n"
        "[checkpoints]\nkeep_last_n = 5\n"
    )
    config = settings.load_config(tmp_path / name, {"max_restarts": 8})
    assert config.fault_tolerance.rank_heartbeat_timeout == math.inf
    assert config.fault_tolerance.rank_section_timeouts == {"step": 4.5}
    assert config.fault_tolerance.max_restarts == 8
    assert config.checkpoints == CheckpointOptions(keep_last_n=5)
    assert settings.load_config(None, {}) == Config()


EVERY_KEY = """\
[fault_tolerance]
rank_hearbeat_timeout = 3.0
max_restarts = 'x'
calc_ft_timeouts = 1
rank_section_timeouts = { step = 'long', save = 1.0 }
[checkpoint]
"""
PATHS = ["rank_hearbeat_timeout", "max_restarts", "calc_ft_timeouts", "rank_section_timeouts.step"]


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("ft.yaml", "fault_tolerance:\n  rank_hearbeat_timeout: 30\n", ["rank_heartbeat_timeout?"]),
        (
            "ft.yaml",
            "fault_tolerance:\n  safety_factor: quick\n",
            ["fault_tolerance.safety_factor", "'quick'"],
        ),
        ("ft.yaml", "fault_tolerance:\n  rank_section_timeouts: 5\n", ["rank_section_timeouts", "5"]),
        ("ft.yaml", "ft:\n  rank_heartbeat_timeout: 30\n", ["ft"]),
        ("ft.yaml", "- 1\n", ["YAML", "[1]"]),
        ("ft.yaml", "a: [\n", ["YAML"]),
        ("ft.yaml", f"a: {'1' * 5000}\n", ["YAML"]),
        ("ft.yaml", ALIASES, ["65536"]),
        ("ft.cfg", f"fault_tolerance:\n  a: {'[' * 4000}\n", []),
        (
            "c.toml",
            EVERY_KEY,
            [*(f"fault_tolerance.{path}: " for path in PATHS), "'x'", "'long'", "checkpoints?"],
        ),
        ("c.toml", "[train]\nshutdown_timeout_sec = 600\n", ["train: ", "timeout_sec in [preemption]"]),
        ("c.toml", "[distributed]\nnccl_timeout_sec = 1800\n", ["distributed: ", "init_process_group"]),
        ("c.toml", "[fault_tolerance]\nmax_restarts = -1\n", ["fault_tolerance.max_restarts: "]),
        ("c.toml", "[checkpoints]\nkeep_last_n = 1\n", ["checkpoints.keep_last_n: "]),
        ("c.toml", "fault_tolerance = 3\n", ["fault_tolerance"]),
        ("c.toml", "[fault_tolerance]\nmax_restarts = = 3\n", ["line 2"]),
    ],
)
def test_every_problem_of_a_file_is_named_at_once(
    tmp_path: Path, name: str, text: str, named: list[str]
) -> None:
    found = problems(tmp_path / name, text)
    assert [one for one in named if one not in found] == [], found


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        settings.load_config(tmp_path / "absent.toml", {})


NAMES = st.text("abcdefghijklmnopqrstuvwxyz0123456789-./", max_size=20)


def test_alone_it_is_rank_0_of_1() -> None:
    context = worker_context({})
    assert context == WorkerContext()
    assert not context.launched


def test_under_torchrun_only_the_ranks_are_known() -> None:
    context = worker_context(
        {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "TORCHELASTIC_RESTART_COUNT": "2"}
    )
    assert (context.rank, context.local_rank, context.world_size, context.restart_count) == (3, 1, 4, 2)
    assert not context.launched


@given(
    st.integers(0, 10**6),
    NAMES,
    st.lists(st.text("abc123.-", min_size=1, max_size=9), max_size=4),
    st.integers(0, 99),
)
def test_what_the_agent_writes_is_what_the_worker_reads(
    generation: int, name: str, avoid: list[str], warmup: int
) -> None:
    context = WorkerContext(
        generation=generation,
        run_dir=f"/runs/{name}",
        run_id=f"id{name}",
        heartbeat_path=f"/dev/shm/{name}",
        control_path=name,
        avoid=tuple(avoid),
        checkpoints={"keep_last_n": 4, "save_interval": None},
        tripwire={"tripwire_interval": 7, "tripwire_replicas": [[0, 1]]},
        num_warmup_iterations=warmup,
    )
    assert worker_context(worker_variables(context)) == context


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(UsageError, match="WORLD_SIZE='two'"):
        worker_context({"WORLD_SIZE": "two"})


def test_what_the_launchers_file_says_wins_over_the_script() -> None:
    told = settings.changed(CheckpointOptions(keep_last_n=7))
    assert told == {"keep_last_n": 7}
    script = CheckpointOptions(save_interval=10, keep_last_n=4)
    found = settings.in_force(script, "checkpoints", WorkerContext(checkpoints=told))
    assert found == CheckpointOptions(save_interval=10, keep_last_n=7)


def test_the_launchers_modules_import_nothing_heavy() -> None:
    code = (
        "import sys, outlast.settings, outlast.launcher.command.options\n"
        "import outlast.launcher.output.logs, outlast.launcher.workers.environment\n"
        "print([name for name in ('torch', 'numpy', 'rich', 'asyncio') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (
            {"replication": True, "replication_bandwidth": 99_999.0},
            ["replication_bandwidth", "99999.0", "100,000"],
        ),
        ({"replication": True, "replication_bandwidth": 1e5}, []),
        ({"disk_bandwidth": 99_999.0}, ["disk_bandwidth", "99999.0", "100,000"]),
        ({"disk_bandwidth": float("nan")}, ["disk_bandwidth"]),
        ({"disk_bandwidth": 1e5}, []),
        ({"async_save": False, "disk_bandwidth": 1e6}, ["disk_bandwidth", "async_save"]),
        (
            {"async_save": False, "non_persistent_save_interval": 1},
            ["non_persistent_save_interval", "async_save"],
        ),
    ],
)
def test_an_option_that_cannot_take_effect_is_named(options: dict[str, Any], named: list[str]) -> None:
    found = CheckpointOptions(**options).problems()
    assert len(found) == bool(named)
    assert [one for one in named if one not in found[0]] == []
