from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.checkpoint.policy.manifest import copy_name
from outlast.checkpoint.policy.resolve import CopyStatus, Mark, Marks, of_later, removals, strictness

NAME = copy_name(20, 1)


@given(
    st.builds(
        Mark,
        st.sampled_from([f"local/{NAME}", f"*/{NAME}", "*/>10.g7"]),
        st.sampled_from(CopyStatus),
        st.sampled_from(["", "ab12"]),
        st.text(max_size=99),
    )
)
def test_a_mark_survives_an_environment(mark: Mark) -> None:
    text = mark.to_text()
    assert Mark.parse(text) == mark
    assert text.isascii()
    assert text.isprintable()
    assert "," not in text


def test_a_long_reason_is_cut() -> None:
    assert len(Mark.parse(Mark(NAME, reason="x" * 999).to_text()).reason) == 160


@pytest.mark.parametrize("text", ["a/b|suspect", "a/b|gold||", "a/b|suspect|||"])
def test_what_is_no_mark_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - by whichever part is read first
        Mark.parse(text)


def test_which_copies_a_mark_is_about() -> None:
    mark = Mark(f"memory/{NAME}", digest="ab")
    assert mark.covers("memory", NAME, "")
    assert mark.covers("local", NAME, "ab")
    assert not mark.covers("local", NAME, "cd")
    assert not mark.covers("local", NAME, "")
    assert mark.covers("memory", copy_name(20, 2), "ab") is False
    replica = Mark.parse(Mark(f"replica/n1/{NAME}").to_text())
    assert replica.covers("replica/n1", NAME, "")
    assert not replica.covers("replica/n2", NAME, "")
    assert Marks([replica.to_text()]).doubted(NAME)
    assert Mark.parse(NAME).covers("anything", NAME, "")
    path = of_later(7, 98, CopyStatus.SUSPECT, "")
    assert path.covers("local", copy_name(99, 7), "")
    assert not path.covers("local", copy_name(98, 7), "")
    assert not path.covers("local", copy_name(99, 17), "")


def test_the_strictest_mark_counts_and_a_proven_one_speaks_against_nothing() -> None:
    texts = [
        Mark(f"local/{NAME}", bearing).to_text()
        for bearing in (CopyStatus.SUSPECT, CopyStatus.QUARANTINED, CopyStatus.PROVEN, CopyStatus.DURABLE)
    ]
    found = Marks(texts).of("local", NAME)
    assert found is not None
    assert found.bearing is CopyStatus.QUARANTINED
    assert Marks(texts[2:]).of("local", NAME) is None
    assert strictness(None) == -1 < strictness(Marks(texts).of("local", NAME))
    assert (Marks(texts).proven, Marks(texts).doubted(NAME)) == ({NAME}, True)


def test_retention_keeps_what_is_proven_and_counts_no_suspects() -> None:
    names = [copy_name(step, 1) for step in (10, 20, 30, 40, 50)]
    avoid = [
        Mark(f"local/{names[0]}", CopyStatus.PROVEN).to_text(),
        Mark(f"memory/{names[4]}", CopyStatus.SUSPECT).to_text(),
    ]
    assert [one.name for one in removals(dict.fromkeys(names), 2, (), avoid)] == [names[1], names[4]]
