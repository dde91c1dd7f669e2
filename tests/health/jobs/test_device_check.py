"""The device check knows its products without a device, and finds one wrong number and one lost bit."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from operator import mul
from unittest.mock import ANY

import pytest
import torch
from xxhash import xxh3_64_hexdigest

from outlast.health import worker as device_check
from outlast.health.worker import (
    HADAMARD_DIGEST,
    MIXED_DIGEST,
    SIDE,
    check_gpu_health,
    hadamard_factors,
    mixed_factors,
    write_pattern,
    wrong_products,
    wrong_words,
)

CPU = torch.device("cpu")


def digest(numbers: list[int]) -> str:
    found: str = xxh3_64_hexdigest(struct.pack(f"<{len(numbers)}i", *numbers))
    return found


def test_the_known_products_are_those_of_whole_numbers() -> None:
    side = range(SIDE)
    left = [[(7 * i + 3 * k + i * k) % 13 - 6 for k in side] for i in side]
    right = [[(5 * k + 11 * j + k * j) % 11 - 5 for k in side] for j in side]
    assert digest([sum(map(mul, row, column)) for row in left for column in right]) == MIXED_DIGEST
    assert digest([SIDE * (i == j) for i in side for j in side]) == HADAMARD_DIGEST
    assert mixed_factors()[0].tolist() == left
    assert mixed_factors()[1].T.tolist() == right
    signs = [[(-1) ** (i & j).bit_count() for j in side] for i in side]
    assert hadamard_factors()[0].tolist() == signs


@pytest.mark.parametrize("repeats", [1, 3])
def test_this_processor_computes_right(repeats: int) -> None:
    assert list(wrong_products(CPU, repeats)) == []


@pytest.mark.parametrize(
    ("kind", "row", "column", "by"),
    [
        (torch.float32, 300, 7, 2.0),
        (torch.float32, 0, 0, 0.5),
        (torch.float32, 511, 511, float("nan")),
        (torch.float32, 1, 300, float("inf")),
        (torch.bfloat16, 255, 0, 2.0),
    ],
)
def test_one_wrong_number_is_found_where_it_is(kind: torch.dtype, row: int, column: int, by: float) -> None:
    def flawed(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        product = left @ right
        if product.dtype == kind:
            product[row, column] += by
        return product

    (problem,) = wrong_products(CPU, 2, flawed)
    where = f"{str(kind).removeprefix('torch.')}.* 1 .*{row // SIDE * SIDE}.*{column // SIDE * SIDE}"
    assert re.search(where, problem)


def test_lost_bits_and_mixed_up_addresses_are_counted() -> None:
    memory = torch.empty(4096, dtype=torch.int32)
    for pattern in (0, -1, 0x55555555):
        write_pattern(memory, pattern)
        assert wrong_words(memory, pattern) == 0
        memory[17] ^= 1 << 20
        assert wrong_words(memory, pattern) == 1
        memory[100], memory[200] = memory[200].item(), memory[100].item()
        assert wrong_words(memory, pattern) == 3


def test_a_device_that_fails_is_a_problem_and_no_exception() -> None:
    line = device_check.examine(torch.device("cuda", 99))
    assert len(line["problems"]) == 1
    assert line["tested"] == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="this node has a GPU")
def test_kempner_forges_answer_without_a_gpu() -> None:
    assert check_gpu_health() == {
        "cuda_available": False,
        "device_accessible": False,
        "compute_ok": False,
        "memory_ok": False,
        "error": ANY,
    }


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_kempner_forges_answer_with_a_gpu() -> None:
    before = torch.cuda.current_device()
    last = torch.cuda.device_count() - 1
    assert check_gpu_health(last) == {
        "cuda_available": True,
        "device_accessible": True,
        "compute_ok": True,
        "memory_ok": True,
        "error": "",
    }
    assert torch.cuda.current_device() == before
    assert "error" in check_gpu_health(last + 1)


def test_the_program_says_what_it_begins_before_it_does() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "outlast.health.worker", "--devices", "cpu"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert [next(iter(line)) for line in lines] == ["begins", "torch", "begins", "device"]
    assert lines[3]["problems"] == []
    assert lines[3]["tested"] == 16 << 20
