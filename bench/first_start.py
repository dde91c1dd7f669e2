"""first_start: time from the command to a script's first statement, with and without torch, beside torchrun.

Each round starts every script once under each launcher; the order of the launchers alternates (ABBA). A rank
notes the wall time of its first statement after its imports; the figure is that of the last rank, since the
command. "training" makes an optimizer, too, which imports torch's compiler. The load of the host is recorded
with each start.

    python bench/first_start.py --rounds 8 --ranks 2 --out first_start.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
PATIENCE = 180.0
SCRIPTS = {
    "without torch": "",
    "torch": "import torch\n",
    "training": "import torch\ntorch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)\n",
}
END = "import os, time\nopen('began-' + os.environ['RANK'], 'w').write(str(time.time()))\n"
LAUNCHERS = {"torchrun": ("torch.distributed.run",), "outlast": ("outlast", "run")}


def start(launcher: str, text: str, ranks: int) -> float:
    """Return the seconds from the command to the first statement of the last rank."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(text + END)
        words = ("--standalone", f"--nproc-per-node={ranks}", str(script))
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        began = time.time()
        subprocess.run(
            [sys.executable, "-m", *LAUNCHERS[launcher], *words],
            cwd=folder,
            env=environment,
            check=True,
            timeout=PATIENCE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return max(float((Path(folder) / f"began-{rank}").read_text()) for rank in range(ranks)) - began


def main() -> None:
    """Measure, print a table, and write one line for each start."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("first_start.jsonl"))
    options = parser.parse_args()
    seconds: dict[tuple[str, str], list[float]] = {}
    with options.out.open("a") as out:
        for number in range(options.rounds):
            for name, text in SCRIPTS.items():
                for launcher in list(LAUNCHERS)[:: 1 if number % 2 else -1]:
                    load = os.getloadavg()[0]
                    found = start(launcher, text, options.ranks)
                    seconds.setdefault((name, launcher), []).append(found)
                    line = {"script": name, "launcher": launcher, "seconds": round(found, 3), "load": load}
                    out.write(json.dumps({**line, "ranks": options.ranks, "round": number}) + "\n")
                    out.flush()
    for (name, launcher), all_found in seconds.items():
        spread = f"{min(all_found):.2f} to {max(all_found):.2f}, {len(all_found)} starts"
        print(f"{name:14} {launcher:9} {statistics.median(all_found):6.2f} s ({spread})")


if __name__ == "__main__":
    main()
