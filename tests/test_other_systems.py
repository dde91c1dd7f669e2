"""The page about other systems: every name of ours in its tables exists, and its defaults are ours."""

from __future__ import annotations

import importlib
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

import pytest

from outlast import settings
from outlast.compat.nvrx.surface import SERVED
from tests.source_tree import ROOT
from tests.test_reference import commands

PAGE = (ROOT / "docs/reference/from-other-systems.md").read_text(encoding="utf-8")
COMMANDS = (ROOT / "docs/reference/commands.md").read_text(encoding="utf-8")
NONE = "-"
_CODE = re.compile(r"`([^`]+)`")
_LEARNED = {"learned", "not known"}  # what None means


@dataclass(frozen=True)
class Row:
    """A line of a table: their names, what they are here, and both defaults."""

    theirs: str
    ours: str
    default: str
    note: str

    @property
    def names(self) -> list[str]:
        return _CODE.findall(self.ours)

    @property
    def tables(self) -> list[str]:
        return [name[1:-1] for name in self.names if re.fullmatch(r"\[\w+\]", name)]

    @property
    def keys(self) -> list[str]:
        return [name for name in self.names if re.fullmatch(r"[a-z_]+", name)]


def rows(page: str) -> Iterator[Row]:
    """Yield the rows of all tables with five columns."""
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 5 and cells[2] != "here" and set(cells[0]) != {"-"}:
            yield Row(cells[0], cells[2], cells[3], cells[4])


def the_object(name: str) -> Any:
    """Return what a dotted name of Python leads to; None: nothing."""
    found: Any = None
    path = ""
    for part in name.replace(":", ".").split("."):
        path = f"{path}.{part}" if path else part
        try:
            found = getattr(found, part) if hasattr(found, part) else importlib.import_module(path)
        except ModuleNotFoundError:
            return None
    return found


def unknown(row: Row, words: Mapping[str, Collection[str]]) -> list[str]:
    """Return what the row names of ours that does not exist."""
    flags = {flag for options in words.values() for flag in options}
    known = {spec.name for table in row.tables if table in settings.TABLES for spec in table_fields(table)}
    known |= {f"[{table}]" for table in settings.TABLES}

    def there(name: str) -> bool:
        if name.startswith("outlast "):
            return name.removeprefix("outlast ") in words or f"## `{name} " in COMMANDS
        return name in known | flags or (name.startswith("outlast.") and the_object(name) is not None)

    return [name for name in row.names if not there(name)] + [row.ours] * (not row.names and row.ours != NONE)


def table_fields(table: str) -> tuple[Any, ...]:
    return fields(settings.TABLES[table])


def written(value: object) -> str:
    """Return a default as the page writes it."""
    if isinstance(value, (bool, str, list)):
        return {"True": "true", "False": "false"}.get(repr(value), repr(value).replace("'", '"'))
    return str(value)


def wrong_default(row: Row) -> str:
    """Return the default that a row with one key should have; empty: it has it."""
    if len(row.keys) != 1 or len(row.tables) != 1 or len(row.names) != 2:
        return ""
    (spec,) = [spec for spec in table_fields(row.tables[0]) if spec.name == row.keys[0]]
    value = spec.default if spec.default is not MISSING else spec.default_factory()
    if not value and row.default in _LEARNED:
        return ""
    given = row.default.replace(", ", ",")
    return "" if written(value).replace(", ", ",") in (given, f"{given}.0") else written(value)


def test_every_name_of_ours_exists() -> None:
    words = commands()
    found = {row.theirs: missing for row in rows(PAGE) if (missing := unknown(row, words))}
    assert found == {}
    assert len(list(rows(PAGE))) > 150


def test_a_name_that_is_served_to_scripts_of_nvrx_leads_to_what_is_served() -> None:
    served = {name: the_object(home) for names in SERVED.values() for name, home in names.items()}
    for row in rows(PAGE):
        if row.theirs.strip("`") in served:
            assert served[row.theirs.strip("`")] in [the_object(name) for name in row.names], row.theirs


def test_the_defaults_of_keys_are_those_of_the_code() -> None:
    found = {row.theirs: (row.default, right) for row in rows(PAGE) if (right := wrong_default(row))}
    assert found == {}


@pytest.mark.parametrize(
    ("ours", "lost"),
    [
        ("`keep_last` in `[checkpoints]`", ["keep_last"]),
        ("`keep_last_n` in `[saves]`", ["keep_last_n", "[saves]"]),
        ("`--max-restart`", ["--max-restart"]),
        ("`outlast chaos break`", ["outlast chaos break"]),
        ("`outlast.Session.reload`", ["outlast.Session.reload"]),
        ("nothing", ["nothing"]),
    ],
)
def test_a_name_that_does_not_exist_would_be_seen(ours: str, lost: list[str]) -> None:
    (row,) = rows(f"| `theirs` | None | {ours} | None | |")
    assert unknown(row, commands()) == lost


def test_a_wrong_default_would_be_seen() -> None:
    (row,) = rows("| `most_recent_k` | -1 | `keep_last_n` in `[checkpoints]` | 4 | |")
    assert wrong_default(row) == "3"


def test_what_has_no_counterpart_has_a_reason() -> None:
    assert [row for row in rows(PAGE) if row.ours == NONE and not row.note and not row.default] == []
