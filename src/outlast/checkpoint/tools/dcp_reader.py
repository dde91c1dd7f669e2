"""Reading a folder of torch.distributed.checkpoint as it is, without believing its pickles."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, EnumMeta
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from outlast.errors import CheckpointError
from outlast.files import UNFIT, open_regular

_METADATA = ".metadata"
_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_NAMES = {
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
}
_DTYPES = {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


def _member(kind: object, name: str) -> Enum:
    """Return a member of an enumeration of DCP's, as Python 3.11.0 to 3.11.3 pickle it."""
    if isinstance(kind, EnumMeta) and kind.__module__ in _MODULES:
        found: Enum = kind[name]
        return found
    raise pickle.UnpicklingError(f"getattr of {kind!r} has no place in DCP's metadata")


class _Unpickler(pickle.Unpickler):
    """Takes DCP's own classes and torch's types, nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        own = module in _MODULES and "." not in name
        if own or (module, name) in _NAMES or (module == "torch" and name in _DTYPES):
            found = super().find_class(module, name)
            if not own or isinstance(found, type):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} has no place in DCP's metadata")


class _Inside(FileSystem):
    """DCP's access to files, for regular ones in a folder alone: its metadata may name any path."""

    def __init__(self, folder: Path) -> None:
        self._folder = Path(os.path.realpath(folder))

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        place = Path(os.path.realpath(path))
        if self._folder not in place.parents:
            raise CheckpointError(
                f"{path}: it leads to {place}, outside of {self._folder}; nothing was written; if it is a"
                " link that you trust, cp -rL makes a folder without links"
            )
        try:
            descriptor = open_regular(place)
        except OSError as error:
            if error.errno not in UNFIT:
                raise
            raise CheckpointError(f"{path}: {error.strerror}; nothing was written") from error
        with open(descriptor, mode) as stream:
            yield stream


class _Reader(FileSystemReader):
    """DCP's reader, but for places outside of the folder, and pickled metadata, which it would believe."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = _Inside(folder)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002 - the base class's signature
        with self.fs.create_stream(Path(self.path) / _METADATA, "rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"a {type(metadata).__qualname__} is no metadata of DCP")
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        return metadata


class _Planner(DefaultLoadPlanner):
    """DCP's planner, but for values that are no tensors, which it would unpickle whatever they are."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.pickled: list[str] = []

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        try:
            self.state_dict[key] = torch.load(value, weights_only=True)
        except pickle.UnpicklingError:
            self.pickled.append(key)


def read_dcp(source: Path, leave_out: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Read all of a folder.

    Args:
        source: the folder.
        leave_out: keys that are not read, nor what is below them.

    Returns:
        The content, nested as it was saved, and the keys of values that are pickled objects.

    Raises:
        CheckpointError: what its metadata names is no regular file in the folder.
        OSError: the file system refused.
        Exception: any other, if its metadata has another form, since a pickle may hold any values.
    """
    reader, planner = _Reader(source), _Planner()
    metadata = reader.read_metadata()
    flat: dict[str, Any] = {
        key: torch.empty(each.size, dtype=each.properties.dtype)
        if isinstance(each, TensorStorageMetadata)
        else None
        for key, each in metadata.state_dict_metadata.items()
        if not any(key == out or key.startswith(f"{out}.") for out in leave_out)
    }
    load(flat, storage_reader=reader, planner=planner)
    nested: dict[Any, Any] = {}
    paths = metadata.planner_data or {}
    for key, value in flat.items():
        *above, last = paths.get(key, (key,))
        place = nested
        for each in above:
            place = place.setdefault(each, {})
        place[last] = value
    return _with_lists(nested), planner.pickled


def _with_lists(value: Any) -> Any:
    """Return nested dicts with a list for each one whose keys are places."""
    if type(value) is not dict:
        return value
    content = {key: _with_lists(each) for key, each in value.items()}
    if content and all(type(key) is int for key in content):
        return [content[place] for place in sorted(content)]
    return content
