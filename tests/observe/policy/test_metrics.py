"""The metrics of runs, as text and as values, compared with what a scraper and a tracker are to get."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from outlast.observe.policy import metrics
from outlast.observe.policy.metrics import Metric, exposition, flat_name, measured
from outlast.observe.policy.now import CheckpointNow, NodeNow, Now, SlowNow, State
from outlast.recovery.policy.events import RunEnded

EXPECTED = Path(__file__).parent.parent / "data" / "metrics.prom"
KNOWN = Now(
    run_id='a"b\\c\nd',
    state=State.ENDED,
    generation=3,
    ranks=8,
    nodes=tuple(
        NodeNow(f"n{at}", 3, 4, 0, 9.0, present, False) for at, present in enumerate((True, True, False))
    ),
    step=0,
    rate=2.5,
    total=1,
    stepped=0.5,
    heard=0.75,
    launches=2,
    faults={"crash": 4, "lost": 5},
    actions={"restart-in-job": 6, "stop": 1},
    checkpoints=(CheckpointNow("disk", 40, 20.5), CheckpointNow("script", 41, 21.5)),
    saves=10,
    saves_lost=11,
    slow=(SlowNow(3, "n0", 1.5, "computing"),),
    end=RunEnded(9.0, 9.0, 3, 0, 75, "asked to stop"),
)


def test_the_text_has_each_metric_of_each_run_and_nothing_that_is_not_known() -> None:
    assert exposition([KNOWN, Now(run_id="new")]) == EXPECTED.read_text()


def test_those_that_know_no_labels_get_each_value_under_a_name_of_its_own() -> None:
    found = {flat_name(one): one.value for one in measured(KNOWN)}
    assert len(found) == sum('run="a' in line for line in EXPECTED.read_text().splitlines())
    assert {name: found[name] for name in ("outlast_step", "outlast_faults_total/crash")} == {
        "outlast_step": 0.0,
        "outlast_faults_total/crash": 4.0,
    }
    assert [one.labels for one in measured(KNOWN) if one.metric.name == "outlast_checkpoint_step"] == [
        {"tier": "disk"},
        {"tier": "script"},
    ]


@pytest.mark.parametrize("told", [measured, lambda now: exposition([now])])
def test_a_value_whose_labels_are_not_all_named_is_refused(
    told: Callable[[Now], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = Metric("outlast_wrong", "gauge", "Wrong.", lambda now: [(("a", "b"), 1)], ("first",))
    monkeypatch.setattr(metrics, "METRICS", (wrong,))
    with pytest.raises(ValueError, match="zip"):
        told(Now())
