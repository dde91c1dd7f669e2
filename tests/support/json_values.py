"""Values of JSON, and replacing any of those inside another one."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.floats(allow_nan=False), st.text(max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


def replace_one(value: Any, where: int, new: Any) -> None:
    """Replace one of the values inside a JSON value; every value has a number."""
    holders = [(value, key) for key in _keys(value)]
    for holder, key in holders:
        holders += [(holder[key], inner) for inner in _keys(holder[key])]
    holder, key = holders[where % len(holders)]
    holder[key] = new


def _keys(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value)
    return list(range(len(value))) if isinstance(value, list) else []
