"""Are all ranks there? One answer for all of them, over the store: never in the training's stream.

Each rank says in the store that it has arrived. The last one to do so writes that nobody is missing; a rank
whose patience ends writes who is. Only the first of these writes counts (``compare_set``), and everybody goes
by what then stands there, who comes late too: that is why the answer is the same on all.

A collective with a timeout cannot do that: a late rank may still complete what the others have abandoned,
so it says yes and they say no, and giving up on NCCL aborts the communicator.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from outlast import _torch_compat, settings

_LOG = logging.getLogger("outlast")
_SLICE = 1.0  # the longest uninterrupted wait in the store: signals are handled in between
_LOOK = 0.001  # between two looks at the device


class Ping:
    """Asks again and again, on all ranks in the same order.

    Args:
        store: a ``torch.distributed.Store`` that all ranks reach and nobody else waits on.
        rank: this rank.
        world_size: of the ranks.
        generation: of the ranks; keys of another one are never read.
        device_done: marks what the device has been given so far and returns what says, without waiting,
            whether that is done; returns None where no device is used.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        generation: int = 0,
        device_done: Callable[[], Callable[[], bool] | None] = lambda: None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._prefix = f"outlast/{generation}/ping"
        self._device_done = device_done
        self._rounds = itertools.count(1)
        self._spent: list[str] = []

    def all_there(self, timeout: float) -> bool:
        """Return whether every rank arrived in time, with its device; equal on all ranks.

        Args:
            timeout: seconds from this call on.
        """
        base = f"{self._prefix}/{next(self._rounds)}"
        deadline = time.monotonic() + timeout
        try:
            trouble = self._trouble_of_device(deadline, timeout)
            if trouble:
                _LOG.warning("rank %d: its device %s", self._rank, trouble)
                verdict = self._decide(base)
            else:
                verdict = self._arrive(base, deadline)
            missing = json.loads(verdict)
            if not missing:
                self._clean_up()
        except RuntimeError as error:
            _LOG.warning("rank %d: the store between the ranks does not answer (%s)", self._rank, error)
            return False
        if missing:
            ranks = ", ".join(map(str, missing))
            _LOG.warning("rank %d: not there within %g s: rank %s", self._rank, timeout, ranks)
        self._spent += [f"{base}/{self._rank}"]
        self._spent += [f"{base}/count", f"{base}/verdict"] if self._rank == 0 else []
        return not missing

    def _clean_up(self) -> None:
        """Remove this rank's keys of earlier rounds: who has arrived in this one has read those."""
        for key in self._spent:
            self._store.delete_key(key)
        self._spent = []

    def _trouble_of_device(self, deadline: float, timeout: float) -> str:
        """Wait for the device; return what is wrong with it, "" for nothing."""
        try:
            done = self._device_done()
            while done is not None and not done():
                if time.monotonic() > deadline:
                    return f"has not done its work after {timeout:g} s"
                time.sleep(_LOOK)
        except RuntimeError as error:
            return f"has failed ({error})"
        return ""

    def _arrive(self, base: str, deadline: float) -> str:
        self._store.set(f"{base}/{self._rank}", "there")
        if self._store.add(f"{base}/count", 1) == self._world_size:
            return self._settle(base, [])
        while not self._store.check([f"{base}/verdict"]):
            left = deadline - time.monotonic()
            if left <= 0:
                return self._decide(base)
            self._wait(f"{base}/verdict", min(left, _SLICE))
        found: str = self._store.get(f"{base}/verdict").decode()
        return found

    def _wait(self, key: str, seconds: float) -> None:
        """Wait for a key; that it did not come is seen by the caller, as that the store is gone."""
        began = time.monotonic()
        try:
            self._store.wait([key], timedelta(seconds=seconds))
        except RuntimeError:
            if time.monotonic() - began < 0.5 * seconds:
                raise

    def _decide(self, base: str) -> str:
        ranks = range(self._world_size)
        return self._settle(base, [rank for rank in ranks if not self._store.check([f"{base}/{rank}"])])

    def _settle(self, base: str, missing: list[int]) -> str:
        """Write the verdict unless there is one; return the one that counts."""
        found: bytes = self._store.compare_set(f"{base}/verdict", "", json.dumps(missing))
        return found.decode()


class _Here:
    """The ping of this process, and the store that it was made for."""

    ping: Ping | None = None
    store: Any = None


def check_nccl_health(timeout_sec: float = 10.0) -> bool:
    """Say whether all ranks are there and their devices have done their work: KempnerForge's function.

    Unlike there, all ranks get the same answer, it works without NCCL as well, and the communicator is
    neither used nor aborted. Every rank calls it at the same step. Who is missing is logged (logger
    ``outlast``). A rank that cannot reach the store says no by itself.

    Under ``outlast run`` it is not needed: agents see a silent rank and, within milliseconds, a dead one,
    and name the culprit, without any call.

    Args:
        timeout_sec: seconds to wait for the others (KempnerForge, 10).

    Returns:
        True where there is no process group.
    """
    store = _torch_compat.default_store()
    if store is None:
        return True
    if _Here.store is not store or _Here.ping is None:
        own = _torch_compat.own_store()
        generation = settings.worker_context().generation
        _Here.ping = Ping(own, dist.get_rank(), dist.get_world_size(), generation, _device_done)
        _Here.store = store
    return _Here.ping.all_there(timeout_sec)


def _device_done() -> Callable[[], bool] | None:
    """Mark where the current stream is; None: this process uses no CUDA device."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
    mark.record()
    return mark.query
