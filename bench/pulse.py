"""pulse: cost of a heartbeat, a section and an empty step, compared with NVRx's heartbeat client.

Ours is measured through the session, on a page in shared memory that another process could
read; NVRx's client sends to its monitor process under ft_launcher. Each figure is the median
over batches of calls; the processes of the systems alternate (ABBA).

    python bench/pulse.py --ft-launcher /path/to/ft_launcher --out pulse.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from peers import figures

ROOT = Path(__file__).resolve().parent.parent
NVRX = Path(__file__).resolve().parent / "peers" / "nvrx_pulse.py"
MICRO = 1e6
PATIENCE = 300.0
Costs = dict[str, list[float]]


def measure(batches: int, calls: int) -> Costs:
    """Measure our costs in this process."""
    import outlast
    from outlast.hang.worker import heartbeat as liveness
    from outlast.ipc.heartbeat_page import HeartbeatPage, HeartbeatReader

    shared = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
    costs: Costs = {"heartbeat": [], "section": [], "step": []}
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        path = Path(folder) / "page"
        reader = HeartbeatReader(path, rank=0, generation=0, spawned=time.monotonic())
        page = liveness.attach(str(path))
        assert isinstance(page, HeartbeatPage)
        with outlast.start(run_dir=str(Path(folder) / "run")) as session:
            for _ in range(batches):
                began = time.perf_counter()
                for _ in range(calls):
                    session.heartbeat()
                costs["heartbeat"].append((time.perf_counter() - began) / calls)
                section = session.section("forward")
                page.learning = True
                began = time.perf_counter()
                for _ in range(calls):
                    with section:
                        pass
                costs["section"].append((time.perf_counter() - began) / calls)
                began = time.perf_counter()
                for _ in session.steps(session.completed_steps + calls):
                    pass
                costs["step"].append((time.perf_counter() - began) / calls)
        assert reader.read().beats > 0, "nothing was written into the page"
    return costs


def ours(options: argparse.Namespace) -> Costs:
    size = ["--batches", str(options.batches), "--calls", str(options.calls)]
    return costs_of([sys.executable, __file__, "--measure", *size])


def nvrx(options: argparse.Namespace) -> Costs:
    """Measure under ft_launcher; fewer and shorter batches, because each call waits for another process."""
    timeouts = ["--ft-initial-rank-heartbeat-timeout=60", "--ft-rank-heartbeat-timeout=60"]
    timeouts += ["--ft-rank-section-timeouts=step:60", "--ft-rank-out-of-section-timeout=60"]
    place = ["--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    script = [str(NVRX), str(max(1, options.batches // 4)), str(max(1, options.calls // 100))]
    return costs_of([str(options.ft_launcher), *place, *timeouts, *script])


def costs_of(command: list[str]) -> Costs:
    """Run a process and return the costs that it prints."""
    answer = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    lines = [line for line in answer.stdout.splitlines() if "costs {" in line]
    costs: Costs = json.loads(lines[-1].partition("costs ")[2])
    return costs


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--calls", type=int, default=500, help="per batch: shorter than a time slice")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each system")
    parser.add_argument("--ft-launcher", type=Path, help="NVRx's ft_launcher; without it NVRx is left out")
    parser.add_argument("--out", type=Path, help="file that JSON lines are appended to")
    parser.add_argument("--measure", action="store_true", help="measure ours in this process, print, end")
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.measure:
        figures.say("costs " + json.dumps(measure(options.batches, options.calls)))
        return
    lines = figures.Lines(options.out)
    lines.write(figures.surroundings(seed=0))
    systems = {"outlast": ours}
    if options.ft_launcher and options.ft_launcher.exists():
        systems["nvrx"] = nvrx
    else:
        figures.say("nvrx: not installed (--ft-launcher names none); left out")
        lines.write({"record": "left out", "system": "nvrx", "reason": "ft_launcher is not installed"})
    costs: dict[str, Costs] = {name: {} for name in systems}
    for name in figures.abba(list(systems), options.rounds):
        for what, values in systems[name](options).items():
            costs[name].setdefault(what, []).extend(values)
        lines.write({"record": "turn", "system": name, "loadavg": os.getloadavg()[0]})
    figures.say(f"{'microseconds':<22}{'median':>9}{'p99':>9}{'min':>9}   batches")
    for name, found in costs.items():
        for what, values in found.items():
            total = figures.summary([value * MICRO for value in values])
            lines.write({"record": "cost", "system": name, "what": what, "microseconds": total})
            shown = "".join(f"{total[key]:9.3f}" for key in ("median", "p99", "min"))
            figures.say(f"{name + ' ' + what:<22}{shown}   {total['n']}")


if __name__ == "__main__":
    main()
