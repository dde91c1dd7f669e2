"""HTML and SVG as strings in which everything is escaped that was not made here."""

from __future__ import annotations

import html
from datetime import datetime, timezone

from outlast.observe.text import clean


class Markup(str):
    """Text that is markup already; every other text is escaped."""

    __slots__ = ()


def element(name: str, *children: str, **attributes: str | float) -> Markup:
    """Return an element.

    Args:
        name: of the element.
        children: markup, or text that is escaped; control characters are replaced.
        attributes: "class_" is class, "data_at" is data-at; an empty text leaves the attribute out.
    """
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(str(value))}"'
        for key, value in attributes.items()
        if value != ""
    )
    inside = "".join(one if isinstance(one, Markup) else text(one) for one in children)
    return Markup(
        f"<{name}{shown}>{inside}</{name}>" if inside or name not in _EMPTY else f"<{name}{shown}/>"
    )


_EMPTY = {"path", "rect", "line", "meta", "circle", "input"}


def text(value: str) -> str:
    """Return a text escaped for an element and for an attribute in double quotes."""
    return html.escape(clean(value), quote=True)


def joined(*children: str) -> Markup:
    """Return several pieces of markup as one."""
    return Markup("".join(one if isinstance(one, Markup) else text(one) for one in children))


def moment(wall: float) -> Markup:
    """Return a wall time, with a place in which the script writes how long ago it was."""
    try:
        at = datetime.fromtimestamp(wall, timezone.utc)
    except (OverflowError, ValueError, OSError):
        return Markup("at an unknown time")
    shown = element("time", f"{at:%Y-%m-%d %H:%M:%S} UTC", datetime=f"{at:%Y-%m-%dT%H:%M:%SZ}")
    return joined(shown, element("span", class_="age", data_at=f"{wall:.0f}"))


def facts(*pairs: tuple[str, str]) -> Markup:
    """Return a list of names and what they are; those without a text are left out."""
    return element(
        "dl", *(joined(element("dt", name), element("dd", value)) for name, value in pairs if value)
    )


def table(caption: str, columns: tuple[str, ...], rows: list[tuple[str, ...]], numbers: str = "") -> Markup:
    """Return a table that scrolls sideways where it has no room.

    Args:
        caption: what it is about, for those who hear the page.
        columns: their headings.
        rows: of texts or markup.
        numbers: a letter for each column: "n" for numbers, "w" for long words, "-" for others.
    """
    kinds = [{"n": "number", "w": "words"}.get(one, "") for one in numbers.ljust(len(columns), "-")]
    head = element(
        "tr",
        *(element("th", name, scope="col", class_=kind) for name, kind in zip(columns, kinds, strict=True)),
    )
    body = (
        element("tr", *(element("td", cell, class_=kind) for cell, kind in zip(row, kinds, strict=True)))
        for row in rows
    )
    found = element("table", element("thead", head), element("tbody", *body))
    return element("div", found, class_="wide", tabindex=0, role="group", aria_label=caption)
