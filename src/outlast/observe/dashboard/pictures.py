"""Pictures of a run as SVG: the bar of the wall time, the timeline, heat maps, the nodes.

Nothing is told by colour alone: a part of the bar has a letter, a mark of the timeline a shape, a cell of a
heat map a size. A picture of thousands of cells is a few paths.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from outlast.observe.dashboard.markup import Markup, element
from outlast.observe.policy.goodput import Category
from outlast.observe.policy.heat import Heat
from outlast.observe.policy.now import NodeNow
from outlast.observe.policy.page import Part, View
from outlast.observe.report import duration

_WIDE = 1000.0
_LETTER_FROM = 0.025  # share of the bar from which a letter has room
_TICKS = 6
_CELL = 10.0
LETTERS = {category: letter for category, letter in zip(reversed(Category), "TWSRPDVLX", strict=True)}
_COLOURS = {category: f"c{at}" for at, category in enumerate(reversed(Category))}
RATIOS = (1.04, 1.1, 1.3, 1.5)  # of a rank to the median, as outlast stragglers shades them
DEGREES = (60.0, 70.0, 80.0, 90.0)  # Celsius; data-center GPUs lower their clocks from about 85 on


def _picture(label: str, height: float, *children: str) -> Markup:
    return element(
        "svg",
        *children,
        viewBox=f"0 0 {_WIDE:.0f} {height:.0f}",
        role="img",
        aria_label=label,
        xmlns="http://www.w3.org/2000/svg",
    )


def wide(label: str, picture: Markup) -> Markup:
    """Return a picture that scrolls sideways on a narrow screen, also with the keyboard."""
    return element("div", picture, class_="wide", tabindex=0, role="group", aria_label=label)


def swatch(category: Category) -> Markup:
    """Return the colour of a category with its letter."""
    inside = (
        element("rect", class_=f"c {_COLOURS[category]}", width=24, height=20),
        element("text", LETTERS[category], x=12, y=15, text_anchor="middle", class_="key"),
    )
    return element("span", element("svg", *inside, viewBox="0 0 24 20", aria_hidden="true"), class_="swatch")


def bar(parts: Sequence[Part]) -> Markup:
    """Return where the wall time went as one bar."""
    found: list[Markup] = []
    at = 0.0
    for part in parts:
        width = part.share * _WIDE
        name = part.category.value.replace("_", " ")
        title = element("title", f"{name}: {duration(part.seconds)}, {part.share:.1%}")
        if width > 0:
            kind = f"c {_COLOURS[part.category]}"
            found.append(element("rect", title, class_=kind, x=f"{at:.2f}", width=f"{width:.2f}", height=30))
        if part.share >= _LETTER_FROM:
            middle = f"{at + width / 2:.2f}"
            found.append(
                element("text", LETTERS[part.category], x=middle, y=20, text_anchor="middle", class_="key")
            )
        at += width
    told = ", ".join(f"{one.category.value.replace('_', ' ')} {one.share:.1%}" for one in parts if one.share)
    return _picture(f"Where the wall time went: {told}", 30, *found)


def timeline(view: View) -> Markup:
    """Return generations, incidents, checkpoints and starts over the wall time of the run."""
    scale = _WIDE / view.wall if view.wall else 0.0
    boxes = []
    for one in view.generations:
        x, width = one.began * scale, max(0.5, (one.ended - one.began) * scale - 0.5)
        title = element("title", f"generation {one.number}: {one.ranks} ranks, {one.reason}")
        kind = "even" if one.number % 2 == 0 else "odd"
        boxes.append(element("rect", title, class_=kind, x=f"{x:.2f}", y=28, width=f"{width:.2f}", height=20))
        if width > 12 * len(str(one.number)):
            boxes.append(element("text", str(one.number), x=f"{x + 4:.2f}", y=43))
    faults = _marks((one.incident.at for one in view.incidents), scale, "M{0} 24l-6 -12h12z")
    saves = _marks(view.saves, scale, "M{0} 52v10h2v-10z")
    loads = _marks(view.loads, scale, "M{0} 66l5 5l-5 5l-5 -5z")
    starts = _marks(view.launches, scale, "M{0} 6h2v74h-2z")
    label = (
        f"{len(view.generations)} generations, {len(view.incidents)} incidents, {len(view.saves)} checkpoints"
        f" and {len(view.loads)} loads in {duration(view.wall)}"
    )
    marks = (
        element("path", class_="launch", d=starts),
        element("path", class_="save", d=saves),
        element("path", class_="load", d=loads),
        element("path", class_="incident", d=faults),
    )
    return _picture(label, 104, *boxes, *marks, *_axis(view.wall))


def _marks(places: Iterable[float], scale: float, shape: str) -> str:
    return "".join(shape.format(f"{at * scale:.1f}") for at in places)


def _axis(wall: float) -> list[Markup]:
    found = [element("line", class_="axis", x1=0, x2=_WIDE, y1=84, y2=84)]
    for tick in range(_TICKS + 1):
        x = tick / _TICKS * _WIDE
        side = "start" if tick == 0 else "end" if tick == _TICKS else "middle"
        found.append(element("line", class_="axis", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=81, y2=87))
        shown = "0" if tick == 0 else duration(wall * tick / _TICKS)
        found.append(element("text", shown, x=f"{x:.1f}", y=101, text_anchor=side))
    return found


def heat_map(heat: Heat, limits: tuple[float, ...], label: str) -> Markup:
    """Return a heat map: the larger a square, the higher its value; a dot is below all limits.

    Args:
        heat: the values.
        limits: four, rising; a value takes the size of the highest one that it reaches.
        label: what the picture shows, for those who hear the page.
    """
    columns = max((len(row) for row in heat.cells), default=1)
    step = (_WIDE - 170) / max(columns, 24)
    height = 14.0
    paths = [""] * (len(limits) + 1)
    names = []
    for at, (name, row) in enumerate(zip(heat.rows, heat.cells, strict=True)):
        y = at * height + height / 2
        names.append(element("text", name[:22], x=0, y=f"{y + 4:.1f}"))
        for column, value in enumerate(row):
            if math.isnan(value):
                continue
            level = sum(value >= limit for limit in limits)
            half_x, half_y = (step * (level + 1) / 10, height * (level + 1) / 10 - 0.4)
            x = 170 + (column + 0.5) * step
            paths[level] += (
                f"M{x - half_x:.1f} {y - half_y:.1f}h{2 * half_x:.1f}v{2 * half_y:.1f}h{-2 * half_x:.1f}z"
            )
    drawn = (element("path", class_="ground" if not at else "heat", d=d) for at, d in enumerate(paths) if d)
    return _picture(label, max(1, len(heat.rows)) * height, *names, *drawn)


def nodes(found: Sequence[tuple[NodeNow, str]]) -> Markup:
    """Return a square for each node: full with ranks, a ring for a spare, a cross for one that is gone.

    Args:
        found: of each node, "present", "spare" or "gone".
    """
    across = int(_WIDE / _CELL)
    paths = {"present": "", "spare": "", "gone": ""}
    shapes = {"present": "M{0} {1}h8v8h-8z", "spare": "M{0} {1}h7v7h-7z", "gone": "M{0} {1}l8 8m0 -8l-8 8"}
    for at, (_, kind) in enumerate(found):
        paths[kind] += shapes[kind].format(int(at % across * _CELL) + 1, int(at // across * _CELL) + 1)
    told = ", ".join(f"{sum(kind == one for _, kind in found)} {one}" for one in paths)
    rows = math.ceil(len(found) / across)
    drawn = (element("path", class_=kind, d=d) for kind, d in paths.items() if d)
    return _picture(f"Nodes: {told}", rows * _CELL, *drawn)
