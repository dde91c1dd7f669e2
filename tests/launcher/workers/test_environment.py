"""A rank's environment, piece by piece; scenarios/launcher/test_parity.py compares it with torchrun."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from outlast.cluster.policy.messages import Assignment
from outlast.errors import UsageError
from outlast.launcher.command.options import LaunchOptions, parse_run
from outlast.launcher.workers.environment import (
    common_environment,
    logger_variables,
    notice,
    rank_environment,
)


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)


def options(*words: str) -> LaunchOptions:
    return parse_run([*words, "train.py"], {})


def test_what_all_ranks_share() -> None:
    found = common_environment(options("--nproc-per-node=2", "--max-restarts=7"), {"HOME": "/h"})
    assert found["HOME"] == "/h"
    assert (found["OMP_NUM_THREADS"], found["TORCH_NCCL_ASYNC_ERROR_HANDLING"]) == ("1", "1")
    assert found["TORCHELASTIC_MAX_RESTARTS"] == "7"
    assert found["TORCHELASTIC_SIGNALS_TO_HANDLE"] == "SIGTERM,SIGINT,SIGHUP,SIGQUIT"


def test_what_the_user_has_set_stays() -> None:
    kept = {"OMP_NUM_THREADS": "6", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    found = common_environment(options("--nproc-per-node=2"), kept)
    assert {name: found[name] for name in kept} == kept


def test_what_a_rank_has_on_top() -> None:
    mine = Assignment(2, True, first_rank=4, node_rank=1, nodes=2, world_size=8)
    given = options("--nproc-per-node=4", "--role=trainer")
    found = rank_environment(given, mine, 3, "run", ("10.0.0.7", 29400, True))
    assert found == {
        "LOCAL_RANK": "3",
        "RANK": "7",
        "GROUP_RANK": "1",
        "ROLE_RANK": "7",
        "ROLE_NAME": "trainer",
        "LOCAL_WORLD_SIZE": "4",
        "WORLD_SIZE": "8",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_WORLD_SIZE": "8",
        "MASTER_ADDR": "10.0.0.7",
        "MASTER_PORT": "29400",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_RUN_ID": "run",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def virtual(ranks: int, **environment: str) -> list[dict[str, str]]:
    found = parse_run([f"--nproc-per-node={ranks}", "--virtual-local-rank", "train.py"], environment)
    mine = Assignment(1, True, world_size=ranks)
    return [rank_environment(found, mine, rank, "run", ("127.0.0.1", 1, False)) for rank in range(ranks)]


def test_a_virtual_local_rank_is_0_with_a_gpu_of_its_own() -> None:
    found = virtual(2)
    assert [(one["LOCAL_RANK"], one["RANK"]) for one in found] == [("0", "0"), ("0", "1")]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in found] == ["0", "1"]
    assert found[0]["TORCHELASTIC_USE_AGENT_STORE"] == "False"


def test_virtual_ranks_share_the_gpus_that_are_visible() -> None:
    found = virtual(2, CUDA_VISIBLE_DEVICES="GPU-5a, 7,3")
    assert [one["CUDA_VISIBLE_DEVICES"] for one in found] == ["GPU-5a", "7"]
    with pytest.raises(UsageError, match=r"--virtual-local-rank.*CUDA_VISIBLE_DEVICES=3"):
        virtual(2, CUDA_VISIBLE_DEVICES="3")
    with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES= "):
        virtual(2, CUDA_VISIBLE_DEVICES="")


def test_threads_that_nobody_asked_for_are_told() -> None:
    assert "OMP_NUM_THREADS=1" in notice(options("--nproc-per-node=2"), {})
    assert notice(options("--nproc-per-node=2"), {"OMP_NUM_THREADS": "1"}) == ""
    assert notice(options(), {}) == ""


def test_wandb_goes_on_with_the_run_of_a_rank() -> None:
    here = Path("/runs/a")
    first = logger_variables("job/7", here, 0, {})
    assert first == logger_variables("job/7", here, 0, {})
    assert first["WANDB_RUN_ID"].startswith("job-7-")
    assert first["WANDB_RESUME"] == "allow"
    other = logger_variables("job/7", here, 3, {"WANDB_RESUME": "must"})
    assert other == {"WANDB_RUN_ID": first["WANDB_RUN_ID"] + "-rank3", "WANDB_RESUME": "must"}
    assert logger_variables("job/7", Path("/runs/b"), 0, {}) != first
    not_utf8 = Path(os.fsdecode(b"/runs/\xff"))
    assert logger_variables("job/7", not_utf8, 0, {})["WANDB_RUN_ID"].startswith("job-7-")


@pytest.mark.parametrize("name", ["WANDB_RUN_ID", "WANDB_SWEEP_ID"])
def test_an_id_that_somebody_else_chooses_stays(name: str) -> None:
    assert logger_variables("job", Path("/runs/a"), 0, {name: "mine"}) == {}
