"""What a decoder cannot read ends with its own error, in bounded time and memory, whatever it is."""

from __future__ import annotations

import contextlib
import json
import os
import random
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from outlast import settings
from outlast.errors import ConfigError, UsageError
from outlast.health.agent.telemetry import recorded
from outlast.health.policy import fault_logs, ledger, telemetry
from outlast.integrations.kubernetes.lint import lint
from outlast.observe.policy import codec
from tests.integrations.kubernetes.test_lint import GOOD
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
    for one in LITERALS:
        yield one
        yield json.dumps(document).encode().replace(b"1.0", one).replace(b"1.5", one)


def samples(folder: Path, suffix: str) -> Callable[[bytes], object]:
    def read(text: bytes) -> object:
        path = folder / f"samples{suffix}"
        path.write_bytes(text)
        return list(recorded.read(path))

    return read


def tables(folder: Path, suffix: str) -> Callable[[bytes], object]:
    def read(text: bytes) -> object:
        path = folder / f"config{suffix}"
        path.write_bytes(text)
        return settings.load_config(path, {})

    return read


def manifest(text: bytes) -> object:
    return lint(text.decode(errors="replace"))


DECODERS: dict[str, tuple[Callable[[Path], Callable[[bytes], object]], Any, tuple[type[Exception], ...]]] = {
    "sample": (lambda _: telemetry.from_line, SAMPLE, (ValueError,)),
    "samples": (lambda folder: samples(folder, ".jsonl"), SAMPLE, (UsageError,)),
    "trace": (lambda _: lambda text: fault_logs.Logs().add(text), TRACE, (fault_logs.BadLog,)),
    "entry": (lambda _: ledger.entry_of, ENTRY, (ledger.BadEntry,)),
    "record": (
        lambda _: lambda text: codec.decode(text.decode(errors="replace")),
        RECORD,
        (codec.CodecError,),
    ),
    "configuration": (lambda folder: tables(folder, ".yaml"), TABLES, (ConfigError,)),
    "manifest": (lambda _: manifest, list(yaml.safe_load_all(GOOD))[1], (UsageError,)),
}


@pytest.mark.parametrize("name", DECODERS)
def test_what_cannot_be_read_is_an_error_of_the_decoder(tmp_path: Path, name: str, seed: int) -> None:
    make, document, errors = DECODERS[name]
    decode, read = make(tmp_path), 0
    with contextlib.suppress(*errors):
        decode(json.dumps(document).encode())
    for text in forms(random.Random(seed), document):
        with contextlib.suppress(*errors):
            decode(text)
            read += 1
    assert read > 0, "some of them are documents"


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
