"""The text of a rank's JSON file.

The digests are the last thing in it, so that they can be put in by whoever takes them: the saver, which
reads nothing else of the text. Most of the rest is as it was one step ago, and is made only once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

_END = "]}}"  # of the digests, the shard and the document
_UNFINISHED = '"digests":[' + _END


def text_of(value: object) -> str:
    """Return JSON without spaces."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def unfinished(values: Mapping[str, object], shard: Mapping[str, object], listing: str) -> bytes:
    """Return the text of a document that lacks its digests.

    Args:
        values: all but the shard, by name.
        shard: what it says beside its tensors and digests.
        listing: text of its tensors.
    """
    text = f'{text_of(values)[:-1]},"shard":{text_of(shard)[:-1]},"tensors":{listing},{_UNFINISHED}'
    return text.encode()


def finished(document: bytes, digests: Iterable[str]) -> bytes:
    """Return the text with the digests of the shard's chunks.

    Raises:
        OSError: it is not one that :func:`unfinished` returned, or not all of it.
    """
    if not document.endswith(_UNFINISHED.encode()):
        raise OSError(f"a rank's document ends with {document[-20:]!r}, not {_UNFINISHED!r}; it is not used")
    return document[: -len(_END)] + text_of(tuple(digests))[1:-1].encode() + _END.encode()
