"""Which samples become records of the event log: few enough that the log stays small.

Of each device, and of the host, one sample in an interval, and each change of its error. Everything else
(XIDs, silences) is recorded up to 20 times at once and 6 times a minute; more are counted.
"""

from __future__ import annotations

import math
from dataclasses import fields

from outlast.health.policy.telemetry import DeviceSample, HostSample, Notice, Sample, Silence, XidEvent

_AT_ONCE, _EVERY = 20.0, 10.0  # records that are no reading, and seconds for one more
_NOT_VALUES = frozenset(("time", "index"))


class Recording:
    """Chooses samples.

    Args:
        interval: seconds between two records of one device.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._recorded: dict[tuple[int, str], tuple[float, str]] = {}
        self._tokens, self._at = _AT_ONCE, 0.0
        self.dropped = 0

    def admits(self, sample: Sample, now: float) -> bool:
        """Say whether a sample is recorded at ``now`` (monotonic seconds)."""
        if isinstance(sample, (DeviceSample, HostSample)):
            index, uuid = (sample.index, sample.uuid) if isinstance(sample, DeviceSample) else (-1, "")
            at, error = self._recorded.get((index, uuid), (-math.inf, ""))
            if now - at < self._interval and (error == sample.error or not self._token(now)):
                return False
            self._recorded[index, uuid] = (now, sample.error)
            return True
        if self._token(now):
            return True
        self.dropped += 1
        return False

    def _token(self, now: float) -> bool:
        self._tokens = min(_AT_ONCE, self._tokens + max(0.0, now - self._at) / _EVERY)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


def values_of(sample: Sample) -> dict[str, float]:
    """Return the numbers of a sample by their names; what was not read is not among them."""
    if isinstance(sample, Silence):
        return {"seconds": sample.seconds}
    if isinstance(sample, XidEvent):
        return {"xid": float(sample.xid)}
    if isinstance(sample, Notice):
        return {}
    found = {}
    for spec in fields(sample):
        value = getattr(sample, spec.name)
        if isinstance(value, (int, float)) and spec.name not in _NOT_VALUES:
            found[spec.name] = float(value)
    if isinstance(sample, HostSample):
        known = [port for port in sample.ports if port.up is not None]
        found["ports_down"] = float(sum(not port.up for port in known))
        found["link_downed"] = float(sum(port.link_downed or 0 for port in sample.ports))
    return found


def words_of(sample: Sample) -> str:
    """Return the text of a sample: its error, the call that does not come back, the line of the kernel."""
    match sample:
        case DeviceSample() | HostSample():
            return sample.error
        case XidEvent():
            return f"{sample.pci}: {sample.text}"
        case Silence():
            return sample.what
        case Notice():
            return sample.text
