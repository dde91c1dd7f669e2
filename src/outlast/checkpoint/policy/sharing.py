"""Which tensors all ranks hold alike, and which rank of a node writes which of them.

Found by comparing: the leading rank says the digest of each of its tensors, every rank which of them it has,
too. What all have is divided among files by size; the same files are made on every node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

LEAST_BYTES = 64 << 10  # of a tensor that is worth sharing


def mask(digests: Sequence[tuple[str, str]], mine: Mapping[str, str]) -> str:
    """Return which of the leading rank's tensors a rank holds alike: a bit for each, as a hexadecimal number.

    Args:
        digests: of the leading rank, each with its tensor's key.
        mine: this rank's, by key.
    """
    bits = "".join("01"[mine.get(key) == digest] for key, digest in digests)
    return f"{int(bits or '0', 2):x}"


def held_by_all(digests: Sequence[tuple[str, str]], masks: Iterable[str]) -> list[str]:
    """Return the keys of the tensors that every rank holds alike.

    Args:
        digests: of the leading rank, each with its tensor's key.
        masks: what each rank answered, see :func:`mask`.
    """
    common = -1  # every bit
    for one in masks:
        common &= int(one, 16)
    last = len(digests) - 1
    return [key for place, (key, _) in enumerate(digests) if common >> (last - place) & 1]


def divide(nbytes: Mapping[str, int], files: int) -> tuple[tuple[str, ...], ...]:
    """Divide tensors among files, the largest first, each to the file that has least.

    Args:
        nbytes: of each tensor, by key.
        files: how many; fewer are used where there are fewer tensors.
    """
    found: list[list[str]] = [[] for _ in range(min(files, len(nbytes)))]
    sizes = [0] * len(found)
    for key in sorted(nbytes, key=lambda key: (-nbytes[key], key)):
        place = sizes.index(min(sizes))
        found[place].append(key)
        sizes[place] += nbytes[key]
    return tuple(map(tuple, found))
