"""The session: what a training script holds to be watched, saved and resumed.

``outlast.start()`` works the same under ``outlast run``, under torchrun and in a plain
``python train.py``: without an agent the page is read by nobody and the event log is
written by rank 0 itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from outlast import _torch_compat, settings
from outlast.checkpoint.checkpointer import Checkpointer, Identity
from outlast.checkpoint.meeting import Place
from outlast.checkpoint.memory_folder import MemoryFolder, default_root
from outlast.checkpoint.staging import Order
from outlast.core.config import Checkpoints
from outlast.core.errors import OutlastError, RunFolderBusy, RunFolderUnusable, StaleGeneration, UsageError
from outlast.core.pacing import NextSave
from outlast.core.ports import Exchange
from outlast.observe.run_folder import RunFolder
from outlast.transport.clock import SystemClock
from outlast.transport.exchange import SoloExchange, StoreExchange
from outlast.transport.pulse import RankState, Section
from outlast.transport.saver_process import SaverProcess
from outlast.worker import liveness
from outlast.worker.memory_saves import MemorySaves
from outlast.worker.reporting import Reporting

DEFAULT_SAVE_SECONDS = 60.0


def start(
    run_dir: str | None = None,
    *,
    save_interval: int | None = None,
    save_interval_seconds: float | None = None,
    non_persistent_save_interval: int | None = None,
    keep_last_n: int | None = None,
    checkpoints: Checkpoints | None = None,
) -> Session:
    """Begin to watch and save this rank.

    Args:
        run_dir: the run folder when no launcher has named one; default ``outlast-runs/<script>``.
        save_interval: steps between two checkpoints on disk.
        save_interval_seconds: seconds between two checkpoints on disk; 60 when neither is given.
        non_persistent_save_interval: steps between two checkpoints in memory; chosen by cost when it is
            not given.
        keep_last_n: committed checkpoints to keep, at least 2; 3 when it is not given.
        checkpoints: all options; the arguments above win.

    Raises:
        UsageError: an option makes no sense, or the launcher and ``run_dir`` name different folders.
    """
    context = settings.worker_context()
    given = {
        "save_interval": save_interval,
        "save_interval_seconds": save_interval_seconds,
        "non_persistent_save_interval": non_persistent_save_interval,
        "keep_last_n": keep_last_n,
    }
    named = {name: value for name, value in given.items() if value is not None}
    wanted = dataclasses.replace(checkpoints or Checkpoints(), **named)  # type: ignore[arg-type]  # each its own
    options = settings.checkpoints_in_force(wanted, context)
    problems = options.problems()
    if problems:
        raise UsageError(f"outlast.start: {'; '.join(problems)}")
    if options.save_interval is None and options.save_interval_seconds is None:
        options = dataclasses.replace(options, save_interval_seconds=DEFAULT_SAVE_SECONDS)
    if run_dir is not None and context.run_dir and RunFolder(run_dir).root != RunFolder(context.run_dir).root:
        raise UsageError(
            f"outlast.start: run_dir={run_dir!r}, but the launcher was started with --run-dir "
            f"{context.run_dir!r}; leave run_dir out, or name the same folder"
        )
    return Session(context, options, RunFolder(run_dir or context.run_dir or settings.default_run_dir()))


class Session:
    """One rank's hold on its run; use it as a context manager, on the main thread."""

    def __init__(self, context: settings.WorkerContext, options: Checkpoints, folder: RunFolder) -> None:
        self._context = context
        self._options = options
        self._folder = folder
        self._page = liveness.attach(context.pulse_path or None)
        liveness.take_over()
        self._page.mark("session")
        self._clock = SystemClock()
        self._reporting = Reporting(context, folder)
        self._checkpointer: Checkpointer | None = None
        self._state: dict[str, object] = {}
        self._saved_step = -1
        self._staged_step = -1
        self._steps_here = 0
        self._saver: SaverProcess | None = None
        self._cadence = NextSave(options.save_interval, options.save_interval_seconds)
        interval = options.non_persistent_save_interval
        self._in_memory = MemorySaves(interval, context.restart_count, options.timeout)
        self.step = 0

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()

    def section(self, name: str) -> Section:
        """Return the named section of the step: ``with session.section("forward"): ...``."""
        return self._page.section(name)

    def pulse(self) -> None:
        """Say that the rank is alive, in a stretch that is longer than its timeout."""
        self._page.pulse(self.step)

    def restore(self, **state: object) -> int:
        """Register what makes up the training state and load the newest checkpoint that can be trusted.

        Args:
            state: anything with ``state_dict`` and ``load_state_dict`` (model, optimizer, scheduler,
                sampler, ...), by a name that stays the same between runs. The random states of
                python, numpy and torch are kept besides.

        Returns:
            The number of completed steps; 0 when the run is new.

        Raises:
            NoUsableCheckpoint: copies exist, none can be trusted; there is no silent fresh start.
            CheckpointMismatch: the checkpoint is of another world size, model or run.
        """
        self._state = dict(state)
        exchange = self._exchange()
        self._page.mark("group")
        self._checkpointer = self._open_checkpointer(exchange)
        with self._page.section("checkpointing"):
            found = self._checkpointer.restore(self._state, self._context.avoid)
        self.step = self._saved_step = 0 if found is None else found.step
        if found is None:
            self._saved_step = -1
        self._page.mark("loaded")
        self._cadence.begin(self.step, self._clock.monotonic())
        return self.step

    def steps(self, total: int) -> Iterator[int]:
        """Yield the index of each step still to do; pulse after each and save when one is due.

        The state is saved once more after the last step, so that the same command run again
        finds nothing to do.
        """
        page = self._page
        warmup, step = page.section("warmup"), page.section("step")
        warm_after = self._context.num_warmup_iterations
        page.set_state(RankState.RUNNING)
        while self.step < total:
            page.outside()
            began = self._clock.monotonic()
            with step if self._steps_here >= warm_after else warmup:
                yield self.step
            self.step += 1
            self._steps_here += 1
            page.pulse(self.step)
            self._in_memory.trained(self._clock.monotonic() - began)
            page.learning = self._steps_here > warm_after
            if self._steps_here == 1:
                page.mark("first_step")
            if self._checkpointer is None or self.step >= total:
                continue
            if self._cadence.due(self.step):
                self._save_or_agree()
            else:
                self._save_in_memory(self._checkpointer)
        if self._checkpointer is not None and self._saved_step != self.step:
            self.save("the last step is done", wait=True)
        else:
            self._wait_for_disk()

    def save(self, why: str = "the script asked for it", *, wait: bool = False) -> bool:
        """Save now; return False when it could not be written (the older checkpoints stay).

        Every rank calls it at the same step. Training goes on while the saver writes; with
        ``async_save`` off, the call returns when the checkpoint is on disk.

        Args:
            why: one sentence for the event log.
            wait: return only when it is on disk, or lost.

        Raises:
            UsageError: ``restore`` has not been called, so nothing is registered.
            SaveFailed: it failed several times in a row, on every rank alike.
            StaleGeneration: a newer generation of this run has started; this rank must not write.
        """
        if self._checkpointer is None:
            raise UsageError(
                "session.save: nothing is registered; call session.restore(model=..., ...) first"
            )
        self._fence()
        with self._page.section("checkpointing"):
            saved = self._save_state(self._checkpointer, why, durable=True)
            if saved:
                self._staged_step = self.step
            if saved and wait:
                saved = self._wait_for_disk()
            self._settle()
        self._page.touch()
        if saved:
            self._saved_step = self.step
        return saved

    def _save_state(self, checkpointer: Checkpointer, why: str, durable: bool) -> bool:
        if self._options.async_save:
            return checkpointer.stage(Order(self.step, durable, why), self._state)
        return checkpointer.save(self.step, self._state, why)

    def _save_in_memory(self, checkpointer: Checkpointer) -> None:
        """Save for the memory tier alone, when that is due."""
        if not self._options.async_save or not self._in_memory.due(self.step):
            return
        began = self._clock.monotonic()
        with self._page.section("checkpointing"):
            self._save_state(checkpointer, self._in_memory.reason, durable=False)
            now = self._clock.monotonic()
            self._in_memory.saved(now - began, checkpointer.exchange, now)
        self._page.touch()

    def _wait_for_disk(self) -> bool:
        """Wait until the latest state that this process saved is on disk; return whether it is."""
        if self._checkpointer is None or not self._options.async_save or self._staged_step < 0:
            return True
        with self._page.section("checkpointing"):
            return self._checkpointer.durable(self._staged_step)

    def _fence(self) -> None:
        """Refuse to write once the agent has started a newer generation."""
        if not self._context.launched:
            return
        state = self._folder.read(self._folder.job_state) or {}
        newest = state.get("generation", 0)
        if newest > self._context.generation:
            raise StaleGeneration(
                f"rank {self._context.rank} of generation {self._context.generation} tried to save step "
                f"{self.step}, but generation {newest} is in force; nothing was written"
            )

    def close(self) -> None:
        """Say that no more pulses come."""
        self._page.set_state(RankState.DONE)
        if self._checkpointer is not None:
            self._checkpointer.settle()
        if self._saver is not None:
            self._saver.hang_up()

    def _exchange(self) -> Exchange:
        world = self._context.world_size
        if world == 1:
            return SoloExchange()
        store = _torch_compat.default_store()
        if store is None:
            raise UsageError(
                f"session.restore: {world} ranks must agree on a checkpoint, but there is no process group; "
                "call torch.distributed.init_process_group first"
            )
        return StoreExchange(store, self._context.rank, world, self._context.generation)

    def _open_checkpointer(self, exchange: Exchange) -> Checkpointer:
        context = self._context
        run_id = context.run_id
        if not context.launched:
            run_id = self._claim(exchange)
        identity = Identity(run_id, context.generation, context.rank, context.world_size)
        found = Checkpointer(
            self._folder.checkpoints, identity, exchange, self._options, self._clock, self._reporting.record
        )
        if self._options.async_save:
            base = self._options.non_persistent_local_ckpt_dir
            root = Path(context.memory_path or default_root(run_id, context.node, base))
            if not context.memory_path:
                self._saver = SaverProcess(root, "", self._folder.events)
                if context.rank == 0:
                    self._folder.note_memory(root)
            place = Place.of(context.node, context.domains, context.master_addr)
            found.through_memory(MemoryFolder(root), self._call_saver, place)
        return found

    def _call_saver(self) -> None:
        """Without a launcher one rank of each node owns the saver."""
        if self._saver is not None:
            self._saver.ensure()

    def _claim(self, exchange: Exchange) -> str:
        """Without a launcher rank 0 takes the run folder, and every rank hears how that went."""
        answer = ""
        if self._context.rank == 0:
            try:
                answer = "ok " + self._folder.claim()
            except OutlastError as error:
                answer = f"{type(error).__name__} {error}"
        verdict, _, text = exchange.gather("claim", answer, self._options.timeout)[0].partition(" ")
        if verdict != "ok":
            raise {"RunFolderBusy": RunFolderBusy, "RunFolderUnusable": RunFolderUnusable}[verdict](text)
        if self._context.rank == 0:
            self._reporting.open_log(text, self._context.world_size, self._clock)
        return text

    def _save_or_agree(self) -> None:
        if self._cadence.measuring:
            self._settle()
        else:
            self.save(self._cadence.reason)

    def _settle(self) -> None:
        """Agree on the next save; rank 0's clock counts, since no two clocks agree."""
        now = self._clock.monotonic()
        rate = self._cadence.seconds_per_step(self.step, now)
        if self._options.save_interval_seconds is not None and self._checkpointer is not None:
            answers = self._checkpointer.exchange.gather("rate", rate.hex(), self._options.timeout)
            rate = float.fromhex(answers[0])
        self._cadence.settle(rate, self.step, now)
