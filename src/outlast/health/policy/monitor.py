"""The risk of a node: what a collector says goes in, probabilities with their reasons come out.

Hard rules come first (:mod:`outlast.health.policy.rules`, XIDs by :mod:`outlast.health.policy.xids`).
Everything else adds to a hazard that decays (:mod:`outlast.health.policy.hazard`), fed by comparisons with
peers (:mod:`outlast.health.policy.signals`). What is not known adds to it as well, and while a device is not
read completely, nothing of it decays: missing data never lowers a risk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from outlast.health.policy import rules, signals, xids
from outlast.health.policy.hazard import HazardModel, Marks, NodeHistory, probability
from outlast.health.policy.rules import BOOT_GRACE, BURST, DAY, GONE, LINK_FAILURES, SILENT, Looks
from outlast.health.policy.telemetry import DeviceSample, HostSample, Notice, Sample, Silence, XidEvent
from outlast.health.policy.xids import Severity

_WATCHED = (
    *("temperature", "temperature_margin", "sm_clock", "max_sm_clock", "throttle_reasons", "utilization"),
    *("ecc_corrected", "ecc_uncorrected", "remapped_rows_uncorrectable", "remap_pending", "remap_failed"),
    *("recovery_action", "pcie_width", "pcie_max_width", "pcie_replays", "nvlink_errors"),
)  # what the rules and signs need
_FRESH = 60.0  # seconds between the samples of two devices that are compared
_LONGEST_STEP = 60.0  # seconds between two samples that count as observed
_MOST_DEVICES = 128
_MOST_REASONS = 8
_MOST_XIDS = 64
_MOST_ALERTS, _ALERT_EVERY = 20, 180.0  # at once, and seconds for one more
_NODE = ""
_NO_DRIVER = ("disk:", "host:", "kernel log:", "replay:")  # calls that say nothing about a device


@dataclass(frozen=True)
class Risk:
    """The probability that a device, or the node, fails within a horizon.

    Args:
        node: its name.
        device: uuid, or "#index" where that is not known; empty: the node with all that it has.
        probability: from 0 to 1; 1 where a hard rule holds.
        horizon: seconds.
        reasons: the largest part first.
        hard: a hard rule holds: the probability is not estimated.
    """

    node: str
    device: str
    probability: float
    horizon: float
    reasons: tuple[str, ...] = ()
    hard: bool = False


@dataclass(frozen=True)
class Alert:
    """Something new that a person should know; ``sign``: the sign, for the ledger; empty: none."""

    node: str
    device: str
    time: float
    text: str
    sign: str = ""


@dataclass
class _Device:
    marks: Marks
    latest: DeviceSample | None = None
    observed: float = 0.0  # seconds; the clock of the marks
    looks: Looks = field(default_factory=Looks)
    trend: signals.Trend = field(default_factory=signals.Trend)
    known: set[str] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=dict)  # the latest of counters of rare events
    why: dict[str, str] = field(default_factory=dict)  # the latest reason of each sign
    xids: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_MOST_XIDS))


class Health:
    """Judges the devices of one node and its host.

    Args:
        node: its name.
        model: the parameters.
        horizon: seconds for which probabilities hold.
        booted: wall time of the node's start; links get a grace after it.
    """

    def __init__(self, node: str, model: HazardModel, horizon: float, booted: float = 0.0) -> None:
        self._node = node
        self._model = model
        self._horizon = horizon
        self._grace = booted + BOOT_GRACE
        self._devices: dict[str, _Device] = {}
        self._host = _Device(Marks(model.signs))
        self._host_at: float | None = None
        self._silence = (0.0, 0.0)  # when it was told last, and for how long no device was read by then
        self._links: dict[str, int] = {}
        self._history, self._told_at = NodeHistory(), 0.0
        self._alerts: list[Alert] = []
        self._said: dict[tuple[str, str], float] = {}
        self._tokens, self._tokens_at = float(_MOST_ALERTS), 0.0
        self._unsaid = 0

    def ledger_says(self, history: NodeHistory, now: float) -> None:
        """Take the node's history, as it is now."""
        self._history, self._told_at = history, now

    def observe(self, samples: Iterable[Sample], now: float) -> list[Risk | Alert]:
        """Take what the collector said; return what is new, then the risk of the node and of each device.

        Args:
            samples: in the order of time.
            now: wall time, in seconds.
        """
        for together in _rounds(samples):
            self._on_devices(together)
            for one in together:
                match one:
                    case XidEvent():
                        self._on_xid(one)
                    case HostSample():
                        self._on_host(one)
                    case Silence():
                        self._on_silence(one)
                    case DeviceSample() | Notice():
                        pass
        self._look_for_gone()
        alerts, self._alerts = self._alerts, []
        return [*self._admitted(alerts, now), *self.risks(now)]

    def risks(self, now: float) -> list[Risk]:
        """Return the risk of the node, then of each device in the order of their numbers."""
        total = self._model.history_within(self._history_now(now), self._horizon)
        parts = [(total, self._history_in_words(now), False)] if self._history.faults else []
        found = []
        for key, device in (("", self._host), *sorted(self._devices.items(), key=_number)):
            amount, reasons = self._amount(device)
            total += amount
            label = f"GPU {device.latest.index}: " if device.latest is not None else f"{key}: " if key else ""
            parts += [(share, f"{label}{text}", hard) for share, text, hard in reasons]
            if key:
                found.append(self._risk(key, amount, reasons))
        return [self._risk(_NODE, total, parts), *found]

    def _risk(self, device: str, amount: float, reasons: Iterable[tuple[float, str, bool]]) -> Risk:
        ordered = sorted(reasons, key=lambda one: (not one[2], -one[0], one[1]))
        hard = bool(ordered) and ordered[0][2]
        texts = tuple(
            text if is_hard else f"{text} ({probability(share):.2%})" for share, text, is_hard in ordered
        )
        return Risk(
            *(self._node, device, 1.0 if hard else probability(amount), self._horizon),
            *(texts[:_MOST_REASONS], hard),
        )

    def _amount(self, device: _Device) -> tuple[float, list[tuple[float, str, bool]]]:
        """Return the integral of a device's hazards, and its parts with their reasons."""
        shares = device.marks.shares(device.observed, self._horizon)
        reasons = [(0.0, text, True) for text in device.looks.hard.values()]
        reasons += [(share, device.why.get(sign, sign), False) for sign, share in shares.items()]
        return sum(shares.values()), [one for one in reasons if one[2] or one[0] >= 1e-6]

    def _history_now(self, now: float) -> NodeHistory:
        past = self._history
        if past.since_repair is None:
            return past
        return NodeHistory(past.since_repair + max(0.0, now - self._told_at), past.last_fault, past.faults)

    def _history_in_words(self, now: float) -> str:
        past = self._history_now(now)
        hours = (past.since_repair or 0.0) / 3600
        since = f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.0f} d"
        return f"back for {since} after a fault ({past.last_fault or 'unknown'}), {past.faults} in 30 days"

    def _device(self, uuid: str, index: int) -> tuple[str, _Device]:
        """Return a device; one that was known by its number alone gets its name."""
        by_number = f"#{index}"
        key = uuid or next(
            (name for name, one in self._devices.items() if one.latest and one.latest.index == index),
            by_number,
        )
        if key not in self._devices:
            if len(self._devices) >= _MOST_DEVICES:
                self._devices.pop(next(iter(self._devices)))
            found = self._devices.pop(by_number, None)
            self._devices[key] = found or _Device(Marks(self._model.signs))
        return key, self._devices[key]

    def _on_devices(self, together: Sequence[Sample]) -> None:
        """Take one sample of each device; all are known before any is compared."""
        rates = {name: one.trend.rates() for name, one in self._devices.items()}
        read: list[tuple[str, _Device]] = []
        for sample in together:
            if isinstance(sample, DeviceSample):
                key, device = self._device(sample.uuid, sample.index)
                self._on_device(key, device, sample)
                if not sample.error:
                    read.append((key, device))
        if read:
            self._silence = (0.0, 0.0)
            self._host.looks.hard.pop("silence", None)
        for key, device in read:
            sample, peers, trend = self._with_peers(key, device, rates)
            for one in (*self._counted(device), *signals.compare(sample, peers, trend)):
                self._sign(key, device, one, sample.time)

    def _on_device(self, key: str, device: _Device, sample: DeviceSample) -> None:
        """Take a sample by itself."""
        before, device.latest = device.latest, sample
        for reason in device.looks.take(rules.rules_of(sample, sample.time < self._grace)):
            self._alert(key, sample.time, reason)
        missing = {name for name in device.known if getattr(sample, name) is None}
        if sample.error or missing:
            share = 1.0 if sample.error else len(missing) / len(device.known)
            names = ", ".join(sorted(missing)[:4]) + (", ..." if len(missing) > 4 else "")
            words = f"not read: {sample.error or names}"[:160]
            self._sign(key, device, signals.Found("missing", words, weight=share), sample.time)
        elif before is not None:
            device.observed += min(_LONGEST_STEP, max(0.0, sample.time - before.time))
        device.known |= {name for name in _WATCHED if getattr(sample, name) is not None}
        if not sample.error:
            device.looks.hard.pop("gone", None)

    def _with_peers(
        self, key: str, device: _Device, rates: Mapping[str, Mapping[str, float]]
    ) -> tuple[DeviceSample, list[signals.Peer], signals.Trend]:
        sample = device.latest
        assert sample is not None
        peers = [
            signals.Peer(one.latest, rates.get(name, {}))
            for name, one in self._devices.items()
            if name != key
            and one.latest is not None
            and one.latest.model == sample.model
            and not one.latest.error
            and abs(sample.time - one.latest.time) <= _FRESH
        ]
        return sample, peers, device.trend

    def _counted(self, device: _Device) -> list[signals.Found]:
        """Return what counters of rare events and flags say; a counter that fell was reset."""
        now, found = device.latest, []
        assert now is not None
        for sign, name, words in (
            ("uncorrected_ecc", "ecc_uncorrected", "uncorrected ECC error(s)"),
            ("remapped_rows", "remapped_rows_uncorrectable", "row(s) remapped after uncorrectable errors"),
        ):
            value, was = getattr(now, name), device.counts.get(name)
            if value is None:
                continue
            if was is not None and value > was:
                found.append(signals.Found(sign, f"{value - was} {words}", event=True))
            device.counts[name] = value
        if now.remap_pending:
            found.append(signals.Found("remap_pending", "a row is remapped at the next reset"))
        return found

    def _sign(self, key: str, device: _Device, found: signals.Found, time: float) -> None:
        place = device.marks.add if found.event else device.marks.hold
        place(found.sign, device.observed, found.weight)
        device.why[found.sign] = found.reason
        self._alert(key, time, found.reason, found.sign)

    def _on_xid(self, event: XidEvent) -> None:
        key, device = (_NODE, self._host) if event.index < 0 else self._device("", event.index)
        recent = [one for one in device.xids if abs(event.time - one[0]) < DAY]
        if any(code == event.xid and abs(event.time - at) < BURST for at, code in recent):
            return
        device.xids.append((event.time, event.xid))
        words, kind = xids.in_words(event.xid), xids.severity(event.xid)
        if kind is Severity.DEAD:
            if device.looks.set(f"xid {event.xid}", words):
                self._alert(key, event.time, words)
        elif kind is Severity.FAILING:
            self._sign(key, device, signals.Found("xid_failing", words, event=True), event.time)
        elif kind is Severity.LINK and event.time >= self._grace:
            self._sign(key, device, signals.Found("xid_link", words, event=True), event.time)
            links = 1 + sum(xids.severity(code) is Severity.LINK for _, code in recent)
            if links >= LINK_FAILURES and device.looks.set(
                "links", f"{links} link failures in 24 h: {words}"
            ):
                self._alert(key, event.time, f"{links} link failures in 24 h: {words}")
        elif kind is Severity.APPLICATION:
            self._on_application(key, event, words)

    def _on_application(self, key: str, event: XidEvent, words: str) -> None:
        """An error of the program says nothing about a device, unless it stays with one."""
        count = {
            name: sum(
                xids.severity(code) is Severity.APPLICATION and abs(event.time - at) < DAY
                for at, code in one.xids
            )
            for name, one in self._devices.items()
        }
        here = count.get(key, 0)
        if here < 2:
            return
        if sum(number > 0 for number in count.values()) > 1:
            self._alert(_NODE, event.time, f"{words}: on several devices, so the program is likely the cause")
        else:
            self._alert(key, event.time, f"{words}: {here} in 24 h on this device alone; test the device")

    def _on_host(self, sample: HostSample) -> None:
        for port in sample.ports:
            before = self._links.get(port.name)
            if port.link_downed is None:
                continue
            self._links[port.name] = port.link_downed
            if before is not None and port.link_downed > before and sample.time >= self._grace:
                self._host.marks.add("network", self._host.observed)
                self._host.why["network"] = f"the link of {port.name} went down"
                self._alert(_NODE, sample.time, f"the link of {port.name} went down", "network")
        since = 0.0 if self._host_at is None else sample.time - self._host_at
        self._host_at = sample.time
        self._host.observed += min(_LONGEST_STEP, max(0.0, since))

    def _on_silence(self, silence: Silence) -> None:
        if silence.what.startswith(_NO_DRIVER):
            return  # a file server that hangs does so on all nodes
        told_at, before = self._silence
        lasted = before + min(GONE, max(0.0, silence.time - told_at)) if before else 0.0
        seconds = max(silence.seconds, lasted)  # a collector that hangs is killed, so one alone counts fewer
        self._silence = (silence.time, seconds)
        words = f"{silence.what} has not answered for {seconds:.0f} s"
        if seconds < SILENT:
            self._host.marks.hold("slow_calls", self._host.observed, seconds / SILENT)
            self._host.why["slow_calls"] = words
        elif self._host.looks.set("silence", words):
            self._alert(_NODE, silence.time, words)

    def _look_for_gone(self) -> None:
        """Find devices that are no longer read, although others are."""
        times = [one.latest.time for one in self._devices.values() if one.latest is not None]
        newest = max(times, default=0.0)
        for key, device in self._devices.items():
            latest = device.latest
            if latest is None or newest - latest.time <= GONE:
                continue
            words = f"it is no longer there, for {newest - latest.time:.0f} s"
            device.marks.hold("missing", device.observed)
            device.why["missing"] = words
            if device.looks.set("gone", words):
                self._alert(key, newest, words)

    def _alert(self, device: str, time: float, text: str, sign: str = "") -> None:
        """Say something once a day for each device and sign; its numbers may differ."""
        said = self._said.get((device, sign or text))
        if said is not None and 0 <= time - said < DAY:
            return
        self._said[device, sign or text] = time
        if len(self._said) > 4096:
            self._said.pop(next(iter(self._said)))
        self._alerts.append(Alert(self._node, device, time, text, sign))

    def _admitted(self, alerts: Iterable[Alert], now: float) -> list[Alert]:
        """Return the alerts for which there are tokens, and how many were left out before."""
        gained = max(0.0, now - self._tokens_at) / _ALERT_EVERY
        self._tokens, self._tokens_at = min(float(_MOST_ALERTS), self._tokens + gained), now
        found = []
        for one in alerts:
            if self._tokens < 1:
                self._unsaid += 1
                continue
            self._tokens -= 1
            found.append(one)
        if found and self._unsaid:
            more = f"{self._unsaid} more alerts were left out: more than one every {_ALERT_EVERY:.0f} s"
            found.append(Alert(self._node, _NODE, now, more))
            self._unsaid = 0
        return found


def _rounds(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    """Yield samples in groups with at most one sample of each device."""
    together: list[Sample] = []
    seen: set[tuple[str, int]] = set()
    for one in samples:
        name = (one.uuid, one.index) if isinstance(one, DeviceSample) else None
        if name in seen:
            yield together
            together, seen = [], set()
        together.append(one)
        if name is not None:
            seen.add(name)
    yield together


def _number(item: tuple[str, _Device]) -> tuple[int, str]:
    latest = item[1].latest
    return (-1 if latest is None else latest.index), item[0]


def signs_in_words(risk: Risk) -> str:
    """Return a risk in one line, as logs have it."""
    what = risk.device or risk.node
    head = f"{what}: fails within {_span(risk.horizon)} with probability {risk.probability:.2%}"
    if risk.hard:
        head = f"{what}: has failed, or is about to"
    return f"{head}: {'; '.join(risk.reasons)}" if risk.reasons else head


def _span(seconds: float) -> str:
    return f"{seconds / 3600:.3g} h" if seconds >= 3600 else f"{seconds:.0f} s"
