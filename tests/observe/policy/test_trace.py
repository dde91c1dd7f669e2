"""The slices and events of a trace, from logs whose times are known."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace

from outlast.observe.policy.goodput import AGENT_DEATH, fold
from outlast.observe.policy.trace import Slice, Tracks, steps, trace_events, tracks
from outlast.recovery.policy.events import (
    ActionTaken,
    FaultSeen,
    FirstStep,
    GenerationStarted,
    Loaded,
    Progress,
    Record,
    RunEnded,
    RunStarted,
    Saved,
    SaveLost,
    StragglerSeen,
)

START = RunStarted(0.0, 0.0, 1, "id", "n0", 7, "boot", ("train.py",), 2, "a new run")
BEGUN = GenerationStarted(1.0, 1.0, 1, 2, (70, 71), "zygote", "2 workers")
TRAINS = FirstStep(2.0, 2.0, 1, 1, {}, "session")
SLOW = StragglerSeen(3.0, 3.0, 1, 3, 1, "n1", "on", "data", "forward", 1.5, 1.2, 1.0, 0.9, 4, "late")
HANG = FaultSeen(8.0, 8.0, 1, "hang", "n0", 0, 6, 7.0, "rank 0 is silent", "silent")
RESTART = ActionTaken(8.0, 8.0, 1, "restart-in-job", 2, "newest", "attempt 1 of 3")
MARKS = {"spawned": 8.5, "started": 9.0, "session": 9.0, "loaded": 9.5, "first_step": 10.0}
AGAIN = (
    HANG,
    RESTART,
    replace(BEGUN, time=9.0, clock=9.0, generation=2, reason="again"),
    Loaded(9.5, 9.5, 2, 4, "step-4", 900, 0.25, "the newest"),
    FirstStep(10.0, 10.0, 2, 5, MARKS, "session"),
)
RUN: tuple[Record, ...] = (
    START,
    BEGUN,
    TRAINS,
    SLOW,
    replace(SLOW, time=3.5, clock=3.5, slowdown=1.75),  # the same verdict again
    Saved(4.0, 4.0, 1, 4, "step-4", 900, 0.5, "every 4 steps"),
    replace(SLOW, time=5.0, clock=5.0, state="off"),
    replace(SLOW, time=5.25, clock=5.25, rank=0, state="off"),  # it was not slow
    replace(SLOW, time=5.5, clock=5.5, rank=-1, node="", section="", activity="computing"),
    SaveLost(6.0, 6.0, 1, 6, 0.25, "full"),
    *AGAIN,
    replace(SLOW, time=11.0, clock=11.0, generation=2),
    Progress(12.0, 12.0, 2, 7, "session"),  # then the launcher is killed
    replace(START, time=20.0, clock=100.0, generation=3, boot_id="another", reason="after a crash"),
    replace(BEGUN, time=21.0, clock=101.0, generation=3),
    FirstStep(22.0, 102.0, 3, 1, {"spawned": 101.25, "started": 101.5, "first_step": 102.0}, "session"),
    replace(SLOW, time=23.0, clock=103.0, generation=3, rank=0, node="n0"),
    FaultSeen(25.0, 105.0, 3, "lost", "", -1, 3, 0.0, "gone", "gone"),
    replace(RESTART, time=25.0, clock=105.0, generation=3, action="stop", reason="too few nodes"),
    RunEnded(26.0, 106.0, 3, 3, 1, "too few nodes"),
)
SHOWN = """\
job: where the time went
  0-2 starting
  2-3.5 lost_work
  3.5-4 saving
  4-5.75 lost_work
  5.75-6 saving
  6-7 lost_work
  7-8 detecting
  8-9.25 recovering
  9.25-9.5 loading
  9.5-10 recovering
  10-12 lost_work
  12-20 down
  20-22 starting
  22-25 training
  25-26 stopping
job: generations
  1-9 generation 1 {'ranks': 2, 'start': 'zygote', 'reason': '2 workers'}
  9-12 generation 2 {'ranks': 2, 'start': 'zygote', 'reason': 'again'}
  21-26 generation 3 {'ranks': 2, 'start': 'zygote', 'reason': '2 workers'}
job: checkpoints
  3.5-4 save step 4 {'step': 4, 'reason': 'every 4 steps', 'checkpoint': 'step-4', 'bytes': 900}
  5.75-6 save lost step 6 {'step': 6, 'reason': 'full'}
  9.25-9.5 load step 4 {'step': 4, 'reason': 'the newest', 'checkpoint': 'step-4', 'bytes': 900}
n0: rank 0
  7-10 hang: restart-in-job {'reason': 'rank 0 is silent', 'action': 'restart-in-job', 'action_reason': \
'attempt 1 of 3', 'step': 6, 'steps_lost': 2, 'generation': 1}
    7-8 detect
    8-8.5 stop
    8.5-9 spawn
    9-9.5 load
    9.5-10 first_step
n0: NAMELESS
  12-22 agent death: run again {'reason': 'DIED', \
'action': 'run again', 'action_reason': 'after a crash', 'step': 7, 'steps_lost': 7, 'generation': 2}
    21.25-21.5 spawn
    21.5-22 first_step
job: NAMELESS
  25-26 lost: stop {'reason': 'gone', 'action': 'stop', 'action_reason': 'too few nodes', 'step': 3, \
'steps_lost': None, 'generation': 3}
n1: rank 1, slow
  3-5 slow: forward {'reason': 'late', 'slowdown': 1.5, 'section': 'forward', 'step': 3}
  11-12 slow: forward {'reason': 'late', 'slowdown': 1.5, 'section': 'forward', 'step': 3}
job: NAMELESS, slow
  5.5-9 slow: computing {'reason': 'late', 'slowdown': 1.5, 'section': '', 'step': 3}
n0: rank 0, slow
  23-26 slow: forward {'reason': 'late', 'slowdown': 1.5, 'section': 'forward', 'step': 3}
"""


def text(shown: Tracks) -> str:
    """Return a line for each track and each slice."""
    lines = []
    for (node, track), slices in shown.items():
        lines += [f"{node}: {track}\n", *(line for one in slices for line in drawn(one, "  "))]
    return "".join(lines)


def drawn(one: Slice, indent: str) -> Iterator[str]:
    yield f"{indent}{one.begin:g}-{one.end:g} {one.name}{f' {one.told}' if one.told else ''}\n"
    for inner in one.within:
        yield from drawn(inner, indent + "  ")


def of(*records: Record) -> Tracks:
    return tracks(records, fold(records))


def test_a_run_is_shown_as_slices_by_process_and_track() -> None:
    died = next(one.reason for one in fold(RUN).incidents if one.kind == AGENT_DEATH)
    assert "pid 7" in died
    shown = re.sub(
        r"^(n\d|job): (?!rank|where|generations|checkpoints)[^,\n]*",
        r"\1: NAMELESS",
        text(of(*RUN)),
        flags=re.M,
    )
    assert shown.replace(died, "DIED") == SHOWN


def test_an_incident_ends_where_the_next_one_of_the_rank_begins() -> None:
    again = (
        replace(HANG, time=11.0, clock=11.0, generation=2, since=9.0),  # before its first step was told
        replace(RESTART, time=11.0, clock=11.0, generation=2, next_generation=3),
        replace(HANG, time=12.0, clock=12.0, generation=3, since=10.5),
        replace(RESTART, time=12.0, clock=12.0, generation=3, next_generation=4),
        Progress(13.0, 13.0, 4, 7, "session"),
    )
    slices = of(START, BEGUN, TRAINS, *AGAIN, *again)["n0", "rank 0"]
    assert [
        (one.begin, one.end, [(part.name, part.begin, part.end) for part in one.within]) for one in slices
    ] == [
        (7.0, 9.0, [("detect", 7.0, 8.0), ("stop", 8.0, 8.5), ("spawn", 8.5, 9.0)]),
        (9.0, 10.5, [("detect", 9.0, 10.5)]),
        (10.5, 13.0, [("detect", 10.5, 12.0)]),
    ]


def test_the_step_is_counted_where_the_log_told_it() -> None:
    assert steps(RUN) == [(2.0, 1), (10.0, 5), (12.0, 7), (22.0, 1)]


def test_the_events_name_processes_and_tracks_before_their_slices() -> None:
    part = Slice("detect", 0.5, 0.75)
    shown = {
        ("job", "generations"): [Slice("generation 1", 0.25, 2.0, {"ranks": 2})],
        ("n0", "rank 1"): [Slice("hang: stop", 0.5, 1.5, {"slowdown": math.inf}, (part,))],
    }

    def named(what: str, pid: int, tid: int, name: str) -> dict[str, object]:
        return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}

    def a_slice(name: str, ts: float, dur: float, pid: int, tid: int, **args: object) -> dict[str, object]:
        where = {"pid": pid, "tid": tid}
        return {"ph": "X", "name": name, "cat": "outlast", "ts": ts, "dur": dur, **where, "args": args}

    assert list(trace_events(shown, [(1.25, 7)])) == [
        named("process_name", 1, 0, "job"),
        named("process_name", 2, 0, "node n0"),
        named("thread_name", 1, 1, "generations"),
        a_slice("generation 1", 250_000.0, 1_750_000.0, 1, 1, ranks=2),
        named("thread_name", 2, 2, "rank 1"),
        a_slice("hang: stop", 500_000.0, 1_000_000.0, 2, 2, slowdown="inf"),
        a_slice("detect", 500_000.0, 250_000.0, 2, 2),
        {"ph": "C", "name": "step", "ts": 1_250_000.0, "pid": 1, "tid": 0, "args": {"step": 7}},
    ]
