"""The files of a rank: its tensors as a safetensors file, all the rest as typed JSON, digests of chunks.

The container is written here, byte for byte as the safetensors format says (8 bytes of header
length, a JSON header, the tensors without gaps), so that the image of the whole file can be
laid out in memory and digested before any of it travels. Stock safetensors and stock DCP's
HuggingFaceStorageReader read it: the header carries ``DCP_SHARDING_INFO`` and ``DCP_VERSION``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from outlast.checkpoint.content.codecs import Piece
from outlast.checkpoint.content.digest import chunk_digests
from outlast.checkpoint.content.memory import allocate, as_tensor, uncollected
from outlast.checkpoint.content.rank_file import document_of, text_of, whose_file
from outlast.checkpoint.content.state import Captured
from outlast.checkpoint.content.transfers import copy_tensors
from outlast.checkpoint.content.typed_json import Encoder, dtype_name
from outlast.checkpoint.policy.manifest import (
    DOCUMENT_BYTES,
    FileEntry,
    Identity,
)
from outlast.checkpoint.policy.table import Cut, Form, Table, TensorEntry, in_order, is_dense, table_of
from outlast.errors import UsageError

_HEADER_ALIGNMENT = 64
_NO_PIECES: Mapping[str, Piece] = {}
_NOTE_WIDTH = 192  # beside the run id; equal for all steps, so that a layout serves more than one
# What safetensors has had a name for since 0.4; a tensor of another type is stored as its bytes.
_STORED: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


@dataclass(frozen=True)
class Layout:
    """Where each tensor goes in a safetensors file.

    Args:
        header: the file's first bytes, up to the first tensor.
        entries: in the order of the file.
        nbytes: size of the file.
        place: meshes, and where tensors begin, for the rank's JSON file.
        listing: JSON of the tensors for that file.
    """

    header: bytes
    entries: dict[str, TensorEntry]
    nbytes: int
    place: dict[str, Any]
    listing: str


@uncollected()
def lay_out(
    tensors: Mapping[str, torch.Tensor], notes: Mapping[str, str], pieces: Mapping[str, Piece] = _NO_PIECES
) -> Layout:
    """Place tensors in a file, the widest elements first so that each begins at a multiple of its own.

    Args:
        tensors: by key.
        notes: texts for the header's metadata.
        pieces: of which whole some of the tensors are parts, by key; the others are whole.
    """
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, Any] = {"__metadata__": dict(notes)}
    spans: dict[str, tuple[int, int]] = {}
    position = 0
    for key, tensor in ordered:
        end = position + tensor.numel() * tensor.element_size()
        stored = _STORED.get(tensor.dtype)
        shape = list(tensor.shape) if stored else [end - position]
        if key in pieces and not stored:
            shape = [*tensor.shape, tensor.element_size()]
        header[key] = {"dtype": stored or "U8", "shape": shape, "data_offsets": [position, end]}
        spans[key] = (position, end)
        position = end
    header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(
        {key: {"saved_offsets": _offsets(pieces.get(key), len(header[key]["shape"]))} for key in spans}
    )
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _HEADER_ALIGNMENT)
    begin, nbytes = 8 + len(text), 8 + len(text) + position
    meshes: dict[Any, int] = {}
    forms = {key: _form(tensor, pieces.get(key), meshes) for key, tensor in ordered}
    table = Table(tuple(tuple(mesh.mesh.shape) for mesh in meshes), forms, {})
    coordinates = tuple(tuple(mesh.get_coordinate()) for mesh in meshes)
    for key, piece in pieces.items():
        if key in forms and forms[key].of(table.meshes, coordinates) != piece.part:
            forms[key] = replace(forms[key], mesh=None, cuts=(), part=(piece.part.offsets, piece.part.shape))
    entries = table.entries("", FileEntry("", nbytes, ""), begin, coordinates)
    place = {"begin": begin, "coordinates": coordinates, "meshes": table.meshes}
    return Layout(len(text).to_bytes(8, "little") + text, entries, nbytes, place, text_of(table_of(forms)))


def _form(tensor: torch.Tensor, piece: Piece | None, meshes: dict[Any, int]) -> Form:
    """Return the form of a tensor in a table.

    Args:
        tensor: what the rank has of it.
        piece: where it lies in the whole tensor; None: the rank has all of it.
        meshes: number of each in the table; those of the piece are added.
    """
    dtype, width, strides = dtype_name(tensor.dtype), tensor.element_size(), order_of(tensor)
    if piece is None or not piece.cuts:
        shape = tuple(tensor.shape) if piece is None else piece.global_shape
        return Form(dtype, width, shape, strides=strides)
    cuts = tuple(Cut(axis, along) for axis, along in piece.cuts)
    mesh = meshes.setdefault(piece.mesh, len(meshes))
    return Form(dtype, width, piece.global_shape, mesh, cuts, strides=strides)


def order_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the strides with which a tensor comes back; None: its elements are one behind the other.

    The strides of dimensions of one element count, too: kernels of devices compare them. Where there are gaps
    between the elements, they are closed as torch's own copies close them.
    """
    strides, shape = tensor.stride(), tensor.shape
    plain = in_order(shape)
    if strides == plain:
        return None
    if not is_dense(shape, strides):
        strides = torch.empty_like(tensor, device="meta", requires_grad=False).stride()
    return None if strides == plain else strides


def _offsets(piece: Piece | None, dimensions: int) -> tuple[int, ...]:
    offsets = piece.part.offsets if piece else ()
    return (*offsets, *(0,) * (dimensions - len(offsets)))


@dataclass(frozen=True)
class Image:
    """A rank's files in memory; the digests were taken from these very bytes."""

    tensors: memoryview
    digests: bytes
    document: bytes


def make_image(captured: Captured, step: int, identity: Identity) -> Image:
    """Turn a captured state into the bytes of a rank's files.

    Args:
        captured: the state; its tensors are copied here.
        step: completed steps.
        identity: whose state it is; goes into two of the files.
    """
    layout = lay_out(captured.tensors, notes_of(step, identity), captured.pieces)
    memory = allocate(layout.nbytes)
    pairs = ((captured.tensors[key], entry.begin) for key, entry in layout.entries.items())
    copy_tensors(pairs, as_tensor(memory), 1)
    view = memoryview(memory)[: layout.nbytes]
    view[: len(layout.header)] = layout.header
    return Image(view, chunk_digests(view), rank_document(captured, layout, step, identity, {}))


def notes_of(step: int, identity: Identity) -> dict[str, str]:
    """Return what a safetensors header says besides its tensors."""
    return note_of(whose_file(step, identity))


def note_of(whose: Mapping[str, Any]) -> dict[str, str]:
    """Return what a safetensors header says besides its tensors, of a file of someone."""
    width = _NOTE_WIDTH + len(json.dumps(whose["run_id"]))
    return {"format": "pt", "DCP_VERSION": "1.0", "outlast": json.dumps(whose).ljust(width)}


def readdress(layout: Layout, before: Mapping[str, str], now: Mapping[str, str]) -> Layout:
    """Return a layout with other notes of the same width: of the next step, the tensors being the same."""
    old, new = (json.dumps(notes["outlast"]).encode() for notes in (before, now))
    return replace(layout, header=layout.header.replace(old, new, 1))


def rank_document(
    captured: Captured,
    layout: Layout,
    step: int,
    identity: Identity,
    borrowed: Mapping[str, int],
) -> bytes:
    """Return a rank's JSON file.

    Args:
        captured: the state.
        layout: of its tensors.
        step: completed steps.
        identity: whose state it is.
        borrowed: the tensors that are in files which all ranks share: number of the file, by key.

    Raises:
        UsageError: it would be too large to be read again.
    """
    values = {
        "identity": whose_file(step, identity),
        "state": captured.values,
        "kinds": captured.kinds,
        "parameters": captured.parameters,
        "flags": captured.flags,
        "random": Encoder().encode(captured.random, ("random",)),
        "borrowed": borrowed,
        "aliases": captured.aliases,
    }
    document = document_of(values | layout.place, layout.listing)
    if len(document) > DOCUMENT_BYTES:
        raise UsageError(
            f"rank {identity.rank}: what is no tensor in the state takes {len(document)} bytes of JSON, at"
            f" most {DOCUMENT_BYTES} are expected; nothing was saved; keep such data in tensors"
        )
    return document
