"""From silence to a fault: collect evidence, name the culprit, or grant ranks that are not hung more time."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from outlast import files
from outlast.config import FaultToleranceOptions
from outlast.hang.agent import evidence as diagnose
from outlast.hang.agent.monitor import Watch
from outlast.hang.policy.attribution import Blamed, Seen
from outlast.hang.policy.diagnosis import (
    GUESSED,
    WAITS,
    Case,
    RankEvidence,
    Ruling,
    Verdict,
    blame_for_hang,
    is_waiting,
    rule,
)
from outlast.hang.policy.monitor import Silent
from outlast.launcher.output.file_thread import FileThread
from outlast.launcher.workers.generation import Generation
from outlast.recovery.policy.events import Fault, FaultKind

_SAID_AGAIN = 2.0  # times the silence at which it was said last


@dataclass(frozen=True)
class Finding:
    """The result of a look at silent ranks.

    Args:
        fault: they are hung; None: they are not, or it is not known yet.
        note: what is to be said.
        look_in: seconds until they are looked at again.
        seen: what the agents of other nodes may need to know.
    """

    fault: Fault | None = None
    note: str = ""
    look_in: float = 0.0
    seen: Seen | None = None


class Hangs:
    """Turns silent ranks of a generation into one fault.

    Args:
        node: this node's name.
        incidents: folder that receives the evidence.
        config: how long to collect stacks, and the patience with ranks that compute.
        files: writes there.
    """

    def __init__(self, node: str, incidents: Path, config: FaultToleranceOptions, files: FileThread) -> None:
        self._node = node
        self._incidents = incidents
        self._config = config
        self._files = files
        self._looks = (0, diagnose.Looks())  # of a generation
        self._said = (0, 0, 0.0)  # generation, step, and the silence at which something was said last
        self._named: tuple[Blamed, float] | None = None  # by what several nodes saw, and when that was heard
        self._told: dict[int, object] = {}  # where each rank was when other nodes were told

    def named(self, blamed: Blamed) -> None:
        """Record the rank that the evidence of several nodes names."""
        self._named = (blamed, time.monotonic()) if blamed.verdict.rank >= 0 else None

    def _joint(
        self, silents: Sequence[Silent], generation: int, found: Mapping[int, RankEvidence]
    ) -> Blamed | None:
        """Return the rank that several nodes named for this silence, if no rank has moved since."""
        before, self._told = self._told, {rank: _place(one) for rank, one in found.items()}
        if self._named is None:
            return None
        blamed, heard = self._named
        fresh = blamed.generation == generation and heard > max(one.since for one in silents)
        if not fresh or before != self._told:
            self._named = None
            return None
        return blamed

    def examine(self, silents: Sequence[Silent], generation: Generation, watch: Watch) -> Finding:
        """Examine every rank of the generation."""
        if not self._are_silent(silents, watch):
            return Finding()  # the pages were read while they were written
        if self._looks[0] != generation.number:
            self._looks = (generation.number, diagnose.Looks())
        folder = self._incidents / f"gen-{generation.number:04d}-hang-step-{silents[0].step}"
        suspects = {
            worker.rank: diagnose.Suspect(
                worker.pid,
                generation.pages[worker.rank].path,
                generation.stacks(worker.rank),
                watch.heartbeats[worker.rank],
            )
            for worker in generation.living()
            if worker.rank in watch.heartbeats
        }
        keep = functools.partial(self._keep, folder)
        found = diagnose.gather(suspects, keep, self._config.capture_stacks, self._looks[1])
        evidence = tuple(found.values())
        joint = self._joint(silents, generation.number, found)
        verdict = blame_for_hang(evidence) if joint is None else joint.verdict
        silent = next((one for one in silents if one.rank == verdict.rank), silents[0])
        guessed = not any(watch.is_fixed(one) for one in silents)
        if guessed and not self._are_silent(silents, watch):
            return Finding()  # they went on while they were looked at
        ruling = Ruling(True)
        spread = generation.world_size > len(generation.ranks)
        if guessed:
            patience = self._config.busy_rank_timeout
            case = Case(verdict, evidence, silent.waited, patience, spread, joint is not None, silent.limit)
            ruling = rule(case)
        self._write(folder, verdict, ruling, evidence, silents)
        if not ruling.convicted:
            note = self._note(silent, verdict, ruling, generation.number)
            told = Seen(generation.number, evidence, ruling.look_in) if spread else None
            return Finding(None, note, ruling.look_in, told)
        watch.convicted(silent)
        seen = [("stacks", str(folder)), ("found by", verdict.basis)]
        if verdict.rank not in found or is_waiting(found[verdict.rank].stack):
            seen.append(WAITS)
        if guessed:
            seen.append(GUESSED)
        culprit = suspects.get(verdict.rank)
        since = silent.since if culprit is None else max(silent.since, culprit.heartbeat.beat)
        return Finding(self._fault(verdict, replace(silent, since=since), generation.number, tuple(seen)))

    def _are_silent(self, silents: Sequence[Silent], watch: Watch) -> bool:
        """Read the pages again; say whether one of the ranks still exceeds its timeout."""
        still = {one.rank for one in watch.look(time.monotonic())}
        return any(one.rank in still for one in silents)

    def _write(
        self,
        folder: Path,
        verdict: Verdict,
        ruling: Ruling,
        evidence: Sequence[RankEvidence],
        silents: Sequence[Silent],
    ) -> None:
        ranks = [{**asdict(one), "doing": one.doing.value} for one in evidence]
        told = {
            "verdict": asdict(verdict),
            "convicted": ruling.convicted,
            "more_time": ruling.reason,
            "silent": [asdict(one) for one in silents],
            "ranks": ranks,
        }
        self._keep(folder, "verdict.json", json.dumps(told, indent=1))

    def _keep(self, folder: Path, name: str, text: str) -> None:
        """Write evidence into the folder of an incident; of several versions only the newest."""

        def write() -> None:
            files.make_below(self._incidents.parent, folder)
            (folder / name).write_text(text)

        self._files.hand(write, folder / name)

    def _note(self, silent: Silent, verdict: Verdict, ruling: Ruling, generation: int) -> str:
        """Return the message about ranks that get more time: at first, and when the silence has doubled."""
        number, step, waited = self._said
        if (number, step) == (generation, silent.step) and silent.waited < _SAID_AGAIN * waited:
            return ""
        self._said = (generation, silent.step, silent.waited)
        return f"{silent.reason} {verdict.reason}. {ruling.reason}."

    def _fault(
        self, verdict: Verdict, silent: Silent, generation: int, evidence: tuple[tuple[str, str], ...]
    ) -> Fault:
        waiting = f"; waiting for it: ranks {', '.join(map(str, verdict.waiting))}" if verdict.waiting else ""
        where = silent.section or "between sections"
        return Fault(
            kind=FaultKind.HANG,
            node=self._node,
            rank=verdict.rank,
            generation=generation,
            step=silent.step,
            reason=f"{silent.reason} Culprit: {verdict.reason}{waiting} (by {verdict.basis or 'silence'})",
            signature=f"hang in {where}",
            evidence=evidence,
            since=silent.since,
        )


def _place(one: RankEvidence) -> object:
    """Return the position of a rank, on which a verdict of several nodes is based."""
    return one.collectives, is_waiting(one.stack)
