"""The comparison of replicas in a rank: digests are computed here and exchanged through a store.

The digests are computed on the training thread, between two steps; the cost is one pass over the bytes. The
exchange, and the search for the tensors that differ, is done by a thread with its own connection to the
store; its result is seen after one of the next steps.
"""

from __future__ import annotations

import queue
import threading
import warnings
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from xxhash import xxh3_128_hexdigest

from outlast import _torch_compat
from outlast.checkpoint.content.codecs import distributed, local_of
from outlast.checkpoint.content.state import content_of, tensors_in
from outlast.checkpoint.content.tensor_digest import digests_of
from outlast.config import TripwireOptions
from outlast.consistency.policy import Act, Agreement, Bundle, Comparison, Difference, Span
from outlast.errors import ReplicasDiffer, UsageError
from outlast.ipc.exchange import Seal, SoloExchange, StoreExchange, SystemClock
from outlast.ports import Exchange, ExchangeFailed
from outlast.recovery.policy.events import COVERS, Compared, Note, Record

PATIENCE = 600.0  # as for ranks that agree on a checkpoint; other means find the missing ranks
_TOPIC = "tripwire"


@dataclass(frozen=True)
class _Taken:
    """The digests of a rank's tensors after a step, by key of the bundle; in the order of the names."""

    step: int
    bundles: tuple[Bundle, ...]
    digests: Mapping[str, array[int]]

    def of_span(self, key: str, span: Span) -> str:
        found: str = xxh3_128_hexdigest(self.digests[key][slice(*span)].tobytes())
        return found


class Tripwire:
    """Compares the parameters of replicas at a fixed interval of steps.

    Args:
        state: models and optimizers, by name; other objects in it are ignored.
        options: what is compared, and the action.
        exchange: between all ranks; nobody else uses it. None: over the store of the default process group.
        record: takes records; None: they are dropped.
        generation: of the ranks.

    Raises:
        UsageError: there is nothing to compare, or it cannot be told what should be equal.
    """

    def __init__(
        self,
        state: Mapping[str, object],
        options: TripwireOptions,
        exchange: Exchange | None = None,
        record: Callable[[Record], None] | None = None,
        generation: int = 0,
    ) -> None:
        problems = options.problems()
        if options.tripwire_interval is None:
            problems = ("tripwire_interval: steps between two comparisons expected, nothing found",)
        if problems:
            raise UsageError(f"tripwire: {'; '.join(problems)}")
        self._state = dict(state)
        self._exchange: Exchange = exchange or over_the_store(generation)
        self._options = options
        self._interval = options.tripwire_interval or 1
        self._record = record
        self._generation = generation
        self._covers = COVERS[options.tripwire_optimizer]
        self._clock = SystemClock()
        self._group = _group_of(self._exchange, options.tripwire_replicas)
        self._orders: queue.SimpleQueue[_Taken | None] = queue.SimpleQueue()
        self._outcomes: queue.Queue[Difference | None] = queue.Queue()  # see preemption/worker
        self._awaited = 0
        self._agreed = -1
        self._thread: threading.Thread | None = None
        self._problem = ""
        self._told = False

    def begin(self, step: int) -> None:
        """Compare before the first step, also after a load: what differs there was never equal."""
        self._agreed = -1
        self._take(step)

    def after(self, step: int) -> Difference | None:
        """Compute digests if a comparison is due, and return the result of the previous one.

        Every rank calls it after every step. The outcome of a comparison is taken after the next step, so all
        ranks have it at the same one; where it is not there yet, they wait.

        Args:
            step: completed steps.

        Returns:
            None where nothing differs, or nothing was compared.

        Raises:
            ReplicasDiffer: ranks that should hold the same do not, and the action is to raise.
        """
        found = self._answer()
        if found is None and step % self._interval == 0:
            self._take(step)
        return found

    def close(self) -> Difference | None:
        """Wait for the comparison in progress, and return its result, as :meth:`after` does."""
        found = self._answer()
        if self._thread is not None:
            self._orders.put(None)
            self._thread.join(PATIENCE)
            self._thread = None
        return found

    def _take(self, step: int) -> None:
        if self._problem:
            return
        bundles: dict[str, list[tuple[str, int]]] = {}
        named = [(name, one) for name, one in self._tensors() if local_of(one).numel()]
        for (name, one), digest in zip(named, digests_of([one for _, one in named]), strict=True):
            bundles.setdefault(self._holding(one), []).append((name, digest))
        taken = {}
        made = []
        for holding, pairs in sorted(bundles.items()):
            names = tuple(name for name, _ in pairs)
            key = f"{holding} {xxh3_128_hexdigest(repr(names).encode())[:16]}"
            made.append(Bundle(key, names))
            taken[key] = array("Q", (digest for _, digest in pairs))
        if not made:
            raise UsageError("tripwire: no model with parameters was given; nothing can be compared")
        self._orders.put(_Taken(step, tuple(made), taken))
        self._awaited += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="tripwire", daemon=True)
            self._thread.start()

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, holder in self._state.items():
            if isinstance(holder, torch.nn.Module):
                for path, parameter in holder.named_parameters():
                    if getattr(parameter, "_is_flat_param", False) and not self._options.tripwire_replicas:
                        raise UsageError(
                            f"tripwire: {name}.{path} is a flat parameter of FSDP1, of which it is not known"
                            " who holds the same; name the groups with tripwire_replicas, or use fully_shard"
                        )
                    yield f"{name}.{path}", parameter
            elif isinstance(holder, torch.optim.Optimizer) and self._options.tripwire_optimizer:
                for place, tensor in tensors_in(content_of(holder)):
                    yield ".".join((name, *place)), tensor

    def _holding(self, tensor: torch.Tensor) -> str:
        """Return a key that is equal on ranks with the same part of a tensor, on the same kind of device."""
        kind = tensor.device.type
        return self._part(tensor) + ("" if kind == "cpu" else f" on {kind}")

    def _part(self, tensor: torch.Tensor) -> str:
        if self._options.tripwire_replicas:
            return self._group
        if not distributed(tensor):
            return "whole"
        mesh = tensor.device_mesh
        coordinate = mesh.get_coordinate() or ()
        places = [
            f"{placement}@{-1 if placement.is_replicate() else place}/{mesh.size(dimension)}"
            for dimension, (placement, place) in enumerate(zip(tensor.placements, coordinate, strict=True))
        ]
        return " ".join(places)

    def _serve(self) -> None:
        while True:
            taken = self._orders.get()
            if taken is None:
                return
            try:
                self._outcomes.put(self._compare(taken))
            except (ExchangeFailed, ValueError) as error:
                self._problem = f"tripwire: comparison stopped: {error}"
                self._outcomes.put(None)
                return

    def _compare(self, taken: _Taken) -> Difference | None:
        comparison = Comparison(taken.step, self._agreed, taken.bundles, taken.of_span)
        outcome: Agreement | Difference | None = None
        while outcome is None:
            outcome = comparison.hear(self._exchange.gather(_TOPIC, comparison.text(), PATIENCE))
        if isinstance(outcome, Difference):
            return outcome
        self._agreed = taken.step
        self._tell(outcome)
        return None

    def _tell(self, outcome: Agreement) -> None:
        alone = sum(1 for count in outcome.peers.values() if count == 1)
        reason = f"all peers are equal, {len(outcome.peers)} bundle(s) of tensors"
        if alone:
            reason += f"; {alone} of them have no peer"
        digest = xxh3_128_hexdigest(" ".join(sorted(set(outcome.digests.values()))).encode())
        self._write(Compared(*self._now(), outcome.step, digest, reason, covers=self._covers))

    def _now(self) -> tuple[float, float, int]:
        return self._clock.wall(), self._clock.monotonic(), self._generation

    def _write(self, record: Record) -> None:
        if self._exchange.rank == 0 and self._record is not None:
            self._record(record)

    def _answer(self) -> Difference | None:
        """Return the result of the comparison in progress, when it is there."""
        found = None
        if self._awaited and not self._told:
            self._awaited -= 1
            try:
                found = self._outcomes.get(timeout=2 * PATIENCE)
            except queue.Empty:
                self._problem = f"tripwire: comparison stopped: no outcome in {2 * PATIENCE:g} s"
        if self._problem and not self._told:
            self._told = True
            self._write(Note(*self._now(), self._problem))
            warnings.warn(f"outlast: {self._problem}", RuntimeWarning, stacklevel=3)
        if found is None:
            return None
        seen = (found.agreed, found.ranks, found.tensors)
        self._write(Compared(*self._now(), found.step, "", found.reason, *seen, self._covers))
        if self._options.tripwire_action == Act.RAISE.value:
            raise ReplicasDiffer(found.reason, found.step, found.agreed, found.ranks)
        warnings.warn(f"outlast: {found.reason}", RuntimeWarning, stacklevel=3)
        return found


def over_the_store(generation: int, seal: Seal | None = None) -> Exchange:
    """Return an exchange of its own over the store of the default process group."""
    store = _torch_compat.own_store()
    if store is None:
        return SoloExchange()
    return StoreExchange(store, dist.get_rank(), dist.get_world_size(), generation, seal=seal)


def _group_of(exchange: Exchange, groups: Sequence[Sequence[int]]) -> str:
    """Return the key of the group of a rank.

    Raises:
        UsageError: a rank that does not exist is named.
    """
    ranks = exchange.world_size
    unknown = [one for group in groups for one in group if not 0 <= one < ranks]
    if unknown:
        raise UsageError(f"tripwire_replicas: rank {unknown[0]} is named, there are {ranks} ranks")
    for number, group in enumerate(groups):
        if exchange.rank in group:
            return f"group {number}"
    return f"rank {exchange.rank}"
