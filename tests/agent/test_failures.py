from __future__ import annotations

import pytest

from outlast.agent.logs import Failure


@pytest.mark.parametrize(
    ("message", "kind", "expected"),
    [
        ("NonFinite: loss is nan in step 7", "", True),
        ("outlast.core.errors.NonFinite: loss is nan in step 7", "", True),
        ("FloatingPointError: overflow encountered in exp", "", True),
        ("MyOwn: it is a FloatingPointError", "non-finite", True),
        ("RuntimeError: NonFinite", "", False),
        ("RuntimeError: boom", "something newer", False),
    ],
)
def test_which_exceptions_say_that_a_number_is_not_finite(message: str, kind: str, expected: bool) -> None:
    assert Failure(message, "", kind=kind).not_finite is expected
