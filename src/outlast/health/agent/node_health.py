"""The health of this node while a job runs: samples go in; notes, ledger entries and orders come out.

In the mode "observe" an order is said and not carried out.
"""

from __future__ import annotations

import csv
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path

from outlast import files
from outlast.config import Config
from outlast.errors import ExitCode, UsageError
from outlast.health.agent.node_ledger import NodeLedger
from outlast.health.policy import weighted
from outlast.health.policy.emergency import Decision, Do, Emergency, Filter, Tier, Work
from outlast.health.policy.hazard import DEFAULT, BadModel, HazardModel, model_of
from outlast.health.policy.ledger import Entry, Ledger, State, What, is_loss
from outlast.health.policy.monitor import Alert, Health, Risk
from outlast.health.policy.telemetry import DeviceSample, Sample
from outlast.health.policy.weighted import Scored, Weighted
from outlast.launcher.output.file_thread import FileThread
from outlast.recovery.policy.events import Fault, FaultKind

LEDGER = "ledger"  # folder in the run folder
METRICS = "gpu_logs"  # likewise, for the weighted score
_MODEL_BYTES = 1 << 20
_EVERY = 10.0  # seconds between two decisions without samples
_MOST_METRICS = 64 << 20  # bytes of one file of metrics
_READ_PATIENCE = 2.0  # seconds for the ledger, at the start
_MOST_REASON = 500  # characters that other nodes are told
_MOST_MODELS, _MOST_MODEL_TEXT = 8, 120
_NEVER = 2.0  # a probability that none reaches


class NodeHealth:
    """Judges this node.

    Args:
        config: of the run.
        node: its name.
        folder: of the run.
        own: folder of this node in it.
        thread: writes the files.
        note: takes what a person should read.

    Raises:
        UsageError: the parameters file cannot be used.
    """

    def __init__(
        self,
        config: Config,
        node: str,
        folders: tuple[Path, Path],
        thread: FileThread,
        note: Callable[[str], None],
    ) -> None:
        options = config.health
        root, own = folders
        self._options = options
        self._node = node
        self._files = thread
        self._note = note
        self._metrics = own / METRICS
        self._ledger = NodeLedger(Path(options.ledger or root / LEDGER), node, self._say_later)
        self._later: list[str] = []
        now = self._began = time.time()
        self._health = Health(node, _model(options.model_file), options.horizon, now - time.monotonic())
        self._weighted = None
        if options.model == "weighted":
            self._weighted = Weighted(options.risk_threshold, options.telemetry_interval)
        interval, share = config.checkpoints.save_interval, options.threshold_frac
        limit = None if share is None or interval is None else Filter(interval, share)
        self._emergency = Emergency(options.drain_at if self._weighted is None else _NEVER, limit)
        self._saved, self._cost = (-1, now), options.save_cost
        self._alerting: set[int] = set()  # GPUs whose weighted score is above the threshold
        self._looked = 0.0
        self.device = ""  # the model of this node's devices; several: all of them
        self._models: set[str] = set()
        self.at_risk = ""  # why this node is about to fail, where that has consequences
        self._said: dict[Do, str] = {}
        self._begin(now)

    def _begin(self, now: float) -> None:
        """Read the ledger; a node whose last entry is a fault is back now."""
        after = self._options.quarantine_after
        unread = Ledger((), after)
        ledger = self._files.ask(lambda: self._ledger.read(after), unread, _READ_PATIENCE)
        if ledger is unread:
            words = f"the node ledger was not read within {_READ_PATIENCE:.0f} s"
            self._say_later(f"health: {words}: quarantine and burn-in of this node have no effect")
        if ledger.needs_repair_entry(self._node):
            back = Entry(now, self._node, What.REPAIR, reason="an agent has started on it")
            self._write(back)
            ledger = Ledger([*ledger.entries(self._node), back], after)
        self._standing = ledger.standing(self._node, now)
        self._health.ledger_says(ledger.history(self._node, now), now)

    @property
    def last_choice(self) -> str:
        """Why this node gets ranks only where no other is left; empty: it does not."""
        return self._standing.last_choice

    def start(self) -> None:
        """Say how the node stands, and what the ledger lacks."""
        while self._later:
            self._note(self._later.pop(0))
        if self._standing.state is not State.GOOD:
            words = f"this node is in {self._standing.last_choice}"
            self._note(f"health: {words}; it gets ranks only where no other node is left")

    def _say_later(self, text: str) -> None:
        self._later.append(text)

    def saved(self, step: int, seconds: float) -> None:
        """Take note of the newest checkpoint on disk, for which training stood still for some seconds.

        Args:
            step: completed steps in it; may be told more than once.
            seconds: 0: another node's rank has saved it.
        """
        before, since = self._saved
        if step != before:  # an older one is left where the newest was put aside
            self._saved = (step, time.time() if step > before else since)
        if seconds > 0:
            self._cost = seconds

    def faulted(self, fault: Fault | None) -> None:
        """Write a fault that says something about a node into the ledger."""
        if fault is None:
            return
        unfit = fault.kind is FaultKind.REFUSED and fault.exit_code == ExitCode.NODE_UNFIT
        lost = fault.kind is FaultKind.LOST and fault.signature.endswith(" is lost")
        wrong = fault.kind is FaultKind.CORRUPT and fault.rank >= 0
        failing = fault.kind is FaultKind.FAILING and not fault.signature.endswith(" is drained")
        if unfit or lost or wrong or failing:
            entry = Entry(time.time(), fault.node, What.FAULT, fault.kind.value, "", fault.reason)
            self._write(entry)

    def lived(self, node: str) -> None:
        """Write that a node that was lost has lived: its loss counts no more.

        This node itself writes it only if it was lost since its agent has started.
        """
        reason = "it was paused or cut off, and is back with the same agent"
        entry = Entry(time.time(), node, What.LIVED, FaultKind.LOST.value, "", reason)
        if node != self._node:
            self._write(entry)
        else:
            self._files.hand(lambda: self._write_if_lost(entry), patience=0.0)

    def _write_if_lost(self, entry: Entry) -> None:
        ledger = self._ledger.read(self._options.quarantine_after)
        if any(one.time >= self._began for one in ledger.entries(self._node) if is_loss(one)):
            self._ledger.append(entry)

    def look(self, samples: Sequence[Sample], generation: int, step: int) -> list[Decision]:
        """Judge the node, and return what to do about it.

        Args:
            samples: that have arrived.
            generation: that runs here; 0: none does.
            step: completed steps of it.
        """
        now = time.time()
        while self._later:
            self._note(self._later.pop())
        if not samples and 0 <= now - self._looked < _EVERY:
            return []
        self._looked = now
        self._take_models(samples)
        risk = self._risk(samples, now)
        acts = self._options.mode == "act" and self._emergency.doomed(risk)
        self.at_risk = (self.at_risk or risk.reasons[0][:_MOST_REASON]) if acts and risk.reasons else ""
        if generation <= 0 or not risk.reasons:
            return []
        age = max(0.0, now - self._saved[1])
        work = Work(generation, step, self._saved[0], (Tier("local", self._cost, True, age),))
        found = self._emergency.decide(risk, work, now)
        if self._options.mode == "act":
            return found
        for one in found:
            if self._said.get(one.do) != risk.reasons[0]:
                self._said[one.do] = risk.reasons[0]
                self._note(f'health: would {one.do.value} ({one.reason}); mode = "observe"')
        return []

    def _take_models(self, samples: Sequence[Sample]) -> None:
        models = {one.model for one in samples if isinstance(one, DeviceSample) and one.model}
        if not models <= self._models and len(self._models) < _MOST_MODELS:
            self._models |= models
            self.device = " and ".join(sorted(self._models))[:_MOST_MODEL_TEXT]

    def _risk(self, samples: Sequence[Sample], now: float) -> Risk:
        if self._weighted is not None:
            return self._weighted_risk(self._weighted.observe(samples))
        found = self._health.observe(samples, now)
        for one in found:
            if isinstance(one, Alert):
                self._alert(one)
        return next(one for one in found if isinstance(one, Risk))

    def _alert(self, alert: Alert) -> None:
        self._note(f"health: {alert.device or self._node}: {alert.text}")
        if alert.sign:
            self._write(Entry(alert.time, self._node, What.SIGN, alert.sign, alert.device, alert.text))

    def _weighted_risk(self, found: Iterable[Scored]) -> Risk:
        scored = list(found)
        if scored:
            self._files.hand(lambda: _write_metrics(self._metrics, scored), patience=0.0)
        alerts = []
        for one in scored:
            index = one.sample.index
            if one.alert:
                alerts.append(f"GPU {index}: {one.reason}")
                if index not in self._alerting:
                    self._note(f"health: {alerts[-1]}")
            (self._alerting.add if one.alert else self._alerting.discard)(index)
        return Risk(self._node, "", float(bool(alerts)), self._options.telemetry_interval, tuple(alerts))

    def _write(self, entry: Entry) -> None:
        self._files.hand(lambda: self._ledger.append(entry), patience=0.0)


def _model(path: str) -> HazardModel:
    if not path:
        return DEFAULT
    try:
        return model_of(json.loads(files.read_text(path, _MODEL_BYTES)))
    except (OSError, BadModel, ValueError, RecursionError) as error:
        raise UsageError(f"health.model_file {path}: {error}; nothing was started") from error


def _write_metrics(folder: Path, scored: Iterable[Scored]) -> None:
    """Append to gpu_metrics.csv and gpu_detailed_metrics.csv, up to a size."""
    rows = [(one, datetime.fromtimestamp(one.sample.time, timezone.utc).isoformat()) for one in scored]
    for name, columns, lines in (
        ("gpu_metrics.csv", weighted.METRICS, [weighted.metrics_row(one, at) for one, at in rows]),
        (
            "gpu_detailed_metrics.csv",
            weighted.DETAILED,
            [weighted.detailed_row(one.sample, at) for one, at in rows],
        ),
    ):
        os.makedirs(folder, exist_ok=True)
        with open(
            files.open_regular(folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a", newline=""
        ) as file:
            writer = csv.writer(file)
            if not os.fstat(file.fileno()).st_size:
                writer.writerow(columns)
            if os.fstat(file.fileno()).st_size < _MOST_METRICS:
                writer.writerows(lines)
