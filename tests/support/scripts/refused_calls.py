"""Make calls of a session that are refused, one after the other; refused_calls.py RUN_DIR."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

import outlast

model = torch.nn.Linear(4, 2)
extra = torch.zeros(1)


def refused(what: str, call: Callable[[], object]) -> None:
    try:
        call()
    except outlast.UsageError as error:
        print(what, "|", error)
    else:
        print(what, "| was done")


with outlast.start(sys.argv[1], save_interval=2) as session:
    refused("nothing", session.restore)
    session.register(model=model)
    refused("twice", lambda: session.register(model=model))
    print("restored", session.restore(extra=extra))
    refused("late", lambda: session.register(more=model))
    refused("again", lambda: session.restore(model=model))
    refused("ahead", lambda: session.step_done(2))
    print("done", session.step_done(1))
    refused("backwards", lambda: session.step_done(1))
    refused("mixed", lambda: next(session.steps(4)))
    print("done", session.step_done(2), session.completed_steps)
with outlast.start(sys.argv[1], save_interval=2) as session:
    print("restored", session.restore(model=model, extra=extra))
    for _ in session.steps(3):
        refused("mixed", lambda: session.step_done(3))
