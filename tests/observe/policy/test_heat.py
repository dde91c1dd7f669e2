"""Heat maps: which rows they show, how records and readings are put into columns, and what is left out."""

from __future__ import annotations

import math

from outlast.observe.policy.heat import Heat, Temperatures, of_steps
from outlast.recovery.policy.events import StepTimes, Telemetry

NAN = math.nan
NOTHING = Heat((), (), (), 0, 0.0, 0.0)


def times(step: int, **ratios: float) -> StepTimes:
    return StepTimes(0.0, 0.0, 1, step, 0.1, {name.removeprefix("r"): one for name, one in ratios.items()})


def device(time: float, number: int, degrees: float, what: str = "device") -> Telemetry:
    return Telemetry(time, 0.0, 1, "n0", what, number, "", {"temperature": degrees}, "")


def temperatures(*records: Telemetry, rows: int = 9, columns: int = 4) -> Heat:
    kept = Temperatures()
    for record in records:
        kept.take(record)
    return kept.heat(rows, columns)


def same(one: Heat, other: Heat) -> bool:
    """Compare as values; a nan equals itself."""
    return repr(one) == repr(other)


def test_each_record_of_step_times_is_a_column_where_there_is_room() -> None:
    log = [times(10, r0=0.5, r1=1.5), times(20, r0=0.25), times(30, r1=3.0)]
    assert same(
        of_steps(log, 9, 3),
        Heat(("rank 0", "rank 1"), ((0.5, 0.25, NAN), (1.5, NAN, 3.0)), (0.5, 3.0), 0, 10, 30),
    )


def test_of_several_records_in_a_column_the_largest_ratio_is_shown() -> None:
    log = [times(step, r7=ratio) for step, ratio in ((1, 1.0), (2, 3.0), (3, 2.0), (4, 0.5), (5, 0.75))]
    assert same(of_steps(log, 9, 2), Heat(("rank 7",), ((3.0, 0.75),), (3.0,), 0, 1, 5))


def test_ranks_that_were_the_furthest_above_the_median_are_shown_in_order() -> None:
    log = [times(1, r0=1.0, r1=2.0, r2=3.0, r3=2.0, r10=4.0)]
    assert same(
        of_steps(log, 3, 96),
        Heat(("rank 1", "rank 2", "rank 10"), ((2.0,), (3.0,), (4.0,)), (2.0, 3.0, 4.0), 2, 1, 1),
    )


def test_temperatures_are_put_into_columns_of_equal_time() -> None:
    readings = [(100.0, 50.0), (109.9, 60.0), (110.0, 55.0), (119.0, 40.0), (139.0, 65.0), (140.0, 70.0)]
    assert same(
        temperatures(*(device(time, 3, degrees) for time, degrees in readings)),
        Heat(("n0 GPU 3",), ((60.0, 55.0, NAN, 70.0),), (70.0,), 0, 100.0, 140.0),
    )


def test_the_hottest_devices_are_shown_and_the_others_counted() -> None:
    degrees = (50.0, 80.0, 70.0, 70.0, 60.0)
    found = temperatures(*(device(7.0, number, one) for number, one in enumerate(degrees)), rows=2)
    assert found == Heat(("n0 GPU 1", "n0 GPU 2"), ((80.0,), (70.0,)), (80.0, 70.0), 3, 7.0, 7.0)


def test_only_a_device_with_a_temperature_and_a_time_counts() -> None:
    without = Telemetry(1.0, 0.0, 1, "n0", "device", 0, "", {}, "")
    others = [device(1.0, -1, 20.0, "host"), device(1.0, 0, NAN), device(math.inf, 0, 50.0)]
    assert temperatures(without, *others) == NOTHING
