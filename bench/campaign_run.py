"""One campaign: generations of a small job, the faults, and the verdict on each restore."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from campaign_harm import MOMENTS, spoil
from campaign_job import Setup, Shift, reference, work
from campaign_oracle import Copies, Oracle, Survey, Wrong, names_in, place_of
from campaign_processes import Processes

_EVENTS = 60  # of the end of the event log, told of a campaign that was wrong
KILLS = 4  # of one campaign's savers: an owner gives up after five that ended within ten seconds
LIVE = {"kill saver": 5, "stop saver": 3, "kill owner": 3, "wipe memory": 1}
GAP = {
    "damage memory": 6,
    "damage disk": 4,
    "damage both": 3,
    "damage everything": 1,
    "delete from disk": 2,
    "wipe memory": 2,
    "kill saver": 3,
    "stop saver": 2,
    "kill owner": 3,
}


@dataclass(frozen=True)
class Plan:
    """A fault that is made while a generation runs.

    Args:
        action: what.
        when: "time" since the fork, "step" that begins, or an event in the folders.
        at: seconds, step after the restored one, or the number of such events.
        delay: seconds from then on.
    """

    action: str
    when: str
    at: float
    delay: float = 0.0

    @classmethod
    def drawn(cls, dice: random.Random, action: str, steps: int) -> Plan:
        if action == "wipe memory":
            return cls(action, "step", dice.randint(1, steps), dice.uniform(0, 0.01))
        draw = dice.random()
        if draw < 0.3:
            return cls(action, "time", dice.uniform(0, 0.02 + 0.02 * steps))
        if draw < 0.6:
            return cls(action, "step", dice.randint(1, steps), dice.uniform(0, 0.006))
        return cls(action, dice.choice(MOMENTS), dice.randint(1, steps), dice.choice((0, 0, 0.0005, 0.002)))

    def __str__(self) -> str:
        at = f"{self.at:.3f} s" if self.when == "time" else f"{self.when} {self.at}"
        return f"{self.action} at {at}" + (f" + {self.delay * 1000:.1f} ms" if self.delay else "")


class Campaign:
    """One campaign, from its seed to its verdict.

    Args:
        seed: of all draws.
        folder: for the disk.
        memory: the memory folder.
        verbose: print each event on stderr.
    """

    def __init__(self, seed: int, folder: Path, memory: Path, verbose: bool) -> None:
        self.dice = random.Random(f"campaign {seed}")
        self.setup = Setup.drawn(seed, self.dice, folder, memory)
        self.processes = Processes(self.setup)
        self.copies = Copies(self.setup)
        self.told: list[dict[str, Any]] = []
        self.lost: list[int] = []
        self._verbose, self._began = verbose, time.monotonic()
        self._kills, self.done, self._disturbed, self._wiped = 0, list[str](), False, False
        self._orphaned: int | None = None  # the step that all ranks had staged when the owner was killed
        self._coming = False  # a copy was being written to disk when a restore was refused
        self.calm, self.wipes = list[int](), 0
        learned = self.processes.start("reference", partial(reference, self.setup))
        self.processes.wait(lambda: not self.processes.runs(learned), "the run without faults")
        self.oracle = Oracle(self.copies, [said["contents"] for said in learned.said])

    def run(self) -> None:
        """Run the campaign.

        Raises:
            Wrong: the oracle found an error.
        """
        last = self.dice.randint(3, 5)
        for number in range(1, last + 1):
            shift, plans = self._drawn(number)
            if not self._generation(shift, plans):
                if self._generation(Shift(last + 1, 2), []) and not self._coming:
                    raise Wrong("fresh start: refused once, and accepted the next time")
                return
            self._gap()
        if self._generation(Shift(last + 1, 3, durable=self.dice.random() < 0.5), []):
            self.processes.part()
            self._generation(Shift(last + 2, 0, memory=False), [])

    def note(self, text: str) -> None:
        self.done.append(text)
        if self._verbose:
            print(f"  {time.monotonic() - self._began:6.3f} {text}", file=sys.stderr)

    # A generation.

    def _drawn(self, number: int) -> tuple[Shift, list[Plan]]:
        dice, steps = self.dice, self.dice.randint(2, 8)
        live = dice.choices(list(LIVE), list(LIVE.values()), k=dice.choice((0, 0, 1, 1, 2)))
        plans = [Plan.drawn(dice, action, steps) for action in live]
        end = dice.random()
        if end < 0.8:
            plans.append(Plan.drawn(dice, f"kill rank {dice.randrange(self.setup.world)}", steps))
        return Shift(number, steps, durable=end > 0.9), plans

    def _generation(self, shift: Shift, plans: list[Plan]) -> bool:
        """Run one generation; return whether it was not refused."""
        processes = self.processes
        if shift.memory:
            processes.ensure_owner()
        survey = self._survey()
        self._tell(shift.generation, survey)
        if self._verbose:
            print(f"generation {shift.generation}: {survey.told()}; {[*map(str, plans)]}", file=sys.stderr)
        self._disturbed = self._wiped = False
        self._orphaned = None
        self.oracle.begin()
        self._set_off(plans)
        self._spawn(shift)
        try:
            processes.wait(self._over, f"generation {shift.generation}")
        finally:
            processes.on_moment = lambda _: None
            processes.end_workers()
        refused = self._review(survey)
        if refused:
            self._coming = bool(survey.passing)
        self._survey()
        return not refused

    def _spawn(self, shift: Shift) -> None:
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) if self.setup.world == 2 else ()
        self.processes.workers = []
        for rank, link in enumerate(pair or (None,)):
            body = partial(work, self.setup, rank, shift, link)
            keep = () if link is None else (link.fileno(),)
            self.processes.workers.append(self.processes.start(f"rank {rank}", body, *keep))
        for one in pair:
            one.close()

    def _set_off(self, plans: list[Plan]) -> None:
        """Plan the faults of this generation."""
        processes = self.processes
        processes.moments.hear()
        processes.moments.look()
        processes.moments.counts.clear()
        self._waiting = [plan for plan in plans if plan.when != "time"]
        for plan in plans:
            if plan.when == "time":
                processes.later(plan.at, partial(self._act, plan))
        processes.on_moment = self._on_moment

    def _on_moment(self, moment: str) -> None:
        self._fire(moment, self.processes.moments.counts[moment])

    def _fire(self, when: str, count: int) -> None:
        for plan in [one for one in self._waiting if one.when == when and one.at <= count]:
            self._waiting.remove(plan)
            if plan.delay:
                self.processes.later(plan.delay, partial(self._act, plan))
            else:
                self._act(plan)

    def _over(self) -> bool:
        """Make the faults that wait for a step; return whether the workers have ended."""
        workers, processes = self.processes.workers, self.processes
        start = workers[0].newest("restored")
        self._fire("step", max(one.newest("begins") for one in workers) - start)
        ended = [one for one in workers if not processes.runs(one)]
        if any(not one.said or "settled" not in one.said[-1] for one in ended):
            processes.rest(self.dice.uniform(0, 0.002))
            processes.end_workers()
        return not any(map(processes.runs, workers))

    def _review(self, survey: Survey) -> bool:
        """Check the reports of the workers of a generation; return whether they were refused."""
        restored, refused = set(), False
        workers = self.processes.workers
        for rank, child in enumerate(workers):
            if child.said and "error" in child.said[-1]:
                self._require_sane(rank, child.said[-1])
        for rank, child in enumerate(workers):
            for said in child.said:
                self._require_sane(rank, said)
                if "restored" in said:
                    self.oracle.judge(rank, said, survey)
                    restored.add(said["restored"])
                elif said.get("ended") == "NoUsableCheckpoint":
                    self.oracle.refused(rank, said["text"], survey)
                    refused = True
        if len(restored) > 1 or (restored and refused):
            raise Wrong(f"ranks differ: restored {sorted(restored)}, refused: {refused}")
        if restored:
            step = restored.pop()
            self.lost.append(self.oracle.restored(step, stays=step <= survey.newest))
            self.calm += [self.lost[-1]] * (not self.oracle.was_hit)
            self.told[-1] |= {"resumed": step, "again": self.lost[-1], "hit": self.oracle.was_hit}
        settled = all(child.said and "settled" in child.said[-1] for child in workers)
        staged = [child.newest("staged") for child in workers]
        certain = min(staged) if settled else min(staged) - 1
        if self._orphaned is not None:
            certain = min(certain, self._orphaned)
        self.oracle.worked(max(child.newest("begins") for child in workers), min(staged), certain)
        verdict = "refused" if refused else "resumed" if "resumed" in self.told[-1] else "killed before"
        self.told[-1] |= {"staged": min(staged), "settled": settled, "verdict": verdict}
        return refused

    def _require_sane(self, rank: int, said: dict[str, Any]) -> None:
        """Check the other reports of a rank."""
        if "error" in said and not (self._wiped and "is not on disk after" in said["error"]):
            raise Wrong(f"error: rank {rank}: {said['error']}")
        if "begins" in said and said["content"] != self.oracle.contents[rank][said["begins"]]:
            raise Wrong(f"wrong bytes: rank {rank}: training left the right path at step {said['begins']}")
        if said.get("ended") == "ExchangeFailed" and not self._disturbed:
            raise Wrong(f"error: rank {rank}: {said['text']}")
        if (said.get("ended") == "SaveFailed" or "not_durable" in said) and not self._wiped:
            raise Wrong(f"error: rank {rank}: a save was lost: {said}")

    def _survey(self) -> Survey:
        """Survey the copies, and check that nothing staged is lost."""
        with self.processes.still():
            survey = self.copies.survey(self.processes.draining())
        self.oracle.require_floor(survey)
        return survey

    def _tell(self, generation: int, survey: Survey) -> None:
        if self.told:
            self.told[-1]["done"] = self.done
        self.told.append(
            {
                "generation": generation,
                "staged_before": self.oracle.staged,
                "left": survey.told(),
                "newest_whole": survey.newest,
            }
        )
        self.done = []

    # What is done.

    def _act(self, plan: Plan) -> None:
        action, processes = plan.action, self.processes
        if action.startswith("kill rank"):
            if processes.kill_worker(int(action.rpartition(" ")[2])):
                self._disturbed = True
                self.note(str(plan))
        elif self._do(action):
            self.note(str(plan))

    def _do(self, action: str) -> bool:
        """Make a fault in owner, writer or memory; return whether that was possible."""
        processes, done = self.processes, False
        if action == "kill saver" and self._kills < KILLS:
            done = processes.kill_saver()
            self._kills += done
        elif action == "stop saver":
            done = processes.stop_saver(self.dice.uniform(0.01, 0.3))
        elif action == "wipe memory":
            done = self._wipe()
        elif action == "kill owner" and processes.kill_owner():
            self._disturbed = done = True
            # The writer ends when all that it sees is on disk; a rank may go on until it is killed.
            self._orphaned = min(one.newest("staged") for one in processes.workers)
            if any(map(processes.runs, processes.workers)):
                processes.later(self.dice.uniform(0, 0.003), self._end_as_guard)
        return done

    def _end_as_guard(self) -> None:
        for rank in range(self.setup.world):
            self.processes.kill_worker(rank)

    def _wipe(self) -> bool:
        memory = self.setup.memory
        if not memory.exists():
            return False
        aside = memory.with_name(f"{memory.name}-gone")
        with contextlib.suppress(FileNotFoundError):
            os.rename(memory, aside)
            shutil.rmtree(aside)
        self._wiped = True
        self.wipes += 1
        self.processes.drain()
        running = [one.newest("begins") for one in self.processes.workers]
        self.oracle.wipe(max(running, default=0))
        return True

    def _gap(self) -> None:
        """Make the faults between two generations."""
        self.processes.rest(self.dice.choice((0, 0, 0.01, 0.03, 0.1)))
        for action in self.dice.choices(list(GAP), list(GAP.values()), k=self.dice.choice((0, 1, 1, 2, 3))):
            if action.startswith(("damage", "delete")):
                with self.processes.still():
                    self._spoil(action)
                    self.oracle.hit(self.copies.survey(self.processes.draining()))
            elif self._do(action):
                self.note(f"{action} between generations")
            self.processes.rest(self.dice.choice((0, 0, 0.01, 0.05)))

    def _spoil(self, action: str) -> None:
        """Damage or delete copies, mostly the newest, while the writer is stopped."""
        memory, disk = self.copies.in_memory, self.setup.disk
        in_memory, on_disk = names_in(memory), names_in(disk)
        chosen: list[Path] = []
        if action in ("damage memory", "damage both"):
            chosen += [memory / name for name in self._choose(in_memory)]
        if action in ("damage disk", "damage both"):
            chosen += [disk / name for name in self._choose(on_disk)]
        if action == "damage everything":
            chosen = [folder / name for folder in (memory, disk) for name in names_in(folder)]
        draining = self.processes.draining()
        self.copies.late |= {path.name for path in chosen if draining and path.parent == disk}
        for path in chosen:
            with contextlib.suppress(OSError):
                self.note(f"{path.parent.name}/{path.name}: {spoil(self.dice, path, self.copies)}")
        if action == "delete from disk":
            for name in self._choose([one for one in on_disk if one not in in_memory[:-1]]):
                shutil.rmtree(disk / name)
                self.copies.late |= {name} if draining else set()
                self.note(f"checkpoints/{name}: deleted")

    def _choose(self, names: list[str]) -> list[str]:
        newest = sorted(names, key=place_of)
        return newest[-1:] if self.dice.random() < 0.75 or not names else [self.dice.choice(names)]


def run(seed: int, verbose: bool = False) -> dict[str, Any]:
    """Run one campaign in this process, which runs nothing else, and return its line."""
    began, wrong = time.monotonic(), ""
    with tempfile.TemporaryDirectory(prefix=f"campaign-{seed}-") as name:
        folder = Path(name)
        memory = Path("/dev/shm") / f"outlast-{folder.name}"
        if not verbose:
            _say_aside(folder / "stderr")
        campaign = Campaign(seed, folder, memory, verbose)
        try:
            campaign.run()
        except Wrong as error:
            wrong = str(error)
        finally:
            campaign.processes.clear()
            for path in memory.parent.glob(f"*{memory.name}"):  # a writer renames it before it removes it
                shutil.rmtree(path, ignore_errors=True)
        log = folder / "events.jsonl"
        events = log.read_text() if log.exists() else ""
        if verbose:
            sys.stderr.write(events)
        errors = "" if verbose else (folder / "stderr").read_text(errors="replace")
        strange = set(os.listdir(folder)) - {"checkpoints", "events.jsonl", "stderr"}
        if not wrong and strange:
            wrong = f"left: files {sorted(strange)}"
    if not wrong and errors and not campaign.wipes:
        wrong = f"error: {errors[-1500:]}"
    if campaign.told:
        campaign.told[-1]["done"] = campaign.done
    setup = campaign.setup
    told = {key: getattr(setup, key) for key in ("world", "width", "every", "staging", "buffers", "owner")}
    return {
        "record": "campaign",
        "seed": seed,
        "verdict": f"wrong: {wrong}" if wrong else campaign.told[-1]["verdict"],
        "again": campaign.lost,
        "again_undamaged": campaign.calm,
        **told,
        "generations": campaign.told,
        "errors": [line for line in errors.splitlines() if "Error" in line],
        **({"events": events.splitlines()[-_EVENTS:]} if wrong else {}),
        "seconds": round(time.monotonic() - began, 3),
    }


def _say_aside(path: Path) -> None:
    """Redirect stderr of this process and its children to a file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 2)
    os.close(descriptor)
