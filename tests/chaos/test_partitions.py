"""The checker and the draws of bench/partitions.py; the hosts and agents are the benchmark's own."""

from __future__ import annotations

import json
import random

import pytest

from bench.peers.partitions_log import STOPPED, Commit, Pause, check, read
from bench.peers.partitions_schedule import WEIGHTS, Board, draw, mending, moments

NODES = ("n0", "n1", "n2", "n3")


def commit(at: float, node: str, generation: int, took: float | None = 0.001) -> Commit:
    return Commit(generation, node, at, None if took is None else at + took, NODES.index(node), 3, "n0:1")


FOLLOW = [commit(1, "n0", 1), commit(2, "n1", 1), commit(3, "n1", 3), commit(4, "n2", 3)]
BACK = [commit(1, "n0", 1), commit(2, "n1", 2), commit(3, "n0", 1), commit(4, "n1", 2)]
LATE = [commit(2, "n1", 2), *(commit(3 + at, "n0", 1) for at in range(5))]
PAUSED = Pause("n0", 1.4, 10.0)


def halfway(took: float | None) -> list[Commit]:
    return [commit(1, "n1", 1), commit(9, "n2", 2), commit(1.5, "n0", 1, took)]


@pytest.mark.parametrize(
    ("log", "pauses", "overlaps", "stopped", "stalled"),
    [
        pytest.param(FOLLOW, [], 0, 0, 0, id="one generation after another"),
        pytest.param(BACK, [], 1, 0, 0, id="an older one after a younger one"),
        pytest.param(LATE, [], 5, 0, 0, id="every late commit counts"),
        pytest.param([commit(2, "n1", 2), commit(1.999, "n0", 1)], [], 1, 0, 0, id="by line, not by clock"),
        pytest.param([commit(1.999, "n0", 1), commit(2, "n1", 2)], [], 0, 0, 0, id="in order"),
        pytest.param(halfway(9.0), [PAUSED], 0, 1, 0, id="a pause stopped it halfway"),
        pytest.param(halfway(None), [PAUSED], 0, 1, 0, id="a pause stopped it for good"),
        pytest.param(halfway(9.0), [Pause("n1", 1.4, 10.0)], 1, 0, 1, id="another host's pause"),
        pytest.param(halfway(9.0), [Pause("n0", 0.0, 1.4)], 1, 0, 1, id="a pause before"),
        pytest.param(halfway(9.0), [Pause("n0", 10.6, 12.0)], 1, 0, 1, id="a pause after"),
        pytest.param(
            [commit(9, "n2", 2), commit(10, "n0", 1, STOPPED / 2)],
            [Pause("n0", 1.0, 12.0)],
            1,
            0,
            0,
            id="at once",
        ),
        pytest.param([commit(1, "n0", 1, 5.0)], [Pause("n0", 2.0, 6.0)], 0, 1, 0, id="stopped, in time"),
        pytest.param(
            [Commit(4, "n1", 1.0, 1.1, 0, 2, "n1:1"), Commit(4, "n2", 2.0, 2.1, 0, 2, "n1:1")],
            *([], 1, 0, 0),
            id="one rank on two nodes",
        ),
        pytest.param(
            [Commit(4, "n1", 1.0, 1.1, 0, 2, "n1:1"), Commit(4, "n2", 2.0, 2.1, 1, 2, "n2:1")],
            *([], 1, 0, 0),
            id="one generation that meets at two places",
        ),
    ],
)
def test_commits_out_of_order_are_overlaps_unless_a_pause_of_their_host_stopped_them(
    log: list[Commit], pauses: list[Pause], overlaps: int, stopped: int, stalled: int
) -> None:
    found = check(log, pauses)
    counts = (len(found.overlaps), len(found.stopped_in_between), len(found.stalled))
    assert counts == (overlaps, stopped, stalled)
    assert (found.commits, found.generations) == (len(log), sorted({one.generation for one in log}))


def test_a_line_is_read_with_the_one_that_says_when_it_was_written() -> None:
    same = {"node": "n1", "pid": 7, "generation": 2}
    begun = {"before": 1.0, "rank": 1, "world": 3, "master": "n0:1", **same}
    lines = [{"number": 1, **begun}, {"number": 1, "after": 1.5, **same}, {"number": 2, **begun}]
    first, second = read(map(json.dumps, lines))
    assert (first.after, second.after, first.node, first.master) == (1.5, None, "n1", "n0:1")


def play(seed: int) -> tuple[Board, list[str]]:
    """Let what is drawn happen to a board; the first host coordinates."""
    dice, board, log = random.Random(seed), Board(NODES), []
    for _ in moments(dice):
        what = draw(dice, board, "n0")
        for host in what.hosts:
            assert host in board.candidates(what.kind), (seed, what)
            board.note(what.kind, host)
        log.append(f"{what}")
    return board, log


def test_the_draws_repeat_with_the_seed_and_everything_is_well_after_the_mending() -> None:
    for seed in range(200):
        board, log = play(seed)
        assert 3 <= len(log) <= 7
        assert play(seed)[1] == log
        for what in mending(board):
            for host in what.hosts:
                board.note(what.kind, host)
        assert board == Board(NODES), seed


def test_everything_is_drawn_and_the_leader_most_often() -> None:
    log = "\n".join(line for seed in range(200) for line in play(seed)[1])
    assert all(f"kind='{kind}'" in log for kind in WEIGHTS)
    assert log.count("'n0'") > 1.3 * log.count("'n1'")
