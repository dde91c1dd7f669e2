"""The place of a fit in its data: part of a checkpoint of OutlastCheckpointIO, and gone back to.

Lightning makes the iterator of an interrupted epoch before the samplers know the epoch, of a loader that
torchdata has wound forward by the state of rank 0. So here the epoch begins again with the generators as they
were at its start, and the batches that were trained on are loaded and dropped. A loader whose dataset keeps
its own place goes on from the state that this rank saved.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from outlast.checkpoint.content.random_states import capture_random, restore_random
from outlast.errors import UsageError
from outlast.integrations.resuming import samplers_of, set_loader, state_of_loader

_LOG = logging.getLogger("outlast")


class Place:
    """The place of one fit.

    Args:
        alive: called with each batch that is dropped.
    """

    def __init__(self, alive: Callable[[], None]) -> None:
        self._alive = alive
        self._began: dict[str, Any] | None = None  # the generators at the start of the epoch
        self._after: dict[str, Any] | None = None  # those to put back when the next epoch begins
        self._resumed: dict[str, Any] | None = None

    def state(self, trainer: Any) -> dict[str, Any]:
        """Return the place of this rank."""
        loaders = _loaders(trainer)
        own = [one.state_dict() for one in loaders if _keeps_place(one)]
        return {"now": _generators(loaders), "began": self._began, "loaders": own}

    def resume(self, state: dict[str, Any]) -> None:
        """Note the place of this rank in a checkpoint that is being loaded."""
        self._resumed = state
        restore_random(state["now"]["random"])

    def start(self, trainer: Any) -> None:
        """Go to the place, after the loaders were made and before the first batch.

        Raises:
            UsageError: the loaders cannot go on from a place within an epoch.
        """
        loaders, fit = _loaders(trainer), trainer.fit_loop
        own = [one for one in loaders if _keeps_place(one)]
        _refuse(fit, own, loaders)
        state, self._resumed = self._resumed, None
        self._began = self._after = None
        if state is None:
            return
        _set_epoch(loaders, fit.epoch_progress.current.processed)
        progress = fit.epoch_loop.batch_progress
        taken = 0 if progress.is_last_batch else progress.current.ready
        for one, kept in zip(own, state["loaders"], strict=False):
            one.load_state_dict(kept)
        if not taken:
            for one, kept in zip(own, state["loaders"], strict=False):
                if next(iter(one), None) is not None:  # its next epoch has begun already: go back
                    one.load_state_dict(kept)
            self._after = state["now"]
            self._put_back(loaders)
            self._began = _generators(loaders)
            iter(fit._data_fetcher)  # Lightning may call no hook when the epoch begins
            _before_next(fit._data_fetcher, capture_random())
            return
        self._began = state["began"]
        if not own and self._began is not None:
            _set(loaders, self._began)
        iter(fit._data_fetcher)
        if not own:
            self._drop(fit._data_fetcher, taken)
        _before_next(fit._data_fetcher, state["now"]["random"])

    def begin_epoch(self, trainer: Any) -> None:
        """Keep the generators with which an epoch begins, and let its iterator begin with them."""
        loaders, fit = _loaders(trainer), trainer.fit_loop
        self._put_back(loaders)
        self._began = _generators(loaders)
        lightning_does = (
            trainer.current_epoch > 0
            and not getattr(fit, "is_resuming", False)
            and not fit.epoch_loop.restarting
        )
        if not lightning_does:
            iter(fit._data_fetcher)

    def first_batch(self) -> None:
        """Note that an epoch has begun."""
        self._after = None

    def _put_back(self, loaders: list[Any]) -> None:
        if self._after is not None:
            _set(loaders, self._after)

    def _drop(self, fetcher: Any, count: int) -> None:
        """Load batches that were trained on, and drop them.

        Raises:
            UsageError: there are fewer.
        """
        _LOG.info("OutlastCheckpointIO: %d batches that were trained on are loaded and dropped", count)
        for number in range(count):
            try:
                next(fetcher)
            except StopIteration:
                raise UsageError(
                    f"OutlastCheckpointIO: found {number} batches in the epoch, expected at least {count}, as"
                    " were trained on; the data or the batch size changed"
                ) from None
            self._alive()
        fetcher.fetched -= count  # Lightning adds them


class _Then:
    """An iterator that calls something once, before its next value."""

    def __init__(self, values: Iterator[Any], do: Callable[[], Any]) -> None:
        self._values = values
        self._do: Callable[[], Any] | None = do

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        do, self._do = self._do, None
        if do is not None:
            do()
        return next(self._values)


def _before_next(fetcher: Any, states: dict[str, Any]) -> None:
    """Set the generators before the next batch is taken: a validation's loader may draw until then."""
    fetcher.iterator = _Then(fetcher.iterator, lambda: restore_random(states))


def _refuse(fit: Any, own: list[Any], loaders: list[Any]) -> None:
    if own and len(own) < len(loaders):
        other = next(type(one).__name__ for one in loaders if not _keeps_place(one))
        raise UsageError(
            f"OutlastCheckpointIO: found a {type(own[0]).__name__} that keeps its own place beside a {other}"
            " that does not, expected one kind; within an epoch they cannot go on together. Let each dataset"
            " have state_dict and load_state_dict, or none"
        )
    if own and fit._data_fetcher.length is None:
        raise UsageError(
            f"OutlastCheckpointIO: found a {type(own[0]).__name__} that keeps its place, without a length,"
            " so that Lightning takes a batch ahead and its place in a checkpoint is one batch too far. Give"
            " the dataset a __len__, or use torch's DataLoader, whose batches are loaded again"
        )


def _loaders(trainer: Any) -> list[Any]:
    combined = trainer.fit_loop._combined_loader  # None before the fit
    return [] if combined is None else list(combined.flattened)


def _keeps_place(loader: Any) -> bool:
    """Return whether a loader goes on by a state of its own, not by its sampler's order."""
    if not _has_state(loader):
        return False
    return not isinstance(loader, DataLoader) or (
        isinstance(loader.dataset, IterableDataset) and _has_state(loader.dataset)
    )


def _has_state(one: Any) -> bool:
    return hasattr(one, "state_dict") and hasattr(one, "load_state_dict")


def _set_epoch(loaders: list[Any], epoch: int) -> None:
    for loader in loaders:
        for one in samplers_of(loader):
            if hasattr(one, "set_epoch"):
                one.set_epoch(epoch)


def _generators(loaders: list[Any]) -> dict[str, Any]:
    return {"random": capture_random(), "loaders": [state_of_loader(one) for one in loaders]}


def _set(loaders: list[Any], states: dict[str, Any]) -> None:
    if len(loaders) != len(states["loaders"]):
        raise UsageError(
            f"OutlastCheckpointIO: found {len(loaders)} loaders, expected {len(states['loaders'])}, as saved;"
            " use the same ones"
        )
    restore_random(states["random"])
    for one, state in zip(loaders, states["loaders"], strict=True):
        set_loader(one, state)
