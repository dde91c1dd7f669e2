"""What is in a safetensors file: the table of its tensors, which is the same for all ranks of a mesh.

A table has the shapes of whole tensors, and how they are divided along the dimensions of meshes. Which part a
rank has, and where its bytes are, follows from the rank's place in the meshes; see :meth:`Table.entries`.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, NoReturn

from outlast import codec
from outlast.checkpoint.policy.manifest import Count, FileEntry, Row
from outlast.codec import Malformed, Meta
from outlast.fields import Damage, DamagedCopy, Fields
from outlast.parallelism.policy.slices import Part, Split, part_of

_MOST_ELEMENTS = 1 << 60  # of a whole tensor; sizes and strides of torch have 63 bits
_MOST_DIMENSIONS = 256  # more than any tensor has
_WIDTHS = {  # bytes of an element, of the types that most checkpoints have
    **dict.fromkeys(("float64", "int64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"), 1),
}
_NOTHING: Mapping[str, int] = {}
_Size = Annotated[int, Meta(ge=0, le=_MOST_ELEMENTS)]
_Shape = Annotated[tuple[_Size, ...], Meta(max_length=_MOST_DIMENSIONS)]
_Mesh = Annotated[tuple[Annotated[int, Meta(ge=1, le=1 << 20)], ...], Meta(max_length=_MOST_DIMENSIONS)]


@dataclass(frozen=True)
class TensorEntry:
    """A rank's part of a tensor, in its file.

    Args:
        dtype: torch's name of it, "bfloat16".
        shape: of the part that is in this file.
        global_shape: of the whole tensor.
        offsets: where the part begins in the whole, one number a dimension.
        begin: first byte in the file.
        end: byte after the last.
        strides: memory order that the part had, in elements; None: its elements were one behind the other, as
            they are in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    begin: int
    end: int
    strides: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return self.end - self.begin

    @property
    def part(self) -> Part:
        """Where in the whole it is."""
        return Part(self.offsets, self.shape)


class Cut(NamedTuple):
    """A division of one dimension of a tensor among the ranks along one dimension of a mesh.

    Args:
        axis: the tensor's dimension.
        along: dimension of the mesh.
    """

    axis: Count
    along: Count


@dataclass(frozen=True)
class Form:
    """A tensor in a table.

    Args:
        dtype: torch's name of it.
        width: bytes of an element.
        shape: of the whole tensor.
        mesh: number of its mesh in the table; None: it has none.
        cuts: how it is divided along the mesh, the first division first.
        part: offsets and shape of the part that the rank has, where that follows from no mesh; None: it does,
            or is all.
        strides: memory order that the part had; None: in order.
    """

    dtype: str
    width: Annotated[int, Meta(ge=1, le=1 << 10)]
    shape: _Shape
    mesh: Count | None = None
    cuts: Annotated[tuple[Cut, ...], Meta(max_length=_MOST_DIMENSIONS)] = ()
    part: tuple[_Shape, _Shape] | None = None
    strides: _Shape | None = None

    def in_parts(self, meshes: Sequence[Sequence[int]]) -> bool:
        """Return whether a rank has less than the whole of it."""
        mesh = () if self.mesh is None else meshes[self.mesh]
        divided = any(mesh[along] > 1 for _, along in self.cuts)
        return divided or (self.part is not None and self.part[1] != self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.width

    @property
    def text(self) -> str:
        """Type and shape of the whole tensor."""
        return f"{self.dtype}{list(self.shape)}"

    def problem(self, meshes: Sequence[Sequence[int]]) -> str:
        """Return why it is none of a table with these meshes; empty: it is."""
        if math.prod(max(size, 1) for size in self.shape) > _MOST_ELEMENTS:
            return "of too many elements"
        if self.width != _WIDTHS.get(self.dtype, self.width):
            return f"elements of {self.width} bytes"
        mesh = meshes[self.mesh] if self.mesh is not None and self.mesh < len(meshes) else ()
        axes, along = zip(*self.cuts, strict=True) if self.cuts else ((), ())
        known = max(axes, default=-1) < len(self.shape) and max(along, default=-1) < len(mesh)
        if not known or len(set(along)) < len(along) or (self.mesh is None) == bool(self.cuts):
            return f"divided by {list(map(list, self.cuts))} along {mesh}"
        if self.part is not None:
            offsets, shape = self.part
            fits = len(offsets) == len(shape) == len(self.shape)
            if self.cuts or not fits or any(map(operator.gt, map(operator.add, offsets, shape), self.shape)):
                return f"a part {self.part} of {self.shape}"
        return ""

    def of(self, meshes: Sequence[Sequence[int]], coordinates: Sequence[Sequence[int]]) -> Part:
        """Return the part of the rank that has a place in each mesh."""
        if self.part is not None:
            return Part(*self.part)
        if self.mesh is None:
            return Part.whole(self.shape)
        sizes, place = meshes[self.mesh], coordinates[self.mesh]
        return part_of(self.shape, [Split(axis, sizes[along], place[along]) for axis, along in self.cuts])


@dataclass(frozen=True)
class Table:
    """What is in a safetensors file, or in those of several ranks.

    Args:
        meshes: the sizes of each.
        forms: the tensors by key, in the order of the file.
        aliases: keys of tied tensors, each with the key under which its bytes are stored.
    """

    meshes: tuple[_Mesh, ...]
    forms: dict[str, Form]
    aliases: dict[str, str]

    @classmethod
    def of(cls, fields: Fields, borrowed: Mapping[str, int]) -> Table:
        """Read the table in a JSON file.

        Args:
            fields: of the file.
            borrowed: the tensors that the same rank has in other files.

        Raises:
            DamagedCopy: it is none.
        """
        try:
            names = {"meshes": "meshes", "forms": "tensors", "aliases": "aliases"}
            found = codec.convert({name: fields.values.get(one) for name, one in names.items()}, cls)
        except Malformed as error:
            fields.refuse("tensors", "a table", str(error))
        ranks = Fields(fields.source, fields.mapping("identity")).count("world_size")
        if any(math.prod(mesh) > ranks for mesh in found.meshes):
            fields.refuse("meshes", f"of at most {ranks} ranks", str(found.meshes))
        for key, form in found.forms.items():
            problem = form.problem(found.meshes)
            if problem:
                fields.refuse(key, f"the form of a tensor {form.text}", problem)
        for key, target in found.aliases.items():
            if target not in found.forms and target not in borrowed:
                fields.refuse(f"aliases.{key}", "the key of a tensor", repr(target))
        both = found.forms.keys() & borrowed.keys()
        if both:
            fields.refuse("borrowed", "tensors that are not in the rank's own file, too", min(both))
        return found

    def entries(
        self, source: str, file: FileEntry, begin: int, coordinates: Sequence[Sequence[int]]
    ) -> dict[str, TensorEntry]:
        """Return the tensors in the file of one rank, by key.

        Args:
            source: of the place, for errors.
            file: the safetensors file.
            begin: its first byte behind the header.
            coordinates: the rank's place in each mesh.

        Raises:
            DamagedCopy: the file has other bytes.
        """
        self.require_place(source, coordinates)
        found, place = {}, begin
        parts: dict[tuple[Any, ...], Part] = {}  # many tensors are of one shape, and divided alike
        for key, form in self.forms.items():
            kind = (form.shape, form.mesh, form.cuts, form.part)
            part = parts.get(kind) or parts.setdefault(kind, form.of(self.meshes, coordinates))
            if form.strides is not None and not is_dense(part.shape, form.strides):
                _refuse(source, key, f"strides of {part.shape} that leave no gap", str(form.strides))
            end = place + part.numel * form.width
            entry = TensorEntry(form.dtype, part.shape, form.shape, part.offsets, place, end, form.strides)
            found[key], place = entry, end
        if place != file.nbytes:
            _refuse(source, "tensors", f"{file.nbytes} bytes with the header, as {file.name} has", str(place))
        return found

    def require_place(self, source: str, coordinates: Sequence[Sequence[int]]) -> None:
        """Check that there is such a place in the meshes.

        Raises:
            DamagedCopy: there is none.
        """
        if len(coordinates) != len(self.meshes) or not all(map(_is_in, coordinates, self.meshes)):
            _refuse(source, "coordinates", f"a place in each of {self.meshes}", str(coordinates))


@dataclass(frozen=True)
class Shard:
    """A safetensors file of one rank, or one that all ranks share.

    Args:
        file: name, size and digest.
        table: what is in it.
        tensors: the same for this file, by key.
    """

    file: FileEntry
    table: Table
    tensors: dict[str, TensorEntry]

    @classmethod
    def of(cls, fields: Fields, file: FileEntry, row: Row, borrowed: Mapping[str, int] = _NOTHING) -> Shard:
        """Read the description of a safetensors file in the JSON file beside it.

        Args:
            fields: of the JSON file.
            file: the safetensors file, in the manifest.
            row: of both.
            borrowed: the tensors that the same rank has in other files.

        Raises:
            DamagedCopy: it describes no such file.
        """
        begin, coordinates = place_in_meshes(fields)
        if (begin, coordinates) != (row.begin, row.coordinates):
            fields.refuse("begin, coordinates", f"{row.begin}, {row.coordinates}", f"{begin}, {coordinates}")
        table = Table.of(fields, borrowed)
        return cls(file, table, table.entries(fields.source, file, begin, coordinates))


def place_in_meshes(fields: Fields) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """Return where tensors begin in a safetensors file, and the rank's place in each mesh.

    Raises:
        DamagedCopy: the JSON file lacks it.
    """
    try:
        found = codec.convert(fields.value("coordinates", list), tuple[tuple[Count, ...], ...])
    except Malformed as error:
        fields.refuse("coordinates", "places in meshes", str(error))
    return fields.count("begin"), found


def _refuse(source: str, name: str, expected: str, found: str) -> NoReturn:
    raise DamagedCopy(Damage(source, f"{name}: {expected}", found[:200]))


def _is_in(coordinate: Sequence[int], mesh: Sequence[int]) -> bool:
    return len(coordinate) == len(mesh) and all(map(operator.lt, coordinate, mesh))


def table_of(forms: Mapping[str, Form]) -> dict[str, Any]:
    """Return the tensors of a JSON file as :meth:`Table.of` reads them."""
    found = {}
    for key, form in forms.items():
        found[key] = {name: value for name, value in vars(form).items() if value not in ((), None)}
        found[key]["shape"] = form.shape
    return found


def in_order(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor whose elements are one behind the other, as torch counts them."""
    steps = itertools.accumulate((max(size, 1) for size in reversed(shape)), operator.mul, initial=1)
    return tuple(steps)[-2::-1] if shape else ()


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether the elements of a tensor fill a block of memory, in whatever order."""
    if len(shape) != len(strides):
        return False
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, strides, strict=True) if size != 1):
        if size and step != expected:
            return 0 in shape
        expected *= size
    return True
