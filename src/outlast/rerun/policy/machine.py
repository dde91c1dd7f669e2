"""Reruns: find the cause of a rejected result in a bounded number of attempts.

A rejected result is answered with one rerun in place. If that is clean, the fault was transient, and training
continues with the rerun's results. Otherwise the machine tests in this order: the copy that was loaded a few
steps ago, the device, the data or the model. The names of modes and options are Megatron-LM's
(``core/rerun_state_machine.py``); its machine may restart on the same device for ever (#5281), this one not.

Why every incident ends: a remedy is ordered at most once for a set of devices, there are at most
``max_attempts`` restarts for an incident and ``max_incidents_per_hour`` incidents, and the verdict of an
incident is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from outlast.errors import ExitCode
from outlast.rerun.policy.events import (
    IN_PLACE,
    RESTARTS,
    Attempt,
    Event,
    Found,
    Incident,
    Loaded,
    Means,
    Order,
    Passed,
    Remedy,
    Reran,
    RerunMode,
    Started,
    Swapped,
    Verdict,
)
from outlast.rerun.policy.options import RerunOptions


def place(loaded: Loaded) -> str:
    """Return tier and name of a copy; empty for a fresh start."""
    return f"{loaded.tier}/{loaded.copy}" if loaded.copy else ""


def held(devices: tuple[str, ...], ranks: Iterable[int]) -> set[str]:
    """Return the devices of some ranks."""
    return {devices[rank] for rank in ranks if rank < len(devices)}


def suspects(devices: tuple[str, ...], ranks: tuple[int, ...]) -> set[str]:
    """Return the devices that may have caused a finding: those of its ranks, or all if they are not known."""
    return held(devices, ranks) if ranks else set(devices)


def pairs(
    ranks: Iterable[int], peers: Mapping[int, int], devices: tuple[str, ...]
) -> tuple[tuple[int, int], ...]:
    """Return for each rank a peer with another device, no rank twice; empty if that is not possible."""
    found = tuple((rank, peers.get(rank, -1)) for rank in ranks)
    taken = [one for pair in found for one in pair]
    sound = len(set(taken)) == len(taken) and all(0 <= one < len(devices) for one in taken)
    return found if sound and all(devices[one] != devices[other] for one, other in found) else ()


def differ(digests: tuple[str, ...], rerun: Reran, tolerance: float) -> set[int]:
    """Return the ranks whose results differ from the previous run."""
    differences = rerun.differences or (math.inf,) * len(digests)
    return {
        rank
        for rank, (one, other, apart) in enumerate(zip(digests, rerun.digests, differences, strict=False))
        if one != other and not apart <= tolerance
    }


def named(ranks: tuple[int, ...]) -> str:
    """Return ranks in words."""
    if not ranks:
        return "some rank"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def rejected_on(ranks: tuple[int, ...]) -> str:
    """Say on which ranks a result was rejected, if any."""
    return f"rejected on {named(ranks)}" if ranks else "nothing was rejected"


GLOBAL = "global"
HOUR, DAY = 3600.0, 86_400.0
RESUME_TO_DISAMBIGUATE, FAILED_ON_RESULT_VALIDATION = 16, 17  # exit codes of Megatron-LM
_KEPT = 256
_AGAIN = "the fault occurred again; "
_BOTH = "the same step was accepted and rejected; it is not deterministic"
_ALONE = "it accepted and rejected the same step, and all other ranks repeat their results"
_CONFIRM = "nothing was rejected; testing whether every rank repeats its result"
_OTHERS = "rejected on different ranks each time; it is not deterministic"
_CONTINUE = Order()


class RerunMachine:
    """All incidents of a job; every rank that hears the same events gives the same orders.

    Args:
        options: budgets and policy.
    """

    def __init__(self, options: RerunOptions) -> None:
        self._options = options
        self._incidents: dict[int, Incident] = {}
        self._devices: tuple[str, ...] = ()
        self._loaded = Loaded(0)
        self._means = Means()

    @property
    def open(self) -> Incident | None:
        """The incident with a pending remedy; there is at most one."""
        return next((one for one in self._incidents.values() if one.pending is not None), None)

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of the current generation, by rank."""
        return self._devices

    def skips(self, step: int) -> bool:
        """Say whether the batch of a step is skipped, also when the step is replayed."""
        known = self._incidents.get(step)
        return known is not None and known.skipped

    def records(self) -> tuple[dict[str, Any], ...]:
        """Return every incident as JSON values, the oldest first."""
        return tuple(one.to_record() for one in self._incidents.values())

    def restore(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Take over the records of an earlier process; nothing is taken over when it raises.

        Raises:
            ValueError: a record is invalid.
        """
        found = sorted(map(Incident.of_record, records), key=lambda one: one.began)
        self._incidents = {one.step: one for one in found}

    def handle(self, event: Event, now: float) -> Order:
        """Return the answer to an event.

        Args:
            event: the same on every rank.
            now: seconds on a clock that continues across launchers of one run, the same on every rank.
        """
        match event:
            case Started(devices):
                return self._on_start(devices, now)
            case Loaded():
                self._loaded = event
                return _CONTINUE
            case Found():
                return self._on_found(event, now)
            case Reran():
                return self._on_rerun(event, now)
            case Swapped():
                return self._on_swap(event, now)
            case Passed(step):
                return self._on_pass(step)

    def _on_start(self, devices: tuple[str, ...], now: float) -> Order:
        self._devices, incident = devices, self.open
        if incident is None:
            return _CONTINUE
        if incident.pending in IN_PLACE:
            incident.resolve("the process ended before the result")
        same = held(devices, incident.ranks) <= held(incident.devices, incident.ranks)
        if incident.pending is Remedy.SPARE and same:
            incident.resolve("the devices are the same")
            return self._conclude(incident, now, incident.verdict, "restarted on the same devices")
        return _CONTINUE

    def _on_found(self, event: Found, now: float) -> Order:
        self._means = event.means
        waiting, incident = self.open, self._incidents.get(event.step)
        if waiting is not None and event.step > waiting.step:
            self._on_pass(waiting.step)
        elif waiting is not None and event.step < waiting.step:
            waiting.resolve(f"{event.check} is {event.value} in the earlier step {event.step}")
        if incident is None:
            return self._begin(event, now)
        same = incident.pending is Remedy.LOAD_OLDER and place(self._loaded) == incident.place
        result = f"{event.check} is {event.value} in step {event.step} again"
        why = f"{incident.place} was loaded again instead of another copy" if same else ""
        incident.resolve(f"{result}; {why}" if why else result)
        return self._again(incident, event, why, now)

    def _begin(self, event: Found, now: float) -> Order:
        recent = sum(0 <= now - one.began < HOUR for one in self._incidents.values())
        incident = Incident(event.step, event.check, event.value, now)
        self._take_in(incident, event)
        self._incidents[event.step] = incident
        for step in list(self._incidents)[:-_KEPT]:
            del self._incidents[step]
        if self._options.rerun_mode != RerunMode.VALIDATE_RESULTS.value:
            return self._conclude(incident, now, why="reruns are off")
        most = self._options.max_incidents_per_hour
        if recent >= most:
            incident.conclude(Verdict.INCONCLUSIVE, f"{most} incidents in an hour (max_incidents_per_hour)")
            return self._order(incident, Remedy.STOP, incident.reason, now)
        return self._next(incident, now)

    def _take_in(self, incident: Incident, event: Found) -> None:
        incident.ranks, incident.devices, incident.digests = event.ranks, self._devices, event.digests
        incident.since_load = event.step - self._loaded.step
        incident.place = place(self._loaded)

    def _again(self, incident: Incident, event: Found, why: str, now: float) -> Order:
        """Continue an incident whose step was rejected again after a restart."""
        before, convicted = incident.verdict, incident.culprit
        self._take_in(incident, event)
        if before in (Verdict.DATA_OR_MODEL, Verdict.INCONCLUSIVE):
            reason = incident.reason.removeprefix(_AGAIN)
            return self._conclude(incident, now, before, f"{_AGAIN}{reason}")
        if before is Verdict.PERSISTENT and convicted in suspects(self._devices, event.ranks):
            return self._conclude(incident, now, before, f"{convicted} is still in use")
        if incident.tried(Remedy.RERUN, self._devices):
            incident.seen_on(self._devices, event.ranks)
        incident.verdict, incident.culprit = None, ""
        return self._next(incident, now, why)

    def _next(self, incident: Incident, now: float, why: str = "") -> Order:
        """Order the first remedy of the ladder that was not tried on these devices."""
        if now - incident.began > self._options.max_incident_seconds:
            return self._conclude(
                incident, now, why="the time limit of this incident is exceeded (max_incident_seconds)"
            )
        for remedy, reason in self._ladder(incident):
            if incident.tried(remedy, self._devices):
                continue
            if remedy in RESTARTS and incident.restarts >= self._options.max_attempts:
                return self._conclude(
                    incident,
                    now,
                    why=f"{incident.restarts} of {self._options.max_attempts} restarts used (max_attempts)",
                )
            return self._order(incident, remedy, reason, now)
        return self._conclude(incident, now, why=why)

    def _ladder(self, incident: Incident) -> Iterator[tuple[Remedy, str]]:
        """Yield the remedies that are possible, in the order in which they are tried, each with a reason."""
        found = f"{incident.check} is {incident.value} in step {incident.step}"
        yield Remedy.RERUN, f"{found} on {named(incident.ranks)}"
        if self._is_near(incident) and self._means.another_copy:
            loaded = f"{incident.since_load} steps after {incident.place} was loaded"
            yield Remedy.LOAD_OLDER, f"{found} again, {loaded}"
        if not incident.ranks or len(incident.rejected_on) != 1:
            return
        (on,) = incident.rejected_on
        if pairs(incident.ranks, self._means.peers, self._devices):
            yield Remedy.SWAP, f"{found} again on {on}; testing the device against the data"
        if self._means.spare:
            yield Remedy.SPARE, f"{found} again on {on}; testing another device"

    def _is_near(self, incident: Incident) -> bool:
        """Say whether the copy that was loaded may be the cause."""
        tier = incident.place.rpartition("/")[0]
        return bool(incident.place) and tier != GLOBAL and incident.since_load <= self._options.suspect_steps

    def _on_rerun(self, event: Reran, now: float) -> Order:
        incident = self.open
        if incident is None or incident.pending not in (Remedy.RERUN, Remedy.CONFIRM):
            return _CONTINUE
        confirming = incident.pending is Remedy.CONFIRM
        rejected = tuple(rank for rank in event.rejected if rank in incident.ranks or not incident.ranks)
        others = differ(incident.digests, event, self._options.tolerance)
        if event.rejected and (confirming or not rejected):
            incident.resolve(rejected_on(event.rejected))
            if rejected == event.rejected and self._alone(incident, event, others):
                return self._convict(incident, self._devices[rejected[0]], _ALONE, now)
            why = _BOTH if confirming else _OTHERS
            return self._conclude(incident, now, Verdict.INCONCLUSIVE, why)
        if rejected:
            same = "with the same bits" if not others & set(rejected) else "with other bits"
            incident.resolve(f"rejected again on {named(rejected)} {same}")
            incident.ranks = rejected if incident.ranks else ()
            incident.seen_on(self._devices, incident.ranks)
            return self._next(incident, now)
        incident.resolve(rejected_on(()))
        if confirming:
            return self._not_deterministic(incident, others) if others else self._transient(incident, now)
        return self._clean(incident, event, others, now)

    def _alone(self, incident: Incident, event: Reran, others: set[int]) -> bool:
        """Say whether one device accepted and rejected, and all other ranks repeat their results."""
        witnesses = set(range(len(event.digests))) - set(incident.ranks)
        return bool(witnesses) and not witnesses & others and len(held(self._devices, incident.ranks)) == 1

    def _clean(self, incident: Incident, event: Reran, others: set[int], now: float) -> Order:
        """Have a clean rerun confirmed by another one, if the other ranks repeat their results.

        A rank that is not deterministic repeats its loss with some probability q, for a loss has few bits.
        Of n ranks n - 1 have to repeat it in the rerun and n in the confirmation: q ** (2 * n - 1).
        """
        everyone = set(range(len(event.digests)))
        if not incident.ranks and 2 * len(others) <= len(everyone):
            incident.ranks = tuple(sorted(others))
        witnesses = everyone - set(incident.ranks)
        if witnesses & others:
            return self._not_deterministic(incident, witnesses & others)
        incident.digests = event.digests
        return self._order(incident, Remedy.CONFIRM, _CONFIRM, now)

    def _not_deterministic(self, incident: Incident, differ: Iterable[int]) -> Order:
        """Continue after a clean rerun that names no device."""
        reason = (
            f"the result of {named(tuple(sorted(differ)))} changed in the rerun: the step is not"
            " deterministic, so no device is blamed; rerun_mode report_determinism_stats measures the"
            " differences"
        )
        incident.conclude(Verdict.INCONCLUSIVE, reason)
        return Order(Remedy.CONTINUE, reason, Verdict.INCONCLUSIVE)

    def _transient(self, incident: Incident, now: float) -> Order:
        """Continue after a clean rerun, unless the device had too many transient faults."""
        device = min(held(self._devices, incident.ranks), default="")
        earlier = (one for one in self._incidents.values() if now - one.began < DAY)
        before = sum(one.verdict is Verdict.TRANSIENT and one.culprit == device for one in earlier)
        most = self._options.max_transients_per_day
        if device and before + 1 >= most:
            return self._convict(
                incident, device, f"{before + 1} transient incidents on {device} in 24 h", now
            )
        incident.conclude(Verdict.TRANSIENT, "two clean reruns with equal results, which count", device)
        return Order(Remedy.CONTINUE, incident.reason, Verdict.TRANSIENT, device=device)

    def _on_swap(self, event: Swapped, now: float) -> Order:
        incident = self.open
        if incident is None or incident.pending is not Remedy.SWAP:
            return _CONTINUE
        others = tuple(peer for _, peer in incident.pairs)
        follows = tuple(rank for rank in others if rank in event.rejected)
        incident.resolve(rejected_on(event.rejected))
        if not event.same_state:
            why = "parameters differ on ranks that should have equal ones"
            return self._conclude(incident, now, Verdict.INCONCLUSIVE, why, action=Remedy.ROLL_BACK)
        if event.rejected and not follows and not set(event.rejected) & set(incident.ranks):
            return self._conclude(incident, now, Verdict.INCONCLUSIVE, _OTHERS)
        if follows:
            incident.seen_on(self._devices, follows)
            return self._conclude(incident, now)
        device = min(held(self._devices, incident.ranks), default="")
        return self._convict(incident, device, "another device computes the same data correctly", now)

    def _convict(self, incident: Incident, device: str, why: str, now: float) -> Order:
        incident.conclude(Verdict.PERSISTENT, why, device)
        untried = not incident.tried(Remedy.SPARE, self._devices)
        if self._means.spare and untried and incident.restarts < self._options.max_attempts:
            return self._order(incident, Remedy.SPARE, why, now)
        return self._order(incident, Remedy.STOP, f"{why}; there is no replacement", now)

    def _on_pass(self, step: int) -> Order:
        """Conclude from a replay in which the step of the open incident passed."""
        incident = self.open
        if incident is None or step < incident.step:
            return _CONTINUE
        pending, loaded = incident.pending, incident.place
        here, there = (suspects(one, incident.ranks) for one in (self._devices, incident.devices))
        incident.resolve(f"step {incident.step} passed")
        if incident.verdict is not None:
            return Order(Remedy.CONTINUE, f"step {incident.step} passed", incident.verdict)
        other_copy = place(self._loaded) != loaded
        verdict, culprit, reason = (
            Verdict.INCONCLUSIVE,
            "",
            "the step passed, but both device and copy may have changed",
        )
        if here == there and pending is Remedy.LOAD_OLDER and other_copy:
            verdict, culprit, reason = Verdict.BAD_CHECKPOINT, loaded, "the step passed with another copy"
        elif here == there and not other_copy:
            reason = "the step passed with the same devices and the same copy"
        elif len(there) == 1 and here and not here & there and not (other_copy and self._is_near(incident)):
            verdict, culprit, reason = Verdict.PERSISTENT, min(there), "the step passed with another device"
        incident.conclude(verdict, reason, culprit)
        device, copy = ("", culprit) if verdict is Verdict.BAD_CHECKPOINT else (culprit, "")
        return Order(Remedy.CONTINUE, reason, verdict, device=device, place=copy)

    def _conclude(
        self,
        incident: Incident,
        now: float,
        verdict: Verdict | None = None,
        why: str = "",
        action: Remedy | None = None,
    ) -> Order:
        """End an incident whose result stays rejected: by ``rejected_action`` once, then with a stop."""
        if verdict is None and len(incident.rejected_on) > 1:
            verdict, why = (
                Verdict.DATA_OR_MODEL,
                f"rejected on several devices: {', '.join(incident.rejected_on)}",
            )
        why = why or "no other device and no other copy is available"
        incident.conclude(verdict or Verdict.INCONCLUSIVE, why, incident.culprit)
        remedy = Remedy.STOP if verdict is Verdict.PERSISTENT else action or self._options.action
        spent = any(one.remedy in (remedy, Remedy.STOP) for one in incident.attempts)
        if spent or (remedy is Remedy.ROLL_BACK and incident.restarts >= self._options.max_attempts):
            remedy = Remedy.STOP
        incident.skipped = incident.skipped or remedy is Remedy.SKIP_BATCH
        return self._order(incident, remedy, why, now)

    def _order(self, incident: Incident, remedy: Remedy, reason: str, now: float) -> Order:
        if remedy is not Remedy.STOP or not incident.tried(remedy, self._devices):
            incident.attempts.append(Attempt(remedy, self._devices, now, reason))
        incident.pending = remedy if remedy in RESTARTS or remedy in IN_PLACE else None
        if remedy is Remedy.SWAP:
            incident.pairs = pairs(incident.ranks, self._means.peers, self._devices)
        return Order(
            remedy,
            reason,
            incident.verdict,
            incident.pairs,
            incident.culprit or (incident.rejected_on[0] if remedy is Remedy.SPARE else ""),
            incident.place if remedy is Remedy.LOAD_OLDER else "",
            self._exit_code(incident, remedy),
        )

    def _exit_code(self, incident: Incident, remedy: Remedy) -> int:
        if remedy is not Remedy.STOP and remedy not in RESTARTS:
            return 0
        if self._options.megatron_exit_codes:
            return FAILED_ON_RESULT_VALIDATION if remedy is Remedy.STOP else RESUME_TO_DISAMBIGUATE
        if remedy is Remedy.SPARE or (remedy is Remedy.STOP and incident.verdict is Verdict.PERSISTENT):
            return int(ExitCode.NODE_UNFIT)
        return int(ExitCode.FAILED if remedy in RESTARTS else ExitCode.DO_NOT_REQUEUE)
