"""Lightning's checkpoints with digests: verified when they are loaded, never half written.

A checkpoint stays Lightning's file at Lightning's path. Beside it is a small file with its digest, which is
written before the checkpoint gets its name; so after a kill at any moment the two fit together.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import pickletools
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
import xxhash

from outlast import files
from outlast.errors import NoUsableCheckpoint, UsageError
from outlast.integrations.collectives import from_rank0
from outlast.integrations.lightning.callback import package
from outlast.integrations.lightning.unfinished import remove_stale, written_to

_LOG = logging.getLogger("outlast")
_BESIDE = ".digests.json"
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_PART = 1 << 22  # bytes
_MOST = 1 << 20  # bytes of a file of digests; one digest takes some 40
_HEAD = 1 << 16  # bytes of a checkpoint's pickle, which begins with the epoch and the step
_TorchIO: Any = importlib.import_module(f"{package()}.plugins.io").TorchCheckpointIO


class OutlastCheckpointIO(_TorchIO):  # type: ignore[misc]
    """A plugin of Lightning's Trainer: ``Trainer(plugins=[OutlastCheckpointIO()])``.

    ``ModelCheckpoint`` and ``ckpt_path="last"`` stay as they are. A damaged checkpoint is set aside and the
    newest whole one of its folder is loaded, the same on every rank. With an OutlastCallback, which
    ``outlast run`` attaches, the random states of all ranks are kept, too.
    """

    keeps_random_states = True

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a checkpoint whole, with its digest; remove what a killed process left half written.

        Raises:
            UsageError: the path is not one of a local file system, or there are storage options.
        """
        if storage_options is not None:
            raise UsageError("OutlastCheckpointIO: storage_options have no effect; leave them out")
        target = _local(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(target.parent)
        with written_to(target) as part:
            with open(files.open_regular(part, _CREATE, 0o666), "wb") as file:
                digested: Any = _Digested(file)  # torch.save asks for an IO, and needs `write` only
                torch.save(checkpoint, digested)
                file.flush()
                os.fsync(file.fileno())
            digests = [digested.hexdigest(), *(_known(target) or ())]
            _note(target, digests)
            os.replace(part, target)
        if len(digests) > 1:
            _note(target, digests[:1])

    def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        """Load a checkpoint that is whole.

        Raises:
            NoUsableCheckpoint: it is damaged, and its folder has no other one that is whole.
        """
        named = _local(path)
        chosen = _agreed(Path(os.path.realpath(named)), named.name.startswith("last"))
        if _known(chosen) is not None and not is_whole(chosen):  # this rank reads other bytes than rank 0
            raise NoUsableCheckpoint(
                f"{chosen}: rank 0 found it whole, and this rank finds other bytes; nothing was loaded"
            )
        found: dict[str, Any] = super().load_checkpoint(chosen, *args, **options)
        return found

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint and its digest."""
        target = _local(path)
        super().remove_checkpoint(path)
        _beside(target).unlink(missing_ok=True)


class _Digested:
    """Digests what is written to a file, so that no save has to read it again."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = xxhash.xxh3_128()
        self.flush = file.flush
        self.hexdigest = self._digest.hexdigest

    def write(self, part: Any) -> int:
        self._digest.update(part)
        return self._file.write(part)


def _local(path: Any) -> Path:
    if "://" in str(path):
        raise UsageError(f"OutlastCheckpointIO: {path}: found a URL, needs a path of a local file system")
    folder, name = os.path.split(os.path.abspath(path))
    return Path(os.path.realpath(folder), name)  # a link such as last.ckpt is replaced, not what it names


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}{_BESIDE}")


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with open(files.open_regular(path, follow=True), "rb") as file:
        while part := file.read(_PART):
            digest.update(part)
    return digest.hexdigest()


def _note(path: Path, digests: list[str]) -> None:
    with written_to(_beside(path)) as part:
        with open(files.open_regular(part, _CREATE, 0o666), "w") as file:
            json.dump(digests, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, _beside(path))


def _known(path: Path) -> list[str] | None:
    """Return the digests that a checkpoint may have; None: written without, empty: they are damaged."""
    try:
        found = json.loads(files.read_whole(_beside(path), _MOST, follow=True))
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in files.UNFIT:
            raise
        return []
    except (ValueError, RecursionError):
        return []
    return [one for one in found if isinstance(one, str)] if isinstance(found, list) else []


def is_whole(path: Path) -> bool:
    """Return whether the bytes of a checkpoint are those that were written with its digest."""
    return path.is_file() and _digest(path) in (_known(path) or ())


def can_be_read(path: Path) -> bool:
    """Return whether a checkpoint is whole; one that the disk refuses is not, or is gone meanwhile."""
    try:
        return is_whole(path)
    except OSError:
        return False


def step_of(path: Path) -> int | None:
    """Return the ``global_step`` of a checkpoint of Lightning, read without unpickling; None: it has none."""
    before: list[Any] = ["", ""]  # the values last read
    try:
        with (
            open(files.open_regular(path, follow=True), "rb") as whole,
            zipfile.ZipFile(whole) as archive,
        ):
            (name,) = (one for one in archive.namelist() if one.endswith("/data.pkl"))
            with archive.open(name) as file:
                head = file.read(_HEAD)
        for kind, value, _ in pickletools.genops(head):
            if kind.name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
                continue
            before = [before[1], value]
            if before[0] == "global_step" and type(value) is int:
                return value
    except Exception:  # noqa: BLE001 - zipfile, pickletools and decompressors have many for damaged bytes
        return None
    return None


def _agreed(path: Path, any_other: bool) -> Path:
    """Return what rank 0 chooses, on every rank; another one than that which is named if that is allowed.

    Raises:
        NoUsableCheckpoint: it finds none.
    """
    chosen, failed = "", None
    if not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0:
        try:
            chosen = str(_chosen(path, any_other))
        except Exception as error:  # noqa: BLE001 - the other ranks wait for an answer; it is raised on all
            failed = error
    answer = from_rank0([chosen, str(failed or "")], f"the choice for {path}")
    if failed is not None:
        raise failed
    if not (isinstance(answer, list) and len(answer) == 2 and all(isinstance(one, str) for one in answer)):
        raise NoUsableCheckpoint(f"{path}: rank 0 answered {answer!r}; expected a path and an error")
    if answer[1] or not answer[0]:
        raise NoUsableCheckpoint(f"on rank 0: {answer[1] or 'no answer'}")
    return Path(answer[0])


def _chosen(path: Path, any_other: bool) -> Path:
    if not path.exists():
        return path
    is_file = path.is_file()
    if is_file and _known(path) is None:
        _LOG.warning("%s: loaded unverified, since it was written without a digest", path)
        return path
    if is_whole(path):
        return path
    why = "its bytes are not those that were written" if is_file else "a file is expected, it is none"
    if not any_other:
        raise NoUsableCheckpoint(
            f"{path}: {why}; nothing was loaded. Name another checkpoint of {path.parent}, or"
            " ckpt_path='last', which takes the newest whole one"
        )
    aside = path.with_name(f"{path.name}.damaged")
    os.replace(path, aside)
    for other in sorted(path.parent.glob("*.ckpt"), key=_age, reverse=True):
        if can_be_read(other):
            _LOG.warning("%s: damaged, kept as %s; %s is loaded instead", path, aside.name, other.name)
            return other
    raise NoUsableCheckpoint(
        f"{path}: {why}; it was kept as {aside.name}. No other checkpoint in {path.parent} is whole; nothing"
        " was loaded"
    )


def _age(path: Path) -> tuple[int, float]:
    """Return what orders checkpoints: the step, and the time where there is none; a copy has other times."""
    step, written = step_of(path), 0.0
    with suppress(OSError):
        written = path.stat().st_mtime
    return -1 if step is None else step, written
