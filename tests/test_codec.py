"""What the codec writes it reads again, exactly; what does not fit is refused by the name of its field."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.codec import Malformed, Meta, convert, decode, encode, plain


class Colour(str, Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Inner:
    name: Annotated[str, Meta(max_length=8)]
    share: float = 1.0


@dataclass(frozen=True)
class Outer:
    count: Annotated[int, Meta(ge=0, le=9)]
    seconds: float
    colour: Colour = Colour.RED
    several: tuple[Inner, ...] = ()
    times: dict[str, float] = field(default_factory=dict)
    said: str = ""
    maybe: int | None = None
    limit: float | None = None


FLOATS = st.floats(allow_nan=False)
OUTERS = st.builds(
    Outer,
    count=st.integers(0, 9),
    seconds=FLOATS,
    several=st.lists(st.builds(Inner, st.text(max_size=8), FLOATS)).map(tuple),
    times=st.dictionaries(st.text(), FLOATS),
    said=st.text(st.characters(exclude_categories=()), max_size=20),  # with lone surrogates
    maybe=st.none() | st.integers(-(2**63), 2**63 - 1),
)


@given(OUTERS)
def test_a_value_comes_back_as_it_was_in_one_ascii_line(value: Outer) -> None:
    content = encode(value)
    assert content.isascii()
    assert b"\n" not in content
    assert decode(content, Outer, exactly=True) == value
    assert json.loads(content, parse_constant=pytest.fail)["count"] == value.count


def test_floats_that_are_not_finite_are_texts_and_texts_stay_texts() -> None:
    value = Outer(
        1, math.inf, several=(Inner("inf", -math.inf),), times={"nan": math.nan}, said="nan", limit=math.inf
    )
    raw = json.loads(encode(value))
    assert (raw["seconds"], raw["several"][0]["share"], raw["times"], raw["said"]) == (
        *("inf", "-inf", {"nan": "nan"}),
        "nan",
    )
    found = decode(encode(value), Outer, exactly=True)
    assert repr(found) == repr(value)
    assert plain({"a": (1, math.nan), "b": [None]}) == {"a": [1, "nan"], "b": [None]}


GOOD = {"count": 1, "seconds": 0.5}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"count": 10}, "`count`"),
        ({"count": -1}, "`count`"),
        ({"count": True}, "`count`"),
        ({"count": 1.0}, "`count`"),
        ({"count": "1"}, "`count`"),
        ({"seconds": "soon"}, "`seconds`"),
        ({"seconds": None}, "`seconds`"),
        ({"colour": "green"}, "`colour`"),
        ({"several": [{"name": "a"}, {"name": "too long a name"}]}, "several[1].name"),
        ({"several": [{"share": 1}]}, "`name`"),
        ({"times": {"x": [1]}}, "times"),
        ({"said": 5}, "`said`"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    for read in (lambda: decode(json.dumps(GOOD | changes), Outer), lambda: convert(GOOD | changes, Outer)):
        with pytest.raises(Malformed, match=r"^(expected|invalid|object)") as caught:
            read()
        assert named in str(caught.value)


@pytest.mark.parametrize(
    "text", [b"", b"[" * 100_000, b"\xff", b'{"count":1,"seconds":NaN}', b"null", b"[]", b'{"count":1']
)
def test_what_is_no_such_object_is_refused(text: bytes) -> None:
    with pytest.raises(Malformed):
        decode(text, Outer)


def test_unknown_fields_pass_unless_the_text_must_be_exact() -> None:
    exact = encode(Outer(1, 0.5))
    doubled = exact.replace(b'"count":1,', b'"count":2,"count":1,')
    for text in (exact[:-1] + b',"later":[1]}', doubled, exact.replace(b",", b", ", 1), exact + b"\n"):
        assert decode(text, Outer) == Outer(1, 0.5)
        with pytest.raises(Malformed):
            decode(text, Outer, exactly=True)


def test_a_whole_number_is_a_float_where_one_is_expected() -> None:
    for seconds in (0, 2, -3):
        assert decode(encode(Outer(1, seconds)), Outer, exactly=True) == Outer(1, float(seconds))


def test_what_has_no_form_in_json_is_not_written() -> None:
    with pytest.raises(Malformed):
        encode(Outer(1, 0.5, said=object()))  # type: ignore[arg-type]
