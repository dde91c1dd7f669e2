"""What is shown of runs, made from records."""

from __future__ import annotations

from xml.etree import ElementTree

from outlast.observe.dashboard.document import Shown
from outlast.observe.policy.now import NowFold
from outlast.observe.policy.page import History
from outlast.recovery.policy.events import Record


def shown(*records: Record, node: str = "", wall: float = 1795000200.0) -> Shown:
    history, now = History(), NowFold()
    for record in records:
        history.take(record, node)
        now.take(record, node)
    return Shown("outlast-runs/train", now.now(), history.view(), wall)


def ids(tree: ElementTree.Element) -> list[str]:
    return [one.attrib["id"] for one in tree.iter() if "id" in one.attrib]
