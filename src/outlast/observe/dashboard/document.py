"""The page of a run, and the page of several runs: HTML without anything from outside.

A page is a list of sections, each with an id. The live page gets those that changed and swaps them. It needs
no script to be read: then it is what the run was when the page was asked for.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.resources
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from outlast.observe import top
from outlast.observe.dashboard import forms, pictures
from outlast.observe.dashboard.markup import Markup, element, facts, joined, moment, table, text
from outlast.observe.policy.goodput import AGENT_DEATH, COUNTED, Incident
from outlast.observe.policy.now import NodeNow, Now, State
from outlast.observe.policy.page import Numbered, View
from outlast.observe.report import duration

_NODES_NAMED = 50
_NODES_DRAWN = 4096
_SPARE_SECONDS = 60.0  # a node without ranks that wrote within this of the newest record is a spare
_EVIDENCE = 20
_UNKNOWN = "unknown: the log does not say from which step the script went on"
_STATES = {
    State.EMPTY: "\N{MIDLINE HORIZONTAL ELLIPSIS}",
    State.STARTING: "\N{MIDLINE HORIZONTAL ELLIPSIS}",
    State.TRAINING: "\N{BLACK RIGHT-POINTING TRIANGLE}",
    State.RECOVERING: "\N{ANTICLOCKWISE OPEN CIRCLE ARROW}",
}
_TRUST = {
    "committed": "\N{WHITE CIRCLE}",
    "loaded": "\N{CIRCLE WITH LEFT HALF BLACK}",
    "proven": "\N{BLACK CIRCLE}",
    "suspect": "?",
    "quarantined": "\N{MULTIPLICATION SIGN}",
    "pruned": "\N{EN DASH}",
}


@dataclass(frozen=True)
class RankLog:
    """A log of the first failed rank of an incident.

    Args:
        name: of the file, below the run folder.
        link: where the page gets it; empty: nowhere.
        end: its last lines, where the page has them in it.
    """

    name: str
    link: str = ""
    end: str = ""


@dataclass(frozen=True)
class Shown:
    """A run as it is shown.

    Args:
        name: of the run folder, as the user gave it.
        wall: the time at which it is shown, in seconds since the epoch.
        logs: of incidents, by number.
        skipped, unknown: lines of the log that are torn, or of a newer version.
        trouble: why the run cannot be read now; empty: it can.
        link: of the run's own page, on a page of several.
    """

    name: str
    now: Now
    view: View
    wall: float
    logs: Mapping[int, Sequence[RankLog]] = field(default_factory=dict)
    skipped: int = 0
    unknown: int = 0
    trouble: str = ""
    link: str = ""


def sections(run: Shown) -> dict[str, Markup]:
    """Return the sections of a run's page by their ids, in their order."""
    found = {
        "now": _now(run),
        "goodput": _goodput(run.view),
        "timeline": _timeline(run.view),
        "incidents": _incidents(run),
        "checkpoints": _checkpoints(run),
        "nodes": _nodes(run.now),
        "slow": _slow(run.view),
        "devices": _devices(run.view),
        "log": _log(run),
    }
    return {
        name: _section(name, *one, news=_news(run) if name == "now" else "") for name, one in found.items()
    }


def cards(runs: Sequence[Shown]) -> dict[str, Markup]:
    """Return a section for each of several runs by their ids, in their order."""
    return {f"run-{at}": _card(at, one) for at, one in enumerate(runs)}


def requests(action: str) -> Markup:
    """Return the section from which a running job is asked for something; see :func:`.forms.requests`."""
    return _section("requests", forms.requests(action), news="")


def page(
    title: str,
    found: Mapping[str, Markup],
    *,
    events: str = "",
    version: str = "",
    up: str = "",
    acts: bool = False,
) -> str:
    """Return a whole page.

    Args:
        title: of the page.
        found: its sections.
        events: where the page gets sections that change; empty: nowhere.
        version: of the sections.
        up: where the list of all runs is; empty: there is none.
        acts: it has forms.
    """
    style, script = _asset("page.css"), _asset("page.js")
    cards_only = all(name.startswith("run-") for name in found)
    body = element("div", *found.values(), class_="cards") if cards_only else joined(*found.values())
    links = "" if cards_only else joined(*(_link(name, _HEADINGS[name]) for name in found))
    top_link = element("li", element("a", "all runs", href=up)) if up else ""
    return "".join(
        (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>',
            element("meta", http_equiv="Content-Security-Policy", content=policy(acts)),
            '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
            '<meta name="referrer" content="no-referrer"/>',
            element("title", title),
            f"<style>{style}</style></head>",
            f'<body data-events="{text(events)}" data-version="{text(version)}">',
            '<a class="skip" href="#main">To the content</a>',
            element(
                "header", element("h1", title), element("p", "", role="status", id="status", class_="status")
            ),
            element("nav", element("ul", top_link, links), aria_label="Sections")
            if links or top_link
            else "",
            element("main", body, id="main"),
            f"<script>{script}</script></body></html>\n",
        )
    )


@functools.cache
def policy(acts: bool = False) -> str:
    """Return the Content-Security-Policy of a page: its own style and script, and nothing from elsewhere.

    Args:
        acts: the page has forms, which are sent to its own server.
    """
    own = "'self'" if acts else "'none'"
    return (
        f"default-src 'none'; style-src '{_hash('page.css')}'; script-src '{_hash('page.js')}';"
        f" connect-src 'self'; base-uri 'none'; form-action {own}"
    )


@functools.cache
def _asset(name: str) -> str:
    return importlib.resources.files("outlast.observe.dashboard").joinpath(name).read_text("utf-8")


def _hash(name: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(_asset(name).encode()).digest()).decode()}"


_HEADINGS = {
    "now": "Now",
    "goodput": "Where the time went",
    "timeline": "Timeline",
    "incidents": "Incidents",
    "checkpoints": "Checkpoints",
    "nodes": "Nodes",
    "slow": "Slow ranks",
    "devices": "Devices",
    "log": "Event log",
    "requests": "Requests",
}


def _link(name: str, heading: str) -> Markup:
    return element("li", element("a", heading, href=f"#{name}"))


def _section(name: str, *content: Markup, news: str) -> Markup:
    heading = element("h2", _HEADINGS[name], id=f"{name}-heading")
    return element("section", heading, *content, id=name, aria_labelledby=f"{name}-heading", data_news=news)


def _news(run: Shown) -> str:
    """Return what is read out when it changes."""
    last = run.now.incident
    return f"{run.name}: {last.kind}, {last.action}" if last is not None else ""


def _state(run: Shown) -> Markup:
    """Return what the run is doing, in words and with a sign."""
    now = run.now
    words = run.trouble or top.doing(now, run.wall)
    failed = now.end is not None and now.end.exit_code != 0
    quiet = words.startswith("no record")
    ended = now.state is State.ENDED
    sign = (
        "\N{WARNING SIGN}"
        if run.trouble or quiet or failed
        else "\N{CHECK MARK}"
        if ended
        else _STATES[now.state]
    )
    kind = "state bad" if run.trouble or quiet or failed or now.state is State.RECOVERING else "state"
    return element("span", f"{sign} {words}", class_=kind)


def _now(run: Shown) -> tuple[Markup]:
    now = run.now
    kinds = [kind for _, kind in node_kinds(now)]
    rate = top.rate(now.rate) if now.rate is not None else "not known"
    left = now.seconds_left
    total = f" of {now.total}" if now.total > 0 else ""
    step = "none yet" if now.step < 0 else f"{now.step}{total}{top.counted(now.source)}"
    restarts = ", ".join(f"{count} x {name}" for name, count in now.actions.items() if name != "stop")
    content = facts(
        ("state", _state(run)),
        ("run", joined(now.run_id or "without a name", " in ", run.name)),
        ("step", step),
        ("rate", f"{rate}{f', {top.ago(left)} left' if left is not None else ''}"),
        ("ranks", f"{now.ranks}, generation {now.generation}"),
        (
            "nodes",
            f"{kinds.count('present')} with ranks, {kinds.count('spare')} spare, {kinds.count('gone')} gone",
        ),
        (
            "restarts",
            f"{now.restarts}{f' ({restarts})' if restarts else ''}, {now.launches} starts of the launcher",
        ),
        ("checkpoints", _tiers(now)),
        ("latest incident", _latest(now)),
        (
            "slow ranks",
            "; ".join(
                f"rank {one.rank} on {one.node}: {one.slowdown:.2f} times, {one.activity}"
                for one in now.slow[:8]
            ),
        ),
        ("latest record", moment(now.heard) if now.heard else ""),
        ("end", now.end.reason if now.end is not None else ""),
    )
    return (content,)


def _tiers(now: Now) -> Markup:
    found: list[str] = []
    for one in now.checkpoints:
        where = "on disk" if one.tier == "disk" else "of the script's own"
        found += ["; " if found else "", f"step {one.step} {where}, ", moment(one.time)]
    if now.saves_lost:
        found = [*(found or ["none"]), f"; {now.saves_lost} could not be written"]
    return joined(*(found or ["none"]))


def _latest(now: Now) -> Markup:
    last = now.incident
    if last is None:
        return Markup("none")
    who = f" of rank {last.rank}" if last.rank >= 0 else ""
    where = f" on {last.node}" if last.node else ""
    step = f" at step {last.step}{top.counted(last.source)}" if last.step >= 0 else ""
    words = f"{last.kind}{who}{where}{step}: {last.reason}. {last.action}: {last.action_reason}. "
    return joined(element("span", "\N{BLACK UP-POINTING TRIANGLE} ", class_="bad"), words, moment(last.time))


def _goodput(view: View) -> tuple[Markup]:
    if not view.parts:
        return (element("p", "No time has passed in the log."),)
    rows: list[tuple[str, ...]] = []
    for part in view.parts:
        name = joined(pictures.swatch(part.category), " ", part.category.value.replace("_", " "))
        if part.unknown and part.seconds:
            name = joined(name, ", lost work included")
        told = part.seconds or not part.unknown
        rows.append((name, f"{part.seconds:.3f}" if told else "unknown", f"{part.share:.1%}" if told else ""))
    rows.append(("wall time", f"{view.wall:.3f}", "100.0%"))
    share = _UNKNOWN if view.goodput is None else f"{view.goodput:.1%}"
    return (
        joined(
            element(
                "p", f"Goodput {share}: training that was kept, over {duration(view.wall)} of wall time."
            ),
            pictures.wide("Where the wall time went", pictures.bar(view.parts)),
            table("Seconds of each category", ("category", "seconds", "share"), rows, "-nn"),
        ),
    )


def _timeline(view: View) -> tuple[Markup]:
    legend = (
        "Triangles: incidents. Boxes: generations. Ticks: checkpoints on disk. Diamonds: loads."
        " Long lines: starts of the launcher."
    )
    rows: list[tuple[str, ...]] = [
        (
            str(one.number),
            duration(one.began),
            duration(one.ended - one.began),
            str(one.ranks),
            one.start,
            one.reason,
        )
        for one in reversed(view.generations)
    ]
    hidden = _left_out(view.generations_left_out, "older generations")
    columns = ("generation", "began after", "lasted", "ranks", "start", "reason")
    listed = element(
        "details",
        element("summary", f"{len(rows)} generations", id="generations-summary"),
        hidden,
        table("Generations", columns, rows, "nnnn-w"),
        id="generations",
    )
    return (
        joined(
            element("p", "Began ", moment(view.began), ". ", legend) if view.began else "",
            pictures.wide("Timeline", pictures.timeline(view)),
            listed,
        ),
    )


def _left_out(count: int, what: str) -> Markup:
    return element("p", f"{count} {what} are left out.", class_="soft") if count else Markup("")


def _incidents(run: Shown) -> tuple[Markup]:
    view = run.view
    if not view.incidents:
        return (element("p", "No incidents."),)
    found = [
        _incident(one, run.logs.get(one.number, ()), one is view.incidents[-1], view.steps_unknown)
        for one in reversed(view.incidents)
    ]
    return (joined(*found, _left_out(view.incidents_left_out, "older incidents")),)


def _incident(one: Numbered, logs: Sequence[RankLog], newest: bool, steps_unknown: bool) -> Markup:
    incident, key = one.incident, f"incident-{one.number}"
    who = f" of rank {incident.rank}" if incident.rank >= 0 else ""
    where = f" on {incident.node}" if incident.node else ""
    mark = top.counted(COUNTED) if steps_unknown else ""
    step = f" at step {incident.step}{mark}" if incident.step >= 0 else ""
    head = f"{one.number}. {incident.kind}{who}{where}{step}, then {incident.action or 'nothing yet'}"
    summary = element(
        "summary", element("span", "\N{BLACK UP-POINTING TRIANGLE} ", class_="bad"), head, id=f"{key}-summary"
    )
    lost = "unknown" if steps_unknown else "" if incident.steps_lost is None else str(incident.steps_lost)
    since = "the new launcher's spawn" if incident.kind == AGENT_DEATH else "the detection"
    phases = ", ".join(
        f"{name.replace('_', ' ')} {duration(spent)}" for name, spent in incident.phases.items()
    )
    content = facts(
        ("what", incident.reason),
        ("done", f"{incident.action}: {incident.action_reason}"),
        ("when", f"{duration(incident.at)} after the start, generation {incident.generation}"),
        ("detected after", duration(incident.detected_after)),
        ("running again after", duration(incident.running_again_after)),
        ("steps lost", lost),
        ("phases", f"since {since}: {phases}" if phases else ""),
        ("logs", _logs(incident, logs)),
    )
    evidence = [
        joined(element("h3", name), element("pre", words, tabindex=0))
        for name, words in list(incident.evidence.items())[:_EVIDENCE]
    ]
    ends = [
        element(
            "details",
            element("summary", f"The end of {log.name}", id=f"{key}-log-{at}-summary"),
            element("pre", log.end, tabindex=0),
            id=f"{key}-log-{at}",
        )
        for at, log in enumerate(logs)
        if log.end
    ]
    return element("details", summary, content, *evidence, *ends, id=key, open="open" if newest else "")


def _logs(incident: Incident, logs: Sequence[RankLog]) -> Markup:
    if not logs:
        return Markup("no rank is named") if incident.rank < 0 else Markup("none in the run folder")
    found: list[str] = []
    for one in logs:
        found += [", " if found else "", element("a", one.name, href=one.link) if one.link else one.name]
    return joined(*found)


def _checkpoints(run: Shown) -> tuple[Markup]:
    view = run.view
    if not view.checkpoints:
        return (element("p", "No checkpoint is in the log."),)
    columns = ("step", "trust", "tiers", "name", "latest word", "reason")
    there: list[tuple[str, ...]] = []
    pruned: list[tuple[str, ...]] = []
    for one in reversed(view.checkpoints):
        (pruned if one.trust == "pruned" else there).append(
            (
                str(one.step) if one.step >= 0 else "-",
                f"{_TRUST.get(one.trust, '?')} {one.trust}",
                ", ".join(one.tiers) or "-",
                one.name,
                moment(one.time),
                one.reason,
            )
        )
    listed = element(
        "details",
        element("summary", f"{len(pruned)} pruned", id="pruned-summary"),
        table("Pruned checkpoints", columns, pruned, "n----w"),
        id="pruned",
    )
    lost = [
        element("li", f"step {one.step}: {one.reason}, ", moment(one.time)) for one in view.lost_saves[-10:]
    ]
    return (
        joined(
            table("Checkpoints", columns, there, "n----w"),
            listed if pruned else "",
            _left_out(view.checkpoints_left_out, "older checkpoints"),
            joined(element("h3", "Could not be written"), element("ul", *lost)) if lost else "",
        ),
    )


def node_kinds(now: Now) -> list[tuple[NodeNow, str]]:
    """Return each node with what it is: "present" (it has ranks), "spare" or "gone"."""
    gone = {one.name for one in now.nodes if one.lost or now.heard - one.heard > _SPARE_SECONDS}
    return [(one, "present" if one.present else "gone" if one.name in gone else "spare") for one in now.nodes]


def _nodes(now: Now) -> tuple[Markup]:
    kinds = node_kinds(now)
    order = {"gone": 0, "spare": 1, "present": 2}
    told = sorted(kinds, key=lambda one: (order[one[1]], one[0].step, one[0].name))
    rows: list[tuple[str, ...]] = [
        (
            one.name or "this node",
            kind,
            str(one.ranks if kind == "present" else 0),
            str(one.step) if one.step >= 0 else "-",
            str(one.generation),
            moment(one.heard),
        )
        for one, kind in told[:_NODES_NAMED]
    ]
    columns = ("node", "is", "ranks", "step", "generation", "latest record")
    drawn = kinds[:_NODES_DRAWN]
    return (
        joined(
            element(
                "p",
                "Full squares have ranks, rings are spares, crosses are gone. Named: those that are the"
                " least far.",
            )
            if len(kinds) > 1
            else "",
            pictures.wide("Nodes", pictures.nodes(drawn)) if len(kinds) > 1 else "",
            _left_out(len(kinds) - len(drawn), "nodes"),
            table("Nodes", columns, rows, "--nnn-"),
            _left_out(max(0, len(kinds) - _NODES_NAMED), "nodes that are further"),
        ),
    )


def _slow(view: View) -> tuple[Markup]:
    heat = view.steps
    if not heat.rows:
        return (
            element("p", "No times of steps are in the log; a run writes them with [stragglers] enabled."),
        )
    label = f"Busy seconds of ranks against the median of all, steps {heat.first:.0f} to {heat.last:.0f}"
    sizes = ", ".join(f"{limit:g}" for limit in pictures.RATIOS)
    return (
        joined(
            element("p", f"{label}. The larger a square, the slower; sizes from {sizes} times on."),
            pictures.wide(label, pictures.heat_map(heat, pictures.RATIOS, label)),
            _left_out(heat.left_out, "ranks that were nearer to the median"),
            _worst("Ranks at their slowest", heat.rows, [f"{one:.2f} times" for one in heat.worst]),
        ),
    )


def _devices(view: View) -> tuple[Markup]:
    heat = view.temperatures
    found: list[str] = []
    if heat.rows:
        label = "Temperatures of the hottest devices"
        sizes = ", ".join(f"{limit:g}" for limit in pictures.DEGREES)
        found += [
            element(
                "p",
                "From ",
                moment(heat.first),
                " to ",
                moment(heat.last),
                f". The larger a square, the hotter; sizes from {sizes} degrees Celsius on.",
            ),
            pictures.wide(label, pictures.heat_map(heat, pictures.DEGREES, label)),
            _left_out(heat.left_out, "cooler devices"),
            _worst("Devices at their hottest", heat.rows, [f"{one:.0f} degrees" for one in heat.worst]),
        ]
    rows: list[tuple[str, ...]] = [
        (one.what, one.node, str(one.device) if one.device >= 0 else "-", moment(one.time), one.reason)
        for one in reversed(view.signs)
    ]
    if rows:
        found.append(
            table("XIDs and silent devices", ("what", "node", "GPU", "when", "words"), rows, "--n-w")
        )
    return (joined(*(found or [element("p", "No telemetry of devices is in the log.")])),)


def _worst(caption: str, names: Sequence[str], values: Sequence[str]) -> Markup:
    rows: list[tuple[str, ...]] = list(zip(names, values, strict=True))
    key = caption.lower().replace(" ", "-")
    inside = table(caption, ("name", "most"), rows, "-n")
    return element("details", element("summary", caption, id=f"{key}-summary"), inside, id=key)


def _log(run: Shown) -> tuple[Markup]:
    view = run.view
    limits = ", ".join(f"{name} {duration(limit)}" for name, limit in view.limits.items())
    unread = [
        f"{count} {what}"
        for count, what in (
            (run.skipped, "lines are torn or damaged and were passed over"),
            (run.unknown, "lines are of a newer outlast and were passed over"),
            (view.dropped, "records were too old to be kept: times and numbers begin after them"),
        )
        if count
    ]
    return (
        joined(
            element("p", f"Timeouts learned: {limits or 'none yet; configured ones and defaults apply'}."),
            element("ul", *(element("li", f"\N{WARNING SIGN} {one}.") for one in unread)) if unread else "",
        ),
    )


def _card(at: int, run: Shown) -> Markup:
    now, view = run.now, run.view
    name = element("a", run.name, href=run.link, id=f"run-{at}-link") if run.link else Markup(text(run.name))
    share = "unknown" if view.goodput is None else f"{view.goodput:.1%}" if view.parts else "not known"
    rate = f", {top.rate(now.rate)}" if now.rate is not None else ""
    content = facts(
        ("state", _state(run)),
        ("step", ("none yet" if now.step < 0 else f"{now.step}{top.counted(now.source)}") + rate),
        ("ranks", f"{now.ranks} on {sum(one.present for one in now.nodes)} nodes"),
        ("restarts", str(now.restarts)),
        ("checkpoints", _tiers(now)),
        ("latest incident", _latest(now)),
        ("goodput", share),
    )
    bar = pictures.wide("Where the wall time went", pictures.bar(view.parts)) if view.parts else ""
    heading = element("h2", name, id=f"run-{at}-heading")
    return element(
        "section",
        heading,
        content,
        bar,
        id=f"run-{at}",
        aria_labelledby=f"run-{at}-heading",
        data_news=_news(run),
    )
