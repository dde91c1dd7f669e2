"""What a rank is compared with: the median of its peers, and how far healthy ranks are from it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

from outlast.stragglers.policy.limits import Limits

ENOUGH = 16  # peers from which their own spread is enough; below, changes between windows count, too
PEERS_FOR_SPREAD = 4  # from which on a group tells its own spread, roughly
_FAR = 4  # windows between which changes count, too: noise that lasts for some windows changes little in one
_LASTING = 1.4  # times: changes over several windows against those over one, from which on noise lasts
_SAMPLE = 256
TO_DEVIATION = 1.4826  # of a normal distribution: standard deviation over median absolute deviation
_LEAST = 1e-9  # seconds: stands for a time of nothing


def references(ordered: Sequence[float]) -> tuple[float, float]:
    """Return the median of the peers without the rank itself: for a rank of the upper half, and of the lower.

    Of an even number of peers it is the one of the two middle ones that is nearer to the rank: the mean is
    where nobody is, if nearly half of the peers have less to do.

    Args:
        ordered: the values of all, at least two, in ascending order.
    """
    middle = len(ordered) // 2
    return ordered[middle - 1 if len(ordered) % 2 == 0 else middle], ordered[middle]


def spread(ordered: Sequence[float]) -> float:
    """Return the standard deviation of the logarithms, from the median absolute deviation.

    Args:
        ordered: in ascending order. Of more than 256 values as many are taken at equal distances.
    """
    if len(ordered) < PEERS_FOR_SPREAD:
        return 0.0
    sample = ordered[:: -(-len(ordered) // _SAMPLE)]
    middle = max(sample[len(sample) // 2], _LEAST)
    away = sorted(abs(math.log(max(one, _LEAST) / middle)) for one in sample)
    return TO_DEVIATION * _median(away)


def _median(ordered: Sequence[float]) -> float:
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


class Moves:
    """How much ranks change against their peers, from one window to the next and to the fourth after it.

    Few peers do not tell their spread, and two cannot tell at all which of them is usual. The changes in
    time can: they are small for a rank that is slow in every window.
    """

    def __init__(self, limits: Limits) -> None:
        self._least = max(1, limits.moves)
        self._latest: dict[int, deque[float]] = {lag: deque(maxlen=_SAMPLE) for lag in (1, _FAR)}
        self._before: dict[int, deque[float]] = {}
        self._room = 0

    def begin(self) -> None:
        """Begin a window; 256 ranks of it are enough."""
        self._room = _SAMPLE

    def add(self, values: Mapping[int, float], ordered: Sequence[float]) -> None:
        """Note the values of a group.

        Args:
            values: by rank.
            ordered: the same in ascending order.
        """
        if len(values) > self._room:
            return
        self._room -= len(values)
        upper = ordered[len(ordered) // 2]
        low, high = (math.log(max(one, _LEAST)) for one in references(ordered))
        for rank, value in values.items():
            now = math.log(max(value, _LEAST)) - (low if value >= upper else high)
            before = self._before.get(rank)
            if before is None:
                before = self._before[rank] = deque(maxlen=_FAR)
            for lag, latest in self._latest.items():
                if len(before) >= lag:
                    latest.append(abs(now - before[-lag]))
            before.append(now)

    @property
    def settled(self) -> bool:
        """Enough changes over several windows are known, and they say that windows are independent."""
        near, far = self._latest.values()
        if len(far) < self._least:
            return False
        return _median(sorted(far)) <= _LASTING * _median(sorted(near))

    @property
    def spread(self) -> float:
        """The standard deviation in one window, of logarithms; infinite until enough is known."""
        if len(self._latest[1]) < self._least:
            return math.inf
        known = [_median(sorted(one)) for one in self._latest.values() if len(one) >= self._least]
        return TO_DEVIATION * max(known) / math.sqrt(2)
