"""Every record survives its line; every wrong line is named; newer lines are kept."""

from __future__ import annotations

import json
import math
import re
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.observe.policy import codec
from outlast.observe.policy.codec import KINDS, CodecError, Unknown, decode, encode
from outlast.recovery.policy import events
from outlast.recovery.policy.events import (
    FaultSeen,
    Note,
    Record,
    RecoveryAction,
    Saved,
    TimeoutsLearned,
)

EVERY_KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
WHOLE = st.integers(-(2**63), 2**63 - 1)
DRAWN = {"Int64": WHOLE, "tuple[Int64, ...]": st.lists(WHOLE).map(tuple)}


def drawn(kind: type[Record]) -> st.SearchStrategy[Record]:
    bounded = {spec.name: DRAWN[str(spec.type)] for spec in fields(kind) if str(spec.type) in DRAWN}
    return st.builds(kind, **bounded, **({"evidence": ...} if kind is FaultSeen else {}))


RECORDS = st.one_of([drawn(kind) for kind in KINDS.values()])
DOCUMENT = Path(__file__).parents[3] / "docs" / "reference" / "event-log.md"
SAVED = Saved(12.5, 3.25, 7, 120, "step-000000120.g7", 4096, 0.5, "every 60 s")


def same(one: object, other: object) -> bool:
    """Compare as values and types; a nan equals itself, 0.0 does not equal -0.0."""
    return type(one) is type(other) and repr(one) == repr(other)


@given(RECORDS)
def test_a_record_survives_its_line(record: Record) -> None:
    line = encode(record)
    assert line.isascii()
    assert len(line.splitlines()) == 1
    assert same(decode(line), record)


def test_a_whole_number_is_a_float_and_what_the_class_does_not_name_is_passed_over() -> None:
    assert same(decode(altered(seconds=2, colour="blue")), replace(SAVED, seconds=2.0))


def test_a_line_is_what_the_document_says() -> None:
    assert encode(SAVED) == (
        '{"v":1,"kind":"saved","time":12.5,"clock":3.25,"generation":7,"step":120,'
        '"checkpoint":"step-000000120.g7","nbytes":4096,"seconds":0.5,"reason":"every 60 s"}'
    )
    assert encode(SAVED) in DOCUMENT.read_text(encoding="utf-8")


def test_floats_that_are_not_finite_are_strings_and_text_stays_text() -> None:
    record = TimeoutsLearned(math.inf, -math.inf, 1, {"nan": math.nan, "step": math.inf}, "inf")
    raw = json.loads(encode(record))
    assert (raw["time"], raw["clock"], raw["reason"]) == ("inf", "-inf", "inf")
    assert raw["timeouts"] == {"nan": "nan", "step": "inf"}
    assert same(decode(encode(record)), record)


def test_an_enum_is_written_as_its_value() -> None:
    record = events.ActionTaken(0.0, 0.0, 1, RecoveryAction.RESTART_IN_JOB, 2, events.StateSource.NEWEST, "")
    assert decode(encode(record)) == events.ActionTaken(0.0, 0.0, 1, "restart-in-job", 2, "newest", "")


def test_the_table_names_every_record_by_its_class() -> None:
    records = {one for one in vars(events).values() if isinstance(one, type) and issubclass(one, Record)}
    assert set(KINDS.values()) == records - {Record}
    for name, kind in KINDS.items():
        assert "".join(word.capitalize() for word in name.split("_")) == kind.__name__


@pytest.mark.parametrize(
    "line",
    [
        '{"v":1,"kind":"evicted","time":1.0,"clock":1.0,"generation":1,"why":["x",null]}',
        '{"v":2,"kind":"saved","checkpoint":{"moved":true}}',
        '{"v":99,"kind":"evicted"}',
    ],
)
def test_a_line_of_a_newer_version_is_kept_whole(line: str) -> None:
    raw = json.loads(line)
    assert decode(line) == Unknown(raw["kind"], raw["v"], raw)


def altered(**changes: object) -> str:
    return json.dumps({**json.loads(encode(SAVED)), **changes})


@EVERY_KIND
def test_each_field_without_a_default_is_missed(kind: type[Record]) -> None:
    example = RECORDS_BY_KIND[kind]
    for spec in fields(kind):
        raw = json.loads(encode(example))
        del raw[spec.name]
        if spec.default is MISSING and spec.default_factory is MISSING:
            with pytest.raises(CodecError, match=f"`{spec.name}`"):
                decode(json.dumps(raw))
        else:
            assert isinstance(decode(json.dumps(raw)), kind)


@EVERY_KIND
@pytest.mark.parametrize("value", [None, True, [1.5], {"a": None}], ids=str)
def test_a_field_of_another_type_is_refused(kind: type[Record], value: object) -> None:
    example = RECORDS_BY_KIND[kind]
    for spec in fields(kind):
        raw = {**json.loads(encode(example)), spec.name: value}
        with pytest.raises(CodecError, match=spec.name):
            decode(json.dumps(raw))


EXAMPLE_VALUES: dict[str, object] = {
    "Int64": 3,
    "float": 1.5,
    "str": "x",
    "tuple[Int64, ...]": (1, 2),
    "tuple[str, ...]": ("a", "b"),
    "dict[str, float]": {"step": 1.5},
    "dict[str, str]": {"stacks": "x"},
}
RECORDS_BY_KIND = {
    kind: kind(**{spec.name: EXAMPLE_VALUES[str(spec.type)] for spec in fields(kind)})
    for kind in KINDS.values()
}


@pytest.mark.parametrize(
    ("line", "named"),
    [
        *((line, ()) for line in ("", encode(SAVED)[:-9], "\0\0\0\0", "[" * 100_000)),
        ('{"v":1,"kind":"saved","time":NaN}', ("NaN",)),
        ("[1]", ("list",)),
        ('"saved"', ("a text",)),
        ("{}", ("`v`",)),
        ('{"v":1}', ("`kind`",)),
        ('{"kind":"saved"}', ("`v`",)),
        *((altered(v=value), ("`v`",)) for value in (True, 0, "1")),
        (altered(kind=["saved"]), ("`kind`", "a list")),
        (altered(step=1.0), ("`step`", "a whole number")),
        (altered(step=True), ("`step`", "true or false")),
        (altered(seconds="soon"), ("`seconds`", "a text")),
        (altered(seconds=10**400), ("`seconds`",)),
        *((altered(step=one), ("`step`", str(2**63)[:9])) for one in (2**63, 2**1000, -(2**63) - 1)),
        (altered(reason=None), ("`reason`", "a text")),
        (altered(checkpoint="x" * 10_000, step=None), ("`step`",)),
    ],
    ids=range(23),
)
def test_a_wrong_line_is_refused_with_what_is_wrong(line: str, named: tuple[str, ...]) -> None:
    with pytest.raises(CodecError) as raised:
        decode(line)
    assert all(word in str(raised.value) for word in (*named, repr(line[:100])[1:-1]))
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize("step", [2**63 - 1, -(2**63)])
def test_whole_numbers_of_64_bits_are_read(step: int) -> None:
    record = decode(altered(step=step))
    assert isinstance(record, Saved)
    assert record.step == step


@given(RECORDS, st.data())
def test_a_damaged_line_is_decoded_or_refused(record: Record, data: st.DataObject) -> None:
    line = encode(record)
    begin = data.draw(st.integers(0, len(line)))
    end = data.draw(st.integers(begin, len(line)))
    filling = data.draw(st.text(max_size=5) | st.sampled_from(["null", "1e999", "-1", "{}", "[]", '"inf"']))
    try:
        found = decode(line[:begin] + filling + line[end:])
    except CodecError:
        return
    if isinstance(found, Record):
        assert same(decode(encode(found)), found)


@dataclass(frozen=True)
class Strange(Record):
    """Of no kind that the log knows."""


@pytest.mark.parametrize(
    "record",
    [
        Strange(0.0, 0.0, 0),
        Note(0.0, 0.0, 0, Path("x")),  # type: ignore[arg-type]
    ],
    ids=["kind", "path"],
)
def test_what_cannot_be_a_line_is_refused(record: Record) -> None:
    with pytest.raises(CodecError):
        encode(record)


def test_the_document_lists_every_kind_with_its_fields() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    common = [spec.name for spec in fields(Record)]
    for name, kind in KINDS.items():
        row = next((line for line in text.splitlines() if line.startswith(f"| `{name}` |")), "")
        listed = re.findall(r"`(\w+)`", row.split("|")[2]) if row else []
        assert listed == [spec.name for spec in fields(kind) if spec.name not in common], name
    assert f"`v` is {codec.SCHEMA_VERSION}" in text
