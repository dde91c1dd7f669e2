"""Each transcript reads like an incident report, and the deciders still answer as it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulation.transcript import play

TRANSCRIPTS = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_the_deciders_answer_as_the_transcript_says(path: Path, request: pytest.FixtureRequest) -> None:
    script = path.read_text()
    answered = play(script)
    if request.config.getoption("--rewrite-transcripts"):
        path.write_text(answered)
    assert answered == path.read_text()
    assert any(line.startswith("> ") for line in answered.splitlines())


def test_a_line_that_is_no_event_is_refused() -> None:
    with pytest.raises(ValueError, match="nonsense"):
        play("begin 2 ranks\nat 1 nonsense\n")
