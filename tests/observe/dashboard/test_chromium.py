"""The page in a real browser: from a file, live, in the dark, on a narrow screen, with the keyboard."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the dashboard's extra is not installed")
pytest.importorskip("uvicorn", reason="the dashboard's extra is not installed")

from outlast import cli
from outlast.observe.requests import Request, What, take
from outlast.observe.run_folder import RunFolder
from tests.support import browser
from tests.support.browser import Tab
from tests.support.dashboards import EVENTFUL, FAULT, HEALTHY, append, served
from tests.support.launching import until

pytestmark = pytest.mark.skipif(browser.PROGRAM is None, reason="Chromium is not installed")


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser.opened(tmp_path_factory.mktemp("chromium")) as found:
        yield found


def test_the_saved_page_works_from_a_file(tab: Tab, tmp_path: Path) -> None:
    shutil.copy(EVENTFUL, tmp_path / "events.jsonl")
    page = tmp_path / "page.html"
    assert cli.main(["report", str(tmp_path), "--html", str(page)]) == 0
    tab.complaints.clear()
    tab.open(f"file://{page}")
    assert "Goodput 41.0%" in tab.value("document.body.innerText")
    assert "days ago" in tab.value("document.getElementById('now').innerText")
    assert tab.value("getComputedStyle(document.querySelector('.c0')).fill") == "rgb(86, 180, 233)"

    paper = "getComputedStyle(document.body).backgroundColor"
    assert tab.value(paper) == "rgb(255, 255, 255)"
    tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert tab.value(paper) == "rgb(22, 22, 24)"
    tab.call("Emulation.setEmulatedMedia", features=[])

    tab.call("Emulation.setDeviceMetricsOverride", width=360, height=700, deviceScaleFactor=1, mobile=False)
    tab.wait("innerWidth === 360")
    assert tab.value("document.documentElement.scrollWidth") <= 360
    tab.call("Emulation.clearDeviceMetricsOverride")
    assert tab.complaints == []


def test_a_fault_appears_without_a_reload_and_the_reader_keeps_the_place(tab: Tab, tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    append(log, HEALTHY)
    with served(tmp_path) as server:
        tab.complaints.clear()
        tab.open(f"http://127.0.0.1:{server.port}/")
        tab.wait("document.getElementById('status').textContent === 'Live.'")
        tab.value("window.mark = 'same page'")
        tab.value("document.getElementById('generations').open = true")
        tab.value("document.getElementById('generations-summary').focus()")
        append(log, FAULT)
        tab.wait("document.getElementById('incidents').innerText.includes('crash of rank 2 on n01')")
        assert tab.value("window.mark") == "same page"
        assert "crash" in tab.value("document.getElementById('now').innerText")
        tab.wait("document.getElementById('status').textContent.includes('crash, restart-in-job')")
        assert tab.value("document.getElementById('generations').open") is True
        assert tab.value("document.activeElement.id") == "generations-summary"
        assert tab.complaints == []
    tab.wait("document.getElementById('status').textContent.startsWith('No connection since')")
    assert "crash of rank 2" in tab.value("document.body.innerText")


def test_a_job_is_asked_to_save_from_the_page_by_who_may(tab: Tab, tmp_path: Path) -> None:
    run, token = RunFolder(tmp_path / "train"), tmp_path / "act"
    run.claim()
    append(run.events, HEALTHY)
    token.write_text("staple-battery-correct")
    token.chmod(0o600)
    tab.open("about:blank")  # which has no server that could be missing
    with served("--act-token-file", token, run.root) as server:
        tab.complaints.clear()
        tab.open(f"http://127.0.0.1:{server.port}/")
        assert tab.value("document.forms.length") == 0
        tab.value("location.href = '/?token=staple-battery-correct'")
        tab.wait("document.readyState === 'complete' && document.forms.length === 3")
        assert tab.value("document.querySelector('#request-save button').checkVisibility()") is False
        tab.value("document.getElementById('request-save-summary').click()")
        tab.value("document.querySelector('#request-save button').click()")
        taken = until(lambda: take(run.request), "a request")
        assert isinstance(taken, Request)
        assert taken.what is What.SAVE
        tab.wait("document.getElementById('status').textContent.includes('train: taken: save.')")
        assert tab.complaints == []
    run.release()
