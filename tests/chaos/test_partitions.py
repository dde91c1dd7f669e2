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


def test_generations_that_follow_each_other_do_not_overlap() -> None:
    log = [commit(1, "n0", 1), commit(2, "n1", 1), commit(3, "n1", 3), commit(4, "n2", 3)]
    found = check(log, [])
    assert (found.commits, found.generations) == (4, [1, 3])
    assert (found.overlaps, found.stopped_in_between, found.stalled) == ([], [], [])


def test_an_older_generation_after_a_younger_one_is_an_overlap() -> None:
    found = check([commit(1, "n0", 1), commit(2, "n1", 2), commit(3, "n0", 1), commit(4, "n1", 2)], [])
    assert len(found.overlaps) == 1
    assert "generation=1" in found.overlaps[0]


def test_the_order_is_that_of_the_lines_and_not_of_the_clock() -> None:
    assert check([commit(2, "n1", 2), commit(1.999, "n0", 1)], []).overlaps
    assert not check([commit(1.999, "n0", 1), commit(2, "n1", 2)], []).overlaps


def test_every_late_commit_counts() -> None:
    late = [commit(3 + at, "n0", 1) for at in range(5)]
    assert len(check([commit(2, "n1", 2), *late], []).overlaps) == 5


@pytest.mark.parametrize("took", [9.0, None])
def test_a_commit_that_a_pause_stopped_halfway_is_counted_apart(took: float | None) -> None:
    log = [commit(1, "n1", 1), commit(9, "n2", 2), commit(1.5, "n0", 1, took)]
    found = check(log, [Pause("n0", 1.4, 10.0)])
    assert (len(found.stopped_in_between), found.overlaps, found.stalled) == (1, [], [])


@pytest.mark.parametrize("pause", [Pause("n1", 1.4, 10.0), Pause("n0", 0.0, 1.4), Pause("n0", 10.6, 12.0)])
def test_a_commit_that_no_pause_of_its_host_stopped_is_an_overlap(pause: Pause) -> None:
    found = check([commit(9, "n2", 2), commit(1.5, "n0", 1, 9.0)], [pause])
    assert (len(found.overlaps), len(found.stalled), found.stopped_in_between) == (1, 1, [])


def test_a_pause_excuses_no_commit_that_was_written_at_once() -> None:
    found = check([commit(9, "n2", 2), commit(10, "n0", 1, STOPPED / 2)], [Pause("n0", 1.0, 12.0)])
    assert len(found.overlaps) == 1


def test_a_commit_in_time_that_was_stopped_is_counted_too() -> None:
    found = check([commit(1, "n0", 1, 5.0)], [Pause("n0", 2.0, 6.0)])
    assert (len(found.stopped_in_between), found.overlaps) == (1, [])


def test_one_rank_on_two_nodes_is_an_overlap() -> None:
    twins = [Commit(4, "n1", 1.0, 1.1, 0, 2, "n1:1"), Commit(4, "n2", 2.0, 2.1, 0, 2, "n1:1")]
    assert len(check(twins, []).overlaps) == 1


def test_one_generation_that_meets_at_two_places_is_an_overlap() -> None:
    twins = [Commit(4, "n1", 1.0, 1.1, 0, 2, "n1:1"), Commit(4, "n2", 2.0, 2.1, 1, 2, "n2:1")]
    assert len(check(twins, []).overlaps) == 1


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
