"""How ranks hand each other texts: through the store that their process group was made with.

Each rank sets a key of its own, rank 0 collects them and sets one key with everybody's answers,
on which the others wait: two operations a rank, whatever the world size. Keys carry the
generation, the number of this exchange on its store and a counter for each topic, so none is
ever used twice; those of a round go when the next one is complete: by then all ranks have read them.

Every account that reaches the store can read and write it, so each text is authenticated by a key that
only the job knows (:class:`Seal`), together with the name under which it stands. Each rank adds a random
number to its answer and looks for it in the answer of rank 0, which rules out texts of an earlier round.

The clocks of this host.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from outlast.ports import Clock, ExchangeFailed


class SystemClock:
    """The port :class:`outlast.ports.Clock` on the system's clocks."""

    def monotonic(self) -> float:
        """Return seconds from an arbitrary start."""
        return time.monotonic()

    def wall(self) -> float:
        """Return seconds since the epoch."""
        return time.time()


_T = TypeVar("_T")
_SLICE = 1.0  # the longest uninterrupted wait in the store: signals are handled in between
_GRACE = 5.0  # how much longer than rank 0 the others wait, so that its account of who is missing arrives
_TAG = hashlib.sha256().digest_size * 2  # characters of an authentication code


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


class Seal:
    """Authenticates texts that pass through a store (HMAC-SHA256).

    Args:
        key: known to the ranks of the job and nobody else; "": nothing is authenticated.
    """

    def __init__(self, key: str = "") -> None:
        self._key = key.encode()

    def prefix(self, name: str) -> str:
        """Return a prefix of keys that nobody without the key can guess, and so fill ahead of the ranks."""
        return f"{name}/{self._code('prefix', name)[:32]}" if self._key else name

    def close(self, name: str, text: str) -> str:
        """Return what is set under a name for a text."""
        return self._code(name, text) + text if self._key else text

    def open(self, name: str, content: bytes) -> str:
        """Return the text of what was found under a name.

        Raises:
            ExchangeFailed: it was not set by a process that knows the key.
        """
        text = content.decode(errors="surrogateescape")
        if not self._key:
            return text
        code, text = text[:_TAG], text[_TAG:]
        if not hmac.compare_digest(code.encode(errors="replace"), self._code(name, text).encode()):
            raise ExchangeFailed(
                f"store key {name!r}: its value was not set by a process of this job; another account"
                " reaches the store of the ranks; this rank ends"
            )
        return text

    def _code(self, name: str, text: str) -> str:
        content = f"{len(name)} {name}{text}".encode(errors="surrogateescape")
        return hmac.new(self._key, content, "sha256").hexdigest()


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
        seal: authenticates the answers.

    Raises:
        ExchangeFailed: the store does not answer.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        generation: int,
        clock: Clock | None = None,
        seal: Seal | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._clock: Clock = clock or SystemClock()
        self._seal = seal or Seal()
        self._rounds: Counter[str] = Counter()
        self._spent: list[str] = []
        prefix = self._seal.prefix(f"outlast/{generation}")
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
            self._set(f"{base}/all", {"missing": missing})
            raise self._silence(topic, missing, timeout)
        found = [self._get(key) for key in keys]
        answers = [value, *(self._field(topic, each, "answer", str) for each in found)]
        nonces = [self._field(topic, each, "nonce", str) for each in found]
        self._set(f"{base}/all", {"answers": answers, "nonces": nonces})
        for key in self._spent:
            self._store.delete_key(key)
        self._spent = [*keys, f"{base}/all"]
        return answers

    def _follow(self, topic: str, base: str, value: str, timeout: float) -> list[str]:
        nonce = secrets.token_hex(8)
        self._set(f"{base}/{self.rank}", {"answer": value, "nonce": nonce})
        if not self._arrive([f"{base}/all"], timeout + _GRACE):
            others = (rank for rank in range(1, self.world_size) if not self._store.check([f"{base}/{rank}"]))
            raise self._silence(topic, [0, *others], timeout)
        found = self._get(f"{base}/all")
        if isinstance(found, dict) and "missing" in found:
            raise self._silence(topic, self._field(topic, found, "missing", list), timeout)
        answers: list[str] = self._field(topic, found, "answers", list)
        nonces = self._field(topic, found, "nonces", list)
        if len(answers) != self.world_size or len(nonces) != self.world_size - 1:
            raise self._malformed(topic, f"answers of {self.world_size} ranks expected, {len(answers)} found")
        if nonces[self.rank - 1] != nonce or answers[self.rank] != value:
            raise self._malformed(topic, f"the answers hold another answer of rank {self.rank} than it gave")
        if not all(isinstance(answer, str) for answer in answers):
            raise self._malformed(topic, "texts expected as answers")
        return answers

    def _set(self, key: str, content: Mapping[str, object]) -> None:
        self._store.set(key, self._seal.close(key, json.dumps(content)))

    def _get(self, key: str) -> object:
        try:
            return json.loads(self._seal.open(key, self._store.get(key)))
        except (ValueError, RecursionError) as error:
            raise ExchangeFailed(
                f"store key {key!r}: JSON expected, found {error}; rank {self.rank} ends"
            ) from error

    def _field(self, topic: str, found: object, name: str, kind: type[_T]) -> _T:
        value = found.get(name) if isinstance(found, dict) else None
        if not isinstance(value, kind):
            raise self._malformed(topic, f"{name!r} of type {kind.__name__} expected")
        return value

    def _malformed(self, topic: str, what: str) -> ExchangeFailed:
        return ExchangeFailed(
            f"exchange {topic!r}: {what}; another process writes to the store of the ranks;"
            f" rank {self.rank} ends"
        )

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
