"""Incidents of a whole job of several nodes as transcripts; see :mod:`.transcript` and :mod:`.fleet`.

begin fleet 4 nodes 2:3 spares 1           n0 has the endpoint; the delays of the network have one seed
begin fleet 3 nodes 2:2 spares 1 resilient    ranks can be entered again in their processes, one a node
at 5 kill n0                               its agent and workers; everybody's connections with it break
at 5 power n0                              the same, and nobody is told
at 5 cut n0 n1                             from all others              at 9 heal
at 5 stop n0                               SIGSTOP                      at 9 resume n0
at 5 start n0                              an agent, once more          at 5 fail n2
at 5 raise n2                              an exception in its rank's function
at 5 stick n2                              its rank does not leave the function, and is ended in the end
at 5 deaf n2                               it does not answer either
at 20 look                                 who runs what, and who leads
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.simulation.fencing import overlaps
from tests.simulation.fleet import Fleet
from tests.simulation.fleet_reentry import ResilientFleet

_START = 1000.0
_ORDERS = {
    "raise": "raise_in",
    **{one: one for one in ("kill", "stop", "resume", "start", "fail", "stick", "deaf")},
}


class FleetStage:
    """One job on a simulated network and clock."""

    def __init__(self, line: str) -> None:
        numbers = r"begin fleet (\d+) nodes (\d+):(\d+) spares (\d+)"
        found = re.fullmatch(f"{numbers}( resilient)?", line)
        if found is None:
            raise ValueError(f"transcript: {line!r} is no event")
        count, least, most, spares = map(int, found.groups()[:4])
        self._fleet = (ResilientFleet if found[5] else Fleet)(count, least, most, spares=spares)
        self._told = 0

    def take(self, line: str) -> Iterator[str]:
        """Take a line of the script, and give what was said since the last one."""
        found = re.fullmatch(r"at (\S+) (\w+)((?: n\d+)*)", line)
        if found is None:
            raise ValueError(f"transcript: {line!r} is no event")
        self._fleet.run(_START + float(found[1]))
        yield from self._news()
        what, names = found[2], found[3].split()
        if what == "look":
            yield from self._look()
        elif what == "cut":
            self._fleet.cut(*names)
        elif what == "heal":
            self._fleet.heal()
        elif what == "power":
            self._fleet.kill(names[0], power=True)
        elif what in _ORDERS and hasattr(self._fleet, _ORDERS[what]):
            getattr(self._fleet, _ORDERS[what])(names[0])
        else:
            raise ValueError(f"transcript: {line!r} is no event")
        yield from self._news()

    def _news(self) -> Iterator[str]:
        log, self._told = self._fleet.log[self._told :], len(self._fleet.log)
        for entry in log:
            when, _, words = entry.strip().partition(" ")
            yield f"{when} s: {words}"

    def _look(self) -> Iterator[str]:
        fleet = self._fleet
        ranks = " ".join(sorted(fleet.active(), key=fleet.place))
        chairs = " ".join(fleet.leaders()) or "nobody"
        fenced = "; ".join(overlaps(fleet.commits)) or "no generation committed after a younger one"
        steps = fleet.steps.get(fleet.generation(), 0)
        yield f"generation {fleet.generation()} on {ranks}, step {steps}; {chairs} coordinates; {fenced}"
