"""A heartbeat page that is read while it is written."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from outlast.errors import UsageError
from outlast.hang.policy.timeouts import OTHER_SECTIONS, section_of_user
from outlast.ipc.heartbeat_page import SLOTS, HeartbeatPage, HeartbeatReader, Section


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[HeartbeatReader]:
    one = HeartbeatReader(tmp_path / "page", rank=0, generation=1, spawned=time.monotonic())
    yield one
    one.close()


def ages(reader: HeartbeatReader) -> dict[str, float]:
    sections = reader.read().sections
    now = time.monotonic()
    return {name: now - opened for name, opened in sections}


def test_the_end_of_an_inner_section_is_never_charged_to_the_outer_one(reader: HeartbeatReader) -> None:
    page = HeartbeatPage.open(reader.path)
    outer, middle, inner = (page.section(name) for name in ("outer", "middle", "inner"))
    seen: list[dict[str, float]] = []

    def look(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code in {Section.__exit__.__code__, Section.__enter__.__code__}:
            seen.append(ages(reader))
            return look
        return None

    sys.settrace(look)  # a look at every line of the writer
    try:
        with outer, middle:
            with inner:
                time.sleep(1.5)
            with inner:
                time.sleep(1.0)
    finally:
        sys.settrace(None)
    spent = [one[name] for one in seen for name in ("outer", "middle") if name in one]
    assert len(spent) > 50
    assert max(spent) < 1.0, max(spent)


@pytest.mark.parametrize(
    "name", ["", "\0", "outlast.finishing", "out_of_section", "\ud800", "é" * 40, "user."]
)
def test_a_section_of_any_name_is_kept_and_hides_no_other(reader: HeartbeatReader, name: str) -> None:
    page = HeartbeatPage.open(reader.path)
    page.learning = True
    with page.section(section_of_user(name)):
        (found,) = reader.read().sections
    with page.section("after it"):
        pass
    page.touch()
    page.outside()
    page.heartbeat(1)
    durations = reader.durations()
    assert found[0] in durations
    assert durations["after it"].count == 1
    assert durations["outlast.out_of_section"].count == 1
    assert durations[found[0]].count == 1


def test_names_beyond_the_last_slot_share_one(reader: HeartbeatReader) -> None:
    page = HeartbeatPage.open(reader.path)
    for number in range(SLOTS + 3):
        page.section(f"section {number}")
    with page.section("one more"):
        assert [name for name, _ in reader.read().sections] == [OTHER_SECTIONS]


def test_a_page_of_another_layout_is_refused(reader: HeartbeatReader) -> None:
    HeartbeatPage.open(reader.path).words[0] += 1
    with pytest.raises(UsageError, match=r"2.*1"):
        HeartbeatPage.open(reader.path)
