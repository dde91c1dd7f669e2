"""Copies to and from what other programs read: Hugging Face folders, DCP folders, files of torch.save.

State objects are put together from the files of all ranks, with whole tensors. DCP folders are written and
read by torch.distributed.checkpoint itself.
"""

from __future__ import annotations

import json
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from outlast.checkpoint.content.digest import ends_of, row_of
from outlast.checkpoint.content.format import Image, lay_out, make_image
from outlast.checkpoint.content.memory import allocate, as_tensor, share_of_processors
from outlast.checkpoint.content.rank_file import contents_of
from outlast.checkpoint.content.state import take_apart, tensors_in
from outlast.checkpoint.content.typed_forms import Json, references
from outlast.checkpoint.content.typed_json import Decoder, Encoder
from outlast.checkpoint.load.reading import Target, carry_out, reserve
from outlast.checkpoint.load.reshard import derived_random
from outlast.checkpoint.load.world import EVERYTHING, Merger, World
from outlast.checkpoint.policy.manifest import (
    Identity,
    Manifest,
    copy_name,
    first_few,
    rank_files,
    runs_of,
    some,
)
from outlast.checkpoint.policy.table import place_in_meshes
from outlast.checkpoint.tiers.inventory import read_manifest
from outlast.checkpoint.tiers.tier import CopyFolder, DirectoryTier
from outlast.errors import CheckpointError, CheckpointMismatch, OutlastError, UsageError
from outlast.fields import Fields
from outlast.ipc.exchange import SystemClock
from outlast.parallelism.policy.slices import Part

_SHARD_BYTES = 5_000_000_000  # as huggingface_hub divides models
_WRAPPED = "module."  # what DDP puts before every name
_REST = "rest"
_GENERATION = 0  # of an imported copy: older than what the run writes itself
_CLASS = re.compile(r"GLOBAL ([\w.]+)")  # in torch's message about what it did not unpickle


@dataclass(frozen=True)
class Exported:
    """What an export wrote.

    Args:
        files: names in the target folder.
        nbytes: of the tensors.
        left_out: paths of what the format has no place for.
    """

    files: tuple[str, ...]
    nbytes: int
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Origin:
    """What an imported state is to count as.

    Args:
        run_id: the run that will load it.
        step: completed steps.
        kinds: the type of each optimizer and scheduler, by name: {"optimizer": "AdamW"}.
    """

    run_id: str
    step: int
    kinds: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Saved:
    """State objects of a copy, put together from the files of all ranks.

    Args:
        folder: the copy.
        world: what is in it.
        values: typed JSON of the objects, by name.
    """

    folder: CopyFolder
    world: World
    values: dict[str, Json]

    @property
    def keys(self) -> list[str]:
        """The keys of their tensors."""
        return sorted({key for value in self.values.values() for key in references(value)})

    def nbytes(self, keys: Iterable[str]) -> int:
        """Return the bytes of whole tensors."""
        return sum(self.world.forms[key].nbytes for key in keys)

    def whole(self, key: str) -> tuple[Part, torch.dtype]:
        """Return the part that is the whole of a tensor, and the type of its elements."""
        return Part.whole(self.world.forms[key].shape), self.world.dtype(key)

    def read(self, targets: Iterable[tuple[str, Target]]) -> None:
        """Read tensors to memory, each given by its key.

        Raises:
            CheckpointMismatch: parts of one are missing.
            DamagedCopy: a byte is not as it was saved.
            OSError: the file system refused.
        """
        moves = []
        for key, target in targets:
            found, why = self.world.moves(key, target, 0)
            if why:
                raise CheckpointMismatch(f"{why}; nothing was written")
            moves += found
        carry_out(self.folder, moves, share_of_processors(1))


@contextmanager
def _exporting(
    tier: DirectoryTier, name: str, target: Path, holders: Sequence[str]
) -> Iterator[tuple[_Saved, DirectoryTier, str]]:
    """Open a copy and begin a folder, which gets its name when all went well.

    Args:
        tier: where the copy is.
        name: of the copy.
        target: the folder.
        holders: names of the state objects; empty: all of them.

    Yields:
        The objects, the tier that writes the folder, and its temporary name.

    Raises:
        UsageError: no rank saved such an object, or there is something at the target.
        CheckpointMismatch: values belong to single ranks, or ranks saved a tensor in other forms, or with
            other bytes at one place; names the first few.
        DamagedCopy: a byte that had to be read is not as it was saved.
        OSError: the file system refused.
    """
    target = Path(target).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} is there already and not empty; nothing was written")
    writer = DirectoryTier(target.parent)
    with tier.open(name) as folder, writer.writing(target.name) as temporary:
        world = World(folder, read_manifest(folder, name)[0])
        values: dict[str, Json] = {}
        problems: list[str] = []
        for holder in holders or world.names:
            said = world.values(holder)
            if not said:
                raise UsageError(f"no state object is called {holder!r}; there are {some(world.names, 10)}")
            values[holder] = Merger(problems=problems).merge(said, EVERYTHING, holder)
        if problems:
            raise CheckpointMismatch(f"the ranks' parts cannot be put together: {first_few(problems)}")
        saved = _Saved(folder, world, values)
        problems += filter(None, map(world.disagreement, saved.keys))
        problems = problems or world.differences(saved.keys, 0, 1)
        if problems:
            raise CheckpointMismatch(f"{first_few(problems)}; nothing was written")
        yield saved, writer, temporary


def export_hugging_face(
    tier: DirectoryTier, name: str, target: Path, holder: str = "model", max_shard_bytes: int = _SHARD_BYTES
) -> Exported:
    """Write an object's tensors, whole, as a folder that Hugging Face's loaders read.

    Names are those of the object's state_dict, without DDP's "module."; tied tensors are written under
    each of their names. No file is larger than ``max_shard_bytes``, but for one with a single tensor.

    Args:
        tier: where the copy is.
        name: of the copy.
        target: the folder; made here.
        holder: name of the state object.
        max_shard_bytes: bytes of tensors in a file.

    Raises:
        UsageError: no such object, or the target is not empty.
        DamagedCopy: a byte is not as it was committed.
        CheckpointMismatch: ranks saved what cannot be put together; names it.
        OSError: the file system refused.
    """
    with _exporting(tier, name, target, (holder,)) as (saved, writer, temporary):
        keys, others = _named(saved.values[holder])
        groups = _divide({each: saved.nbytes([key]) for each, key in keys.items()}, max_shard_bytes)
        files: dict[str, str] = {}
        for number, names in enumerate(groups, start=1):
            file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            file = file if len(groups) > 1 else "model.safetensors"
            writer.write(temporary, {file: _safetensors(saved, {each: keys[each] for each in names})})
            files.update(dict.fromkeys(names, file))
        total = saved.nbytes(keys.values())
        if len(groups) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": files}
            writer.write(temporary, {"model.safetensors.index.json": json.dumps(index, indent=2).encode()})
    return Exported(tuple(dict.fromkeys(files.values())), total, others)


def export_dcp(tier: DirectoryTier, name: str, target: Path, holders: Sequence[str] = ()) -> Exported:
    """Write state objects, whole, as a folder of torch.distributed.checkpoint.

    All of them are in memory at once. Random states and the data cursor are not written. Values that are
    no tensors are pickled by DCP.

    Args:
        tier: where the copy is.
        name: of the copy.
        target: the folder; made here.
        holders: names of the state objects; empty: all of them.

    Raises:
        UsageError: no such object, the target is not empty, or this process is in a process group.
        DamagedCopy: a byte is not as it was committed.
        CheckpointMismatch: ranks saved what cannot be put together; names it.
        CheckpointError: DCP failed.
        OSError: the file system refused.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with _exporting(tier, name, target, holders) as (saved, writer, temporary):
        targets = reserve({key: (*saved.whole(key), None) for key in saved.keys})
        saved.read(targets.items())
        decoder = Decoder(name, {key: each.tensor for key, each in targets.items()})
        state = {each: decoder.decode(value) for each, value in saved.values.items()}
        place = writer.folder / temporary
        with _dcp(f"the export of {name}", target):
            save(state, storage_writer=FileSystemWriter(place))
        files = tuple(sorted(path.name for path in place.iterdir()))
    return Exported(files, saved.nbytes(saved.keys))


def import_from(
    form: str,
    source: Path,
    tier: DirectoryTier,
    origin: Origin,
    into: str = "",
    leave_out: Sequence[str] = (),
) -> str:
    """Make a copy, of a world of one rank, of what another program wrote.

    Args:
        form: "dcp": a folder of torch.distributed.checkpoint; "torch": a file of torch.save.
        source: the folder or file.
        tier: where the copy goes.
        origin: what it is to count as.
        into: name of the one state object that all of it becomes; empty: each entry is an object, and
            entries that are plain values together become the object "rest".
        leave_out: entries that are not imported, as what no copy can hold must be; of DCP keys, dotted as
            it has them, and what is below them.

    Returns:
        The name of the copy.

    Raises:
        UsageError: an entry is a pickled object, or cannot be saved exactly; names it.
        CheckpointError: it cannot be read.
        OSError: the file system refused.
    """
    content = {"dcp": _of_dcp, "torch": _of_torch_save}[form](source, leave_out)
    if not into and not isinstance(content, dict):
        raise UsageError(f"{source} holds a {type(content).__qualname__}; name the object for it (--into)")
    return _commit(tier, origin, {into: content} if into else _objects(content))


def _of_dcp(source: Path, leave_out: Sequence[str]) -> Any:
    """Return the content of a folder of torch.distributed.checkpoint.

    DCP turns all keys into texts; those of an optimizer's state that are numbers are turned back. Its
    metadata is a pickle, in which only DCP's own classes are accepted.
    """
    from outlast.checkpoint.tools.dcp_reader import read_dcp

    if not source.is_dir():
        raise UsageError(f"{source} is no folder; one that DCP wrote is expected; nothing was written")
    with _understood(source, "a folder of DCP"), _dcp(str(source)):
        content, pickled = read_dcp(source, leave_out)
    if pickled:
        raise UsageError(
            f"{source}: {len(pickled)} value(s) are pickled objects, which may run any code when they are"
            f" loaded: {some(pickled)}; nothing was written; leave them out by name if they are not needed"
        )
    for holder in [content, *content.values()]:
        _number_keys(holder)
    return content


def _of_torch_save(source: Path, leave_out: Sequence[str]) -> Any:
    """Return the content of a file of torch.save."""
    if not source.is_file():
        raise UsageError(f"{source} is no file; one that torch.save wrote is expected; nothing was written")
    _require_stored(source)
    with _understood(source, "a file of torch.save"):
        content = torch.load(source, map_location="cpu", weights_only=True)
    if isinstance(content, dict):
        for key in leave_out:
            content.pop(key, None)
    return content


@contextmanager
def _understood(source: Path, form: str) -> Iterator[None]:
    """Turn what is raised for something of another form into an error that names it.

    Raises:
        UsageError: it holds pickled objects.
        CheckpointError: it cannot be read.
        OSError: the file system refused.
    """
    try:
        yield
    except (OSError, OutlastError):
        raise
    except Exception as error:
        named = _CLASS.search(str(error)) if isinstance(error, pickle.UnpicklingError) else None
        if named is not None:
            raise UsageError(
                f"{source} holds pickled objects, which may run any code when they are loaded: {named[1]};"
                " nothing was written; if you trust the file, load it and save it again without them"
            ) from error
        why = (str(error).strip().splitlines() or ["it is cut off"])[-1]
        what = f"{type(error).__name__}: {why}"
        raise CheckpointError(f"{source} cannot be read as {form}: {what}; nothing was written") from error


def _require_stored(source: Path) -> None:
    """Check that a zip archive, which torch.save writes, is as large as what is in it.

    Raises:
        CheckpointError: it is not; torch compresses nothing, and a small file could take any memory.
    """
    if not zipfile.is_zipfile(source):
        return
    try:
        with zipfile.ZipFile(source) as archive:
            size = sum(one.file_size for one in archive.infolist())
    except (OSError, ValueError, RuntimeError, zipfile.BadZipFile):
        return  # torch tells what is wrong with it
    if size > source.stat().st_size:
        raise CheckpointError(
            f"{source} cannot be read as a file of torch.save: an archive without compression is expected,"
            f" its entries have {size} bytes and it has {source.stat().st_size}; nothing was written"
        )


def _named(tree: Json) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the keys of an object's tensors by their names in it, and the paths of its other values."""
    stands = {key: torch.empty(0, device="meta") for key in references(tree)}
    keys = {id(tensor): key for key, tensor in stands.items()}
    content = Decoder("state", stands).decode(tree)
    found = {".".join(path): keys[id(tensor)] for path, tensor in tensors_in(content)}
    if not found:
        raise UsageError("the object holds no tensors")
    if all(name.startswith(_WRAPPED) for name in found):
        found = {name.removeprefix(_WRAPPED): key for name, key in found.items()}
    return found, tuple(_values(content, ""))


def _values(content: Any, path: str) -> Iterator[str]:
    if isinstance(content, Mapping):
        for key, each in content.items():
            yield from _values(each, f"{path}.{key}" if path else str(key))
    elif not isinstance(content, torch.Tensor):
        yield path


def _divide(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Divide names among files, in their order, given the bytes of each."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, nbytes in sizes.items():
        if groups[-1] and size + nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += nbytes
    return groups


def _safetensors(saved: _Saved, keys: Mapping[str, str]) -> memoryview:
    """Return the image of a safetensors file with whole tensors, the keys given by name."""
    wholes = {name: saved.whole(key) for name, key in keys.items()}
    stands = {
        name: torch.empty(part.shape, dtype=dtype, device="meta") for name, (part, dtype) in wholes.items()
    }
    layout = lay_out(stands, {"format": "pt"})
    header = json.loads(layout.header[8:])
    for name, entry in layout.entries.items():
        if (header[name]["dtype"] == "U8") != (entry.dtype == "uint8"):
            raise UsageError(f"{name} is {entry.dtype}{list(entry.shape)}, for which safetensors has no type")
    memory = allocate(layout.nbytes)
    octets, view = as_tensor(memory), memoryview(memory)[: layout.nbytes]
    view[: len(layout.header)] = layout.header
    places = {name: octets[entry.begin : entry.end] for name, entry in layout.entries.items()}
    saved.read((keys[name], Target(part, places[name], dtype)) for name, (part, dtype) in wholes.items())
    return view


@contextmanager
def _dcp(what: str, target: Path | None = None) -> Iterator[None]:
    """Let DCP work in this process alone, without its warning that it does.

    Raises:
        OSError: it writes to ``target``, and the file system refused.
        CheckpointError: it failed otherwise.
    """
    import torch.distributed as dist
    from torch.distributed.checkpoint.api import CheckpointException

    if dist.is_available() and dist.is_initialized():
        raise UsageError(f"{what}: this process is in a process group; convert in a process of its own")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            yield
        except CheckpointException as error:
            why = next((one for one, _ in error.failures.values()), error)  # there is one rank
            if target is not None and isinstance(why, OSError):
                raise OSError(why.errno, why.strerror, str(target)) from error
            if isinstance(why, CheckpointError):
                raise why from error
            text = f"{type(why).__name__}: {why}"
            raise CheckpointError(f"{what}: torch.distributed.checkpoint failed: {text}") from error


def _number_keys(content: Any) -> None:
    """Turn the keys of an optimizer's state back into numbers."""
    if isinstance(content, dict) and {"state", "param_groups"} <= content.keys():
        state = content["state"]
        if isinstance(state, dict) and all(type(key) is str and key.isdecimal() for key in state):
            content["state"] = {int(key): each for key, each in state.items()}


def _objects(content: Mapping[Any, object]) -> dict[str, object]:
    """Divide what was read among state objects."""
    found: dict[str, object] = {}
    rest: dict[Any, object] = {}
    for key, value in content.items():
        is_object = type(key) is str and isinstance(value, (Mapping, list, torch.Tensor))
        (found if is_object else rest)[key] = value
    if rest and _REST in found:
        raise UsageError(f"an entry is called {_REST!r}, as the plain values are; import into an object")
    return {**found, _REST: rest} if rest else found


def _commit(tier: DirectoryTier, origin: Origin, contents: Mapping[str, object]) -> str:
    """Write a copy of a world of one rank and return its name."""
    name = copy_name(origin.step, _GENERATION)
    if name in tier.names():
        raise UsageError(f"{name} is in {tier.folder} already; nothing was written")
    unknown = origin.kinds.keys() - contents.keys()
    if unknown:
        raise UsageError(f"no object is called {some(unknown)}; there are {some(contents, 10)}")
    random = derived_random(f"{origin.run_id}:{origin.step}", {})
    captured = take_apart(contents, dict(origin.kinds), random)
    identity = Identity(origin.run_id, _GENERATION, 0, 1)
    image = make_image(captured, origin.step, identity)
    with tier.writing(name) as temporary:
        manifest = Manifest(
            run_id=origin.run_id,
            generation=_GENERATION,
            step=origin.step,
            world_size=1,
            parallelism={},
            cursor=Encoder().encode(None, ("cursor",)),
            created=SystemClock().wall(),
            **write_rank_files(tier, temporary, image, identity),
        )
        tier.write(temporary, ends_of(manifest))
    return name


def write_rank_files(tier: DirectoryTier, temporary: str, image: Image, identity: Identity) -> dict[str, Any]:
    """Write a rank's files and return their row and contents for a manifest.

    Raises:
        OSError: the file system refused.
    """
    files = rank_files(identity.rank, identity.world_size)
    tier.write(temporary, dict(zip(files, (image.tensors, image.digests, image.document), strict=True)))
    fields = Fields.parse(files.document, image.document)
    row = row_of(len(image.tensors), image.digests, image.document, *place_in_meshes(fields))
    return {"own": (row,), "contents": runs_of([contents_of(files.document, fields.values)])}
