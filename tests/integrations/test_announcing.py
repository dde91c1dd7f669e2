"""What a loop says of itself outside of the launcher, and frameworks that are missing or too old."""

from __future__ import annotations

import re

import pytest

from outlast.errors import UsageError
from outlast.integrations.announcing import AnnouncedLoop, require


def test_outside_of_the_launcher_nothing_happens(caplog: pytest.LogCaptureFixture) -> None:
    with AnnouncedLoop() as loop:
        loop.begin(3)
        assert loop.step_done(4) == 4
        loop.saved(4)
        loop.enter_section("evaluation")
        loop.leave_section()
    assert (loop.active, loop.should_save, loop.should_stop, caplog.text) == (False, False, False, "")


def test_a_framework_that_is_missing_or_too_old_is_named_with_what_is_needed() -> None:
    require("pytest", (8, 0), "a test")
    with pytest.raises(UsageError, match=re.escape("a test: found no nobody-has-this, needs")):
        require("nobody-has-this", (1, 2), "a test")
    with pytest.raises(UsageError, match=r"found pytest \d.*, needs pytest 999\.1 or newer"):
        require("pytest", (999, 1), "a test")
