"""Imports what it is told in each generation, trains, and is killed when the next zygote has imported that.

Arguments: a folder for facts, the number of the last generation, modules to import. ``V=value`` sets a
variable (``GENERATION`` in the value stands for its number), ``name@1`` is imported on rank 1 only, ``~name``
after two steps.
"""

import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path

folder, last, words = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
generation, rank = int(os.environ["OUTLAST_GENERATION"]), int(os.environ["RANK"])
events = Path(os.environ["OUTLAST_RUN_DIR"]) / "events.jsonl"
facts = {"pid": os.getpid(), "modules": {}, "before": sorted(sys.modules)}


def take(word):
    name, _, where = word.partition("@")
    if "=" in name:
        variable, _, value = name.partition("=")
        os.environ[variable] = value.replace("GENERATION", str(generation))
    elif not where or int(where) == rank:
        module = importlib.import_module(name)
        facts["modules"][name] = {"ahead": os.getpid() != module.PID, "value": getattr(module, "VALUE", None)}


for word in words:
    if not word.startswith("~"):
        take(word)

import torch  # noqa: E402 - after what the script sets

weight = torch.nn.Parameter(torch.zeros(2))
optimizer = torch.optim.SGD([weight], lr=0.1)


def ready():
    whole = events.read_text().rpartition("\n")[0]  # the last line may be on its way
    found = [json.loads(line) for line in whole.splitlines()]
    return any(one["kind"] == "imported_ahead" and one["generation"] == generation for one in found)


for step in range(1 << 30):
    weight.grad = torch.ones(2)
    optimizer.step()
    if step == 1:
        for word in words:
            if word.startswith("~"):
                take(word[1:])
        (folder / f"facts-{generation}-{rank}.json").write_text(json.dumps(facts))
    if step > 40:
        if generation >= last:
            break
        time.sleep(0.05)
        if rank == 0 and (ready() or (folder / f"go-{generation}").exists()):
            os.kill(os.getpid(), signal.SIGKILL)
