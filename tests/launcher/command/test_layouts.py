"""``[parallelism]`` has or makes a layout for the numbers of nodes of a job, or nothing is started."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from outlast.cluster.agent.cluster_controller import shared_options
from outlast.errors import UsageError
from outlast.launcher.command.options import LaunchOptions, parse_run

NODES = ("--nnodes=1:4", "--rdzv-endpoint=n0:29400", "--nproc-per-node=2")
LISTED = "layouts = [{tp = 2, pp = 2, dp = 2}, {tp = 2, pp = 2}, {tp = 2}]"
PLANNED = 'model = "gpt.toml"\nglobal_batch = 64\npreferred = {tp = 2, pp = 2}'
MODEL = "layers = 12\nhidden = 768\nheads = 12\nsequence = 1024\nvocabulary = 50304\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "gpt.toml").write_text(MODEL)
    monkeypatch.chdir(tmp_path)


def parsed(table: str, *words: str) -> LaunchOptions:
    Path("job.toml").write_text(f"[parallelism]\n{table}\n")
    return parse_run(["--config=job.toml", *words, "train.py"], {})


def chosen(options: LaunchOptions) -> list[str]:
    return [str(one) for one in options.config.parallelism.chosen]


def test_a_job_without_layouts_says_nothing_of_them() -> None:
    assert not parsed("", *NODES).caveats


class TestListed:
    def test_both_ends_have_one_and_what_lies_between_is_said(self) -> None:
        found = parsed(LISTED, *NODES)
        assert chosen(found) == ["tp 2, pp 2, dp 2", "tp 2, pp 2, dp 1", "tp 2, pp 1, dp 1"]
        (caveat,) = found.caveats
        assert "3 nodes" in caveat
        assert not parsed(LISTED, "--nproc-per-node=4").caveats

    @pytest.mark.parametrize(
        ("words", "line"),
        [
            (("--nproc-per-node=3",), "--nproc-per-node=3.*3 ranks.*2, 4, 8"),
            (("--nnodes=1:3", *NODES[1:]), "--nnodes=1:3.*6 ranks.*2, 4, 8"),
        ],
    )
    def test_an_end_that_has_none_is_refused(self, words: tuple[str, ...], line: str) -> None:
        with pytest.raises(UsageError, match=line):
            parsed(LISTED, *words)


class TestPlanned:
    def test_the_planner_makes_a_layout_for_each_number_of_nodes_that_can_use_one(self) -> None:
        found = parsed(PLANNED, *NODES)
        kept = ["tp 2, pp 2, dp 2", "tp 2, pp 2, dp 1"]
        assert chosen(found) == [kept[0], "tp 2, pp 1, dp 3", kept[1], "tp 2, pp 1, dp 1"]
        (caveat,) = found.caveats
        assert re.search("tp 2, pp 2, dp 2.*tp 2, pp 1, dp 3.*tp 2, pp 2, dp 1.*tp 2, pp 1, dp 1", caveat)
        fixed = parsed(PLANNED + '\nfixed = ["tp", "pp"]', "--nnodes=2:4", *NODES[1:])
        assert chosen(fixed) == kept
        assert "3 nodes" in fixed.caveats[1]

    def test_a_node_with_another_model_is_told_apart(self) -> None:
        ours = shared_options(parsed(PLANNED, *NODES))
        assert shared_options(parsed(PLANNED, *NODES)) == ours
        Path("gpt.toml").write_text(MODEL.replace("layers = 12", "layers = 5"))
        theirs = shared_options(parsed(PLANNED.replace("pp = 2", "pp = 1"), *NODES))
        assert "parallelism.layouts=" in ours
        assert theirs != ours

    @pytest.mark.parametrize(
        ("table", "named"),
        [
            (PLANNED + '\nfixed = ["tp", "pp"]', r"gpt.toml.*pp 2, tp 2.*--nnodes=2:4"),
            (PLANNED.replace("tp = 2", "tp = 4"), "preferred.*tp 4"),
            (PLANNED.replace("pp = 2", "pp = 2, dp = 3"), "preferred.*12.*tp 2, pp 2, dp 3.*8"),
            (PLANNED.replace("pp = 2", "pp = 2, ep = 2"), "gpt.toml.*tp 2, pp 2, dp 2, ep 2"),
            (PLANNED.replace("gpt.toml", "gpt"), "parallelism.model.*gpt"),
            (PLANNED.replace("gpt.toml", "no.toml"), "no.toml"),
            (PLANNED + "\n" + LISTED, "layouts, model"),
            ("global_batch = 8", "parallelism.global_batch.*model"),
        ],
    )
    def test_what_cannot_be_planned_is_refused(self, table: str, named: str) -> None:
        with pytest.raises(UsageError, match=named):
            parsed(table, *NODES)
