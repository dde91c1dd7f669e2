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
        assert found.caveats == (
            "[parallelism] has no layout for 3 nodes: the job then runs on the next smaller number of nodes"
            " that has one, and the others wait as spares",
        )
        assert not parsed(LISTED, "--nproc-per-node=4").caveats

    @pytest.mark.parametrize(
        ("words", "line"),
        [
            (("--nproc-per-node=3",), "--nproc-per-node=3: there is no layout for 3 ranks in [parallelism]"),
            (
                ("--nnodes=1:3", *NODES[1:]),
                "--nnodes=1:3 with 2 ranks a node, 3 node(s): there is no layout for 6 ranks",
            ),
        ],
    )
    def test_an_end_that_has_none_is_refused(self, words: tuple[str, ...], line: str) -> None:
        with pytest.raises(UsageError, match=re.escape(line)) as caught:
            parsed(LISTED, *words)
        assert "it has layouts for 2, 4, 8" in str(caught.value)


class TestPlanned:
    def test_the_planner_makes_a_layout_for_each_number_of_nodes_that_can_use_one(self) -> None:
        found = parsed(PLANNED, *NODES)
        kept = ["tp 2, pp 2, dp 2", "tp 2, pp 2, dp 1"]
        assert chosen(found) == [kept[0], "tp 2, pp 1, dp 3", kept[1], "tp 2, pp 1, dp 1"]
        assert found.caveats == (
            "[parallelism] layouts: 4 nodes: tp 2, pp 2, dp 2; 3 nodes: tp 2, pp 1, dp 3;"
            " 2 nodes: tp 2, pp 2, dp 1; 1 node: tp 2, pp 1, dp 1",
        )
        fixed = parsed(PLANNED + '\nfixed = ["tp", "pp"]', "--nnodes=2:4", *NODES[1:])
        assert chosen(fixed) == kept
        assert fixed.caveats[1].startswith("[parallelism] has no layout for 3 nodes: ")

    def test_a_node_with_another_model_is_told_apart(self) -> None:
        ours = shared_options(parsed(PLANNED, *NODES))
        assert shared_options(parsed(PLANNED, *NODES)) == ours
        Path("gpt.toml").write_text(MODEL.replace("layers = 12", "layers = 5"))
        theirs = shared_options(parsed(PLANNED.replace("pp = 2", "pp = 1"), *NODES))
        assert "parallelism.layouts=" in ours
        assert theirs != ours

    @pytest.mark.parametrize(
        ("table", "words", "line"),
        [
            (
                PLANNED + '\nfixed = ["tp", "pp"]',
                NODES,
                "[parallelism] 1 node with 2 rank(s) each: no layout for gpt.toml has its fixed degrees"
                " (pp 2, tp 2) on 2 devices; the least number of nodes that has a layout is 2: --nnodes=2:4",
            ),
            (
                PLANNED.replace("tp = 2", "tp = 4"),
                NODES,
                "preferred: tp 4 does not divide the 2 rank(s) of a",
            ),
            (
                PLANNED.replace("pp = 2", "pp = 2, dp = 3"),
                NODES,
                "preferred: found 12 ranks (tp 2, pp 2, dp 3), expected at most 8, and a multiple of 2",
            ),
            (
                PLANNED.replace("pp = 2", "pp = 2, ep = 2"),
                NODES,
                "gpt.toml cannot have today's layout (tp 2, pp 2, dp 2, ep 2)",
            ),
            (PLANNED.replace("gpt.toml", "gpt"), NODES, "parallelism.model gpt: no preset and no .toml"),
            (PLANNED.replace("gpt.toml", "no.toml"), NODES, "no.toml: 1 problem(s)"),
            (PLANNED + "\n" + LISTED, NODES, "layouts, model: found both; give the layouts, or the model"),
            ("global_batch = 8", NODES, "parallelism.global_batch: has no effect without model"),
        ],
    )
    def test_what_cannot_be_planned_is_refused(self, table: str, words: tuple[str, ...], line: str) -> None:
        with pytest.raises(UsageError, match=re.escape(line)):
            parsed(table, *words)
