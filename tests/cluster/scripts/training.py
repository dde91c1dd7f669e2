"""Train for a while, save each step, and end in the way that is asked for.

training.py STEPS ENDING, which is "clean": save and exit 0 on SIGTERM; "none": no handler; a number:
exit with it after some steps.
"""

from __future__ import annotations

import signal
import sys
import time

STOP: list[int] = []
if sys.argv[2] == "clean":
    signal.signal(signal.SIGTERM, lambda number, _: STOP.append(number))

import torch  # noqa: E402 - the handler has to be there before the seconds that this takes

import outlast  # noqa: E402


def main() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with outlast.start(save_interval=1) as session:
        done = session.restore(model=model, optimizer=optimizer)
        print(f"restored {done}", flush=True)
        for step in session.steps(int(sys.argv[1])):
            model(torch.randn(4)).sum().backward()
            optimizer.step()
            print(f"step {step}", flush=True)
            if sys.argv[2].isdigit() and step >= 2:
                sys.exit(int(sys.argv[2]))
            time.sleep(0.05)
            if STOP:
                print(f"stopping after step {step}", flush=True)
                return
    print("finished", flush=True)


if __name__ == "__main__":
    main()
