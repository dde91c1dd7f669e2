"""A script's own loop whose state a session saves and restores, bit for bit, within an epoch, too.

Frameworks leave it to the script to find its place in the data. Here the loop's place is part of the state:
the epoch, the batches that were taken, and the random states with which the epoch began. After a restart
the epoch begins with those again, the batches that were taken are loaded and dropped, and the random states
of the last completed step are put back.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from outlast.checkpoint.content.random_states import capture_random, restore_random
from outlast.config import CheckpointOptions
from outlast.errors import UsageError
from outlast.worker.session import Session, start

_NONE = object()  # where there is no batch


class Trained(Protocol):
    """What a loop trains, as its framework knows it; an integration fills it in."""

    one_step: str = "step once in a batch"  # what to do where a batch made several steps
    unknown_loader: str = "the loader is not known"

    @property
    def processes(self) -> int:
        """The number of processes that divide the data among them."""

    def loaders(self) -> list[Any]:
        """Return the loaders whose generators belong to the state."""

    def state(self) -> dict[str, Any]:
        """Return what makes up the state, by names that stay the same between runs."""

    def steps(self) -> int:
        """Return a count of optimizer steps, which grows by one with each."""

    def micro_step(self) -> int:
        """Return the framework's count of micro-batches, where loading a batch depends on it."""
        return 0

    def set_micro_step(self, step: int) -> None:  # noqa: ARG002 - most need nothing
        """Set that count."""
        return

    def end(self) -> None:
        """End to count steps."""
        return

    def require_whole(self) -> None:
        """Raise UsageError where the state that was loaded lacks what an epoch needs to go on."""
        return


class ResumedLoop:
    """A loop whose state a session keeps; ``resume`` of an integration makes it.

    Args:
        trained: what the loop trains.
        checkpoints: when and where to save; default as for :func:`outlast.start`.
        name: of the training, as for :func:`outlast.start`.
    """

    def __init__(self, trained: Trained, checkpoints: CheckpointOptions | None, name: str) -> None:
        self._trained = trained
        self._name = name
        self._checkpoints = checkpoints
        self._session: Session | None = None
        self._end: tuple[int, bool] | None = None  # completed steps of a loop that is over, and if it stopped
        self._place = _Place(trained)
        self._steps = 0
        self._reading = False

    @property
    def completed_steps(self) -> int:
        """The number of completed optimizer steps, over all restarts; after the block, too."""
        return self._of_session.completed_steps if self._end is None else self._end[0]

    @property
    def should_stop(self) -> bool:
        """Whether the loop ends before its time, because the job is to end; equal on every rank."""
        return self._of_session.should_stop if self._end is None else self._end[1]

    @property
    def _of_session(self) -> Session:
        if self._session is None:
            raise UsageError("resume: the loop is used outside of its `with` block")
        return self._session

    def __enter__(self) -> ResumedLoop:
        session = start(name=self._name, checkpoints=self._checkpoints)
        self._session, self._end = session, None
        session.register(**self._trained.state(), place=self._place)
        if session.restore():
            self._place.resumes(capture_random())
        self._steps = self._trained.steps()
        return self

    def __exit__(self, *error: Any) -> None:
        session = self._of_session
        self._trained.end()
        try:
            if error[0] is None:
                self._count()
        finally:
            self._end = (session.completed_steps, session.should_stop)
            session.__exit__(*(error if error[0] else sys.exc_info()))
            self._session = None

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the index of each epoch still to do, the one that was interrupted first."""
        while self._place.epoch < total and not self.should_stop:
            yield self._place.epoch
            if not self.should_stop:
                self._place.next_epoch()
                self._count()  # of a batch after which the script left the epoch

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of the present epoch that are still to do, and save between two of them.

        Args:
            loader: one that the integration knows.

        Raises:
            UsageError: the epoch's batches are taken already, the data are shorter than before, or the
                optimizer made more than one step with a batch.
        """
        session, place = self._of_session, self._place
        if self._reading or (place.batches and not place.interrupted):
            raise UsageError(
                "resume: job.batches is called twice in an epoch; loop over a loader for evaluation itself"
            )
        self._reading = True
        try:
            skip, after = place.begin_epoch(loader)
            if place.epoch:
                keep_seed(loader)
            found = iter(loader)
            for number in range(skip):
                if next(found, _NONE) is _NONE:
                    raise UsageError(
                        f"resume: found {number} batches in the epoch, expected at least {skip}, which were"
                        " trained on; the data or the batch size changed"
                    )
                session.heartbeat()
            if after is not None:
                restore_random(after)
                place.restore_step()
            while (batch := next(found, _NONE)) is not _NONE:  # iter() would begin DeepSpeed's loader again
                place.batches += 1
                yield batch
                self._count()
                if session.should_stop:
                    return
        finally:
            self._reading = False

    def _count(self) -> None:
        """Count the step of the last batch, if there was one; what follows a step belongs to its state."""
        made, self._steps = self._trained.steps() - self._steps, self._trained.steps()
        if not made:
            return
        if made > 1:
            raise UsageError(
                f"resume: found {made} optimizer steps within one batch of job.batches, expected at most one;"
                f" {self._trained.one_step}"
            )
        session = self._of_session
        step = session.completed_steps + 1
        done = session.step_done(step)
        if done != step and not session.should_stop:  # the job may end before the first step is counted
            raise RuntimeError(
                f"resume: all ranks went back from step {step} to {done}, which this loop cannot; this rank"
                " ends, and all ranks restart from there"
            )


class _Place:
    """The loop's place in the data.

    Args:
        trained: what the loop trains.
    """

    def __init__(self, trained: Trained) -> None:
        self._trained = trained
        self.epoch = self.batches = 0
        self._batch_size: int | None = None  # of all processes together; None: it is not known
        self.interrupted = False
        self._random: dict[str, Any] | None = None  # at the beginning of the epoch
        self._loaders: list[Any] = []  # the same
        self._step = 0
        self._after: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the place, what the epoch began with, and what the number of batches depends on."""
        return {
            "epoch": self.epoch,
            "batches": self.batches,
            "processes": self._trained.processes,
            "batch_size": self._batch_size,
            "random": self._random,
            "loaders": self._now() if self._random is None else self._loaders,
            "micro_step": self._trained.micro_step(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a place.

        Raises:
            UsageError: it is within an epoch that another number of processes has begun.
        """
        saved, found = state["processes"], self._trained.processes
        if state["random"] is not None and saved != found:
            raise UsageError(
                f"resume: found a world of {found}, expected {saved} processes, as saved: the state is"
                f" of batch {state['batches']} of an epoch, whose data another number of processes"
                " divides otherwise; start the job again with the number that was saved"
            )
        self.epoch, self.batches, self._batch_size = state["epoch"], state["batches"], state["batch_size"]
        self._random, self._loaders = state["random"], state["loaders"]
        self._step = state["micro_step"]

    def resumes(self, after: dict[str, Any]) -> None:
        """Note that the epoch was interrupted after a step, and the random states that the step left."""
        self._after, self.interrupted = after, self._random is not None
        if not self.interrupted:
            self._set_loaders()
            self.restore_step()

    def next_epoch(self) -> None:
        """Go on to the next epoch."""
        self.epoch, self.batches, self._random, self.interrupted = self.epoch + 1, 0, None, False

    def begin_epoch(self, loader: Any) -> tuple[int, dict[str, Any] | None]:
        """Begin an epoch, with the random states with which it began before it was interrupted.

        Returns:
            how many batches were taken, and the random states after the last of them; None: the present ones.

        Raises:
            UsageError: the loader is not known, or its batches have another size than before.
        """
        if not any(loader is one for one in self._trained.loaders()):
            raise UsageError(f"resume: job.batches: {self._trained.unknown_loader}")
        self._trained.require_whole()
        before, self._batch_size = self._batch_size, _batch_size_of(loader, self._trained.processes)
        if self.interrupted and self._random is not None:
            self.interrupted = False
            if before != self._batch_size:
                raise UsageError(
                    f"resume: found batches of {self._batch_size} samples over all processes, expected"
                    f" {before}, as saved within an epoch; use the same batch size until the epoch has ended"
                )
            restore_random(self._random)
            self._set_loaders()
            return self.batches, self._after
        self._random, self._loaders = capture_random(), self._now()
        return 0, None

    def _now(self) -> list[Any]:
        return [state_of_loader(one) for one in self._trained.loaders()]

    def _set_loaders(self) -> None:
        loaders = self._trained.loaders()
        if len(loaders) != len(self._loaders):
            raise UsageError(
                f"resume: found {len(loaders)} loaders, expected {len(self._loaders)}, as saved;"
                " use the same ones"
            )
        for one, state in zip(loaders, self._loaders, strict=True):
            set_loader(one, state)

    def restore_step(self) -> None:
        """Set the framework's count of micro-batches, which loading a batch does not change."""
        self._trained.set_micro_step(self._step)


def keep_seed(loader: Any) -> None:
    """Let a new iterator of persistent workers take its seed from elsewhere than the kept generators.

    Call it before an epoch that is not the first: without a restart the iterator is there, and draws none.
    """
    import torch

    own = getattr(loader, "base_dataloader", loader)  # accelerate's
    if getattr(own, "persistent_workers", False) and getattr(own, "_iterator", None) is None:
        own.generator = torch.Generator().manual_seed(torch.initial_seed())


def _sampler_of(loader: Any) -> Any:
    if hasattr(loader, "get_sampler"):  # accelerate's
        return loader.get_sampler()
    return getattr(loader, "data_sampler", getattr(loader, "sampler", None))  # DeepSpeed's, torch's


def samplers_of(loader: Any) -> list[Any]:
    """Return the samplers of a loader, of indices and of batches, with those that they wrap, each once."""
    rest = [_sampler_of(loader), getattr(loader, "batch_sampler", None)]
    found: dict[int, Any] = {}
    while rest:
        one = rest.pop(0)
        if one is None or id(one) in found:
            continue
        found[id(one)] = one
        rest += [getattr(one, name, None) for name in ("sampler", "batch_sampler")]
        rest.append(getattr(getattr(one, "dataset", None), "_sampler", None))  # Lightning's wrapper
    return list(found.values())


def _generators(loader: Any) -> list[Any]:
    """Return the generators of a loader, each once: those of the loader and of its samplers."""
    found = [getattr(loader, "synchronized_generator", None)]
    found += [getattr(one, "generator", None) for one in samplers_of(loader)]
    found.append(getattr(loader, "generator", None))
    return list({id(one): one for one in found if hasattr(one, "get_state")}.values())


def _batch_size_of(loader: Any, processes: int) -> int | None:
    """Return the samples of a batch over all processes; None: the loader does not say."""
    try:
        total = getattr(loader, "total_batch_size", None)  # of accelerate's
        return int(loader.batch_size) * processes if total is None else int(total)
    except (AttributeError, TypeError):  # without a sampler of batches
        return None


def state_of_loader(loader: Any) -> dict[str, Any]:
    """Return the states of a loader's generators, and what else its order depends on."""
    return {
        "iteration": getattr(loader, "iteration", 0),
        "seed": getattr(_sampler_of(loader), "initial_seed", None),
        "generators": [one.get_state().numpy().tobytes() for one in _generators(loader)],
    }


def set_loader(loader: Any, state: dict[str, Any]) -> None:
    """Set what :func:`state_of_loader` returned."""
    import torch

    if hasattr(loader, "iteration"):
        loader.iteration = state["iteration"]
    if state["seed"] is not None:
        _sampler_of(loader).initial_seed = state["seed"]
    for one, octets in zip(_generators(loader), state["generators"], strict=False):
        one.set_state(torch.frombuffer(bytearray(octets), dtype=torch.uint8))
