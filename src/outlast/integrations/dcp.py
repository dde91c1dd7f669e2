"""torch.distributed.checkpoint with digests: verified where it is loaded, and never half written.

A checkpoint stays a folder in torch's own format, which ``FileSystemReader`` reads, too. It is written under
another name and gets its own when it is whole. A file beside ``.metadata`` has a digest of each slice of
each file, so a reader verifies what it reads, and no more.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from outlast import files
from outlast.errors import NoUsableCheckpoint, UsageError
from outlast.fields import Fields
from outlast.integrations.collectives import from_all_ranks, from_rank0

_LOG = logging.getLogger("outlast")
_METADATA, _DIGESTS = ".metadata", ".outlast_digests.json"
_LEFT = (f"*{_DIGESTS}", _METADATA, f"{_METADATA}.tmp", "*.distcp")  # by a save that was killed
_PART, _BEFORE = ".part", ".before"
_BYTES = 1 << 22  # read at once
_MOST = 1 << 30  # bytes of a file of digests: some ten million slices


class _Files(FileSystem):
    """torch's access to files, for regular ones alone: a new one is written, and no FIFO is waited for."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with _reading(path) if mode == "rb" else _creating(path) as stream:
            yield stream


class OutlastStorageWriter(FileSystemWriter):
    """A FileSystemWriter whose checkpoints have digests and replace older ones whole.

    ``dcp.save(state, storage_writer=OutlastStorageWriter(path))``; all ranks write to one folder.

    Args:
        path: folder of the checkpoint, on a file system that all ranks share.
        options: those of FileSystemWriter; ``sync_files`` stays on, and ``overwrite`` is True.
    """

    def __init__(self, path: str | os.PathLike[str], **options: Any) -> None:
        refused = {"sync_files": True, "overwrite": True}
        for name, only in refused.items():
            if options.get(name, only) != only:
                raise UsageError(
                    f"OutlastStorageWriter: {name}={options[name]!r} has no effect; leave it out:"
                    " a checkpoint is synced and replaces the one before when it is whole"
                )
        super().__init__(path, **options)
        self.fs = _Files()
        self._target = _folder(path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Write to another folder from now on; None: to the same one."""
        if checkpoint_id:
            self._target = _folder(checkpoint_id)
        super().reset(self._target)

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The folder of the checkpoint, as it is called when it is whole."""
        return self._target

    @property
    def _under_way(self) -> Path:
        return _beside(self._target, _PART)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a checkpoint.

        Raises:
            UsageError: ranks write without collectives, each with metadata of its own.
        """
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if not getattr(self, "use_collectives", True):  # torch before 2.8 has no such option
            raise UsageError("OutlastStorageWriter: use_collectives=False is not supported; leave it out")
        self.path = self._under_way

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Take the plan as it is; the folder is made when all ranks have begun."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Remove what a save that was killed has left, and make the folder."""
        self._make_folder()
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what this rank holds, and the digests of it."""
        written = super().write_data(plan, planner)
        results = written.value()  # it is done: nothing is written in the background
        if results:
            digests = {}
            for one in (result.storage_data for result in results):
                with _reading(self._under_way / one.relative_path) as file:
                    digests[_name(one)] = _digest_of(file, one.offset, one.length)
            _write(self._under_way / f"{plan.storage_data.prefix}{_DIGESTS}", digests)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata and all digests, and give the checkpoint its name."""
        super().finish(metadata, results)
        digests: dict[str, str] = {}
        for part in sorted(self._under_way.glob(f"*{_DIGESTS}")):
            digests.update(_read(part) or {})
            part.unlink()
        digests[_METADATA] = _digest_of_file(self._under_way / _METADATA)
        _write(self._under_way / _DIGESTS, digests)
        files.sync_folder(self._under_way)
        self._give_name()

    def _make_folder(self) -> None:
        if self._under_way.exists():
            shutil.rmtree(self._under_way)
        self._under_way.mkdir(parents=True)

    def _give_name(self) -> None:
        before = _beside(self._target, _BEFORE)
        if self._target.exists():  # else a save was killed between the renames, and the one before is there
            shutil.rmtree(before, ignore_errors=True)
            os.rename(self._target, before)
        os.rename(self._under_way, self._target)
        files.sync_folder(self._target.parent)
        shutil.rmtree(before, ignore_errors=True)


class OutlastStorageInPlace(OutlastStorageWriter):
    """A writer for a folder in which somebody else has begun a checkpoint, and names it when it is done.

    The folder counts as whole when the digests are there, which are written last.

    Args:
        path: folder of the checkpoint; it exists.
        beside: names of files in it that are no slices; those that exist at ``finish`` are digested, too.
    """

    def __init__(self, path: str | os.PathLike[str], beside: Sequence[str]) -> None:
        super().__init__(path)
        self._others = beside

    @property
    def _under_way(self) -> Path:
        return self._target

    def _make_folder(self) -> None:
        for pattern in _LEFT:
            for left in self._target.glob(pattern):
                left.unlink()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Sync and digest the other files, then write the metadata and all digests."""
        digests = {}
        for path in (self._target / name for name in self._others):
            if not path.exists():
                continue
            with _reading(path) as file:
                os.fsync(file.fileno())
            digests[_whole_file(path)] = _digest_of_file(path)
        _write(self._target / f"beside{_DIGESTS}", digests)
        super().finish(metadata, results)

    def _give_name(self) -> None:
        """Leave the name as it is."""


class OutlastStorageReader(FileSystemReader):
    """A FileSystemReader that verifies what it reads.

    ``dcp.load(state, storage_reader=OutlastStorageReader(path))``. A checkpoint that another writer wrote has
    no digests: it is loaded unverified, and a warning says so.

    Args:
        path: folder of the checkpoint.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(_whole_name(_folder(path)))
        self.fs = _Files()
        self._digests: Mapping[str, str] | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Read another folder from now on; None: the same one."""
        super().reset(_whole_name(_folder(checkpoint_id)) if checkpoint_id else None)
        self._digests = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata, verified before they are unpickled.

        Raises:
            NoUsableCheckpoint: they are not what was written.
        """
        folder = Path(self.path)
        self._digests = _read(folder / _DIGESTS)
        if self._digests is None:
            _LOG.warning("%s: loaded unverified, since it was written without digests", folder)
        elif self._digests.get(_METADATA) != _digest_of_file(folder / _METADATA):
            why = _damaged(folder / _METADATA)
            _LOG.error("%s", why)  # torch 2.9 replaces the exception by "assert metadata is not None"
            raise NoUsableCheckpoint(why)
        return super().read_metadata(*args, **kwargs)

    def verify(self, name: str) -> None:
        """Verify a file beside the slices that :class:`OutlastStorageInPlace` has digested.

        Raises:
            NoUsableCheckpoint: it is not what was written.
        """
        for place, digest in (self._digests or {}).items():
            if place.startswith(f"{name}:"):
                path = Path(self.path, name)
                if not path.exists() or place != _whole_file(path) or digest != _digest_of_file(path):
                    raise NoUsableCheckpoint(_damaged(path))

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        if self._digests is not None:
            found = _digest_of(file, sinfo.offset, sinfo.length)
            if self._digests.get(_name(sinfo)) != found:
                raise NoUsableCheckpoint(_damaged(Path(self.path) / sinfo.relative_path))
        return super()._slice_file(file, sinfo)


def newest_whole(
    folder: str | os.PathLike[str], wanted: Callable[[Path], bool] = lambda _: True
) -> Path | None:
    """Return the newest checkpoint in a folder whose bytes are those that were written; None: there is none.

    The answer is the same on every rank; each verifies a part. Checkpoints without digests are passed over.
    In a job every rank has to call it, after ``init_process_group``.

    Args:
        folder: its subfolders are the checkpoints.
        wanted: says of a whole one whether it will do, the same on every rank.
    """
    ranks, rank = 1, 0
    if dist.is_available() and dist.is_initialized():
        ranks, rank = dist.get_world_size(), dist.get_rank()
    names: list[str] = []
    failed: OSError | None = None
    if rank == 0:
        try:
            names = _newest_first(Path(folder))
        except OSError as error:  # the other ranks wait for an answer; it is raised on all
            failed = error
    heard = from_rank0([names, str(failed or "")], f"the checkpoints of {folder}")
    if failed is not None:
        raise failed
    names, refused = _listed(heard, folder)
    if refused:
        raise OSError(f"on rank 0: {refused}")
    for name in names:
        one = _whole_name(Path(folder, name))
        answers = from_all_ranks(_is_whole(one, rank, ranks), f"the look at {one}") or []
        if not all(answer is True for answer in answers):
            _LOG.warning("%s: damaged; an older checkpoint is looked for", one)
        elif wanted(one):
            return one
    return None


def _listed(heard: Any, folder: str | os.PathLike[str]) -> tuple[list[str], str]:
    """Return the names that rank 0 has found, and its error, both checked.

    Raises:
        DamagedCopy: it has sent something else.
    """
    fields = Fields(f"the checkpoints of {folder}", dict(zip(("names", "error"), heard, strict=False)))
    names = fields.value("names", list)
    for name in names:
        if not isinstance(name, str) or name != os.path.basename(name) or name in ("", ".", ".."):
            fields.refuse("names", "names of folders", repr(name))
    return names, fields.text("error")


def settle(folder: Path) -> None:
    """Give the checkpoints of a folder their names where saves were killed; one process calls it, in no save.

    Args:
        folder: its subfolders are the checkpoints.
    """
    for left in sorted(folder.iterdir()) if folder.is_dir() else ():
        if left.name.endswith(_PART):
            shutil.rmtree(left)
        elif left.name.endswith(_BEFORE):
            target = left.with_name(left.name.removesuffix(_BEFORE))
            if target.exists():
                shutil.rmtree(left)
            else:
                os.rename(left, target)


def _newest_first(folder: Path) -> list[str]:
    """Return the names of the checkpoints that have digests, the newest first.

    Names that differ in one number, the step, are ordered by it: a copied folder has other times. Other names
    are ordered by the time at which their checkpoint was finished.
    """
    found: dict[str, float] = {}
    for one in folder.iterdir() if folder.is_dir() else ():
        name = one.name.removesuffix(_BEFORE)
        if not name.endswith(_PART) and (_whole_name(folder / name) / _DIGESTS).exists():
            found[name] = (_whole_name(folder / name) / _DIGESTS).stat().st_mtime
    numbers = {name: re.findall(r"\d+", name) for name in found}
    counted = len({re.sub(r"\d+", "#", name) for name in found}) == 1
    if counted and all(len(each) == 1 for each in numbers.values()):
        return sorted(found, key=lambda name: (int(numbers[name][0]), name), reverse=True)
    return sorted(found, key=lambda name: (found[name], name), reverse=True)


def _is_whole(folder: Path, rank: int, ranks: int) -> bool:
    """Verify every ``ranks``-th slice of a checkpoint, from the one of this rank on."""
    try:
        digests = _read(folder / _DIGESTS)
        if digests is None or digests.get(_METADATA) != _digest_of_file(folder / _METADATA):
            return False
        for name in sorted(digests)[rank::ranks]:
            if name == _METADATA:
                continue
            place, offset, length = name.rsplit(":", 2)
            with _reading(folder / os.path.basename(place)) as file:
                if _digest_of(file, int(offset), int(length)) != digests[name]:
                    return False
    except (OSError, ValueError):
        return False
    return True


def _folder(path: str | os.PathLike[str]) -> Path:
    if "://" in str(path):
        raise UsageError(f"{path}: found a URL, needs a path of a file system that all ranks share")
    return Path(os.path.abspath(path))


def _beside(target: Path, suffix: str) -> Path:
    return target.with_name(target.name + suffix)


def _whole_name(target: Path) -> Path:
    """Return the folder, or the one before it where a save was killed between two renames."""
    before = _beside(target, _BEFORE)
    return before if not target.exists() and before.exists() else target


def _name(place: Any) -> str:
    """Return what the digest of a slice is filed under."""
    return f"{place.relative_path}:{place.offset}:{place.length}"


def _whole_file(path: Path) -> str:
    """Return what the digest of a whole file is filed under, as if it were one slice."""
    return f"{path.name}:0:{path.stat().st_size}"


def _reading(path: str | os.PathLike[str]) -> IO[bytes]:
    return open(files.open_regular(path, follow=True), "rb")


def _creating(path: str | os.PathLike[str]) -> IO[bytes]:
    return open(files.open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb")


def _digest_of(file: IO[bytes], offset: int, length: int) -> str:
    digest = xxhash.xxh3_128()
    file.seek(offset)
    while length > 0 and (part := file.read(min(length, _BYTES))):
        digest.update(part)
        length -= len(part)
    return f"{digest.hexdigest()} {length}" if length else digest.hexdigest()


def _digest_of_file(path: Path) -> str:
    with _reading(path) as file:
        return _digest_of(file, 0, os.fstat(file.fileno()).st_size)


def _write(path: Path, digests: Mapping[str, str]) -> None:
    with _creating(path) as file:
        file.write(json.dumps(digests).encode())
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> dict[str, str] | None:
    """Return the digests of a checkpoint; None: it was written without; none at all: they are damaged."""
    try:
        found = json.loads(files.read_whole(path, _MOST, follow=True))
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in files.UNFIT:
            raise
        return {}
    except (ValueError, RecursionError):
        return {}
    return {str(name): str(digest) for name, digest in found.items()} if isinstance(found, dict) else {}


def _damaged(path: Path) -> str:
    return (
        f"{path}: its bytes are not those that were written; nothing more was loaded. Load another"
        " checkpoint: outlast.integrations.dcp.newest_whole(folder) finds the newest one that is whole"
    )
