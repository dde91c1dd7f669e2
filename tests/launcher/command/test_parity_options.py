"""The command line means under ``outlast run`` what it means to torchrun, or is refused for a reason.

torchrun's side is its own parser and configuration, asked once in a process of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from outlast.errors import OutlastError, UsageError
from outlast.launcher.command.options import LaunchOptions, parse_run
from tests.source_tree import ROOT
from tests.support.parity import LAUNCHERS, environment, skip_without

pytestmark = pytest.mark.timeout(420)
SCRIPT = "train.py"

# What is asked of both: the words, the variables, and what some of the facts below are then.
CASES: dict[str, tuple[list[str], dict[str, str], dict[str, Any]]] = {
    "nothing": ([], {}, {"nodes": [1, 1], "ranks": 1, "role": "default", "kind": "file"}),
    "nnodes": (["--nnodes=1"], {}, {"nodes": [1, 1]}),
    "nnodes of a range": (["--nnodes=1:1"], {}, {"nodes": [1, 1]}),
    "nnodes as a variable": ([], {"PET_NNODES": "1:1"}, {"nodes": [1, 1]}),
    "three nodes": (["--nnodes=1:2:3"], {}, {"refused": True}),
    "no nodes": (["--nnodes=0"], {}, {"refused": True}),
    "more nodes than most": (["--nnodes=4:2"], {}, {"refused": True}),
    "words for nodes": (["--nnodes=some"], {}, {"refused": True}),
    "ranks": (["--nproc-per-node=3"], {}, {"ranks": 3}),
    "ranks with an underscore": (["--nproc_per_node", "3"], {}, {"ranks": 3}),
    "ranks with a space": (["--nproc-per-node", " 2"], {}, {"ranks": 2}),
    "ranks as a variable": ([], {"PET_NPROC_PER_NODE": "4"}, {"ranks": 4}),
    "an option wins over its variable": (["--nproc-per-node=2"], {"PET_NPROC_PER_NODE": "4"}, {"ranks": 2}),
    "ranks by processors": (["--nproc-per-node=cpu"], {}, {"ranks": len(os.sched_getaffinity(0))}),
    "ranks by what there is": (["--nproc-per-node=auto"], {}, {"ranks": len(os.sched_getaffinity(0))}),
    "ranks by GPUs that are not there": (["--nproc-per-node=gpu"], {}, {"refused": True}),
    "ranks by a word": (["--nproc-per-node=many"], {}, {"refused": True}),
    "role": (["--role=trainer"], {}, {"role": "trainer"}),
    "role as a variable": ([], {"PET_ROLE": "trainer"}, {"role": "trainer"}),
    "restarts": (["--max-restarts=7"], {}, {"restarts": 7}),
    "no restarts": (["--max_restarts", "0"], {}, {"restarts": 0}),
    "restarts as a variable": ([], {"PET_MAX_RESTARTS": "5"}, {"restarts": 5}),
    "fewer restarts than none": (["--max-restarts=-1"], {}, {"refused": True}),
    "restarts that are no number": (["--max-restarts=many"], {}, {"refused": True}),
    "interval": (["--monitor-interval=0.05"], {}, {"interval": 0.05}),
    "interval of 0.2": (["--monitor_interval", "0.2"], {}, {"interval": 0.2}),
    "interval that is no number": (["--monitor-interval=soon"], {}, {"refused": True}),
    "spawn": (["--start-method=spawn"], {}, {"ranks": 1}),
    "fork": (["--start-method=fork"], {}, {"ranks": 1}),
    "forkserver": (["--start_method", "forkserver"], {}, {"ranks": 1}),
    "another start method": (["--start-method=thread"], {}, {"refused": True}),
    "start method as a variable": ([], {"PET_START_METHOD": "fork"}, {"ranks": 1}),
    "module": (["-m"], {}, {"kind": "module"}),
    "module in full": (["--module"], {}, {"kind": "module"}),
    "module as a variable": ([], {"PET_MODULE": "1"}, {"kind": "module"}),
    "module not, as a variable": ([], {"PET_MODULE": "0"}, {"kind": "file"}),
    "program": (["--no-python"], {}, {"kind": "command"}),
    "program as a variable": ([], {"PET_NO_PYTHON": "1"}, {"kind": "command"}),
    "program and module": (["--no-python", "-m"], {}, {"refused": True}),
    "run path": (["--run-path"], {}, {"kind": "file"}),
    "run path wins over a program": (["--run-path", "--no-python"], {}, {"kind": "file"}),
    "run path wins over a module": (["--run_path", "-m"], {}, {"kind": "file"}),
    "another interpreter": ([], {"PYTHON_EXEC": "/bin/sh"}, {"python": "/bin/sh"}),
    "tee": (["--tee=3"], {}, {"tee": "3"}),
    "tee in short": (["-t3"], {}, {"tee": "3"}),
    "tee by ranks": (["-t", "0:1,1:2"], {}, {"tee": "0:1,1:2"}),
    "tee of no such stream": (["--tee=4"], {}, {"refused": True}),
    "tee as a variable": ([], {"PET_TEE": "2"}, {"tee": "2"}),
    "redirects": (["--redirects=1"], {}, {"redirects": "1"}),
    "redirects in short": (["-r", "0:3"], {}, {"redirects": "0:3"}),
    "redirects of a rank that is not there": (["-r", "5:1"], {}, {"redirects": "5:1"}),
    "redirects of no such stream": (["--redirects=0:9"], {}, {"refused": True}),
    "abbreviation": (["--redirect=3", "--standal"], {}, {"redirects": "3"}),
    "ranks shown": (["--local-ranks-filter=0,2"], {}, {"shown": [0, 2]}),
    "ranks shown with spaces": (["--local-ranks-filter=0, 2"], {}, {"shown": [0, 2]}),
    "ranks shown that are not there": (["--local-ranks-filter=99"], {}, {"shown": [99]}),
    "words for ranks shown": (["--local-ranks-filter=a"], {}, {"refused": True}),
    "lines copied": (["--duplicate-stdout-filters=a,b"], {}, {"copied": ["a", "b"]}),
    "lines copied with a comma": (["--duplicate-stdout-filters=a,,b"], {}, {"copied": ["a,b"]}),
    "lines of stderr copied": (["--duplicate_stderr_filters", "e"], {}, {"copied_errors": ["e"]}),
    "log folder": (["--log-dir=here"], {}, {"log_dir": "here"}),
    "no log folder": (["--log-dir=/dev/null"], {}, {"log_dir": "/dev/null"}),
    "log folder that is a file": (["--log-dir=train.py"], {}, {"refused": True}),
    "log folder as a variable": ([], {"PET_LOG_DIR": "there"}, {"log_dir": "there"}),
    "events nowhere": (["--event-log-handler=null"], {}, {"events": "null"}),
    "events on the console": (["--event_log_handler=console"], {}, {"events": "console"}),
    "signals": (["--signals-to-handle=SIGTERM,SIGUSR1"], {}, {"signals": ["SIGTERM", "SIGUSR1"]}),
    "signals by default": ([], {}, {"signals": ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"]}),
    "time to leave": (["--shutdown-timeout=7"], {}, {"leave": 7}),
    "no time to leave": (["--shutdown-timeout=0"], {}, {"leave": 0}),
    "time to leave as a variable": ([], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "9"}, {"leave": 9}),
    "time to leave below 0": (["--shutdown-timeout=-5"], {}, {"refused": True}),
    "standalone": (["--standalone"], {}, {"nodes": [1, 1]}),
    "standalone as a variable": ([], {"PET_STANDALONE": "1"}, {"nodes": [1, 1]}),
    "standalone beside another backend": (["--standalone", "--rdzv-backend=etcd"], {}, {"nodes": [1, 1]}),
    "backend c10d": (["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"], {}, {"nodes": [1, 1]}),
    "run id": (["--rdzv-id=job7", "--master-port=29511"], {}, {"run_id": "job7"}),
    "run id as a variable": ([], {"PET_RDZV_ID": "job7", "PET_MASTER_PORT": "29511"}, {"run_id": "job7"}),
    "configuration of the rendezvous": (["--rdzv-conf=join_timeout=5,timeout=5"], {}, {"nodes": [1, 1]}),
    "configuration that nobody knows": (["--rdzv-conf=foo=1"], {}, {"nodes": [1, 1]}),
    "configuration without a value": (["--rdzv-conf=foo"], {}, {"refused": True}),
    "configuration without a name": (["--rdzv-conf==1"], {}, {"refused": True}),
    "a static master": (
        ["--master-addr=localhost", "--master-port=29511", "--node-rank=0"],
        {},
        {"nodes": [1, 1]},
    ),
    "a port that is no number": (["--master-port=http"], {}, {"refused": True}),
    "address of this node": (["--local-addr=127.0.0.1"], {}, {"nodes": [1, 1]}),
    "an option that nobody knows": (["--no-such-option"], {}, {"refused": True}),
    "binding that nobody knows": (["--numa-binding=near"], {}, {"refused": True}),
    "logs by a class that is not there": (["--logs-specs=mine"], {}, {"refused": True}),
    "arguments of the script": (["--role=a", SCRIPT, "--role", "b", "--", "-m"], {}, {"role": "a"}),
}

ASK_TORCHRUN = """
import contextlib, io, json, os, sys
import torch.distributed.run as run

def spoken(bits):
    if not isinstance(bits, dict):
        return str(int(bits))
    return ",".join(f"{rank}:{int(one)}" for rank, one in bits.items())

def recent(config):
    names = {"duplicate_stdout_filters": "copied", "duplicate_stderr_filters": "copied_errors"}
    names |= {"event_log_handler": "events", "signals_to_handle": "signals", "shutdown_timeout": "leave"}
    found = {fact: getattr(config, name) for name, fact in names.items() if hasattr(config, name)}
    return found | ({"signals": found["signals"].split(",")} if "signals" in found else {})

def facts(words):
    args = run.parse_args(words)
    if args.standalone:
        args.rdzv_backend, args.rdzv_endpoint = "c10d", "localhost:0"
    config, command, rest = run.config_from_args(args)
    specs = config.logs_specs
    kind = "command" if isinstance(command, str) and "-u" not in rest else "file"
    kind = "module" if isinstance(command, str) and rest[:2] == ["-u", "-m"] else kind
    return {
        "nodes": [config.min_nodes, config.max_nodes], "ranks": config.nproc_per_node, "role": config.role,
        "restarts": config.max_restarts, "interval": config.monitor_interval, "kind": kind,
        "python": command if isinstance(command, str) else "", "tee": spoken(specs._tee),
        "redirects": spoken(specs._redirects), "shown": sorted(specs._local_ranks_filter or ()),
        "log_dir": args.log_dir, "run_id": config.run_id, **recent(config),
    }

found, kept = {}, dict(os.environ)
for name, (words, variables) in json.load(sys.stdin).items():
    os.environ.clear()
    os.environ.update(kept | variables)
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            found[name] = facts(words)
        except (Exception, SystemExit) as error:
            found[name] = {"refused": True, "why": repr(error)}
print("FACTS" + json.dumps(found))
"""


def words_of(name: str) -> list[str]:
    words = CASES[name][0]
    return words if SCRIPT in words else [*words, f"./{SCRIPT}"]


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def our_facts(words: list[str], variables: dict[str, str]) -> dict[str, Any]:
    try:
        found: LaunchOptions = parse_run(words, {**environment(), **variables})
    except (OutlastError, SystemExit) as error:
        return {"refused": True, "why": str(error)}
    logs, config = found.logs, found.config.fault_tolerance
    return {
        "nodes": [found.nodes.least, found.nodes.most],
        "ranks": found.world.nproc_per_node,
        "role": found.world.role,
        "restarts": config.max_restarts,
        "interval": config.workload_check_interval,
        "kind": found.script.kind.value,
        "python": found.script.python,
        "tee": logs.tee,
        "redirects": logs.redirects,
        "shown": list(logs.only),
        "copied": list(logs.copied_stdout),
        "copied_errors": list(logs.copied_stderr),
        "log_dir": logs.log_dir,
        "events": found.event_log,
        "run_id": found.run_id,
        "signals": list(found.signals),
        "leave": config.workers_stop_timeout,
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    (folder / SCRIPT).write_text("")
    (folder / SCRIPT).chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def facts(launcher: str, place: Path) -> dict[str, dict[str, Any]]:
    if launcher == "outlast":
        with inside(place):
            return {name: our_facts(words_of(name), case[1]) for name, case in CASES.items()}
    done = subprocess.run(
        [sys.executable, "-c", ASK_TORCHRUN],
        cwd=place,
        input=json.dumps({name: [words_of(name), case[1]] for name, case in CASES.items()}),
        text=True,
        capture_output=True,
        timeout=150,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.partition("FACTS")[2])
    return found


@pytest.mark.long
@LAUNCHERS
@pytest.mark.parametrize("name", list(CASES))
def test_a_command_line(facts: dict[str, dict[str, Any]], launcher: str, name: str) -> None:
    expected = CASES[name][2]
    if "refused" not in expected:
        skip_without(launcher, *CASES[name][0])
        if launcher == "torchrun" and not expected.keys() <= facts["nothing"].keys():
            pytest.skip(f"torchrun of torch {torch.__version__} does not know of {', '.join(expected)}")
    assert {fact: facts[name].get(fact) for fact in expected} == expected, facts[name]
    assert "refused" in expected or "refused" not in facts[name]


# torchrun accepts these, and they are refused on purpose; docs/how-to/from-torchrun.md tells why.
REFUSED = (
    ["--rdzv-backend=etcd"],
    ["--logs-specs=mine"],
    ["--signals-to-handle=SIGNOPE"],
    ["--signals-to-handle="],
    ["--standalone", "--nnodes=2"],
    ["--nproc-per-node=xpu"],
)


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_what_is_refused_is_refused_by_name_with_what_to_do(words: list[str], place: Path) -> None:
    with inside(place), pytest.raises(UsageError) as caught:
        parse_run([*words, f"./{SCRIPT}"], environment())
    assert words[0].partition("=")[0] in str(caught.value)


def test_the_document_lists_what_is_refused() -> None:
    text = (ROOT / "docs" / "how-to" / "from-torchrun.md").read_text()
    table = text.partition("## What is refused")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(--[^`]*)` \| ([^|]+) \| ([^|]+) \|$", table, re.MULTILINE)
    assert [row[0].split(" ") for row in rows] == [list(words) for words in REFUSED]
    assert all(why.strip() and instead.strip() for _, why, instead in rows)
