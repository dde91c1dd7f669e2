from __future__ import annotations

import json
from pathlib import Path

import pytest

from outlast.launcher.output.logs import Failure, failure_of


@pytest.mark.parametrize(
    ("message", "kind", "expected"),
    [
        ("NonFinite: loss is nan in step 7", "", True),
        ("outlast.errors.NonFinite: loss is nan in step 7", "", True),
        ("FloatingPointError: overflow encountered in exp", "", True),
        ("MyOwn: it is a FloatingPointError", "non-finite", True),
        ("RuntimeError: NonFinite", "", False),
        ("RuntimeError: boom", "something newer", False),
    ],
)
def test_which_exceptions_say_that_a_number_is_not_finite(message: str, kind: str, expected: bool) -> None:
    assert Failure(message, "", kind=kind).not_finite is expected


DIFFER = "ranks 0, 1 should hold the same and do not after step 10 (they agreed after step 5): weight"


@pytest.mark.parametrize(
    ("extra", "message", "expected"),
    [
        ({"fault": "corrupt", "agreed": 7, "ranks": [1]}, f"ReplicasDiffer: {DIFFER}", (True, 7, (1,))),
        ({"fault": "corrupt", "agreed": -1, "ranks": []}, f"ReplicasDiffer: {DIFFER}", (True, -1, ())),
        ({}, f"outlast.errors.ReplicasDiffer: {DIFFER}", (True, 5, ())),
        ({}, "ReplicasDiffer: they never agreed", (True, -1, ())),
        ({}, f"RuntimeError: {DIFFER}", (False, 5, ())),
    ],
)
def test_since_when_replicas_differ(
    extra: dict[str, object], message: str, expected: tuple[bool, int, tuple[int, ...]], tmp_path: Path
) -> None:
    error_file = tmp_path / "error.json"
    error_file.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
    found = failure_of(error_file, None)
    assert found is not None
    assert (found.replicas_differ, found.agreed, found.ranks) == expected


def test_a_log_tells_it_where_a_rank_has_left_no_error_file(tmp_path: Path) -> None:
    log = tmp_path / "stderr.log"
    log.write_text(
        f"Traceback (most recent call last):\n  File\noutlast.core.errors.ReplicasDiffer: {DIFFER}\n"
    )
    found = failure_of(tmp_path / "none", log)
    assert found is not None
    assert (found.replicas_differ, found.agreed) == (True, 5)
