"""What a decoder cannot read ends with its own error, in bounded time and memory, whatever it is."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from outlast import settings
from outlast.agreement.worker.reports import Report
from outlast.checkpoint.policy.resolve import Copy, Mark
from outlast.checkpoint.replica import frames
from outlast.checkpoint.replica.handshake import Credentials
from outlast.checkpoint.tiers.memory_folder import MemoryFolder
from outlast.checkpoint.tiers.tier import DirectoryTier
from outlast.checkpoint.tools import convert
from outlast.cluster.lease_file import allowed
from outlast.cluster.rpc import handshake
from outlast.codec import Malformed, decode
from outlast.doctor.script import compiled
from outlast.errors import CheckpointError, ConfigError, RunFolderUnusable, UsageError
from outlast.health.agent import node_health, probe
from outlast.health.agent.telemetry import recorded
from outlast.health.agent.telemetry.kernel_log import KernelLog
from outlast.health.policy import device_memory, fault_logs, ledger, telemetry, weighted
from outlast.health.policy.hazard import DEFAULT
from outlast.health.policy.preflight import Preflight
from outlast.inprocess import barrier
from outlast.integrations import dcp
from outlast.integrations.kubernetes.lint import lint
from outlast.integrations.slurm import supervise
from outlast.ipc.exchange import SystemClock
from outlast.launcher.output import logs
from outlast.launcher.torchelastic import FileTimers
from outlast.launcher.workers import learned, own_source, script_sets, warming
from outlast.observe import requests
from outlast.observe.policy import codec
from outlast.observe.run_folder import RunFolder
from outlast.parallelism import agent as parallel
from outlast.preemption.worker import read_notice
from outlast.rerun.worker import rerun
from outlast.worker import installed
from tests.integrations.kubernetes.test_lint import GOOD
from tests.support.bounds import bounded_memory, bounded_time, bounded_wait
from tests.support.ckpt_run import ckpt, make_run

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

ODD: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    10**400,
    1e308,
    "",
    "x" * 3_000,
    [],
    {},
    [[]],
    {"a": {}},
    {"kind": []},
)
LITERALS = (
    b"1e999",
    b"NaN",
    b"-Infinity",
    b"9" * 5000,
    b"[" * 5_000,
    b'"\\ud800"',
    b"\x00",
    b"\xff",
    b"{}",
    b"[]",
)
_VALUES = re.compile(rb'(?<=[:\[,] )(-?[0-9][0-9.e+-]*|"[^"]*"|null|true|false)|(?<=\[)[^][{}]+')
SAMPLE = {"kind": "device", "time": 1.0, "node": "a", "index": 0, "uuid": "GPU-1", "temperature": 50.0}
TRACE = [
    {"node_id": "a", "event_time": 1.5, "event_type": what, "fault_type": {"Class": "GPU"}}
    for what in ("fault_start", "fault_end")
]
ENTRY = {"time": 1.0, "node": "a", "what": "fault", "kind": "lost"}
RECORD = {"v": 1, "kind": "saved", "time": 1.0, "clock": 1.0, "generation": 1, "step": 3, "checkpoint": "x"}
TABLES = {"fault_tolerance": {"safety_factor": 5.0, "rank_section_timeouts": {"a": 3.0}}, "checkpoints": {}}


def mutated(dice: random.Random, value: Any) -> Any:
    """Return a document with something else in one of its places."""
    if dice.random() < 0.3 or not isinstance(value, (dict, list)) or not value:
        return dice.choice(ODD)
    if isinstance(value, list):
        at = dice.randrange(len(value))
        return [*value[:at], mutated(dice, value[at]), *value[at + 1 :]]
    key = dice.choice(list(value))
    found = {**value, key: mutated(dice, value[key])}
    return {name: one for name, one in found.items() if name != key or dice.random() < 0.9}


def forms(dice: random.Random, document: Any) -> Iterator[bytes]:
    """Yield JSON texts that are near a document, and some that are near no document."""
    for _ in range(100):
        text = json.dumps(mutated(dice, document)).encode()
        yield text
        at = dice.randrange(len(text) + 1)
        yield text[:at] + dice.choice(LITERALS) + text[at + dice.randrange(3) :]
        yield text[:at]
    whole = json.dumps(document).encode()
    places = list(_VALUES.finditer(whole))
    for one in LITERALS:
        yield one
        for place in places if len(places) < 9 else dice.sample(places, 4):
            yield whole[: place.start()] + one + whole[place.end() :]


def incidents(folder: Path) -> object:
    return rerun.Records(folder, "", 0).read()


ERROR = {
    "message": {"message": "ValueError: x", "extraInfo": {"monotonic": 1.5, "ranks": [1], "exit_code": 3}}
}
HAZARD = DEFAULT.to_json()


def of_file(name: str, decode: Callable[[Path], object]) -> Callable[[Path], Callable[[bytes], object]]:
    """Return what makes a decoder of bytes out of one of a file of that name."""

    def make(folder: Path) -> Callable[[bytes], object]:
        def read(text: bytes) -> object:
            (folder / name).write_bytes(text)
            return decode(folder / name)

        return read

    return make


def plain(decode: Callable[[bytes], object]) -> Callable[[Path], Callable[[bytes], object]]:
    return lambda _: decode


def of_text(decode: Callable[[str], object]) -> Callable[[Path], Callable[[bytes], object]]:
    return lambda _: lambda text: decode(text.decode(errors="replace"))


def timers(folder: Path) -> Callable[[bytes], object]:
    """Return what takes requests of torchelastic's timers, as its workers write them into a FIFO."""
    made = FileTimers(folder / "timers")
    writer = os.open(made.path, os.O_WRONLY | os.O_NONBLOCK)

    def read(text: bytes) -> object:
        os.write(writer, text.replace(b"\n", b"")[:4000] + b"\n")
        made.take()
        made.deadline(0.0)
        return made.expire([])

    return read


def editable(folder: Path) -> Callable[[bytes], object]:
    (folder / "x.dist-info").mkdir()
    path = folder / "x.dist-info" / "direct_url.json"
    return lambda text: (path.write_bytes(text), list(installed._projects(str(folder))))


IMPORTED = {"modules": 3, "seconds": 1.5, "left_out": {"a": "b"}}
NAMES = {"names": [["a", 0]], "changes": [{"A": "b"}], "places": {"a": ["b", 1, 2]}}
LEARNED = {
    "format": learned.FORMAT,
    "python": [sys.executable, sys.version],
    "script": "train.py",
    "own": ["A"],
    "places": {"a": ["b", 1, 2]},
    "names": ["a"],
}
TIMER = {"pid": 1 << 40, "scope_id": "a", "expiration_time": 1.5, "signal": 9}
MODEL = {"n_layer": 2, "n_embd": 8, "n_head": 2, "n_positions": 9, "vocab_size": 9, "hidden_act": "silu"}
TOML = {"layers": 2, "hidden": 8, "heads": 2, "sequence": 9, "vocabulary": 9}
COPY = {"name": "step-1.g1", "state": "whole", "part": [0], "damage": None}
PROBE = {
    "device": "cuda:0",
    "model": "H100",
    "free": 9,
    "total": 9,
    "tested": 9,
    "problems": [],
    "seconds": 1.0,
}
NOTHING: tuple[type[Exception], ...] = ()
Make = Callable[[Path], Callable[[bytes], object]]
DECODERS: dict[str, tuple[Make, Any, tuple[type[Exception], ...]]] = {
    "sample": (plain(telemetry.from_line), SAMPLE, (ValueError,)),
    "samples": (of_file("samples.jsonl", lambda path: list(recorded.read(path))), SAMPLE, (UsageError,)),
    "trace": (plain(lambda text: fault_logs.Logs().add(text)), TRACE, (fault_logs.BadLog,)),
    "entry": (plain(ledger.entry_of), ENTRY, (ledger.BadEntry,)),
    "record": (of_text(codec.decode), RECORD, (codec.CodecError,)),
    "configuration": (
        of_file("config.yaml", lambda path: settings.load_config(path, {})),
        TABLES,
        (ConfigError,),
    ),
    "manifest": (of_text(lint), list(yaml.safe_load_all(GOOD))[1], (UsageError,)),
    "request": (of_file("request", requests.take), {"version": 1, "what": "save", "by": "me"}, NOTHING),
    "state": (
        of_file("run.json", lambda path: RunFolder(path.parent).read(path)),
        {"a": 1},
        (RunFolderUnusable,),
    ),
    "error": (of_file("error.json", lambda path: logs.failure_of(path, None)), ERROR, NOTHING),
    "imported": (of_file("imported", warming._result), IMPORTED, NOTHING),
    "imports": (of_file("imports", learned.listing), NAMES, NOTHING),
    "learned": (of_file("learned", lambda path: learned.kept(path, "train.py")), LEARNED, NOTHING),
    "variables": (of_file("variables", script_sets._read), {"A": "b", "C": None}, NOTHING),
    "timer": (timers, TIMER, NOTHING),
    "note": (
        of_file("node-1.json", lambda path: supervise.read_notes(path.parent)),
        {"node": "a", "exit_code": 1, "signals": [15]},
        NOTHING,
    ),
    "incident": (of_file("rerun-step-1.json", lambda path: incidents(path.parent)), {"step": 1}, NOTHING),
    "listing": (
        plain(device_memory.listing_of),
        {"listing": {"number": 1, "pids": [2], "problem": ""}},
        (ValueError,),
    ),
    "hazard": (of_file("hazard.json", lambda path: node_health._model(str(path))), HAZARD, (UsageError,)),
    "layers": (
        of_file("config.json", lambda path: parallel._model_of_file(str(path))),
        MODEL,
        (ConfigError,),
    ),
    "notice": (
        of_file("notice", lambda path: read_notice(str(path), 60.0, SystemClock())),
        {"action": "terminate", "time": "2026-01-02T03:04:05Z"},
        NOTHING,
    ),
    "members": (of_file("members.json", lambda path: MemoryFolder(path.parent).members()), {"a": 1}, NOTHING),
    "reason": (
        of_file("reason.json", lambda path: DirectoryTier(path.parent)._reason(path)),
        {"reason": "a"},
        NOTHING,
    ),
    "credentials": (of_text(Credentials.from_json), {"key": "a", "host": "b", "tls": ["c"]}, NOTHING),
    "mark": (of_text(lambda text: Mark.parse(f"local/a|proven|d|{text}")), "because", (ValueError,)),
    "copies": (of_text(lambda text: decode(text, tuple[Copy, ...])), [COPY], (Malformed,)),
    "report": (of_text(Report.from_json), ["fine", "a", {"b": 1.5}, None], (ValueError,)),
    "hello": (plain(handshake.parse), {"version": 1, "nonce": "a"}, (handshake.Refusal,)),
    "probe": (of_text(lambda text: probe._parse(text, "", 1.0, Preflight())), PROBE, NOTHING),
    "worker": (plain(barrier._decoded), {"say": "left", "generation": 1, "patience": 1.5}, NOTHING),
    "slices": (of_file("digests.json", dcp._read), {"a": "b"}, NOTHING),
    "editable": (editable, {"dir_info": {"editable": True}, "url": "file:///a"}, NOTHING),
}


def decoded(make: Make, folder: Path, texts: Iterable[bytes], errors: tuple[type[Exception], ...]) -> int:
    """Return how many texts a decoder could read, in bounded time and memory each; others are its errors."""
    decode, read = make(folder), 0
    with bounded_memory():
        for text in texts:
            with bounded_time(), contextlib.suppress(*errors):
                decode(text)
                read += 1
    return read


@pytest.mark.parametrize("name", DECODERS)
def test_what_cannot_be_read_is_an_error_of_the_decoder(tmp_path: Path, name: str, seed: int) -> None:
    make, document, errors = DECODERS[name]
    texts = [json.dumps(document).encode(), *forms(random.Random(seed), document)]
    assert decoded(make, tmp_path, texts, errors) > 0, "some of them are documents"


def garbled(dice: random.Random, content: bytes, times: int) -> Iterator[bytes]:
    """Yield bytes that are near some: cut off, changed, repeated, or with something else in between."""
    pieces = [b"\x00" * 9, b"\xff" * 9, b"[" * 100_000, b"9" * 5_000, b"\n", b'"', b",", b"0x" + b"f" * 5_000]
    for _ in range(times):
        at, end = sorted(dice.randrange(len(content) + 1) for _ in range(2))
        yield content[:at]
        yield content[:at] + content[end:]
        yield content[:at] + content[at:end] * 3 + content[end:]
        yield content[:at] + dice.choice(pieces) + content[min(len(content), at + dice.randrange(4)) :]
        changed = bytearray(content)
        for place in range(min(len(content), at), min(len(content), at + dice.randrange(1, 9))):
            changed[place] = dice.randrange(256)
        yield bytes(changed)


def frame_header(text: bytes) -> object:
    return frames._read_header(
        text.ljust(frames.HEADER_BYTES, b"\0")[: frames.HEADER_BYTES], frames.Kind.CHUNK, "a"
    )


def kernel_lines(folder: Path) -> Callable[[bytes], object]:
    path = folder / "kernel.log"

    def read(text: bytes) -> object:
        path.write_bytes(text)
        return list(KernelLog(str(path), "n", {}, -2).sample(1.0))

    return read


CELLS = b"kind,time,node,index,temperature,remap_pending,ports\ndevice,1.5,a,0,50,true,\nhost,1.5,a,,,,[]\n"
METRICS = ",".join(weighted.METRICS).encode() + b"\n2026-01-02T03:04:05,1,H100,,50,400,90,50,4,8,0,0.1\n"
LAYERS = b"[model]\n" + b"".join(f"{name} = {value}\n".encode() for name, value in TOML.items())
CONFIG = (
    b"[fault_tolerance]\nsafety_factor = 5.0\nrank_section_timeouts = {a = 3.0}\n[stragglers]\nenabled = 1\n"
)
SOURCE = b"import os, torch\nfrom a.b import c\ndef f(x):\n    return [x, (x + 1), {x: 'a'}]\n"
XIDS = b"NVRM: Xid (PCI:0000:10:00): 48, DBE\n" * 3
FRAME = frames._header_of(frames.Kind.CHUNK, b"abc")
BYTES: dict[str, tuple[Make, bytes, tuple[type[Exception], ...]]] = {
    "table": (of_file("samples.csv", lambda path: list(recorded.read(path))), CELLS, (UsageError,)),
    "metrics": (of_file("gpu_metrics.csv", lambda path: list(recorded.read(path))), METRICS, (UsageError,)),
    "configuration": (
        of_file("config.toml", lambda path: settings.load_config(path, {})),
        CONFIG,
        (ConfigError,),
    ),
    "layers": (
        of_file("model.toml", lambda path: parallel._model_of_file(str(path))),
        LAYERS,
        (ConfigError,),
    ),
    "script": (of_file("train.py", compiled), SOURCE, NOTHING),
    "imports": (plain(own_source._imports), SOURCE, NOTHING),
    "kernel log": (kernel_lines, XIDS, NOTHING),
    "lease": (of_file("lease", lambda path: allowed(str(path))), b"\0" * 20, (OSError,)),
    "frame": (plain(frame_header), FRAME, (frames.NotUnderstood,)),
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_that_cannot_be_read_are_an_error_of_the_decoder(
    tmp_path: Path, name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, content, errors = BYTES[name]
    monkeypatch.setattr("outlast.cluster.lease_file._TRY_AGAIN", 0.0)
    for path in tmp_path.glob("*"):
        path.chmod(0o600)
    texts = [content, *garbled(random.Random(seed), content, 40)]
    with bounded_wait():  # a file that never becomes whole
        assert decoded(make, tmp_path, texts, errors) > 0, "some of them can be read"


TEXTS = {
    "laughs": "a0: &a0 [x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"a{at}: &a{at} [{','.join([f'*a{at - 1}'] * 9)}]\n" for at in range(1, 12)),
    "itself": "a: &a [*a, *a]\n",
    "deep": "a: " + "[" * 50_000,
    "deep keys": "? " * 2_000 + "x",
    "list as key": "? [1, 2]\n: 3\n",
    "empty number": 'a: !!int ""\n',
    "no time": "a: !!timestamp x\n",
    "no float": 'a: !!float ""\n',
    "no bool": "a: !!bool maybe\n",
    "digits": f"a: {'9' * 5000}\n",
}


@pytest.mark.parametrize("name", TEXTS)
def test_yaml_without_end_or_sense_is_refused(tmp_path: Path, name: str) -> None:
    text = "apiVersion: batch/v1\nkind: Job\nspec: {}\n" + TEXTS[name]
    with contextlib.suppress(UsageError):
        lint(text)
    (tmp_path / "config.yaml").write_text("fault_tolerance: {}\n" + TEXTS[name])
    with pytest.raises(ConfigError):
        settings.load_config(tmp_path / "config.yaml", {})


@pytest.mark.parametrize("number", ["0x" + "f" * 5000, "9" * 5000, "[[0x" + "f" * 5000 + "]]"])
def test_a_number_of_too_many_digits_is_no_option(tmp_path: Path, number: str) -> None:
    (tmp_path / "config.toml").write_text(f"[stragglers]\nenabled = {number}\n")
    with pytest.raises(ConfigError):
        settings.load_config(tmp_path / "config.toml", {})


@pytest.mark.parametrize("time", ["9" * 400, "1e999", "-1", "NaN"])
def test_a_time_without_a_day_is_none_of_a_trace(time: str) -> None:
    text = json.dumps([{**one, "event_time": "TIME"} for one in TRACE])
    fault_logs.Logs().add(text.replace('"TIME"', "1.5").encode())
    with pytest.raises(fault_logs.BadLog):
        fault_logs.Logs().add(text.replace('"TIME"', time).encode())


@pytest.mark.parametrize("cell", ["x" * 200_000, '"' + "x\n" * 200_000, "\x00", "9" * 5000])
def test_a_cell_of_any_form_is_no_sample(tmp_path: Path, cell: str) -> None:
    path = tmp_path / "big.csv"
    path.write_text(f"time,node,index\n1,{cell},0\n1,a,{cell}\n")
    with pytest.raises(UsageError):
        list(recorded.read(path))


def test_an_archive_that_is_larger_inside_is_not_imported(tmp_path: Path) -> None:
    import torch

    make_run(tmp_path / "run")
    torch.save({"model": torch.zeros(1 << 20)}, tmp_path / "stored.pt")
    with (
        zipfile.ZipFile(tmp_path / "stored.pt") as stored,
        zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as bomb,
    ):
        for name in stored.namelist():
            bomb.writestr(name, stored.read(name))
    assert os.path.getsize(tmp_path / "bomb.pt") < 1 << 20
    for name, code in (("bomb.pt", 65), ("stored.pt", 0)):
        done = ckpt("import", tmp_path / name, "--format", "torch", "--to", tmp_path / "run", "--step", "77")
        assert done.returncode == code, done.stderr


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("form", ["torch", "safetensors", "dcp"])
def test_a_file_of_any_form_is_imported_or_refused(tmp_path: Path, form: str, seed: int) -> None:
    import torch
    from safetensors.torch import save_file
    from torch.distributed.checkpoint import FileSystemWriter, save

    state = {"model": torch.arange(6.0), "other": torch.ones(2, dtype=torch.int64)}
    source = tmp_path / {"torch": "state.pt", "safetensors": "state.safetensors", "dcp": "state"}[form]
    file = source / ".metadata" if form == "dcp" else source
    if form == "torch":
        torch.save(state, source)
    elif form == "safetensors":
        save_file(state, source)
    else:
        save(state, storage_writer=FileSystemWriter(source))
    steps, tier = iter(range(10**6)), DirectoryTier(tmp_path / "tier")
    content = file.read_bytes()
    header = b"[" * 100_000
    deep = len(header).to_bytes(8, "little") + header
    kind = "dcp" if form == "dcp" else "torch"

    def load(_: str) -> object:
        return convert.import_from(kind, source, tier, convert.Origin("run", next(steps)), "state")

    make = of_file(str(file), load)
    texts = [content, deep, header, *garbled(random.Random(seed), content, 12)]
    assert decoded(make, tmp_path, texts, (UsageError, CheckpointError, OSError)) > 0, "some are whole"
