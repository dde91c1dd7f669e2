"""The report of a log written by hand: a SIGKILL, a hang, a bad copy, an agent's death and a rerun."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from outlast import cli
from outlast.errors import UsageError
from outlast.observe import report
from outlast.observe.policy.goodput import AGENT_DEATH, fold
from outlast.observe.recorder import read
from outlast.recovery.policy.events import (
    ActionTaken,
    FaultSeen,
    FirstStep,
    Progress,
    Quarantined,
    Record,
    RunStarted,
    Saved,
    TimeoutsLearned,
    TrustChanged,
)

DATA = Path(__file__).parent / "data"
LOG = DATA / "eventful.jsonl"
START = RunStarted(1.0, 1.0, 1, "id", "n01", 1, "boot", (), 2, "a new run")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    shutil.copy(LOG, tmp_path / "events.jsonl")
    return tmp_path


def rendered(records: tuple[Record, ...], encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, newline="\n")
    report.render(fold(records), Console(file=file, width=110))
    file.flush()
    return "".join(line.rstrip() + "\n" for line in raw.getvalue().decode(encoding).splitlines())


def test_the_seconds_are_those_that_were_added_up_by_hand() -> None:
    log = read(LOG)
    assert (len(log.unknown), log.skipped) == (1, 1)
    ledger = fold(log.records)
    assert {name.value: spent for name, spent in ledger.seconds.items()} == {
        "training": (22.875 - 2.875 - 1.0) + (56.25 - 46.25 - 0.5) + (114.25 - 94.25 - 1.25),
        "lost_work": (27.875 - 22.875) + (43.5 - 28.5 - 0.5) + (61.25 - 56.25),
        "starting": 2.875 + (94.25 - 91.25 - 0.25),
        "recovering": (28.5 - 27.890625 - 0.125) + (46.25 - 45.25 - 0.375),
        "stopping": 115.25 - 114.25,
        "detecting": 0.015625 + 1.75,
        "saving": 6 * 0.5 + 0.25,
        "loading": 0.125 + 0.375 + 0.25,
        "down": 91.25 - 61.25,
    }
    assert ledger.wall == 115.25
    assert [
        (one.kind, one.rank, one.detected_after, one.running_again_after, one.steps_lost)
        for one in ledger.incidents
    ] == [
        ("crash", 2, 0.015625, 28.5 - 27.875, 50),
        ("hang", 1, 1.75, 46.25 - 43.5, 150),
        (AGENT_DEATH, -1, None, 94.25 - 61.25, 50),
    ]
    for incident in ledger.incidents[:2]:
        assert incident.detected_after is not None
        assert incident.detected_after + sum(incident.phases.values()) == incident.running_again_after


def test_the_report_is_printed_and_says_what_was_passed_over(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    assert cli.main(["report", str(run_dir)]) == 0
    printed = capsys.readouterr().out
    for word in ("41.0%", "crash", "hang", "restart-in-job", "step-000000300.g2", "500"):
        assert word in printed
    torn, newer = printed.splitlines()[-2:]
    assert (" 1 " in torn, " 1 " in newer, torn != newer) == (True, True, True)


def test_the_report_for_programs_holds_the_same_numbers(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", "--json", str(run_dir)]) == 0
    found = json.loads(capsys.readouterr().out)
    ledger = fold(read(LOG).records)
    assert found["seconds"] == {name.value: spent for name, spent in ledger.seconds.items()}
    assert sum(found["seconds"].values()) == found["wall"] == 115.25
    assert found["goodput"] == 47.25 / 115.25
    assert [one["phases"] for one in found["incidents"]] == [one.phases for one in ledger.incidents]
    assert found["checkpoints"] == {
        "committed": 6,
        "lost": 1,
        "median_seconds": 0.5,
        "last_step": 500,
        "own": 0,
        "own_last_step": None,
        "quarantined": [
            {"checkpoint": "step-000000300.g2", "reason": ledger.quarantined[0].reason},
        ],
        "trust": [],
    }
    assert found["timeouts"] == {"initial": 30.0, "step": 1.5, "checkpointing": 2.5}
    assert found["end"] == {"exit_code": 0, "reason": "every rank finished"}
    assert (found["lines_skipped"], found["lines_unknown"]) == (1, 1)


@pytest.mark.parametrize(
    ("step", "marks"), [(-1, {}), (22, {}), (-1, {"session": 1.5}), (22, {"session": 1.5})]
)
def test_counted_steps_are_explained_where_the_table_has_one(step: int, marks: dict[str, float]) -> None:
    began = FirstStep(2.0, 2.0, 1, 1, marks, "counted")
    fault = FaultSeen(3.0, 3.0, 2, "crash", "n01", 1, step, 2.5, "rank 1 died", "", source="counted")
    action = ActionTaken(3.0, 3.0, 2, "restart-in-job", 3, "newest", "restart 1 of 3")
    told = rendered((START, began, fault, action))
    assert "restart-in-job" in told
    assert (f"{step} counted" in told) is (step >= 0)
    assert ("counted: " in told) is (step >= 0)


def test_doubts_about_copies_are_told_and_proofs_are_counted() -> None:
    places = ["local/step-000000010.g1", "local/step-000000020.g1", "memory/step-000000030.g2"]
    words = ["proven", "proven", "suspect"]
    changes = [
        TrustChanged(float(at), float(at), 1, 10, place, word, f"why {at}")
        for at, (place, word) in enumerate(zip(places, words, strict=True))
    ]
    text = rendered((START, *changes))
    assert re.search(f"2 proven.*{places[1]}", text)
    assert re.search(f"suspect {places[2]}.*why 2", text)
    assert "why 1" not in text
    found = report.to_json(fold([START, *changes]))["checkpoints"]["trust"]
    assert [(one["checkpoint"], one["trust"]) for one in found] == list(zip(places, words, strict=True))


def test_a_copy_that_was_set_aside_is_told_once() -> None:
    name, why = "step-000000010.g1", "digest aa expected, bb found"
    text = rendered(
        (
            START,
            Saved(2.0, 2.0, 1, 10, name, 100, 0.1, "every 10 steps"),
            Quarantined(3.0, 3.0, 1, 10, name, why),
            TrustChanged(3.0, 3.0, 1, 10, f"local/{name}", "quarantined", why),
            TrustChanged(3.0, 3.0, 1, 10, f"global/{name}", "quarantined", "its bytes are the same"),
        )
    )
    assert text.count(why) == 1
    assert "its bytes are the same" in text


def test_json_has_no_word_for_infinity_and_needs_none() -> None:
    saves = [Saved(2.0, 2.0, 1, 1, "x", 1, spent, "") for spent in (float("inf"), 0.1, 0.9)]
    off = TimeoutsLearned(3.0, 3.0, 1, {"step": float("inf")}, "")
    found = json.loads(json.dumps(report.to_json(fold([START, *saves, off])), allow_nan=False))
    assert found["checkpoints"]["median_seconds"] == 0.9
    assert found["timeouts"] == {"step": "inf"}


def test_what_a_terminal_would_obey_is_shown_and_not_obeyed() -> None:
    reason = "[bold]boom[/nothing] \x1b[2J\x07 \ud800 tab\tend"
    fault = FaultSeen(2.0, 2.0, 1, "error\x1b[0m", "n01", 0, 1, 1.5, reason, "x", {"[red]log": "a\r\nb"})
    action = read(LOG).records[11]
    text = rendered((START, fault, action))
    assert "[bold]boom[/nothing] \ufffd[2J\ufffd \ufffd" in text
    assert re.search(r"\ufffd tab +end", text)
    assert "[red]log: a\ufffd\n     b" in text
    assert not any(ord(one) < 32 and one != "\n" for one in text)


@pytest.mark.parametrize("records", [(START,), (Progress(1.0, 1.0, 1, 3),)])
def test_a_log_that_has_just_begun_is_reported(records: tuple[Record, ...]) -> None:
    assert len(rendered(records).splitlines()) > 2
    assert report.to_json(fold(records))["incidents"] == []


@pytest.mark.parametrize("content", [None, "", '{"v":1,\n{"v":7,"kind":"x"}\n'])
def test_a_folder_without_a_log_is_an_error_that_names_the_file(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "events.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError) as raised:
        report.report(tmp_path, as_json=False)
    assert str(path) in str(raised.value)
    assert raised.value.exit_code == 2
