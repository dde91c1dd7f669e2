"""Who is accused after a rerun, a swap or a restart: a device, a copy, the data, or nobody."""

from __future__ import annotations

import math
from typing import Any

import pytest

from outlast.rerun.policy.events import Loaded, Means
from tests.rerun.policy.builders import (
    CLEAN,
    COPY,
    DEVICES,
    FIVE,
    NEAR,
    OTHER,
    PEERS,
    SPARE,
    SPARED,
    Case,
    Turn,
    found,
    passed,
    reran,
    restarted,
    swapped,
)

ELSEWHERE = ("GPU-s", "GPU-t", "GPU-u")
BOTH = Means({1: 2}, another_copy=True)
HIT, SWAP = found(1), (found(1, means=PEERS), reran(1))


@pytest.mark.parametrize(
    ("given", "turns", "last"),
    [
        # a clean rerun
        ({}, [HIT, *CLEAN], "continue transient GPU-b"),
        *(({}, [HIT, reran(), reran(others=(rank,))], "continue inconclusive") for rank in (0, 1, 2)),
        ({}, [HIT, reran(others=(0,))], "continue inconclusive"),
        ({"devices": FIVE}, [HIT, reran(others=(0,))], "continue inconclusive"),
        ({"devices": DEVICES[:1]}, [found(0), *CLEAN], "continue transient GPU-a"),
        ({"devices": DEVICES[:1]}, [found(0), reran(), reran(others=(0,))], "continue inconclusive"),
        ({"devices": DEVICES[:1]}, [found(0), reran(), reran(0)], "stop-93 inconclusive"),
        # a device that takes back what it computed
        ({}, [HIT, reran(), reran(1)], "stop-69 persistent GPU-b"),
        ({}, [HIT, reran(), reran(1, others=(0,))], "stop-93 inconclusive"),
        ({}, [HIT, reran(), reran(1, 2)], "stop-93 inconclusive"),
        ({}, [HIT, reran(), reran(2)], "stop-93 inconclusive"),
        ({}, [HIT, reran(2)], "stop-93 inconclusive"),
        # differences within the tolerance
        ({}, [HIT, reran(others=(0, 2), apart=(1e-3, math.inf, 1e-5))], "continue inconclusive"),
        (
            {"tolerance": 1e-3},
            [
                HIT,
                reran(others=(0, 2), apart=(1e-3, math.inf, 1e-5)),
                reran(others=(1,), apart=(0.0, 1e-3, 1e-3)),
            ],
            "continue transient GPU-b",
        ),
        # a finding that no rank owns: those that compute something else are faulty, if at most half
        ({}, [found(bad=(1,)), *CLEAN], "continue transient GPU-b"),
        ({}, [found(means=PEERS, bad=()), reran(0, 1, 2)], "stop-93 inconclusive"),
        ({}, [found(means=SPARE, bad=()), reran(0, 1, 2)], "stop-93 inconclusive"),
        *(
            ({"devices": FIVE[:4]}, [found(bad=bad), *CLEAN], answer)
            for bad, answer in (
                ((), "continue transient"),
                ((3,), "continue transient GPU-d"),
                ((1, 3), "continue transient GPU-b"),
            )
        ),
        ({"devices": FIVE[:4]}, [found(bad=(0, 1, 3)), reran()], "continue inconclusive"),
        # a copy that was loaded a few steps ago is tested before the device, unless it is global
        ({"loaded": NEAR}, [found(1, means=BOTH), reran(1)], "load_older-1 of local/p"),
        ({"loaded": Loaded(0, "global", "p")}, [found(1, means=BOTH), reran(1)], "swap 1/2"),
        ({}, [found(1, means=BOTH), reran(1)], "swap 1/2"),
        ({"loaded": NEAR}, [found(1, step=11, means=BOTH), reran(1)], "swap 1/2"),
        ({"loaded": NEAR}, [found(1, means=PEERS), reran(1)], "swap 1/2"),
        ({"loaded": NEAR}, [found(1, means=SPARE), reran(1)], "spare-69 GPU-b"),
        # a swap tells the device from the data
        ({}, [*SWAP, swapped(1)], "stop-69 persistent GPU-b"),
        ({}, [*SWAP, swapped()], "stop-69 persistent GPU-b"),
        ({}, [*SWAP, swapped(2)], "stop-93 data_or_model"),
        ({}, [*SWAP, swapped(1, 2)], "stop-93 data_or_model"),
        ({}, [*SWAP, swapped(0)], "stop-93 inconclusive"),
        ({}, [*SWAP, swapped(same=False)], "roll_back-1 inconclusive"),  # and they go back to equal states
        # peers that are none
        *(({}, [found(1, means=Means({1: one})), reran(1)], "stop-93 inconclusive") for one in (3, -1)),
        ({"devices": ("GPU-a", "GPU-a")}, [found(1, means=Means({1: 0})), reran(1)], "stop-93 inconclusive"),
        # ranks that are rejected each time
        ({}, [found(1, 2, means=Means({1: 0, 2: 0})), reran(1)], "swap 1/0"),
        ({}, [found(1, means=Means({1: 2, 2: 1})), reran(1, 2)], "swap 1/2"),
        ({}, [found(0, 1, means=Means({0: 2, 1: 0}, spare=True)), reran(0, 1)], "stop-93 data_or_model"),
        # results that nobody waits for
        ({}, [reran(1)], "-"),
        ({}, [swapped(1)], "-"),
        ({}, [found(1, means=PEERS), swapped(1)], "-"),
        ({}, [*SWAP, reran(1)], "-"),
        ({}, [HIT, restarted(), passed()], "-"),  # the process ended within the rerun
    ],
)
def test_what_a_rerun_or_a_swap_shows(given: dict[str, Any], turns: list[Turn], last: str) -> None:
    assert Case(**given).play(*turns)[-1] == last


def rejected_twice(means: Means, *ranks: int) -> Case:
    """Return a case near its load, where a rerun was rejected as well."""
    case = Case(NEAR)
    case.play(found(*ranks, means=means), reran(*(ranks or (0, 1, 2))))
    return case


def convicted(means: Means = PEERS, **options: Any) -> Case:
    """Return a case in which a swap has convicted GPU-b."""
    case = Case(**options)
    assert case.play(found(1, means=means), reran(1), swapped(1))[-1].endswith(" persistent GPU-b")
    return case


@pytest.mark.parametrize(
    ("ranks", "means", "devices", "loaded", "answer"),
    [
        ((1,), COPY, DEVICES, OTHER, "bad_checkpoint of local/p"),
        ((1,), COPY, ("GPU-s", "GPU-b", "GPU-c"), OTHER, "bad_checkpoint of local/p"),
        ((1,), COPY, DEVICES, NEAR, "inconclusive"),  # all is the same
        ((1,), COPY, SPARED, OTHER, "inconclusive"),  # both may have changed
        ((1,), COPY, SPARED, NEAR, "persistent GPU-b"),
        ((1,), COPY, ("GPU-a",), NEAR, "inconclusive"),
        ((1,), SPARE, SPARED, NEAR, "persistent GPU-b"),
        ((1,), SPARE, SPARED, OTHER, "inconclusive"),
        ((1,), SPARE, ELSEWHERE, NEAR, "persistent GPU-b"),
        ((), COPY, DEVICES, OTHER, "bad_checkpoint of local/p"),
        ((), COPY, ELSEWHERE, OTHER, "inconclusive"),
        ((), COPY, ELSEWHERE, NEAR, "inconclusive"),  # several devices could be accused
        ((0, 1), COPY, ELSEWHERE, NEAR, "inconclusive"),
    ],
)
def test_a_step_that_passes_accuses_the_one_thing_that_was_changed(
    ranks: tuple[int, ...], means: Means, devices: tuple[str, ...], loaded: Loaded, answer: str
) -> None:
    case = rejected_twice(means, *ranks)
    orders = case.play(restarted(*devices, loaded=loaded), passed(4), passed(), passed(6))
    assert orders == ["-", "-", f"continue {answer}", "-"]
    assert case.record["culprit"] == answer.partition(" ")[2].removeprefix("of ")


@pytest.mark.parametrize(("since", "answer"), [(20, "persistent GPU-b"), (2, "inconclusive")])
def test_a_step_that_passes_on_a_spare_convicts_the_device_unless_the_copy_was_in_question(
    since: int, answer: str
) -> None:
    case = Case(Loaded(5 - since if since < 5 else 0, "local", "old"), suspect_steps=4)
    new = restarted(*SPARED, loaded=Loaded(4, "memory", "new"))
    assert case.play(found(1, means=SPARE), reran(1), new, passed())[-1] == f"continue {answer}"


def test_a_finding_in_another_step_closes_or_leaves_the_open_incident() -> None:
    case = rejected_twice(COPY, 1)
    assert case.play(restarted(loaded=OTHER), found(2, step=9)) == ["-", "rerun"]
    assert [record["verdict"] for record in case.machine.records()] == ["bad checkpoint", None]
    case = rejected_twice(COPY, 1)
    assert case.play(restarted(loaded=OTHER), found(2, step=3)) == ["-", "rerun"]
    later, earlier = case.machine.records()
    assert (later["verdict"], later["pending"], earlier["pending"]) == (None, None, "rerun the step")
    assert case.play(*CLEAN, passed())[-1] == "-", "nothing was tried for step 5 since"


@pytest.mark.parametrize("devices", [DEVICES, ("GPU-s", "GPU-b", "GPU-c")])
def test_a_move_that_left_the_device_in_its_place_ends_the_job(devices: tuple[str, ...]) -> None:
    case = rejected_twice(SPARE, 1)
    assert case.play(restarted(*devices)) == ["stop-93 inconclusive"]
    assert case.tried == ["rerun the step", "replace the node of the device", "stop"]
    assert all(case.results[:2])


@pytest.mark.parametrize("action", ["stop", "skip_batch", "roll_back"])
def test_a_convicted_device_that_comes_back_or_is_still_in_use_ends_the_job(action: str) -> None:
    end = "stop-69 persistent GPU-b"
    spared = convicted(Means({1: 2}, spare=True), rejected_action=action)
    assert spared.play(restarted()) == [end]
    for ranks in ((1,), ()):
        assert convicted(rejected_action=action).play(restarted(), found(*ranks)) == ["-", end]
    other = convicted(rejected_action=action).play(restarted(), found(2))[-1]
    assert "persistent" not in other, "another rank on another device"


def test_without_the_convicted_device_the_step_is_looked_into_anew() -> None:
    orders = ["-", "rerun", "stop-93 data_or_model"]
    assert convicted().play(restarted(*SPARED), found(1), reran(1)) == orders
    assert convicted().play(restarted(*SPARED), found()) == ["-", "rerun"]
    case = convicted()
    assert case.play(restarted(*SPARED), found(1), *CLEAN)[-1] == "continue transient GPU-s"
    assert case.record["rejected_on"] == ["GPU-b"], "a first run alone is no evidence against another device"


def test_what_was_transient_and_comes_back_in_a_replay_is_not_rerun_again() -> None:
    case = Case()
    case.play(HIT, *CLEAN, restarted())
    assert case.play(found(1, means=PEERS), swapped(2)) == ["swap 1/2", "stop-93 data_or_model"]
    assert case.record["rejected_on"] == ["GPU-b", "GPU-c"]
    over = Case(NEAR)
    assert over.play(HIT, *CLEAN, HIT)[-1] == "stop-93 inconclusive"
    assert "local/p" not in over.record["reason"], "no copy was asked for"


def test_another_copy_that_changes_nothing_leaves_the_device_in_question() -> None:
    for loaded in (OTHER, NEAR):
        case = rejected_twice(COPY, 1)
        assert case.play(restarted(loaded=loaded), found(1, means=PEERS)) == ["-", "swap 1/2"]
        assert ("local/p" in case.results[1]) == (loaded is NEAR), "it was loaded again"


def test_nothing_is_spent_on_a_fault_of_which_nobody_knows_the_rank() -> None:
    case = rejected_twice(SPARE, 1)
    orders = case.play(restarted(*SPARED), found(means=SPARE), reran(0, 1, 2))
    assert orders[1:] == ["rerun", "stop-93 inconclusive"]


def test_what_was_tried_and_shown_is_written_down() -> None:
    case = Case()
    case.play(HIT, *CLEAN)
    assert case.tried == ["rerun the step", "rerun the step once more"]
    assert case.record["verdict"] == "transient"
    assert not case.machine.skips(5)
    unsure = Case()
    unsure.play(HIT, reran(others=(0,)))
    assert unsure.record["verdict"] == "inconclusive"
    bits = []
    for others in ((), (0,), (1,)):
        one = Case()
        one.play(found(1, bad=()), reran(1, others=others, bad=()))
        bits.append(one.results[0])
    assert bits[0] == bits[1] != bits[2], "whether the bits are the same"
    named = []
    for turns in ([HIT, reran(2)], [*SWAP, swapped(2)], [*SWAP, swapped()], [HIT, *CLEAN]):
        one = Case()
        one.play(*turns)
        named.append("2" in "".join(one.results))
    assert named == [True, True, False, False], "the rank on which it was rejected"
