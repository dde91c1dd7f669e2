"""A file asks a launcher for something; whoever it is of, and whatever is in it, nobody waits."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from outlast import cli
from outlast.errors import UsageError
from outlast.observe import requests
from outlast.observe.requests import Request, What, ask, take
from outlast.observe.run_folder import RunFolder
from tests.support.launching import until


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    found = RunFolder(tmp_path / "train")
    found.claim()
    return found


def asked(folder: RunFolder, what: What, node: str = "") -> tuple[Request | str | None, str]:
    """Return what an agent takes of a request, and who is said to have taken it."""
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(ask(folder.root, what, node)))
    thread.start()
    try:
        taken = until(lambda: take(folder.request), "a request")
    finally:
        thread.join()
    return taken, answers[0]


@pytest.mark.parametrize("what", [What.SAVE, What.STOP])
def test_an_agent_takes_what_is_asked_and_the_asker_hears_of_it(folder: RunFolder, what: What) -> None:
    taken, node = asked(folder, what)
    assert isinstance(taken, Request)
    assert taken.what is what
    assert os.uname().nodename in taken.by
    assert node == ""
    assert take(folder.request) is None


def test_the_agent_of_a_node_is_asked_to_drain_it(tmp_path: Path) -> None:
    nodes = [RunFolder(tmp_path / "train", name) for name in ("n1", "n2")]
    for node in nodes:
        node.claim()
        node.events.touch()
    taken, who = asked(nodes[1], What.DRAIN, "n2")
    assert isinstance(taken, Request)
    assert who == "n2"
    with pytest.raises(UsageError, match=r"n3.*n1, n2"):
        ask(tmp_path / "train", What.SAVE, "n3")
    with pytest.raises(UsageError, match="--node"):
        ask(tmp_path / "train", What.DRAIN)


def test_without_a_launcher_nothing_is_asked(folder: RunFolder) -> None:
    folder.release()
    with pytest.raises(UsageError, match="train"):
        ask(folder.root, What.SAVE)
    assert not folder.request.exists()


def test_a_request_that_nobody_takes_is_withdrawn(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "PATIENCE", 0.2)
    with pytest.raises(UsageError, match="train"):
        ask(folder.root, What.SAVE)
    assert not folder.request.exists()


def test_one_request_waits_at_a_time(folder: RunFolder) -> None:
    folder.request.write_text("{}")
    with pytest.raises(UsageError, match="train"):
        ask(folder.root, What.SAVE)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", ""),
        ("[]", ""),
        ('{"version": 2, "what": "save", "by": "me"}', "version 2"),
        ('{"version": 1, "what": "format", "by": "me"}', "'format'"),
        ('{"version": 1, "by": "me"}', "'what'"),
        ("x" * 5000, "4096"),
    ],
)
def test_what_is_no_request_is_ignored_with_the_reason(folder: RunFolder, content: str, named: str) -> None:
    folder.request.write_text(content)
    found = take(folder.request)
    assert isinstance(found, str)
    assert named in found
    assert take(folder.request) is None


def test_a_file_that_is_being_written_is_left_until_it_is_whole(folder: RunFolder) -> None:
    folder.request.touch()
    assert take(folder.request) is None
    folder.request.write_text(json.dumps({"version": 1, "what": "save", "by": "me"}))
    assert take(folder.request) == Request(What.SAVE, "me")


def test_a_file_of_another_account_is_ignored(folder: RunFolder) -> None:
    folder.request.write_text(json.dumps({"version": 1, "what": "stop", "by": "root"}))
    os.chown(folder.request, 65534, -1)
    found = take(folder.request)
    assert isinstance(found, str)
    assert not folder.request.exists()


def test_a_link_is_not_followed(folder: RunFolder, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text(json.dumps({"version": 1, "what": "stop", "by": "me"}))
    folder.request.symlink_to(elsewhere)
    assert isinstance(take(folder.request), str)
    assert elsewhere.exists()


def test_the_command_names_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["request", str(tmp_path / "none"), "save"]) == 2
    assert str(tmp_path / "none") in capsys.readouterr().err
