"""Names that differ are named from both sides, with the likely cause."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from outlast.checkpoint.policy.names import name_differences

PLAIN = ["model.out.weight", "model.out.bias"]


@pytest.mark.parametrize(
    ("then", "now", "cause"),
    [
        (PLAIN, ["model._orig_mod.out.weight", "model._orig_mod.out.bias"], r"torch\.compile .* this job"),
        (["model.out._orig_mod.weight"], PLAIN[:1], r"torch\.compile .* checkpoint"),
        (PLAIN, ["model.module.out.weight", "model.module.out.bias"], "DistributedDataParallel .* this job"),
        (["model.module._orig_mod.out.weight"], PLAIN[:1], r"torch\.compile .*checkpoint.*DistributedData"),
        (PLAIN, ["model.head.weight", "model.head.bias"], "renamed"),
        (PLAIN, ["model.head.scale"], "changed"),
        ((), ["model.extra"], "added"),
        (PLAIN, (), "removed"),
    ],
)
def test_both_sides_and_the_cause_are_named(then: Sequence[str], now: Sequence[str], cause: str) -> None:
    text = name_differences(then, now)
    assert all(name in text for name in (*then, *now))
    assert re.search(cause, text)
    assert ("checkpoint only" in text, "this job only" in text) == (bool(then), bool(now))


def test_many_names_make_no_long_message() -> None:
    many = [f"model.layers.{number}.weight" for number in range(10_000)]
    assert len(name_differences(many, [f"other.{name}" for name in many])) < 700
