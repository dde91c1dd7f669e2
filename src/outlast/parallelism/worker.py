"""The data of a rank: micro-batches with exact weights, whatever the number of ranks and their shares."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset

from outlast import settings
from outlast.errors import CheckpointMismatch, UsageError
from outlast.parallelism.policy.samples import Cursor, Sampling, Step
from outlast.parallelism.policy.shares import Slow, shares, speeds_of

_OURS = ("batch_size", "shuffle", "sampler", "batch_sampler", "generator")  # of a DataLoader's options
Timed: TypeAlias = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class MicroBatch:
    """Samples that go through forward and backward together.

    Args:
        data: as the DataLoader collates them.
        weight: the factor of the mean loss of these samples, or of their tokens. With it, the gradient that
            DDP averages over ranks is the mean over the global batch.
        samples: their numbers in the data set; empty: this rank has no samples in this step, takes part in
            the collectives with another rank's, and the weight is 0.
        last: it is the rank's last one of the step, so gradients are reduced in its backward.
    """

    data: Any
    weight: float
    samples: tuple[int, ...]
    last: bool
    _timed: Timed = field(default=contextlib.nullcontext, repr=False)

    @contextlib.contextmanager
    def sync(self, model: torch.nn.Module) -> Iterator[None]:
        """Return a context for forward and backward, in which gradients are reduced for the last one only.

        It is DDP's ``no_sync``, or FSDP2's ``set_requires_gradient_sync``. Rebalancing also measures in it
        how long a micro-batch takes.
        """
        if (reduces := getattr(model, "set_requires_gradient_sync", None)) is not None:
            reduces(self.last)
        own = None if self.last else getattr(model, "no_sync", None)
        with self._timed(), contextlib.nullcontext() if own is None else own():
            yield


class Batches:
    """Yields the micro-batches of this rank, step after step and epoch after epoch, without an end.

    The state (``state_dict``) is the same on every rank: where in the data the whole job is. A job that goes
    on with more or fewer ranks takes the very next sample, and each sample of an epoch once.

    Args:
        dataset: with a length and items by number.
        global_batch: samples of a step, over all ranks; the last step of an epoch may have fewer.
        micro_batch: samples of one forward and backward.
        seed: of the order of samples, which is another one in each epoch; None: by number.
        tokens: weighs gradients by tokens instead of samples: the tokens of each sample by its number; or a
            function that counts those of a micro-batch's ``data``, at the cost of one all-reduce of a number
            in each step.
        group: the ranks that divide the data, among which gradients are averaged; None: all.
        loader: options of :class:`torch.utils.data.DataLoader`: ``num_workers``, ``collate_fn``,
            ``pin_memory``, ... With ``drop_last``, samples at the end of an epoch that fill no step are left
            out.

    Raises:
        UsageError: a value makes no sense; the text names all of them.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        global_batch: int,
        micro_batch: int,
        seed: int | None = 0,
        tokens: Sequence[int] | Callable[[Any], int] | None = None,
        group: dist.ProcessGroup | None = None,
        **loader: Any,
    ) -> None:
        size = getattr(dataset, "__len__", None)
        problems = [f"{name}: it is not an option here" for name in _OURS if name in loader]
        if isinstance(dataset, IterableDataset) or size is None:
            raise UsageError("outlast.Batches: dataset: found no length, expected items by number")
        drop_last = bool(loader.pop("drop_last", False))
        self._sampling = Sampling(size(), global_batch, micro_batch, seed, drop_last)
        problems += self._sampling.problems()
        if tokens is not None and not callable(tokens) and len(tokens) != size():
            problems.append(f"tokens: found {len(tokens)} numbers, expected one for each of {size()} samples")
        if problems:
            raise UsageError(f"outlast.Batches: {'; '.join(problems)}")
        self._dataset, self._options = dataset, loader
        self._tokens = tokens
        self.group = group
        self._counting: dist.ProcessGroup | None = None
        self._cursor = Cursor()
        self._speeds: tuple[int, ...] = ()  # of the ranks in thousandths; empty: all are equal
        self._generation = -1  # in which they were agreed on
        self._fetched: Iterator[Any] | None = None
        self._timed: Timed = contextlib.nullcontext
        self._last_timed: Timed = contextlib.nullcontext

    @property
    def epoch(self) -> int:
        """The epoch in which the latest step was taken."""
        return self._cursor.epoch

    @property
    def shares(self) -> tuple[int, ...]:
        """The micro-batches of each rank in the next step."""
        return self._divide(self._sampling.step(self._cursor))

    def state_dict(self) -> dict[str, Any]:
        """Return where the next step begins; equal on every rank."""
        about = {"size": self._sampling.size, "seed": self._sampling.seed}
        return {"epoch": self._cursor.epoch, "taken": self._cursor.taken, **about}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another job was, of any number of ranks, global batch and micro-batch.

        Raises:
            CheckpointMismatch: it had another data set or seed, so samples would be repeated or left out.
        """
        for name, own in (("size", self._sampling.size), ("seed", self._sampling.seed)):
            if state.get(name) != own:
                raise CheckpointMismatch(
                    f"outlast.Batches: found {name} {state.get(name)} in the checkpoint, expected {own}; some"
                    " samples would be repeated and others left out; use the data set and the seed of the run"
                )
        self._cursor = Cursor(int(state["epoch"]), int(state["taken"]))
        self._fetched = None

    def rebalance(self, slow: Slow) -> tuple[int, ...]:
        """Divide the next steps by the speeds of ranks, on every rank before the same step.

        Args:
            slow: ranks of the group that are slower than the others, each with its speed in thousandths of
                theirs; empty: all are equal.

        Returns:
            The micro-batches of each rank.
        """
        self._speeds = speeds_of(self._place()[1], slow) if slow else ()
        self._fetched = None
        return self.shares

    def measure(self, timed: Timed, last: Timed, generation: int) -> None:
        """Measure micro-batches from now on, for a session begins; the shares are even in a new generation.

        Args:
            timed: the context of every micro-batch but the last of a step.
            last: the context of the last one, in which a rank also waits for others. Every rank has one.
            generation: of the ranks; what they have agreed on holds until it ends.
        """
        self._timed, self._last_timed = timed, last
        self._fetched = self._counting = None
        if generation != self._generation:
            self._generation, self._speeds = generation, ()

    def _place(self) -> tuple[int, int]:
        """Return the rank in the group, and its size."""
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(self.group), dist.get_world_size(self.group)
        context = settings.worker_context()
        return context.rank, context.world_size

    def _divide(self, step: Step) -> tuple[int, ...]:
        world = self._place()[1]
        return shares(step.samples, step.micro_batch, self._speeds or world)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> list[MicroBatch]:
        """Return the micro-batches of this rank in the next step, one at least."""
        step = self._sampling.step(self._cursor)
        parts = self._parts(step)
        fetched, self._fetched = self._fetched, None
        if fetched is None:
            fetched = iter(self._loader(self._cursor))
        data = [next(fetched) for _ in range(max(1, len(parts)))]
        weights = self._weights(step, parts, data) or [0.0]
        self._cursor, self._fetched = step.after, fetched  # after an error the step is fetched again
        samples = parts or [()]
        last = len(data) - 1
        timed = [self._timed] * last + [self._last_timed]
        return [
            MicroBatch(one, weight, numbers, at == last, timed[at])
            for at, (one, weight, numbers) in enumerate(zip(data, weights, samples, strict=True))
        ]

    def _parts(self, step: Step) -> list[tuple[int, ...]]:
        """Return the samples of each micro-batch of this rank."""
        order = self._sampling.order(step.epoch)
        mine = step.of_rank(self._place()[0], self._divide(step))
        return [tuple(order[place] for place in part) for part in mine]

    def _loader(self, cursor: Cursor) -> DataLoader[Any]:
        """Return what fetches the micro-batches of this rank from a cursor on, as long as shares stay."""
        generator = torch.Generator()  # without it, the random state of the script would move on here
        rank = self._place()[0]
        about = (self._sampling.seed or 0, cursor.epoch, cursor.taken, rank)
        generator.manual_seed(hash(about) & (1 << 63) - 1)
        return DataLoader(
            self._dataset, batch_sampler=self._numbers(cursor), generator=generator, **self._options
        )

    def _numbers(self, cursor: Cursor) -> Iterator[list[int]]:
        while True:
            step = self._sampling.step(cursor)
            yield from map(list, self._parts(step) or [(self._sampling.order(step.epoch)[step.first],)])
            cursor = step.after

    def _weights(self, step: Step, parts: list[tuple[int, ...]], data: list[Any]) -> list[float]:
        """Return the part of each micro-batch in the global batch, times the ranks of the average."""
        world = self._place()[1]
        if self._tokens is None:
            return [len(part) * world / step.samples for part in parts]
        if not callable(self._tokens):
            tokens, order = self._tokens, self._sampling.order(step.epoch)
            whole = sum(tokens[order[place]] for place in step.places)
            counts = [sum(tokens[sample] for sample in part) for part in parts]
        else:
            count = self._tokens
            counts = [int(count(one)) for one, _ in zip(data, parts, strict=False)]
            whole = self._sum(sum(counts))
        return [one * world / whole if whole else 0.0 for one in counts]

    def _sum(self, number: int) -> int:
        """Return the sum over the ranks of the group."""
        if self._place()[1] == 1:
            return number
        if self._counting is None:
            ranks = dist.get_process_group_ranks(self.group or dist.group.WORLD)
            self._counting = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        added = torch.tensor([number])
        dist.all_reduce(added, group=self._counting)
        return int(added)


def batches_of(state: Mapping[str, object], context: settings.WorkerContext) -> Batches | None:
    """Return the batches in a training state; None: there are none.

    Raises:
        UsageError: there are several, or ranks are to be rebalanced and do not take their shares from them.
    """
    found = [one for one in state.values() if isinstance(one, Batches)]
    if context.stragglers.get("action") != "rebalance" or context.world_size == 1:
        return found[0] if len(found) == 1 else None
    if len(found) != 1 or found[0].group is not None:
        what = f"found {len(found)}" if len(found) != 1 else "found a group of ranks"
        raise UsageError(
            f"session.restore: the launcher's file says [stragglers] action = 'rebalance', which needs one"
            f" outlast.Batches of all ranks in the state; {what}; pass batches=outlast.Batches(...), or use"
            " another action"
        )
    return found[0]
