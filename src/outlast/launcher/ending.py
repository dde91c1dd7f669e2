"""The waits of an agent whose job has ended, each with a limit."""

from __future__ import annotations

import math
import selectors
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from outlast.checkpoint.agent import Saving
from outlast.config import Config
from outlast.ipc.processes import state_of
from outlast.launcher.journal import Journal
from outlast.launcher.output.logs import Tails
from outlast.launcher.output.screen import PATIENCE, Console, Screen
from outlast.launcher.signals import Signals
from outlast.launcher.workers import processes
from outlast.launcher.workers.generation import Generation

NOTHING_RAN = 5.0  # seconds for the saver of a launcher that began no generation; its memory folder stays
FILES_PATIENCE = 5.0  # for what is still to be read or written in the run folder
_LOOK_EVERY = 0.1
_SILENT_FOR = 5.0  # seconds of waiting for the saver without a word
_ANSWER_WITHIN = 1.0  # seconds for a worker to say that it saves and ends by itself, before its limit is told
_STOPPED = ("T", "t")
_LATE = 1.0  # seconds that a worker may take to end after its own deadline


def finish_saving(
    saving: Saving,
    patience: float,
    selector: selectors.BaseSelector,
    signals: Signals,
    read: Callable[[], None],
    say: Callable[[str], None],
) -> None:
    """Let the saver bring the newest staged state to disk; a signal that nobody repeats ends the wait.

    Args:
        saving: the saver.
        patience: seconds.
        selector: has the saver and the signals, each as its own data.
        signals: of this process.
        read: takes what the saver says.
        say: told what is waited for, if it takes long.
    """
    deadline, told_at = time.monotonic() + patience, time.monotonic() + _SILENT_FOR
    saving.hang_up()
    while not saving.finished() and time.monotonic() < deadline:
        for key, _ in selector.select(_LOOK_EVERY):
            if key.data is signals and signals.insist():
                deadline = 0.0
            elif key.data is saving.inbox:
                read()
        if time.monotonic() > told_at:
            told_at = math.inf
            say(
                f"the checkpoint writer (pid {saving.pid}) brings the newest step to disk; it has"
                f" {_seconds(patience)}, and a signal ends the wait"
            )
    read()


@dataclass(frozen=True)
class Living:
    """The workers of a job that a person or the cluster ends."""

    generation: Generation
    config: Config
    console: Console
    signals: Signals

    def end_politely(self, asked: int, meanwhile: Callable[[Generation, float], None]) -> None:
        """Pass a signal on, and give the workers their time; less when somebody insists.

        A worker that has been stopped (SIGSTOP) for ``workers_stop_timeout`` is killed: no other signal ends
        it, and workers that save would wait for its agreement until their own deadline.

        Args:
            asked: the signal.
            meanwhile: called again and again while they have it.
        """
        generation, began = self.generation, time.monotonic()
        patience = self.config.fault_tolerance.workers_stop_timeout
        end, left, moved = began + patience, 0.0, dict[int, float]()
        goes, told = f"signal {asked} goes to the workers", ""
        plain = f"{goes}; they have {_seconds(patience)} to end"
        for worker in generation.living():
            worker.send(asked)
        while (now := time.monotonic()) < end and processes.wait_for_end(generation.living(), 0.05):
            meanwhile(generation, now)
            for worker in generation.living():
                if state_of(worker.pid) not in _STOPPED:
                    moved[worker.pid] = now
                elif now > moved.get(worker.pid, began) + patience:
                    moved[worker.pid] = math.inf
                    rank = f"rank {worker.rank} (pid {worker.pid})"
                    self.console.say(f"{rank} has been stopped for {_seconds(patience)}: it is killed now")
                    worker.send(signal.SIGKILL)
            if generation.leaves and not left:
                left = max(patience, generation.leaves - began)
                first = "workers" if told else f"{goes}, which"
                told = f"{first} save and end by themselves; they have {_seconds(left)}"
                self.console.say(told + (" instead" if first == "workers" else ""))
            elif not told and now >= began + _ANSWER_WITHIN:
                told = plain
                self.console.say(told)
            end = max(end, generation.leaves + _LATE)
            if self.signals.insist():
                self.console.say("a second signal came: the workers are killed now")
                return
        if not told:
            self.console.say(plain)


def _seconds(count: float) -> str:
    return f"{count:.0f} s" if math.isfinite(count) else "as long as they need"


def show_the_rest(tails: Tails, screen: Screen, signals: Signals, journal: Journal) -> None:
    """Wait until the console has shown the rest; a signal shortens the wait."""
    limit, answers_until = math.inf, time.monotonic() + FILES_PATIENCE
    while tails.active or screen.waiting:
        tails.finish()
        if signals.taken():
            limit = min(limit, time.monotonic() + PATIENCE)
        now = time.monotonic()
        if tails.waits and now < min(limit, answers_until):
            time.sleep(_LOOK_EVERY)
            continue
        if screen.wait(PATIENCE) and now < limit and not tails.waits:
            continue
        left = tails.unshown
        tails.give_up()
        left += screen.give_up()
        journal.note(f"the console took too long: {left} bytes were not shown; the ranks' are in their logs")
