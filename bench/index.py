"""index: what one rank reads and decodes of a copy of very many ranks to know where its tensors are.

Manifest and documents are made of states whose tensors have no memory: 1,000 tensors, a model's and those of
its optimizer, divided by FSDP over all ranks, or over a mesh of dp x tp. "same" is a load by as many ranks,
"half" one by half of them; both without the tensors and without the digests of their chunks. "commit" is what
the leading writer takes, answers and writes for a copy whose parts nodes of 8 ranks have written; each
reports once a second until it is committed, here --reports times.

    python bench/index.py --ranks 8192 --gb 100 --out index.jsonl
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peers import figures

from outlast.checkpoint.content.codecs import Piece
from outlast.checkpoint.content.digest import digests_nbytes, ends_of, row_of
from outlast.checkpoint.content.format import lay_out, notes_of, rank_document
from outlast.checkpoint.content.random_states import capture_random
from outlast.checkpoint.content.rank_file import Parameter, contents_of
from outlast.checkpoint.content.state import Captured
from outlast.checkpoint.load.world import World
from outlast.checkpoint.policy.joint import Leader, Member, Report, Written
from outlast.checkpoint.policy.manifest import Identity, Manifest, Row, copy_name, rank_files, runs_of
from outlast.checkpoint.tiers.inventory import read_manifest, read_rank_file
from outlast.checkpoint.tiers.tier import CopyFolder, DirectoryTier
from outlast.parallelism.policy.slices import Part, Split, part_of

PARAMS, COLUMNS, ON_NODE = 250, 4096, 8
NAME = copy_name(100, 1)
LAYOUTS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "fsdp": lambda ranks: (ranks,),
    "dp x tp": lambda ranks: (ranks // 8, 8),
}


class Mesh:
    """A mesh as one of its ranks has it."""

    def __init__(self, sizes: Sequence[int], place: Sequence[int]) -> None:
        self.mesh = torch.empty(tuple(sizes), device="meta")
        self._place = list(place)

    def get_coordinate(self) -> list[int]:
        return self._place


class Counting:
    """An open copy that counts what is read of it."""

    def __init__(self, folder: CopyFolder) -> None:
        self._folder, self.nbytes, self.files = folder, 0, 0

    def read(self, file: str, nbytes: int | None = None) -> bytes:
        found = self._folder.read(file, nbytes)
        self.nbytes, self.files = self.nbytes + len(found), self.files + 1
        return found


def place_of(rank: int, sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(rank // math.prod(sizes[along + 1 :]) % size for along, size in enumerate(sizes))


def splits_of(sizes: Sequence[int], place: Sequence[int]) -> list[tuple[int, Split]]:
    """Return dimensions of the mesh, and the division along each: first columns by tp, then rows by dp."""
    along = range(len(sizes))
    return [(one, Split(one, sizes[one], place[one])) for one in reversed(along)]


def captured(rank: int, sizes: Sequence[int], rank_bytes: float) -> Captured:
    """Return the state of a rank; its tensors have no memory."""
    rows = max(1, round(rank_bytes / (3 * PARAMS * COLUMNS * 4)))
    whole = (rows * sizes[0], COLUMNS * math.prod(sizes[1:]))
    place = place_of(rank, sizes)
    mesh = Mesh(sizes, place)
    found = splits_of(sizes, place)
    cuts = tuple((split.axis, along) for along, split in found)
    part = part_of(whole, [split for _, split in found])
    piece, local = Piece(whole, part, mesh, cuts), torch.empty(part.shape, device="meta")
    names = [f"layers.{number}.weight" for number in range(PARAMS)]
    tensors = {f"model.{name}": local for name in names}
    states = []
    for number in range(PARAMS):
        keys = {one: f"optimizer.state.{number}.{one}" for one in ("step", "exp_avg", "exp_avg_sq")}
        tensors |= {
            key: torch.empty((), device="meta") if one == "step" else local for one, key in keys.items()
        }
        states.append([number, {"dict": {one: {"tensor": key} for one, key in keys.items()}}])
    group = {"lr": 1e-3, "betas": {"tuple": [0.9, 0.95]}, "eps": 1e-8, "params": list(range(PARAMS))}
    values = {
        "model": {"dict": {name: {"tensor": f"model.{name}"} for name in names}},
        "optimizer": {"dict": {"state": {"map": states}, "param_groups": [{"dict": group}]}},
    }
    stepped: list[Parameter] = [(f"model.{name}", f"float32{list(whole)}", None) for name in names]
    pieces = {key: piece for key, one in tensors.items() if one is local}
    kinds = {"optimizer": "AdamW"}
    return Captured(values, kinds, tensors, {}, capture_random(), pieces, {"optimizer": stepped})


def make(folder: Path, ranks: int, sizes: Sequence[int], rank_bytes: float, own: int) -> Manifest:
    """Write manifest, COMMIT and the documents of two ranks; of the others only random states differ."""
    dice = random.Random(0)
    rows: dict[int, Row] = {}
    said: dict[int, dict[str, str]] = {}
    (folder / NAME).mkdir()
    for rank in (0, own):
        torch.manual_seed(rank)
        state, identity = captured(rank, sizes, rank_bytes), Identity("run", 1, rank, ranks)
        layout = lay_out(state.tensors, notes_of(100, identity), state.pieces)
        document = rank_document(state, layout, 100, identity, {})
        (folder / NAME / rank_files(rank, ranks).document).write_bytes(document)
        digests = dice.randbytes(digests_nbytes(layout.nbytes))
        place = layout.place["begin"], layout.place["coordinates"]
        rows[rank] = row_of(layout.nbytes, digests, document, *place)
        said[rank] = contents_of("", json.loads(document))
    digest = lambda digits: f"{dice.getrandbits(4 * digits):0{digits}x}"  # noqa: E731
    every = [said.get(rank) or {**said[0], "random": digest(16)} for rank in range(ranks)]
    whole = [
        rows.get(rank)
        or rows[0]._replace(
            digest=digest(32),
            digests=digest(32),
            document=digest(32),
            coordinates=(place_of(rank, sizes),),
        )
        for rank in range(ranks)
    ]
    manifest = Manifest("run", 1, 100, ranks, {}, None, 1.5, tuple(whole), runs_of(every))
    for file, content in ends_of(manifest).items():
        (folder / NAME / file).write_bytes(content)
    return manifest


def measured(folder: Path, use: Callable[[Any], object]) -> dict[str, Any]:
    """Return what a use of the copy reads, and the best of three times."""
    found: dict[str, Any] = {}
    for _ in range(3):
        with DirectoryTier(folder).open(NAME) as opened:
            copy, began, busy = Counting(opened), time.perf_counter(), time.process_time()
            use(copy)
            seconds, busy = time.perf_counter() - began, time.process_time() - busy
        if seconds < found.get("seconds", math.inf):
            found = {"files": copy.files, "bytes": copy.nbytes, "seconds": seconds, "cpu_seconds": busy}
    return found


def same(copy: Any, rank: int) -> None:
    """Do what a rank of the same world does before it reads tensors."""
    read_rank_file(copy, read_manifest(copy, NAME)[0], rank)


def half(copy: Any, rank: int, sizes: Sequence[int]) -> None:
    """Do what a rank of half the world does before it reads tensors."""
    world = World(copy, read_manifest(copy, NAME)[0])
    fewer = (sizes[0] // 2, *sizes[1:])
    splits = [split for _, split in splits_of(fewer, place_of(rank, fewer))]
    for key, form in world.forms.items():
        shape = form.shape
        wanted = part_of(shape, splits) if shape else Part.whole(shape)
        for sources in world.held(key, wanted).values():
            world.stored(key, sources[rank % len(sources)])
    world.pairs(world.forms, rank, math.prod(fewer))


def commit(manifest: Manifest, reports: int) -> dict[str, Any]:
    """Have a leader take what nodes have written, and make the manifest.

    Args:
        manifest: of the copy.
        reports: how often each node reports until the copy is committed.
    """
    ranks = range(manifest.world_size)
    nodes = [ranks[first : first + ON_NODE] for first in range(0, len(ranks), ON_NODE)]
    parts, members = manifest.parts(), dict[str, Member]()
    for number, mine in enumerate(nodes):
        own = tuple((rank, parts[rank][0]) for rank in mine)
        contents = runs_of([parts[rank][1] for rank in mine])
        members[f"node-{number}"] = member = Member(f"node-{number}", "session")
        member.made(100)
        member.wrote(Written(NAME, own, 0.1, "", "session", contents=contents))
    leader = Leader(members, False)
    complete, nbytes, seconds, busy = None, 0, 0.0, 0.0
    for _ in range(reports):
        texts = [json.dumps(member.report.to_values()) for member in members.values()]
        began, began_busy = time.perf_counter(), time.process_time()
        for text in texts:
            complete = next(iter(leader.hear(Report.from_values(json.loads(text)))), complete)
        seconds, busy = seconds + time.perf_counter() - began, busy + time.process_time() - began_busy
        nbytes += sum(map(len, texts))
        for node, member in members.items():
            answer = leader.answer_to(node)
            nbytes += len(json.dumps(vars(answer)))
            member.hear(answer)
    assert complete is not None, "all nodes have reported"
    began, began_busy = time.perf_counter(), time.process_time()
    ends = ends_of(replace(manifest, session="session").joined(complete.own, ()))
    seconds, busy = seconds + time.perf_counter() - began, busy + time.process_time() - began_busy
    nbytes += sum(map(len, ends.values()))
    return {"nodes": len(nodes), "reports": reports, "bytes": nbytes, "seconds": seconds, "cpu_seconds": busy}


def main() -> int:
    """Measure the copies that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=[1024, 8192], help="multiples of 16")
    parser.add_argument("--gb", type=float, nargs="*", default=[10.0, 100.0], help="of a rank")
    parser.add_argument("--reports", type=int, default=10, help="of each node, until the copy is committed")
    parser.add_argument("--out", type=Path, help="file that JSON lines are appended to")
    options = parser.parse_args()
    lines = figures.Lines(options.out)
    found: list[dict[str, Any]] = [figures.surroundings(0)]
    for ranks, size, layout in itertools.product(options.ranks, options.gb, LAYOUTS):
        sizes, own = LAYOUTS[layout](ranks), ranks // 2 + 1
        about = {"record": "index", "ranks": ranks, "gb": size, "layout": layout}
        with tempfile.TemporaryDirectory() as place:
            manifest = make(Path(place), ranks, sizes, size * 1e9, own)
            uses = {
                "same": lambda: measured(Path(place), lambda copy: same(copy, own)),  # noqa: B023 - called below
                "half": lambda: measured(Path(place), lambda copy: half(copy, own // 2, sizes)),  # noqa: B023
                "commit": lambda: commit(manifest, options.reports),  # noqa: B023
            }
            found += [{**about, "use": use, **run()} for use, run in uses.items()]
    for line in found:
        lines.write(line)
        figures.say(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
