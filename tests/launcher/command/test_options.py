"""The command line is torchrun's, whole: each option is taken or refused by name, and none is ignored."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from outlast import settings
from outlast.config import FaultToleranceOptions
from outlast.errors import ConfigError, ScriptNotFound, UsageError
from outlast.launcher.command.options import LaunchOptions, ScriptKind, StartKind, parse_run
from outlast.launcher.command.parser import make_parser
from tests.source_tree import ROOT

ASK_TORCH = """
import json
from torch.distributed.run import get_args_parser
actions = get_args_parser()._actions
print(json.dumps([[list(one.option_strings), one.dest, one.nargs] for one in actions if one.option_strings]))
"""


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def torchruns() -> list[tuple[list[str], str, int | None]]:
    run = subprocess.run(
        [sys.executable, "-c", ASK_TORCH], capture_output=True, text=True, timeout=110, check=True
    )
    found: list[tuple[list[str], str, int | None]] = json.loads(run.stdout.splitlines()[-1])
    return found


def parse(*words: str, **environment: str) -> LaunchOptions:
    return parse_run([*words, "train.py"], environment)


def missing(theirs: Iterable[str], ours: Iterable[str]) -> list[str]:
    return sorted(set(theirs) - set(ours))


def ours() -> dict[str, Any]:
    return {word: action for action in make_parser({})._actions for word in action.option_strings}


class TestTorchrunsParser:
    def test_every_spelling_is_known(self, torchruns: list[tuple[list[str], str, int | None]]) -> None:
        theirs = [word for words, _, _ in torchruns for word in words]
        assert len(theirs) > 40
        assert missing(theirs, ours()) == []

    def test_each_has_the_same_name_and_takes_a_value_where_theirs_does(
        self, torchruns: list[tuple[list[str], str, int | None]]
    ) -> None:
        known = ours()
        for words, dest, nargs in torchruns:
            if dest != "help":
                assert (known[words[0]].dest, known[words[0]].nargs) == (dest, nargs), words


class TestTheScript:
    def test_options_end_at_the_script(self) -> None:
        options = parse_run(["--nproc-per-node=2", "train.py", "--nproc-per-node", "9", "--", "-m"], {})
        assert options.world.nproc_per_node == 2
        assert options.script.args == ("--nproc-per-node", "9", "--", "-m")

    def test_the_command_of_a_cold_start_is_torchruns(self) -> None:
        options = parse_run(["-m", "train.py", "--rank=${local_rank}"], {})
        assert options.script.command("python", 3) == ["python", "-u", "-m", "train.py", "--rank=3"]

    def test_one_that_does_not_exist_is_named_with_the_folder(self, tmp_path: Path) -> None:
        with pytest.raises(ScriptNotFound, match=re.escape(str(tmp_path))) as caught:
            parse_run(["absent.py"], {})
        assert "absent.py" in str(caught.value)
        assert caught.value.exit_code == 66

    @pytest.mark.parametrize(
        ("words", "name"),
        [
            (["-m", "cProfile", "-o", "out", "train.py"], "train"),
            (["-m", "pkg.train", "config.py"], "pkg.train"),
            (["-m", "coverage", "run", "-m", "pkg.train"], "pkg.train"),
            (["--no-python", "bash", "tests/run.sh"], "run"),
            (["--no-python", "/bin/true"], "true"),
            (["--no-python", "python", "-u", "train.py", "data.py"], "train"),
        ],
    )
    def test_the_script_names_the_folder_not_what_runs_it(self, words: list[str], name: str) -> None:
        assert parse_run(words, dict(os.environ)).run_dir == f"outlast-runs/{name}"

    def test_code_on_the_command_line_names_its_folder(self) -> None:
        found = [
            parse_run(["--no-python", "sh", "-c", f"exit {number}"], dict(os.environ)).run_dir
            for number in (1, 2, 1)
        ]
        assert found[0] == found[2] != found[1]

    @pytest.mark.parametrize(
        ("words", "name"),
        [
            (["--rdzv-id=../../x", "train.py"], "x"),
            (["--rdzv-id=/etc/x", "train.py"], "etc-x"),
            (["--rdzv-id=team/job 1", "train.py"], "team-job 1"),
            (["--rdzv-id=..", "train.py"], "run"),
            (["--rdzv-id=.hidden", "train.py"], "hidden"),
            (["--rdzv-id=job:2024-01@a", "train.py"], "job:2024-01@a"),
            (["--rdzv-id=../../../tmp/x", "train.py"], "tmp-x"),
        ],
    )
    def test_a_run_id_does_not_leave_its_folder(self, words: list[str], name: str) -> None:
        found = parse_run(words, {})
        assert found.run_dir == f"outlast-runs/{name}"
        assert found.run_id in ("", words[0].removeprefix("--rdzv-id="))

    def test_another_interpreter_starts_cold(self, tmp_path: Path) -> None:
        (tmp_path / "python").symlink_to(sys.executable)
        python = str(tmp_path / "python")
        found = parse("-m", PYTHON_EXEC=python)
        assert found.start is StartKind.COLD
        assert found.script.command("ours", 0)[:2] == [python, "-u"]
        assert parse(PYTHON_EXEC=sys.executable).start is StartKind.WARM
        ignored = parse("--run-path", PYTHON_EXEC=python)
        assert (ignored.start, ignored.script.python) == (StartKind.WARM, "")
        with pytest.raises(UsageError, match="PYTHON_EXEC"):
            parse("--preload=json", PYTHON_EXEC=python)


class TestSpellingsAndVariables:
    @pytest.mark.parametrize(
        "word",
        ["--ft-rank_section_timeouts", "--ft_rank_section_timeouts", "--ft-rank-section-timeouts"],
    )
    def test_nvrx_mixes_both(self, word: str) -> None:
        assert parse(f"{word}=step:3").config.fault_tolerance.rank_section_timeouts == {"step": 3.0}

    def test_a_short_option_with_its_value_attached(self) -> None:
        found = parse("-t3", "-r", "1", "-m")
        assert (found.logs.tee, found.logs.redirects, found.script.kind) == ("3", "1", ScriptKind.MODULE)

    def test_spaces_in_the_list_of_signals(self) -> None:
        found = parse("--signals-to-handle=SIGTERM, SIGINT ,SIGTERM,", "--no-zygote")
        assert found.signals == ("SIGTERM", "SIGINT")

    def test_a_variable_can_hold_a_list(self) -> None:
        assert parse(PET_PRELOAD="json,csv").preload == ("json", "csv")
        with pytest.raises(UsageError, match="PET_MODULE=yes"):
            parse(PET_MODULE="yes")


class TestRefusals:
    @pytest.mark.parametrize(
        "words",
        [
            ["--nnodes=0"],
            ["--nnodes=4:2"],
            ["--nnodes=some"],
            ["--token-file=t"],
            ["--node-group=g"],
            ["--node-rank=1"],
            ["--rdzv-backend=etcd-v2"],
            ["--rdzv-conf=no_such_key"],
            ["--rdzv-conf==1"],
            ["--rdzv-conf=join_timeout=nan", "--nnodes=2"],
            ["--rdzv-conf=join_timeout=-5", "--nnodes=2"],
            ["--rdzv-conf=timeout=inf", "--nnodes=2"],
            ["--ping-timeout=nan", "--nnodes=2"],
            ["--ping-timeout=nan"],
            ["--rdzv-conf=join_timeout=-5"],
            ["--ping-timeout=inf", "--nnodes=2"],
            ["--spares=-1"],
            ["--master-port=99999"],
            ["--master-port=-1"],
            ["--start-method=thread"],
            ["--event-log-handler=mine"],
            ["--logs-specs=mine"],
            ["--numa-binding=near"],
            ["--numa-binding=node"],  # there is no GPU here, nor is there for torchrun
            ["--signals-to-handle=SIGNOPE"],
            ["--signals-to-handle="],
            ["--shutdown-timeout=-5"],
            ["--preload=nosuchmod"],
            ["--preload=json.nosuchmod"],
            ["--monitor-interval=nan"],
            ["--monitor-interval=0"],
            ["--redirects=4"],
            ["--tee=0:9"],
            ["--local-ranks-filter=a"],
            ["--nproc-per-node=0"],
            ["--nproc-per-node=many"],
            ["--ft-enable-nic-monitor=true"],
            ["--ft_enable_nic_monitor=true"],
            ["--ft-rank-heartbeat-timeout=soon"],
            ["--ft-rank-section-timeouts=step"],
            ["--ft-rank-section-timeouts=step:0"],
            ["--ft-rank-heartbeat-timeout=0"],
            ["--ft-initial-rank-heartbeat-timeout=-1"],
            ["--ft-rank-out-of-section-timeout=nan"],
            ["--ft-safety-factor=off"],
            ["--ft-workload-check-interval=inf"],
            ["--ft-max-restarts-per-day=1.5"],
            ["--max-restarts=many"],
            ["--signals-to-handle=SIGTERM,SIGKILL"],
            ["--signals-to-handle=SIGSTOP"],
            ["--log-dir=train.py"],
            ["-m", "--no-python"],
        ],
        ids=" ".join,
    )
    def test_what_cannot_be_carried_out_is_refused_by_name(self, words: list[str]) -> None:
        name = words[0].partition("=")[0]
        with pytest.raises(UsageError) as caught:
            parse(*words)
        assert caught.value.exit_code == 2
        assert name.replace("_", "-") in str(caught.value).replace("_", "-")

    def test_every_kind_of_problem_is_told_with_the_others(self, tmp_path: Path) -> None:
        (tmp_path / "c.toml").write_text("[fault_tolerance]\nrank_heartbeat_timeout = 0.0\n")
        words = ["--nproc-per-node=some", "--ft-safety-factor=-2", "--ft-rank-out-of-section-timeout=0"]
        words += ["--signals-to-handle=SIGKILL", "--log-dir=train.py", "--config=c.toml", "--tee=7"]
        with pytest.raises(UsageError) as caught:
            parse_run([*words, "absent.py"], {"PET_MAX_RESTARTS": "x", "PYTHON_EXEC": "/no/python"})
        found = [line for line in str(caught.value).splitlines() if line]
        assert len(found) == 11, found
        for word in (*(word for word in words if "config" not in word), "PET_MAX_RESTARTS=x", "absent.py"):
            name, _, value = word.partition("=")
            assert any(name in line and value in line for line in found), word
        assert any("c.toml: fault_tolerance.rank_heartbeat_timeout" in line for line in found)
        assert any("PYTHON_EXEC=/no/python" in line for line in found)

    def test_preload_needs_a_zygote(self) -> None:
        with pytest.raises(UsageError, match="--preload"):
            parse("--preload=json", "--no-zygote")
        assert parse("--preload=json", "--preload=csv").preload == ("json", "csv")
        assert parse("--no-zygote").start is StartKind.COLD


class TestWhatHasNoEffect:
    @pytest.mark.parametrize(
        ("words", "environment", "told"),
        [
            (["--rdzv-conf=foo=1"], {}, "--rdzv-conf.*foo"),
            (["--rdzv-conf=join_timeot=3"], {}, "join_timeout"),
            (["--tee=0:3,5:1"], {}, "--tee.*rank 5"),
            (["--redirects=1:3"], {}, "--redirects.*rank 1"),
            (["--local-ranks-filter=99"], {}, "--local-ranks-filter=99"),
            (["--log-line-prefix-template=${host}:"], {}, "'host'"),
            ([], {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "$rnk"}, "'rnk'"),
            ([], {"PET_NPROC_PERNODE": "2"}, "PET_NPROC_PERNODE.*PET_NPROC_PER_NODE"),
            ([], {"OUTLAST_NOD": "a"}, "OUTLAST_NOD.*OUTLAST_NODE"),
        ],
        ids=str,
    )
    def test_it_is_accepted_as_by_torchrun_and_told(
        self, words: list[str], environment: dict[str, str], told: str
    ) -> None:
        found = parse(*words, **environment).caveats
        assert [bool(re.search(told, one)) for one in found] == [True], found

    def test_nothing_is_told_of_what_has_one(self) -> None:
        words = ["--tee=0:3", "--local-ranks-filter=0", "--rdzv-conf=join_timeout=5,store_type=file"]
        words.append("--log-line-prefix-template=[${role_name} $rank ${local_rank}] $$")
        assert parse(*words, PET_NPROC_PER_NODE="1", OUTLAST_NODE="n0").caveats == ()

    @pytest.mark.parametrize(
        ("args", "named"),
        [
            (
                ["--nproc-per-node=2", "--max_restarts", "3", "--lr", "--config=x"],
                ["--max_restarts", "--nproc-per-node"],
            ),
            (["--nnodes", "2"], ["--nnodes"]),
            (["--epochs", "nproc-per-node", "-m"], []),
        ],
    )
    def test_options_of_ours_after_the_script_are_told(self, args: list[str], named: list[str]) -> None:
        found = parse_run(["train.py", *args], {})
        assert found.script.args == tuple(args)
        assert [line.partition(" ")[0] for line in found.caveats] == named

    def test_what_a_launcher_sets_for_its_ranks_is_no_mistake_in_one_that_they_start(self) -> None:
        set_by_us = settings.worker_variables(settings.WorkerContext(run_id="r"))
        assert len(set_by_us) > 10
        assert parse(**set_by_us).caveats == ()

    def test_the_time_to_leave_may_come_from_torchruns_variable(self) -> None:
        name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
        assert parse(**{name: "7"}).config.fault_tolerance.workers_stop_timeout == 7
        assert parse("--shutdown-timeout=8", **{name: "7"}).config.fault_tolerance.workers_stop_timeout == 8
        with pytest.raises(UsageError, match=f"{name}=soon"):
            parse(**{name: "soon"})


class TestFiles:
    @pytest.mark.parametrize(
        "make",
        [
            lambda path: path.write_bytes("[fault_tolerance] # \u00e4".encode("latin-1")),
            lambda path: path.write_text("x = " + "[" * 5000),
            lambda path: path.write_text("x = " + "1" * 5000),
            lambda path: path.symlink_to("/dev/zero"),
            os.mkfifo,
            lambda path: path.write_bytes(b"#" * (2 << 20)),
            lambda path: path.mkdir(),
        ],
        ids=["encoding", "brackets", "digits", "endless", "fifo", "long", "folder"],
    )
    def test_a_configuration_that_is_none_is_refused(
        self, tmp_path: Path, make: Callable[[Path], Any]
    ) -> None:
        make(tmp_path / "c.toml")
        with pytest.raises(ConfigError, match=r"c\.toml"):
            parse("--config=c.toml")

    @pytest.mark.parametrize(
        "make",
        [lambda path: path.mkdir(), lambda path: path.symlink_to("/dev/null"), os.mkfifo],
        ids=["folder", "device", "fifo"],
    )
    def test_a_script_that_is_none_is_refused(self, tmp_path: Path, make: Callable[[Path], Any]) -> None:
        make(tmp_path / "odd")
        with pytest.raises(ScriptNotFound, match="odd"):
            parse_run(["odd"], {})

    @pytest.mark.parametrize("program", ["/nonexistent", "./train.py", "/tmp", "no-such-program"])
    def test_a_program_that_is_none_is_refused(self, program: str) -> None:
        with pytest.raises(ScriptNotFound, match=program):
            parse_run(["--no-python", program], {})

    @pytest.mark.parametrize("text", ["x" * 300, "\u00e4" * 300, "../../../tmp/x" * 30])
    def test_a_long_run_id_has_a_short_folder_of_its_own(self, text: str) -> None:
        found, other = parse(f"--rdzv-id={text}"), parse(f"--rdzv-id={text}y")
        assert found.run_id == text
        assert len(os.fsencode(os.path.basename(found.run_dir))) <= 100
        assert os.path.dirname(found.run_dir) == "outlast-runs"
        assert found.run_dir != other.run_dir


class TestFaultTolerance:
    def test_every_field_has_an_option(self) -> None:
        known = ours()
        names = [spec.name for spec in fields(FaultToleranceOptions) if spec.name != "max_restarts"]
        assert missing((f"--ft-{name.replace('_', '-')}" for name in names), known) == []

    @pytest.mark.parametrize("text", ["off", "none", "NONE"])
    def test_off_means_that_nothing_is_watched(self, text: str) -> None:
        config = parse(f"--ft-rank-heartbeat-timeout={text}").config.fault_tolerance
        assert config.rank_heartbeat_timeout == math.inf

    def test_the_example_of_nvrxs_documents(self) -> None:
        config = parse(
            "--ft-rank-section-timeouts=setup:600,step:180,checkpointing:420",
            "--ft-rank-out-of-section-timeout=300",
            "--max-restarts=5",
            "--no-ft-calc-ft-timeouts",
            "--shutdown-timeout=7",
        ).config.fault_tolerance
        assert config.rank_section_timeouts == {"setup": 600.0, "step": 180.0, "checkpointing": 420.0}
        assert (config.rank_out_of_section_timeout, config.max_restarts) == (300.0, 5)
        assert (config.calc_ft_timeouts, config.workers_stop_timeout) == (False, 7.0)

    @pytest.mark.parametrize(
        ("words", "interval"),
        [
            ([], 2.0),
            (["--monitor-interval=0.1"], 0.1),
            (["--monitor-interval=5"], 5.0),
            (["--monitor-interval=5", "--ft-workload-check-interval=3"], 3.0),
            (["--monitor-interval=0.5", "--ft-workload-check-interval=3"], 0.5),
        ],
    )
    def test_the_monitor_interval_wins_over_the_file(
        self, tmp_path: Path, words: list[str], interval: float
    ) -> None:
        (tmp_path / "c.toml").write_text("[fault_tolerance]\nworkload_check_interval = 2.0\n")
        assert parse("--config=c.toml", *words).config.fault_tolerance.workload_check_interval == interval

    def test_what_no_flag_says_the_file_may(self, tmp_path: Path) -> None:
        told = {"workers_stop_timeout": 3.0, "max_restarts": 9, "calc_ft_timeouts": False}
        text = "\n".join(f"{name} = {json.dumps(value)}" for name, value in told.items())
        (tmp_path / "c.toml").write_text(f"[fault_tolerance]\n{text}\n")
        config = parse("--config=c.toml").config.fault_tolerance
        assert {name: getattr(config, name) for name in told} == told
        found = parse("--config=c.toml", "--shutdown-timeout=8", PET_FT_CALC_FT_TIMEOUTS="1").config
        assert (found.fault_tolerance.workers_stop_timeout, found.fault_tolerance.calc_ft_timeouts) == (
            8,
            True,
        )
        assert parse(PET_FT_CALC_FT_TIMEOUTS="0").config.fault_tolerance.calc_ft_timeouts is False

    def test_a_flag_wins_over_a_variable_over_the_file(self, tmp_path: Path) -> None:
        (tmp_path / "c.toml").write_text("[fault_tolerance]\nsafety_factor = 2.0\nmax_restarts = 9\n")
        config = ("--config", "c.toml")
        assert parse(*config).config.fault_tolerance.safety_factor == 2.0
        assert parse(*config, PET_FT_SAFETY_FACTOR="3").config.fault_tolerance.safety_factor == 3.0
        found = parse(*config, "--ft-safety-factor=4", PET_FT_SAFETY_FACTOR="3").config.fault_tolerance
        assert (found.safety_factor, found.max_restarts) == (4.0, 9)


class TestNodes:
    WORDS = ("--nnodes=2:4", "--spares=1", "--rdzv-endpoint=n0:1234", "--rdzv-id=j")

    def test_what_is_given_counts(self) -> None:
        nodes = parse(*self.WORDS, "--node-name=a", "--rdzv-conf=join_timeout=9,last_call_timeout=3").nodes
        assert (nodes.least, nodes.most, nodes.spares, nodes.endpoint) == (2, 4, 1, "n0:1234")
        assert (nodes.name, nodes.join_timeout, nodes.grace) == ("a", 9.0, 3.0)

    @pytest.mark.parametrize(
        ("words", "endpoint", "rank", "master"),
        [
            (("--node-rank=1", "--master-addr=n0", "--master-port=7700"), "n0:7600", 1, ("n0", 7700)),
            (("--master-addr=n0", "--master-port=77"), "n0:177", 0, ("n0", 77)),
            (("--master-addr=n0",), "n0:29400", 0, ("n0", 29500)),
            (("--node-rank=0",), "127.0.0.1:29400", 0, ("127.0.0.1", 29500)),
        ],
    )
    def test_of_torchruns_static_command_ranks_get_the_master_and_agents_meet_beside_it(
        self, words: tuple[str, ...], endpoint: str, rank: int, master: tuple[str, int]
    ) -> None:
        found = parse("--nnodes=2", *words)
        assert (found.nodes.static, found.nodes.endpoint) == (True, endpoint)
        assert (found.world.node_rank, found.world.master_addr, found.world.master_port) == (rank, *master)
        assert found.nodes.name.endswith(f"-{rank}")

    @pytest.mark.parametrize(
        "words", [("--rdzv-endpoint=n0",), ("--rdzv-endpoint=n0", "--rdzv-backend=c10d")]
    )
    def test_where_there_is_an_endpoint_a_master_says_nothing_as_under_torchrun(
        self, words: tuple[str, ...]
    ) -> None:
        found = parse("--nnodes=2", *words, "--node-rank=1", "--master-addr=n1", "--master-port=77")
        assert (found.nodes.static, found.nodes.endpoint) == (False, "n0:29400")
        assert (found.world.master_addr, found.world.master_port) == ("", 0)

    @pytest.mark.parametrize(
        ("words", "master"),
        [
            ((), ("", 0)),
            (("--master-port=77",), ("127.0.0.1", 77)),
            (("--master-addr=localhost",), ("localhost", 0)),
            (("--standalone", "--master-port=77"), ("127.0.0.1", 77)),
        ],
    )
    def test_of_one_node_the_ranks_meet_where_they_are_told(
        self, words: tuple[str, ...], master: tuple[str, int]
    ) -> None:
        world = parse(*words).world
        assert (world.master_addr, world.master_port) == master

    def test_the_arguments_of_a_script_are_never_taken_for_ours(self) -> None:
        for words in (("--node=1",), ("--pre", "x"), ("--", "--rdzv-id=a", "-t")):
            assert parse_run(["train.py", *words], {}).script.args == words

    def test_keep_alives_as_for_torchrun_are_a_ping_timeout(self) -> None:
        words = "--rdzv-conf=keep_alive_interval=2,keep_alive_max_attempt=4"
        assert parse(*self.WORDS, words).nodes.ping_timeout == 8.0

    @pytest.mark.parametrize(
        ("words", "name"),
        [
            (("--nnodes=2", "--rdzv-id=j"), "--rdzv-endpoint"),
            (("--nnodes=2", "--node-rank=2"), "--node-rank=2"),
            (("--nnodes=2", "--node-rank=-1"), "--node-rank=-1"),
            (("--nnodes=2", "--master-addr=n0", "--master-port=99999"), "--master-port=99999"),
            (("--nnodes=2", "--standalone", "--rdzv-id=j"), "--standalone"),
            ((*WORDS, "--rdzv-endpoint=n0:x"), "--rdzv-endpoint"),
            ((*WORDS, "--node-name=../x"), "--node-name"),
            ((*WORDS, "--node-group-size=3"), "--nnodes"),
            ((*WORDS, "--ping-timeout=0.1"), "--ping-timeout"),
            ((*WORDS, "--spares=-1"), "--spares"),
        ],
    )
    def test_what_cannot_be_carried_out_is_named(self, words: tuple[str, ...], name: str) -> None:
        with pytest.raises(UsageError, match=name):
            parse(*words)

    def test_domains_come_from_the_environment(self) -> None:
        assert parse(*self.WORDS, OUTLAST_FAILURE_DOMAINS="rack=r7").nodes.domains == (("rack", "r7"),)
        with pytest.raises(UsageError, match="OUTLAST_FAILURE_DOMAINS"):
            parse(*self.WORDS, OUTLAST_FAILURE_DOMAINS="rack")


def test_the_reference_lists_every_option() -> None:
    text = (ROOT / "docs" / "reference" / "options.md").read_text()
    shown = [
        word
        for word in ours()
        if word.startswith("--") and "_" not in word and not word.startswith("--no-ft")
    ]
    assert [word for word in shown if f"`{word}`" not in text and word != "--help"] == []
