"""Reruns in a rank: all ranks repeat a step whose result was rejected, until the cause is known.

Megatron-LM's state machine by name and loop (``should_run_forward_backward``), plugged into a guard. The
decisions are made in :mod:`outlast.rerun.policy.machine`, on every rank from the same evidence; this module
restores the state before the step, gathers evidence, and writes each incident to a JSON file, outside of any
checkpoint.
"""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from outlast import _torch_compat, files, settings
from outlast.agreement.policy.votes import Reading
from outlast.checkpoint.content.codecs import distributed
from outlast.config import RerunOptions
from outlast.errors import NonFinite, UsageError
from outlast.ipc.exchange import SystemClock
from outlast.numerics.policy.numerics import Finding
from outlast.numerics.policy.options import Action
from outlast.numerics.policy.tally import Observation
from outlast.observe.run_folder import RunFolder
from outlast.ports import Clock, Exchange, Stateful
from outlast.rerun.policy.events import (
    IN_PLACE,
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
)
from outlast.rerun.policy.machine import RerunMachine
from outlast.rerun.policy.stats import Quantiles, QuickStats, relative_difference
from outlast.rerun.worker.data import StepState, iterators, restore_generators
from outlast.rerun.worker.swap import Parcel, apart, digest, digests, finding_of, owners, trade

_RECORD_BYTES = 16 << 20
_LOG = logging.getLogger("outlast")


class Records:
    """The files of a job's incidents; rank 0 writes them.

    Args:
        folder: created with the first incident.
        tracker: a file that gets a line for each rejected result, in Megatron-LM's format; empty: none.
        rank: this rank.
    """

    def __init__(self, folder: Path, tracker: str, rank: int) -> None:
        self._folder = folder
        self._tracker = tracker
        self._rank = rank
        self._written: dict[int, Mapping[str, Any]] = {}

    def read(self) -> list[dict[str, Any]]:
        """Return all recorded incidents; a file that cannot be read is logged and ignored."""
        found = []
        for path in sorted(self._folder.glob("rerun-step-*.json")):
            try:
                record = json.loads(files.read_whole(path, _RECORD_BYTES))
                Incident.of_record(record)
            except (OSError, ValueError, RecursionError) as error:
                _LOG.warning("incident file %s ignored: %s", path, error)
                continue
            found.append(record)
        return found

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Write the incidents that changed."""
        for record in records if self._rank == 0 else ():
            step = int(record["step"])
            if self._written.get(step) == record:
                continue
            path = self._folder / f"rerun-step-{step:09d}.json"
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                RunFolder(self._folder).write(path, dict(record))
            except OSError as error:
                _LOG.warning("incident file %s not written, a restart will not know it: %s", path, error)
            self._written[step] = record

    def track(self, finding: Finding, status: str, device: str) -> None:
        """Append a line about a rejected result of this rank."""
        if not self._tracker:
            return
        job = settings.inherited().get("SLURM_JOB_ID", "N/A")
        line = (
            f"ts={SystemClock().wall():.3f} node={platform.node()} device={device} jobID={job}"
            f" rank={self._rank} iteration={finding.step} status={status} result={finding.value}"
            f" message='{finding.what}'\n"
        )
        with open(self._tracker, "a") as file:
            file.write(line)


_EVERY = 100  # steps between two reports of differences
_TIMEOUT = 600.0


def device_identity() -> str:
    """Return the identifier of the device of this rank: a GPU's UUID, or the host of its CPU."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return _torch_compat.device_uuid(torch.cuda.current_device())
    return f"CPU of {platform.node()}"


class ResultRejected(NonFinite):
    """A step's result stays rejected, so the job ends or restarts without the device.

    Args:
        finding: what was rejected.
        order: with the verdict, the reason and the exit code.
        devices: of all ranks.
    """

    def __init__(self, finding: Finding, order: Order, devices: Sequence[str]) -> None:
        super().__init__(finding.what, finding.value, finding.step)
        self.verdict = order.verdict
        self.device = order.device
        self.ranks = tuple(rank for rank, one in enumerate(devices) if one == order.device)
        self.exit_code = order.exit_code  # type: ignore[assignment]  # may be one of Megatron-LM's
        verdict = "" if order.verdict is None else f" ({order.verdict.value})"
        wish = "" if order.remedy is Remedy.STOP else f"{order.remedy.value}: "
        words = f"{finding.what} is {finding.value:g} in step {finding.step}{verdict}"
        self.args = (f"{words}: {wish}{order.reason}",)


class RerunStateMachine:
    """Repeats steps whose results a guard rejects; pass it to the guard: ``Guard(..., reruns=...)``.

    Checks whose action is "rerun" lead to reruns; see ``[numerics]``. Gradients are to be zero, or none, when
    a step begins.

    Args:
        model: its persistent buffers are put back before a rerun.
        optimizer: its gradients are cleared before a rerun.
        options: overridden by the table ``[rerun]`` of a launcher.
        also: further objects with a ``state_dict`` that a forward pass changes.
        data_parallel_group: of ranks with the same parameters, that can compute each other's data; None:
            all ranks.
        identity: returns an identifier of this rank's device; None: a GPU's UUID, or the host.

    Raises:
        UsageError: an option is invalid.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        options: RerunOptions | None = None,
        also: Sequence[Stateful] = (),
        data_parallel_group: dist.ProcessGroup | None = None,
        identity: Callable[[], str] | None = None,
    ) -> None:
        context = settings.worker_context()
        self._options = settings.in_force(options or RerunOptions(), "rerun", context)
        self._replaceable = bool(context.replaceable) and not self._options.megatron_exit_codes
        problems = self._options.problems()
        if problems:
            raise UsageError(f"outlast.RerunStateMachine: {'; '.join(problems)}")
        self.mode = RerunMode(self._options.rerun_mode)
        self._model = model
        self._state = StepState(model, optimizer, also)
        self._gradients = tuple(dict.fromkeys([*model.parameters(), *_trained(optimizer)]))
        self._peers_of = data_parallel_group
        self._identity = identity or device_identity
        self._machine = RerunMachine(self._options)
        self._records: Records | None = None
        self._exchange: Exchange | None = None
        self._names: Callable[[], Sequence[str]] = list
        self._loaded = Loaded(0)
        self._clock: Clock = SystemClock()
        self._data: tuple[Any, ...] = ()
        self._order: Order | None = None
        self._finding: Finding | None = None
        self._seen: list[Observation] = []
        self._stats = {"loss": QuickStats(), "gradients": QuickStats()}

    @property
    def always(self) -> bool:
        """Whether every step is repeated, whether it was rejected or not."""
        return self.mode is RerunMode.REPORT_DETERMINISM_STATS

    def begin(self, folder: Path, exchange: Exchange, names: Callable[[], Sequence[str]]) -> None:
        """Join a job; a session calls this on all ranks, after :meth:`loaded`.

        Args:
            folder: for incident files, of rank 0.
            exchange: between all ranks.
            names: returns the available copies.

        Raises:
            ResultRejected: an earlier restart was ordered to replace a device, and has not.
        """
        self._exchange, self._names = exchange, names
        self._records = Records(folder, self._options.result_rejected_tracker_filename, exchange.rank)
        own = self._records.read() if exchange.rank == 0 else []
        told = self._gather({"device": self._identity(), "records": own, "now": self._clock.wall()})
        self._machine.restore(told[0]["records"])
        now, waiting = float(told[0]["now"]), self._machine.open
        order = self._machine.handle(Started(tuple(str(one["device"]) for one in told)), now)
        self._machine.handle(self._loaded, now)
        self._write()
        if order.remedy is Remedy.STOP and waiting is not None:
            raise ResultRejected(finding_of(waiting.to_record()), order, self._machine.devices)

    def loaded(self, step: int, place: str) -> None:
        """Record where training continues: completed steps, and tier and name of a copy, if any."""
        tier, _, name = place.rpartition("/")
        self._loaded = Loaded(step, tier, name)
        if self._exchange is not None:
            self._machine.handle(self._loaded, self._clock.wall())

    def before(self, step: int, attempt: int, data: object) -> None:  # noqa: ARG002 - as the port has it
        """Prepare an attempt at a step; see :class:`outlast.numerics.worker.guard.Reruns`."""
        if attempt == 0:
            self._data = iterators(data)
            for one in self._data:
                one.advance()
            self._state.keep()
            self._order, self._seen = None, []
            return
        self._state.put_back()
        for one in self._data:
            one.rewind()
        if self._order is not None and self._order.remedy is Remedy.SWAP:
            self._swap(self._order)

    def _swap(self, order: Order) -> None:
        assert self._exchange is not None
        taken = trade(self._portable(), order.pairs, self._exchange, _TIMEOUT)
        if taken is not None:
            for one, drawn in zip(self._data, taken["data"], strict=True):
                one.swap(drawn)
            restore_generators({**self._state.generators, **taken["generators"]})

    def _portable(self) -> dict[str, Any]:
        """Return what another rank needs to compute this rank's step."""
        data = [[(batch, _handed(after)) for batch, after in one.drawn] for one in self._data]
        return {"data": data, "generators": _handed(self._state.generators)}

    def mismatch(self, reading: Reading) -> bool:
        """Say whether this rank's loss differs from that of the first attempt."""
        if not self._seen or self._exchange is None:
            return False
        first = self._seen[0].losses[self._exchange.rank]
        return apart(first, reading.loss) > self._options.tolerance

    def again(self, seen: Observation, finding: Finding | None) -> bool:
        """Say whether another attempt is made; see :class:`outlast.numerics.worker.guard.Reruns`."""
        self._seen.append(seen)
        if self.mode is RerunMode.REPORT_DETERMINISM_STATS:
            return self._twice()
        rejected = finding is not None and finding.action is not Action.WARN
        if len(self._seen) > 1:
            self._go_on(finding if rejected else None)
        elif self._machine.skips(seen.step):
            self._finding = finding or finding_of({"step": seen.step})
            self._order = Order(Remedy.SKIP_BATCH, "the batch was skipped before this restart")
        elif not rejected:
            self._pass(seen.step)
        elif finding is not None and (finding.action is Action.RERUN or self._is_awaited(seen.step)):
            self._begin(seen, finding)
        return self._order is not None and self._order.remedy in IN_PLACE

    def _is_awaited(self, step: int) -> bool:
        """Say whether an incident waits for the result of a step, whichever check rejects it now."""
        return self._machine.open is not None and self._machine.open.step == step

    def _pass(self, step: int) -> None:
        if self._machine.open is not None:
            self._tell(Passed(step), self._clock.wall())

    def _begin(self, seen: Observation, finding: Finding) -> None:
        self._finding = finding
        ranks = owners(seen, finding)
        told = self._evidence()
        self._track(ranks, finding)
        event = Found(
            seen.step,
            finding.check.value,
            f"{finding.value:g}",
            ranks,
            digests(seen, told),
            self._means(told),
        )
        self._tell(event, float(told[0]["now"]))

    def _go_on(self, finding: Finding | None) -> None:
        seen, order = self._seen[-1], self._order
        assert order is not None
        told = self._evidence(parameters=order.remedy is Remedy.SWAP)
        ranks = () if finding is None else owners(seen, finding) or tuple(range(len(seen.losses)))
        if finding is not None:
            self._track(ranks, finding)
        if order.remedy is Remedy.SWAP:
            same = all(told[one]["parameters"] == told[other]["parameters"] for one, other in order.pairs)
            self._tell(Swapped(ranks, same), float(told[0]["now"]))
            return
        before = self._seen[-2] if order.remedy is Remedy.CONFIRM else self._seen[0]
        differences = tuple(map(apart, before.losses, seen.losses))
        self._tell(Reran(ranks, digests(seen, told), differences), float(told[0]["now"]))

    def _tell(self, event: Event, now: float) -> None:
        order = self._order = self._machine.handle(event, now)
        self._write()
        if order.reason and self._exchange is not None and self._exchange.rank == 0:
            verdict = "" if order.verdict is None else f" [{order.verdict.value}]"
            _LOG.warning("%s%s: %s", order.remedy.value, verdict, order.reason)

    def _evidence(self, parameters: bool = False) -> list[dict[str, Any]]:
        """Gather the evidence of all ranks about this attempt."""
        assert self._exchange is not None, "a session has called begin()"
        own: dict[str, Any] = {"now": self._clock.wall(), "peers": self._peers(), "copies": []}
        if self._exchange.world_size == 1:
            own["digest"] = digest(one.grad for one in self._gradients)
        if self._exchange.rank == 0:
            own["copies"] = list(self._names())
        if parameters:
            whole = (one for one in self._gradients if not distributed(one))
            own["parameters"] = digest(whole)
        return self._gather(own)

    def _peers(self) -> list[int]:
        """Return the ranks that can compute this rank's data; none if the data cannot be sent."""
        if not self._data or not dist.is_available() or not dist.is_initialized():
            return []
        try:
            Parcel(self._portable())
        except TypeError:
            return []
        return list(dist.get_process_group_ranks(self._peers_of or dist.group.WORLD))

    def _means(self, told: Sequence[Mapping[str, Any]]) -> Means:
        devices = self._machine.devices
        peers: dict[int, int] = {}
        for rank, one in enumerate(told):
            group = [other for other in one["peers"] if told[other]["peers"]]
            after = sorted(group, key=lambda other, rank=rank: (other - rank) % len(told))  # type: ignore[misc]
            other = next((other for other in after if devices[other] != devices[rank]), None)
            if other is not None:
                peers[rank] = other
        other_copies = [name for name in told[0]["copies"] if name != self._loaded.copy]
        return Means(peers, bool(other_copies), spare=self._replaceable)

    def _gather(self, own: Mapping[str, Any]) -> list[dict[str, Any]]:
        assert self._exchange is not None
        answers = self._exchange.gather("rerun", json.dumps(own), _TIMEOUT)
        return [json.loads(answer) for answer in answers]

    def _write(self) -> None:
        if self._records is not None:
            self._records.write(self._machine.records())

    def _track(self, ranks: Sequence[int], finding: Finding) -> None:
        if (
            self._records is not None
            and self._exchange is not None
            and self._exchange.rank in (ranks or (0,))
        ):
            status = "INITIAL_RUN" if len(self._seen) == 1 else "RERUN"
            self._records.track(finding, f"{status}_{len(self._seen)}", self._identity())

    def verdict(self, _: Observation, finding: Finding | None) -> Finding | None:
        """Return the finding with its final action; see :class:`outlast.numerics.worker.guard.Reruns`.

        Raises:
            ResultRejected: the result stays rejected, and no remedy is left.
            SystemExit: the same, or a restart was ordered, with an exit code of Megatron-LM's.
        """
        order = self._order
        if order is None or not order.reason or order.remedy is Remedy.CONTINUE:
            return finding
        found = finding or self._finding
        assert found is not None, "an order other than to continue follows a finding"
        if self._options.megatron_exit_codes and order.exit_code:
            _LOG.error("%s: %s", found.reason, order.reason)
            raise SystemExit(order.exit_code)
        if order.remedy in (Remedy.STOP, Remedy.SPARE):
            raise ResultRejected(found, order, self._machine.devices)
        for one in self._data:
            one.rewind()
        if order.remedy is Remedy.SKIP_BATCH:
            self._state.put_back()
            self._spend()
        action = {Remedy.SKIP_BATCH: Action.SKIP, Remedy.ROLL_BACK: Action.ROLLBACK}.get(
            order.remedy, Action.RAISE
        )
        return replace(found, action=action, reason=f"{found.reason}: {order.remedy.value}, {order.reason}")

    def _spend(self) -> None:
        """Count the batches of the step as used."""
        for one in self._data:
            for _ in one.drawn:
                next(one)

    @property
    def stats(self) -> dict[str, Quantiles]:
        """The differences between two runs of a step, by what was compared; in report_determinism_stats."""
        found = {name: stats.quantiles() for name, stats in self._stats.items()}
        return {name: quantiles for name, quantiles in found.items() if quantiles is not None}

    def _twice(self) -> bool:
        if len(self._seen) == 1:
            return True
        first, second = self._seen
        for name, before, after in (
            ("loss", first.losses, second.losses),
            ("gradients", first.norms, second.norms),
        ):
            for one, other in zip(before, after, strict=True):
                if one is not None and other is not None:
                    self._stats[name].record(relative_difference(one, other))
        if (second.step + 1) % _EVERY == 0 and self._exchange is not None and self._exchange.rank == 0:
            for name, quantiles in self.stats.items():
                _LOG.info("two runs of each step, %s: %s", name, quantiles)
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: incidents must outlive a rollback, so they are not part of a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Do nothing."""


def _handed(states: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the random states that another rank takes over; numpy's are arrays and are not sent."""
    if states is None:
        return None
    return {name: state for name, state in states.items() if name != "numpy"}


def _trained(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
