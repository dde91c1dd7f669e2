"""From silence to a fault: collect evidence, name the culprit, or grant a rank that computes more time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from outlast.agent import diagnose
from outlast.agent.generation import Generation
from outlast.agent.liveness import Watch
from outlast.core.diagnosis import GUESSED, WAITS, Verdict, blame_for_hang, deserves_time, is_waiting
from outlast.core.events import Fault, FaultKind
from outlast.core.liveness import Silent


class Hangs:
    """Turns silent ranks of a generation into one fault.

    Args:
        node: this node's name.
        incidents: folder that receives the evidence.
        patience: seconds that collecting stacks may take.
    """

    def __init__(self, node: str, incidents: Path, patience: float) -> None:
        self._node = node
        self._incidents = incidents
        self._patience = patience

    def examine(
        self, silents: Sequence[Silent], generation: Generation, watch: Watch
    ) -> tuple[Fault | None, str]:
        """Look at every rank of the generation.

        Returns:
            The fault, or None with the reason why the ranks get more time.
        """
        folder = self._incidents / f"gen-{generation.number:04d}-hang-step-{silents[0].step}"
        suspects = {
            worker.rank: diagnose.Suspect(
                worker.pid, generation.stacks(worker.rank), watch.pulses[worker.rank]
            )
            for worker in generation.living()
            if worker.rank in watch.pulses
        }
        evidence = diagnose.gather(suspects, folder, self._patience)
        verdict = blame_for_hang(tuple(evidence.values()))
        (folder / "verdict.json").write_text(
            json.dumps({"verdict": asdict(verdict), "silent": [asdict(one) for one in silents]}, indent=1)
        )
        silent = next((one for one in silents if one.rank == verdict.rank), silents[0])
        guessed = not any(watch.is_fixed(one) for one in silents)
        if guessed and deserves_time(verdict, tuple(evidence.values()), silent.waited):
            return None, f"{silents[0].reason} {verdict.reason}; it computes, so it is not taken for hung yet"
        watch.convicted(silent)
        seen = [("stacks", str(folder))]
        if verdict.rank < 0 or is_waiting(evidence[verdict.rank].stack):
            seen.append(WAITS)
        if guessed:
            seen.append(GUESSED)
        return self._fault(verdict, silent, generation.number, tuple(seen)), ""

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
            reason=f"{silent.reason} Culprit: {verdict.reason}{waiting}",
            signature=f"hang in {where}",
            evidence=evidence,
            since=silent.since,
        )
