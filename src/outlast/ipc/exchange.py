"""How ranks hand each other texts: through the store that their process group was made with.

Each rank sets a key of its own, rank 0 collects them and sets one key with everybody's answers,
on which the others wait: two operations a rank, whatever the world size. Keys carry the
generation, the number of this exchange on its store and a counter for each topic, so none is
ever used twice; those of a round go when the next one is complete: by then all ranks have read them.

The clocks of this host.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from datetime import timedelta
from typing import Any, Protocol

from outlast.ports import Clock, ExchangeFailed


class SystemClock:
    """The port :class:`outlast.ports.Clock` on the system's clocks."""

    def monotonic(self) -> float:
        """Return seconds from an arbitrary start."""
        return time.monotonic()

    def wall(self) -> float:
        """Return seconds since the epoch."""
        return time.time()


_SLICE = 1.0  # the longest uninterrupted wait in the store: signals are handled in between
_GRACE = 5.0  # how much longer than rank 0 the others wait, so that its account of who is missing arrives


class Store(Protocol):
    """What is used of ``torch.distributed.Store``."""

    def set(self, key: str, value: str, /) -> Any:
        """Set a key."""
        ...

    def get(self, key: str, /) -> bytes:
        """Return the value of a key that exists."""
        ...

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter and return it."""
        ...

    def wait(self, keys: list[str], timeout: timedelta, /) -> Any:
        """Return when all keys exist; raise RuntimeError when they do not in time."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Say whether all keys exist."""
        ...

    def delete_key(self, key: str, /) -> bool:
        """Remove a key."""
        ...


class SoloExchange:
    """The exchange of a job of one rank."""

    rank = 0
    world_size = 1

    def gather(self, topic: str, value: str, timeout: float) -> list[str]:  # noqa: ARG002 - the port's signature
        """Return the only answer."""
        return [value]


class StoreExchange:
    """Exchange over a store that all ranks of a generation reach.

    Every rank opens its exchanges on a store in the same order.

    Args:
        store: a ``torch.distributed.Store``.
        rank: this rank.
        world_size: ranks that take part.
        generation: their generation; keys of another one are never read.
        clock: for the deadlines.

    Raises:
        ExchangeFailed: the store does not answer.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, generation: int, clock: Clock | None = None
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._clock: Clock = clock or SystemClock()
        self._rounds: Counter[str] = Counter()
        self._spent: list[str] = []
        prefix = f"outlast/{generation}"
        try:
            self._prefix = f"{prefix}/{store.add(f'{prefix}/opened/{rank}', 1)}"
        except RuntimeError as error:
            raise self._gone("opening", error) from error

    def gather(self, topic: str, value: str, timeout: float) -> list[str]:
        """Return every rank's value; see :class:`outlast.ports.Exchange`."""
        self._rounds[topic] += 1
        base = f"{self._prefix}/{topic}/{self._rounds[topic]}"
        try:
            if self.rank == 0:
                return self._collect(topic, base, value, timeout)
            return self._follow(topic, base, value, timeout)
        except RuntimeError as error:
            raise self._gone(topic, error) from error

    def _collect(self, topic: str, base: str, value: str, timeout: float) -> list[str]:
        keys = [f"{base}/{rank}" for rank in range(1, self.world_size)]
        if not self._arrive(keys, timeout):
            missing = [rank for rank, key in enumerate(keys, 1) if not self._store.check([key])]
            self._store.set(f"{base}/all", json.dumps({"missing": missing}))
            raise self._silence(topic, missing, timeout)
        answers = [value, *(self._store.get(key).decode() for key in keys)]
        self._store.set(f"{base}/all", json.dumps({"answers": answers}))
        for key in self._spent:
            self._store.delete_key(key)
        self._spent = [*keys, f"{base}/all"]
        return answers

    def _follow(self, topic: str, base: str, value: str, timeout: float) -> list[str]:
        self._store.set(f"{base}/{self.rank}", value)
        if not self._arrive([f"{base}/all"], timeout + _GRACE):
            others = (rank for rank in range(1, self.world_size) if not self._store.check([f"{base}/{rank}"]))
            raise self._silence(topic, [0, *others], timeout)
        said = json.loads(self._store.get(f"{base}/all"))
        if "missing" in said:
            raise self._silence(topic, said["missing"], timeout)
        answers: list[str] = said["answers"]
        return answers

    def _arrive(self, keys: list[str], timeout: float) -> bool:
        """Wait until all keys exist; return whether they do.

        Raises:
            RuntimeError: the store failed before the time was up: it is gone.
        """
        deadline = self._clock.monotonic() + timeout
        while keys:
            begun = self._clock.monotonic()
            patience = min(_SLICE, max(deadline - begun, 0.001))
            try:
                self._store.wait(keys, timedelta(seconds=patience))
            except RuntimeError:
                now = self._clock.monotonic()
                if now - begun < 0.5 * patience:
                    raise
                if now >= deadline:
                    return False
            else:
                return True
        return True

    def _silence(self, topic: str, missing: list[int], timeout: float) -> ExchangeFailed:
        ranks = ", ".join(map(str, missing))
        return ExchangeFailed(
            f"exchange {topic!r}: rank {ranks} of {self.world_size} did not answer within {timeout:g} s;"
            f" rank {self.rank} gives up"
        )

    def _gone(self, topic: str, error: RuntimeError) -> ExchangeFailed:
        return ExchangeFailed(
            f"exchange {topic!r}: the store between the ranks does not answer ({error});"
            f" rank {self.rank} gives up"
        )
