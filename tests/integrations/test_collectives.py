"""What ranks tell each other arrives exactly; anything else is refused, and never unpickled."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outlast.compat.straggler import _Message
from outlast.fields import DamagedCopy
from outlast.stragglers.policy.nvrx import Kernel
from tests.support import warm
from tests.support.launching import DEADLINE

MESSAGE = _Message("n", {"a": 1.0}, {}, {"k": Kernel(0.5, 2.0)}, 0.9, {"a": 1.0})
RANKS = """
import json, sys
import torch, torch.distributed as dist
from outlast.errors import OutlastError
from outlast.integrations import collectives

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
values = {"rank": rank, "bytes": b"x" * (rank * 9), "nan": float("nan"), "tuple": (1, [None, True])}
found = collectives.from_all_ranks(values, "values")
assert [(one["rank"], one["bytes"], one["tuple"]) for one in found] == [
    (0, b"", (1, [None, True])), (1, b"x" * 9, (1, [None, True])),
]
assert (collectives.from_all_ranks(rank, "rank", only_rank0=True) or [rank]) == ([0, 1] if not rank else [1])
assert collectives.from_rank0("zero" if rank == 0 else object(), "text") == "zero"
errors = []
for own in (object() if rank else 1, b"x" * (collectives._MOST if rank else 1)):
    try:
        collectives.from_all_ranks(own, "bad")
    except OutlastError as error:
        errors.append(type(error).__name__)
print(json.dumps(errors))
"""


def test_values_arrive_exactly_and_what_is_too_large_is_refused_on_every_rank(tmp_path: Any) -> None:
    (tmp_path / "rank.py").write_text(RANKS)
    outputs = [tmp_path / f"output-{rank}" for rank in (0, 1)]
    ranks = []
    for rank, path in enumerate(outputs):
        with open(path, "wb") as output, open(tmp_path / "errors", "ab") as errors:
            ranks.append(warm.start([tmp_path / "rank.py", str(rank), tmp_path / "store"], output, errors))
    assert [one.wait(DEADLINE) for one in ranks] == [0, 0], (tmp_path / "errors").read_text()
    found = [json.loads(path.read_text()) for path in outputs]
    assert found == [["DamagedCopy"] * 2, ["UsageError", "DamagedCopy"]]


def test_a_report_of_stragglers_arrives_as_it_was_sent() -> None:
    assert _Message.of(json.loads(json.dumps(MESSAGE.fields())), 1) == MESSAGE


@pytest.mark.parametrize(
    "change",
    [
        {"node": 1},
        {"sections": {"a": "1"}},
        {"sections": []},
        {"kernels": {"k": [1.0]}},
        {"kernels": {"k": [1.0, "2"]}},
        {"individual_gpu": None},
    ],
)
def test_a_report_that_is_none_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(DamagedCopy, match=r"rank 1.*" + next(iter(change))):
        _Message.of({**MESSAGE.fields(), **change}, 1)
