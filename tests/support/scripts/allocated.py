"""Train and save each step until a file appears, and end in the way that is asked for.

allocated.py FINISH ENDING, which is "clean": save and exit 0 on SIGTERM; "at-once": fail before the first
step; "at-step-2": fail there, each time.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

FINISH, ENDING = Path(sys.argv[1]), sys.argv[2]
STOP: list[int] = []
if ENDING == "clean":
    signal.signal(signal.SIGTERM, lambda number, _: STOP.append(number))

import torch  # noqa: E402 - the handler has to be there before the seconds that this takes

import outlast  # noqa: E402


def main() -> None:
    if ENDING == "at-once":
        sys.exit(5)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with outlast.start(save_interval=1) as session:
        done = session.restore(model=model, optimizer=optimizer)
        print(f"restored {done}", flush=True)
        for step in session.steps(100_000):
            if ENDING == "at-step-2" and step == 2:
                sys.exit(7)
            model(torch.randn(4)).sum().backward()
            optimizer.step()
            print(f"step {step}", flush=True)
            time.sleep(0.05)
            if STOP or FINISH.exists():
                break
    print("stopped" if STOP else "finished", flush=True)


if __name__ == "__main__":
    main()
