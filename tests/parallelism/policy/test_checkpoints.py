"""Which checkpoints can be loaded in another layout."""

from __future__ import annotations

import pytest

from outlast.parallelism.policy.checkpoints import FORMATS, Loadable, loadable
from outlast.parallelism.policy.degrees import Layout

TODAY = Layout(2, 2, 4, 1, 2)


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_loads_in_the_layout_that_saved(form: str) -> None:
    assert loadable(form, TODAY, TODAY) == Loadable(True, "")


@pytest.mark.parametrize(
    ("form", "allowed"),
    [
        ("outlast", "dp tp pp ep cp virtual"),
        ("dcp", "dp tp pp ep cp virtual"),
        ("megatron", "dp"),
        ("megatron-fully-reshardable", "dp tp pp ep cp virtual"),
        ("deepspeed", ""),
        ("deepspeed-universal", "dp tp pp cp virtual"),
        ("torch-save", ""),
    ],
)
def test_what_each_format_allows_to_change(form: str, allowed: str) -> None:
    others = {
        "dp": Layout(2, 2, 2, 1, 2),
        "tp": Layout(1, 2, 4, 1, 2),
        "pp": Layout(2, 1, 4, 1, 2),
        "cp": Layout(2, 2, 4, 2, 2),
        "ep": Layout(2, 2, 4, 1, 1),
        "virtual": Layout(2, 2, 4, 1, 2, 2),
    }
    assert {name for name, one in others.items() if loadable(form, TODAY, one).can} == set(allowed.split())


def test_a_refusal_names_what_changes_and_what_would_allow_it() -> None:
    answer = loadable("megatron", TODAY, Layout(1, 1, 8, 1, 2))
    assert answer.why == (
        "megatron allows dp to change, not tp, pp; save with --dist-ckpt-optim-fully-reshardable"
    )
    assert loadable("torch-save", TODAY, Layout(2, 2, 2, 1, 2)).why == (
        "torch-save allows nothing to change, not dp; save with outlast or DCP"
    )


def test_a_change_has_its_condition() -> None:
    assert "DTensors" in loadable("outlast", TODAY, Layout(2, 2, 2, 1, 2)).why
