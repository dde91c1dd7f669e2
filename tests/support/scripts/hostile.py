"""Rank 1 does to its agent what it can, something else in each generation; in the last one it trains.

arguments: steps of the last generation
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import outlast
from outlast.ipc.processes import answer_of

steps = int(sys.argv[1])
rank, generation = int(os.environ["RANK"]), int(os.environ["OUTLAST_GENERATION"])
page = Path(os.environ["OUTLAST_HEARTBEAT_PAGE"])
runtime = page.parent
error_file = os.environ["TORCHELASTIC_ERROR_FILE"]
DEEP = "[" * 100_000
INSIDE = {"say": "inside", "generation": 1, "granularity": "rank", "patience": 1.0}
ODD = (
    *({"generation": one} for one in (float("inf"), "x", 10**400)),
    *({"patience": one} for one in (float("nan"), [1])),
    *({"silence": one} for one in ({}, -1)),
    {"granularity": [2]},
)
GATE = (DEEP, '{"say": [1]}', '{"say": {}}', "[]", "3", *(json.dumps({**INSIDE, **one}) for one in ODD))
CONTROL = (
    DEEP,
    "[]",
    "\x00",
    '{"v": 1, "kind": "saved", "step": 1e999}',
    '{"v": 1, "kind": [1]}',
    "x" * 60_000,
)


def gate() -> None:
    for content in GATE:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
            line.connect(os.fspath(runtime / "gate"))
            time.sleep(0.02)
            with suppress(OSError):
                line.send(content.encode())
            time.sleep(0.02)


def control(*lines: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        for content in lines:
            line.sendto(content.encode(), os.fspath(runtime / "control"))


def note(number: int) -> dict[str, object]:
    return {
        "v": 1,
        "kind": "note",
        "time": 1.0,
        "clock": 1.0,
        "generation": generation,
        "reason": f"no {number}",
    }


def environment() -> None:
    again = {"v": 1, "kind": "started_again", "time": 1.0, "clock": 1.0, "generation": generation, "rank": 1}
    os.mkfifo(runtime / f"environment-{generation}-1.json")
    control(json.dumps({**again, "variables": [], "reason": "it says so"}))


def scribble(value: int) -> None:
    with open(page, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        for word in range(3, len(memory) // 8):
            memory[8 * word : 8 * word + 8] = struct.pack("<q", value)


def state() -> None:
    """Be in a state that there is not, for as long as the agent needs to see it."""
    with open(page, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        known = memory[8 * 19 : 8 * 20]
        memory[8 * 19 : 8 * 20] = struct.pack("<q", 77)
        time.sleep(1.5)
        memory[8 * 19 : 8 * 20] = known


def deaf() -> None:
    """Have the agent ask this thread for an answer, and find a FIFO in its place."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    with open(page, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[8 * 13 : 8 * 14] = struct.pack("<q", threading.get_native_id())
    for name in (answer_of(os.fspath(page)), f"{runtime}/stacks-{generation}-1"):
        with suppress(FileNotFoundError):
            os.unlink(name)
        os.mkfifo(name)
    time.sleep(3600)


def end_with(content: str | None) -> None:
    if content is None:
        os.mkfifo(error_file)
    else:
        Path(error_file).write_text(content)
    os._exit(3)


def attack() -> None:
    match generation:
        case 1:
            state()
            gate()
            control(*CONTROL)
            for part in range(30):  # it is no hang that is to be found here
                control(*[json.dumps(note(number)) for number in range(100 * part, 100 * part + 100)])
                outlast.progress(6 + part)
            environment()
            (runtime / "heartbeat-2-1").mkdir()  # whose names can be guessed
            os.mkfifo(runtime / "heartbeat-2-0")
            logs = Path(os.environ["OUTLAST_RUN_DIR"]) / "logs" / "gen-0002" / "rank-00001"
            logs.mkdir(parents=True)
            os.mkfifo(logs / "stdout.log")
            end_with('{"message": {"message": "told all the same", "extraInfo": [1]}}')
        case 2:
            scribble(-1)
            time.sleep(3600)
        case 3:
            os.truncate(page, 0)
            time.sleep(3600)
        case 4:
            deaf()
        case 5:
            end_with(None)
        case 6:
            end_with('{"message": {"message": "x", "extraInfo": {"exit_code": 1e999, "ranks": [1e999]}}}')


for step in range(1, 1_000_000):
    outlast.progress(step)
    time.sleep(0.02)
    if rank == 1 and step == 5:
        attack()
    if generation == 7 and step == steps:
        break
