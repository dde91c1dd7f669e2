"""The page of a run: well-formed, everything escaped, of a bounded size, the same numbers as the report."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from outlast.observe.dashboard import document
from outlast.observe.dashboard.document import RankLog
from outlast.observe.dashboard.markup import Markup, element, moment, text
from outlast.observe.policy.goodput import Category
from outlast.observe.policy.now import NodeNow
from outlast.observe.recorder import read
from outlast.recovery.policy.events import (
    ActionTaken,
    FaultSeen,
    FirstStep,
    GenerationStarted,
    Quarantined,
    RunStarted,
    StepTimes,
    StragglerSeen,
    Telemetry,
)
from tests.observe.dashboard.pages import ids, shown
from tests.support.dashboards import EVENTFUL, parsed

HOSTILE = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(1)>&\x1b[2J\ud800]]>"
RECORDS = read(EVENTFUL).records


def of(run: document.Shown) -> str:
    return document.page(f"run {run.name}", document.sections(run))


def test_the_page_of_an_eventful_run_is_well_formed_and_links_to_each_section() -> None:
    tree = parsed(of(shown(*RECORDS)))
    found = ids(tree)
    assert len(found) == len(set(found))
    links = [one.attrib["href"] for one in tree.iter("a")]
    assert {link[1:] for link in links} <= set(found)
    words = "".join(tree.itertext())
    assert "41.0%" in words
    assert re.search("hang .*rank 1 .*n01 .*step 350.*restart-in-job", words)


@pytest.mark.parametrize("source", ["session", "counted"])
def test_a_counted_step_is_marked_wherever_it_is_shown(source: str) -> None:
    run = shown(
        RunStarted(1.0, 1.0, 1, "id", "n0", 7, "boot", ("t.py",), 1, ""),
        FirstStep(2.0, 2.0, 1, 7, {}, source),
        FaultSeen(3.0, 3.0, 1, "crash", "n0", 1, 22, 2.5, "rank 1 died", "", source=source),
        ActionTaken(3.0, 3.0, 1, "restart-in-job", 2, "newest", "restart 1 of 3"),
    )
    words = "".join(parsed(of(run)).itertext())
    assert words.count("step 22 (counted") == (2 if source == "counted" else 0)
    card = "".join(parsed(document.page("runs", document.cards([run]))).itertext())
    assert ("step7 (counted" in words, "step7 (counted" in card) == (source == "counted",) * 2


def test_nothing_is_fetched_from_anywhere() -> None:
    page = of(shown(*RECORDS))
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    tree = parsed(page)
    assert not [one.tag for one in tree.iter() if {"src", "style", "onclick", "onload"} & one.attrib.keys()]
    assert "default-src 'none'" in document.policy()


@pytest.mark.parametrize("node", ["", HOSTILE])
def test_what_a_log_says_is_text_wherever_it_is_shown(node: str) -> None:
    evidence = {HOSTILE: HOSTILE}
    run = shown(
        RunStarted(1.0, 1.0, 1, HOSTILE, HOSTILE, 7, "boot", (HOSTILE,), 4, HOSTILE),
        GenerationStarted(2.0, 2.0, 1, 4, (7,), HOSTILE, HOSTILE),
        StepTimes(3.0, 3.0, 1, 5, 0.1, {HOSTILE: 2.0, "0": 1.5}),
        StragglerSeen(3.0, 3.0, 1, 5, 0, HOSTILE, "on", HOSTILE, HOSTILE, 2.0, 2.0, 1.0, 1.0, 3, HOSTILE),
        Telemetry(3.0, 3.0, 1, HOSTILE, "device", 0, HOSTILE, {"temperature": 80.0}, HOSTILE),
        Telemetry(3.0, 3.0, 1, HOSTILE, "xid", 0, HOSTILE, {"xid": 79.0}, HOSTILE),
        Quarantined(3.0, 3.0, 1, 5, HOSTILE, HOSTILE),
        FaultSeen(4.0, 4.0, 1, HOSTILE, HOSTILE, 0, 5, 3.5, HOSTILE, HOSTILE, evidence),
        ActionTaken(4.0, 4.0, 1, HOSTILE, 2, HOSTILE, HOSTILE),
        node=node,
    )
    run = replace(run, name=HOSTILE, trouble=HOSTILE, logs={1: [RankLog(HOSTILE, end=HOSTILE)]})
    for page in (of(run), document.page(HOSTILE, document.cards([run])), of(replace(run, trouble=""))):
        page.encode("utf-8")
        tree = parsed(page)
        assert not list(tree.iter("img"))
        assert page.count("<script>") == page.count("</script>") == 1
        assert "alert(1)" in "".join(tree.itertext())
        assert "\x1b" not in page


def test_markup_is_escaped_unless_it_was_made_here() -> None:
    assert element("p", "a<b", Markup("<i/>"), class_='"x"') == '<p class="&quot;x&quot;">a&lt;b<i/></p>'
    assert text("a\ud800\x00b") == "a\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}b"
    assert "unknown time" in moment(1e300)


def test_the_bar_has_a_letter_and_a_row_for_each_category() -> None:
    tree = parsed(of(shown(*RECORDS)))
    section = next(one for one in tree.iter("section") if one.attrib["id"] == "goodput")
    rows = ["".join(row.itertext()) for row in section.iter("tr")][1:]
    assert len(rows) == len(Category) + 1
    assert rows[-1].endswith("115.250100.0%")
    assert len({row[0] for row in rows[:-1]}) == len(Category)


def test_four_thousand_nodes_make_a_page_that_is_not_large() -> None:
    nodes = tuple(
        NodeNow(f"node{at:04}", 4, 8, 500 - (at == 17), 1e9, at % 99 != 0, False) for at in range(4096)
    )
    run = shown(*RECORDS)
    page = of(replace(run, now=replace(run.now, nodes=nodes, heard=1e9)))
    assert len(page) < 300_000
    tree = parsed(page)
    section = next(one for one in tree.iter("section") if one.attrib["id"] == "nodes")
    assert len(list(section.iter("tr"))) == 51
    assert "4046" in "".join(section.itertext())
    label = next(one for one in section.iter() if one.tag.endswith("svg")).attrib["aria-label"]
    assert re.findall(r"\d+", label) == ["4054", "42", "0"]


def test_a_node_that_was_found_lost_is_gone_at_once() -> None:
    names, here = ("n0", "n1", "n2"), (True, False, False)
    nodes = tuple(
        NodeNow(name, 2, 8, 5, 1e9, present, name == "n1") for name, present in zip(names, here, strict=True)
    )
    run = shown(*RECORDS)
    page = of(replace(run, now=replace(run.now, nodes=nodes, heard=1e9)))
    assert re.search(r"\b1\D+\b1 spare\D+\b1 gone", page)


def test_ranks_of_a_heat_map_differ_by_the_size_of_their_squares() -> None:
    times = [StepTimes(10.0 + at, 10.0 + at, 1, at, 0.1, {"0": 1.0, "1": 1.2, "2": 2.0}) for at in range(5)]
    section = document.sections(shown(*RECORDS, *times))["slow"]
    assert section.count("<path") == 3
    assert "rank 2" in section
    assert "2.00 times" in section


def test_a_run_that_cannot_be_read_says_why_and_shows_what_was_read() -> None:
    page = of(replace(shown(*RECORDS), trouble="/x/events.jsonl: Input/output error", skipped=2, unknown=3))
    assert "Input/output error" in page
    assert re.search(r"\b2 lines.*\b3 lines", page, re.DOTALL)
    assert "41.0%" in page
