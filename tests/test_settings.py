"""Settings: one file, every problem of it at once; a rank's place in the job, there and back."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast import settings
from outlast.config import CheckpointOptions, Config
from outlast.errors import ConfigError, UsageError
from outlast.settings import WorkerContext, worker_context, worker_variables


def problems(tmp_path: Path, text: str) -> tuple[str, ...]:
    (tmp_path / "outlast.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        settings.load_config(tmp_path / "outlast.toml", {})
    assert caught.value.exit_code == 2
    return caught.value.problems


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


class TestNvrxsFile:
    @pytest.mark.parametrize("name", ["ft.yaml", "ft.yml", "ft.cfg"])
    def test_its_keys_are_read(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).write_text(NVRX)
        found = settings.load_config(tmp_path / name, {"safety_factor": 6.0}).fault_tolerance
        assert (found.initial_rank_heartbeat_timeout, found.rank_heartbeat_timeout) == (None, 90)
        assert found.rank_section_timeouts == {"setup": 600, "step": 180.5}
        assert found.rank_out_of_section_timeout == math.inf
        assert (found.safety_factor, found.num_warmup_iterations) == (6.0, 3)

    def test_toml_under_another_name_is_read_as_ever(self, tmp_path: Path) -> None:
        (tmp_path / "ft.cfg").write_text("[fault_tolerance]\nrank_heartbeat_timeout = 90\n")
        assert settings.load_config(tmp_path / "ft.cfg", {}).fault_tolerance.rank_heartbeat_timeout == 90

    def test_yaml_of_another_name_that_is_nested_too_deeply_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "ft.cfg").write_text(f"fault_tolerance:\n  a: {'[' * 4000}\n")
        with pytest.raises(ConfigError, match="nested too deeply"):
            settings.load_config(tmp_path / "ft.cfg", {})

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("fault_tolerance:\n  rank_hearbeat_timeout: 30\n", "did you mean rank_heartbeat_timeout?"),
            ("fault_tolerance:\n  safety_factor: quick\n", "fault_tolerance.safety_factor: found 'quick'"),
            (
                "fault_tolerance:\n  rank_section_timeouts: 5\n",
                "fault_tolerance.rank_section_timeouts: found 5",
            ),
            ("ft:\n  rank_heartbeat_timeout: 30\n", "ft: unknown table"),
            ("- 1\n", "is YAML, but no map of sections: found [1]"),
            ("a: [\n", "is no YAML: "),
            (f"a: {'1' * 5000}\n", "is no YAML: "),
            (ALIASES, "is YAML whose aliases stand for more than 65536 values"),
        ],
    )
    def test_what_is_wrong_in_it_is_said(self, tmp_path: Path, text: str, problem: str) -> None:
        (tmp_path / "ft.yaml").write_text(text)
        with pytest.raises(ConfigError) as caught:
            settings.load_config(tmp_path / "ft.yaml", {})
        assert any(problem in one for one in caught.value.problems), caught.value.problems

    def test_without_pyyaml_it_says_what_to_install(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "yaml", None)
        (tmp_path / "ft.yaml").write_text(NVRX)
        with pytest.raises(
            ConfigError, match=r"pip install 'outlast\[nvrx\]', or write the same keys as TOML"
        ):
            settings.load_config(tmp_path / "ft.yaml", {})


class TestTheFile:
    def test_without_one_the_defaults_hold(self) -> None:
        assert settings.load_config(None, {}) == Config()

    def test_both_tables_are_read(self, tmp_path: Path) -> None:
        (tmp_path / "c.toml").write_text(
            "[fault_tolerance]\nrank_heartbeat_timeout = inf\nrank_section_timeouts = { step = 4.5 }\n"
            "[checkpoints]\nkeep_last_n = 5\n"
        )
        config = settings.load_config(tmp_path / "c.toml", {"max_restarts": 8})
        assert config.fault_tolerance.rank_heartbeat_timeout == math.inf
        assert config.fault_tolerance.rank_section_timeouts == {"step": 4.5}
        assert config.fault_tolerance.max_restarts == 8
        assert config.checkpoints == CheckpointOptions(keep_last_n=5)

    def test_every_wrong_key_and_type_is_told_at_once(self, tmp_path: Path) -> None:
        found = problems(
            tmp_path,
            "[fault_tolerance]\nrank_hearbeat_timeout = 3.0\nmax_restarts = 'x'\ncalc_ft_timeouts = 1\n"
            "rank_section_timeouts = { step = 'long', save = 1.0 }\n[checkpoint]\n",
        )
        text = "\n".join(found)
        assert len(found) == 5, text
        assert (
            "fault_tolerance.rank_hearbeat_timeout: unknown key; did you mean rank_heartbeat_timeout?"
            in found
        )
        assert "fault_tolerance.max_restarts: found 'x'" in text
        assert "fault_tolerance.calc_ft_timeouts: found 1" in text
        assert "fault_tolerance.rank_section_timeouts.step: found 'long'" in text
        assert "checkpoint: unknown table; did you mean checkpoints?" in text

    @pytest.mark.parametrize(
        ("table", "key", "here"),
        [
            ("train", "shutdown_timeout_sec = 600", "timeout_sec in [preemption]"),
            ("distributed", "nccl_timeout_sec = 1800", "init_process_group"),
            ("checkpoint", "keep_last_n = 3", "did you mean checkpoints?"),
        ],
    )
    def test_a_table_of_kempnerforge_is_told_with_its_place_here(
        self, tmp_path: Path, table: str, key: str, here: str
    ) -> None:
        (found,) = problems(tmp_path, f"[{table}]\n{key}\n")
        assert found.startswith(f"{table}: unknown table; ")
        assert here in found

    def test_values_that_make_no_sense_are_told_with_their_path(self, tmp_path: Path) -> None:
        found = problems(tmp_path, "[fault_tolerance]\nmax_restarts = -1\n[checkpoints]\nkeep_last_n = 1\n")
        assert [line.partition(":")[0] for line in found] == [
            "fault_tolerance.max_restarts",
            "checkpoints.keep_last_n",
        ]

    def test_a_table_that_is_none(self, tmp_path: Path) -> None:
        assert "expected a table" in problems(tmp_path, "fault_tolerance = 3\n")[0]

    def test_a_broken_file_is_told_with_the_line(self, tmp_path: Path) -> None:
        assert "line 2" in problems(tmp_path, "[fault_tolerance]\nmax_restarts = = 3\n")[0]

    def test_an_absent_file(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot be read"):
            settings.load_config(tmp_path / "absent.toml", {})


NAMES = st.text("abcdefghijklmnopqrstuvwxyz0123456789-./", max_size=20)


class TestARanksPlace:
    def test_alone_it_is_rank_0_of_1(self) -> None:
        context = worker_context({})
        assert context == WorkerContext()
        assert not context.launched

    def test_under_torchrun_only_the_ranks_are_known(self) -> None:
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
        self, generation: int, name: str, avoid: list[str], warmup: int
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

    def test_a_variable_that_is_no_number_is_named(self) -> None:
        with pytest.raises(UsageError, match="WORLD_SIZE='two'"):
            worker_context({"WORLD_SIZE": "two"})

    def test_what_the_launchers_file_says_wins_over_the_script(self) -> None:
        told = settings.changed(CheckpointOptions(keep_last_n=7))
        assert told == {"keep_last_n": 7}
        script = CheckpointOptions(save_interval=10, keep_last_n=4)
        found = settings.in_force(script, "checkpoints", WorkerContext(checkpoints=told))
        assert found == CheckpointOptions(save_interval=10, keep_last_n=7)


def test_the_launchers_modules_import_nothing_heavy() -> None:
    code = (
        "import sys, outlast.settings, outlast.launcher.command.options\n"
        "import outlast.launcher.output.logs, outlast.launcher.workers.environment\n"
        "print([name for name in ('torch', 'numpy', 'pydantic', 'rich', 'asyncio') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "[]"


def test_a_rate_limit_must_let_a_chunk_through_within_a_frames_deadline() -> None:
    (problem,) = CheckpointOptions(replication=True, replication_bandwidth=99_999.0).problems()
    assert problem == "replication_bandwidth: 99999.0 is not at least 100,000 bytes/s"
    assert CheckpointOptions(replication=True, replication_bandwidth=1e5).problems() == ()


def test_an_option_without_effect_is_refused_with_what_to_do() -> None:
    (problem,) = CheckpointOptions(async_save=False, non_persistent_save_interval=1).problems()
    assert problem.startswith("non_persistent_save_interval: has no effect with async_save off; ")
    assert "async_save = true" in problem
    assert problem.endswith("or leave non_persistent_save_interval out")
