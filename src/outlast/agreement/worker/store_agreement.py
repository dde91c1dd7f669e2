"""How ranks without an agent agree on a step after which all of them vote, once any of them asks for a vote.

A vote is a collective: all ranks must take part after the same step. While nobody asks, no step waits for
anything. A thread of each rank looks for a request in the store of the ranks. On a request each rank writes
down how many steps it has completed; from then on it completes one more step at most before it waits. When
all have written, the last one chooses the step after the highest number, which no rank has passed. How long a
step takes plays no part in it.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Protocol

from outlast.ipc.exchange import Seal
from outlast.ports import ExchangeFailed

_LOOK = 0.1  # seconds between two looks at the store
_LOOKS = 4000  # that all ranks together take in a second at most: one process serves the store
_ROUND_PATIENCE = 1800.0  # torch's own for gloo: training's collectives give up no later
_SLICE = 1.0  # the longest uninterrupted wait of the main thread: signals are handled in between
_MOST_DIGITS = 19  # of a step
_JOIN = 1.0  # seconds for the thread to end: one whose store does not answer goes on
_GONE = "gone "


class Store(Protocol):
    """What is used of ``torch.distributed.Store``."""

    def set(self, key: str, value: str, /) -> object:
        """Set a key."""
        ...

    def get(self, key: str, /) -> bytes:
        """Return the value of a key that exists."""
        ...

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter and return it."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Say whether all keys exist."""
        ...


class StoreAgreement:
    """One rank's part; rounds follow one another, and every rank begins each after the same step.

    Args:
        store: over a connection that no other thread waits on.
        rank: this rank.
        world_size: ranks that take part.
        generation: their generation.
        wants: says whether this rank wants a vote; called by the thread.
        seal: authenticates what ranks set.

    Raises:
        ExchangeFailed: the store does not answer.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        generation: int,
        wants: Callable[[], bool],
        seal: Seal | None = None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._wants = wants
        self._seal = seal or Seal()
        self._state = threading.Condition()
        self._round = 0
        self._completed = 0
        self._written = False  # how far this rank is, in this round
        self._meet: int | None = None
        self._failure = ""
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        prefix = self._seal.prefix(f"outlast/{generation}/votes")
        try:
            self._prefix = f"{prefix}/{store.add(f'{prefix}/opened/{rank}', 1)}"
        except RuntimeError as error:
            raise ExchangeFailed(f"the vote after a step: the store does not answer ({error})") from error

    def begin(self, step: int) -> None:
        """Begin a round, on every rank after the same step: before a loop, after a vote, after a rollback."""
        with self._state:
            self._round += 1
            self._completed, self._written, self._meet = step, False, None
        if self._thread is None:
            self._stopped.clear()
            self._thread = threading.Thread(target=self._listen, name="votes", daemon=True)
            self._thread.start()
            atexit.register(self.end)  # a thread in the store must not meet the end of the interpreter

    def due(self, step: int) -> bool:
        """Say whether all ranks vote after this step; waits only where somebody has asked for a vote.

        Raises:
            ExchangeFailed: a rank has gone.
        """
        end = 0.0
        with self._state:
            self._completed = step
            while self._written and self._meet is None:
                end = end or time.monotonic() + _ROUND_PATIENCE
                if self._failure or time.monotonic() > end:
                    reason = self._failure or f"not every rank has answered in {_ROUND_PATIENCE:.0f} s"
                    raise ExchangeFailed(f"the vote after step {step}: {reason}; this rank ends")
                self._state.wait(_SLICE)
            return self._meet == step

    def close(self) -> None:
        """End the loop: this rank completes no more steps, and stands in nobody's way."""
        if self._thread is None or not self._stop():
            return
        with self._state:
            turn, step, written = self._round, self._completed, self._written
        if not (written or self._failure):
            with contextlib.suppress(RuntimeError, ExchangeFailed):
                self._write(turn, step)

    def fail(self, reason: str) -> None:
        """Let the others know that this rank ends with an error, and stop."""
        if self._thread is not None and self._stop() and not self._failure:
            with contextlib.suppress(RuntimeError):
                self._set(self._key("meet", self._round), f"{_GONE}rank {self._rank} failed: {reason}")

    def end(self) -> None:
        """End the thread; nobody hears of it."""
        self._stop()

    def _stop(self) -> bool:
        """End the thread; return whether it has ended."""
        thread, self._thread = self._thread, None
        self._stopped.set()
        atexit.unregister(self.end)
        if thread is not None:
            thread.join(_JOIN)
        return thread is None or not thread.is_alive()

    def _listen(self) -> None:
        pause = max(_LOOK, self._world_size / _LOOKS)
        try:
            while not self._stopped.wait(pause):
                self._look()
        except (RuntimeError, ExchangeFailed) as error:
            gone = isinstance(error, RuntimeError)
            with self._state:
                self._failure = (
                    f"the store between the ranks does not answer ({error})" if gone else str(error)
                )
                self._state.notify_all()

    def _look(self) -> None:
        with self._state:
            turn, written, known = self._round, self._written, self._meet is not None
        if known:
            return
        if written:
            self._read(turn)
        elif self._wants():
            self._store.set(self._key("asked", turn), "1")
            self._answer(turn)
        elif self._store.check([self._key("asked", turn)]):
            self._answer(turn)

    def _answer(self, turn: int) -> None:
        with self._state:
            if self._round != turn:
                return
            self._written, step = True, self._completed
        self._write(turn, step)
        self._read(turn)

    def _write(self, turn: int, step: int) -> None:
        self._set(self._key(f"completed/{self._rank}", turn), str(step))
        if self._store.add(self._key("count", turn), 1) == self._world_size:
            every = (self._key(f"completed/{rank}", turn) for rank in range(self._world_size))
            highest = max(self._step(key, self._get(key)) for key in every)
            self._set(self._key("meet", turn), str(highest + 1))

    def _read(self, turn: int) -> None:
        key = self._key("meet", turn)
        if not self._store.check([key]):
            return
        said = self._get(key)
        with self._state:
            if self._round == turn and said.startswith(_GONE):
                self._failure = said.removeprefix(_GONE)
            elif self._round == turn:
                self._meet = self._step(key, said)
            self._state.notify_all()

    def _set(self, key: str, text: str) -> None:
        self._store.set(key, self._seal.close(key, text))

    def _get(self, key: str) -> str:
        return self._seal.open(key, self._store.get(key))

    def _step(self, key: str, text: str) -> int:
        if not (text.isascii() and text.isdecimal() and len(text) < _MOST_DIGITS):
            raise ExchangeFailed(f"store key {key!r}: a step expected, found {text[:40]!r}")
        return int(text)

    def _key(self, name: str, turn: int) -> str:
        return f"{self._prefix}/{turn}/{name}"
