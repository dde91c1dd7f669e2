"""The device check: whether torch can be imported and every device computes correctly, in a separate process.

The agent starts this module as ``python -m outlast.health.worker``. It prints one JSON object a line. Each
step is announced before it begins, so that the place is known where a process hangs or dies::

    {"begins": "torch"}
    {"torch": "2.9.1", "seconds": 1.9}
    {"begins": "cuda:0"}
    {"device": "cuda:0", "model": "...", "free": n, "total": n, "tested": n, "problems": [], "seconds": 0.4}

Products are of whole numbers so small that every order of summation gives the same bits, in float32 (TF32
too) and in bfloat16. Their digests are constants in this file; devices are not compared with each other.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_64_hexdigest

from outlast.ipc.processes import die_with_parent

if TYPE_CHECKING:
    from torch import Tensor, device, dtype

    Multiply = Callable[[Tensor, Tensor], Tensor]


SIDE = 256  # of the matrices whose product is known
MIXED_DIGEST = "ea847e06bfbbefb3"  # xxh3 of the product as little-endian 32-bit integers, row by row
HADAMARD_DIGEST = "8420f479f2a0de44"  # of 256 times the unit matrix
_REPEATS = {"cpu": 1, "cuda": 16}  # the known matrices side by side: 4096 x 4096 keeps every SM of a GPU busy
_TESTED = {"cpu": 16 << 20, "cuda": 1 << 30}  # bytes of memory that patterns are written to
_PATTERNS = (0, -1, 0x55555555, -0x55555556)
_WORD = 4


def mixed_factors() -> tuple[Tensor, Tensor]:
    """Return two matrices of whole numbers from -6 to 6 in float32: no sum of products goes beyond 2**24."""
    import torch

    row, column = torch.arange(SIDE).view(-1, 1), torch.arange(SIDE).view(1, -1)
    left = (7 * row + 3 * column + row * column) % 13 - 6
    right = (5 * row + 11 * column + row * column) % 11 - 5
    return left.to(torch.float32), right.to(torch.float32)


def hadamard_factors() -> tuple[Tensor, Tensor]:
    """Return Sylvester's matrix twice, in bfloat16: a partial sum is a whole number up to 256, thus exact."""
    import torch

    matrix = torch.ones(1, 1)
    while len(matrix) < SIDE:
        upper = torch.cat((matrix, matrix), 1)
        matrix = torch.cat((upper, torch.cat((matrix, -matrix), 1)))
    return matrix.to(torch.bfloat16), matrix.to(torch.bfloat16)


def wrong_products(where: device, repeats: int, multiply: Multiply | None = None) -> Iterator[str]:
    """Yield a text for each product that is not what it must be.

    Args:
        where: the device.
        repeats: how often the known matrices stand side by side, in both directions.
        multiply: what multiplies; None: torch's matmul.
    """
    import torch

    known = ((mixed_factors, MIXED_DIGEST, repeats), (hadamard_factors, HADAMARD_DIGEST, 1))
    for factors, expected, times in known:
        left, right = (one.repeat(times, times).to(where) for one in factors())
        product = (multiply or torch.matmul)(left, right).to("cpu", torch.float32)
        wrong = [
            (row, column)
            for row in range(times)
            for column in range(times)
            if _digest(_block(product, row, column) / times) != expected
        ]
        if wrong:
            row, column = wrong[0]
            yield (
                f"a product in {_name(left.dtype)} is wrong in {len(wrong)} of {times * times} blocks of"
                f" {SIDE} x {SIDE}, the first from row {row * SIDE}, column {column * SIDE} on: digest"
                f" {_digest(_block(product, row, column) / times)}, {expected} expected"
            )


def _block(product: Tensor, row: int, column: int) -> Tensor:
    return product[row * SIDE : (row + 1) * SIDE, column * SIDE : (column + 1) * SIDE]


def _digest(block: Tensor) -> str:
    """Return the digest of a block of whole numbers, or say that they are not whole."""
    import torch

    if not torch.equal(block, block.trunc()):
        return "none of numbers that are not whole"
    words = bytearray(SIDE * SIDE * _WORD)
    torch.frombuffer(words, dtype=torch.int32).view(SIDE, SIDE).copy_(block)
    digest: str = xxh3_64_hexdigest(words)
    return digest


def _name(kind: dtype) -> str:
    return str(kind).removeprefix("torch.")


def write_pattern(memory: Tensor, pattern: int) -> None:
    """Fill 32-bit words with their own index, turned by a pattern: an address that is mixed up shows, too."""
    import torch

    torch.arange(len(memory), dtype=torch.int32, device=memory.device, out=memory)
    memory.bitwise_xor_(pattern)


def wrong_words(memory: Tensor, pattern: int) -> int:
    """Count the words that are no longer what :func:`write_pattern` wrote."""
    import torch

    expected = torch.arange(len(memory), dtype=torch.int32, device=memory.device).bitwise_xor_(pattern)
    return int((memory != expected).sum())


def examine(where: device) -> dict[str, Any]:
    """Check one device and return the line about it; what it fails with is one of its problems."""
    import torch

    began = time.monotonic()
    line: dict[str, Any] = {"device": str(where), "model": "", "free": 0, "total": 0, "tested": 0}
    problems: list[str] = []
    try:
        if where.type == "cuda":
            line["model"] = torch.cuda.get_device_name(where)
            line["free"], line["total"] = torch.cuda.mem_get_info(where)
        problems += wrong_products(where, _REPEATS[where.type])
        tested = min(_TESTED[where.type], line["free"] // 4 or _TESTED["cpu"])
        memory = torch.empty(tested // _WORD, dtype=torch.int32, device=where)
        for pattern in _PATTERNS:
            write_pattern(memory, pattern)
            wrong = wrong_words(memory, pattern)
            if wrong:
                problems.append(f"{wrong} of {len(memory)} words lost the pattern {pattern & 0xFFFFFFFF:08x}")
        line["tested"] = tested
    except (RuntimeError, AssertionError) as error:
        problems.append(f"{type(error).__name__}: {error}"[:500])
    return {**line, "problems": problems, "seconds": time.monotonic() - began}


def check_gpu_health(device: int = 0) -> dict[str, bool | str]:
    """Check one GPU and return KempnerForge's answer about it.

    Unlike there, the current device stays what it is, and products are compared number by number.

    Returns:
        ``cuda_available``, ``device_accessible``, ``compute_ok``, ``memory_ok``; ``error``: "" or a text.
    """
    import torch

    answer: dict[str, bool | str] = dict.fromkeys(
        ("cuda_available", "device_accessible", "compute_ok", "memory_ok"), False
    )
    if not torch.cuda.is_available():
        return {**answer, "error": "CUDA is not available"}
    found = examine(torch.device("cuda", device))
    problems = found["problems"]
    answer["cuda_available"] = True
    answer["device_accessible"] = bool(found["total"])
    answer["compute_ok"] = bool(found["tested"]) and not any("product" in one for one in problems)
    answer["memory_ok"] = bool(found["tested"]) and not any("words" in one for one in problems)
    return {**answer, "error": "; ".join(problems)}


def _say(**line: Any) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Check what the command line names, and print the lines."""
    parser = argparse.ArgumentParser(prog="python -m outlast.health.worker")
    parser.add_argument("--parent", type=int, default=0, help="die when this process does")
    parser.add_argument("--devices", choices=("none", "cpu", "cuda", "auto"), default="auto")
    options = parser.parse_args(arguments)
    if options.parent:
        die_with_parent(options.parent)
    _say(begins="torch")
    began = time.monotonic()
    import torch

    _say(torch=torch.__version__, seconds=time.monotonic() - began)
    count = torch.cuda.device_count() if options.devices in ("cuda", "auto") else 0
    if options.devices == "cuda" and not count:
        problem = f"torch {torch.__version__} sees no GPU"
        _say(device="cuda", model="", free=0, total=0, tested=0, problems=[problem], seconds=0.0)
    devices = [torch.device("cuda", index) for index in range(count)]
    if options.devices == "cpu" or (options.devices == "auto" and not count):
        devices = [torch.device("cpu")]
    for one in devices:
        _say(begins=str(one))
        _say(**examine(one))
    return 0


if __name__ == "__main__":
    sys.exit(main())
