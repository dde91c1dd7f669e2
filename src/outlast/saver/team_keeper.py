"""The keeper where ranks are on several nodes: keeps this node's part, finishes copies with the others."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

from outlast.checkpoint.tiers.inventory import read_manifest
from outlast.checkpoint.tiers.memory_folder import Members, Status
from outlast.core.alike import ALL
from outlast.core.errors import OutlastError
from outlast.core.events import Note, Record
from outlast.core.joint import Answer, Complete, Member, Written
from outlast.core.manifest import copy_name, parse_copy_name
from outlast.saver.durable import Done, Task, Tasks, commit_parts, write_part
from outlast.saver.keeper import Keeper
from outlast.saver.team import Team, Ties

_ROUNDS = 2  # the present one, and the one before, of which this node may not have heard how it went
_LAST_WORD_SECONDS = 10.0  # how long the others are waited for when the owner has ended


class TeamKeeper(Keeper):
    """Keeps the copies of one node of several.

    Args:
        members: who the ranks are.
        disk: works on the durable tier.
        status: how far the saver is.
        sink: takes records.
        ties: wake this keeper, and prove to others who it is.
        permit: file that says whether this node may commit; "" where nobody watches over that.
    """

    _last = 2

    def __init__(
        self,
        members: Members,
        disk: Tasks,
        status: Status,
        sink: Callable[[Record], None],
        ties: Ties,
        permit: str = "",
    ) -> None:
        assert members.together is not None
        self._ties = ties
        self._sender = Tasks("replicas", ties.ring)
        self._node = members.together.node
        self.team: Team | None = None
        self._member = Member(self._node, members.session)
        self._told: dict[str, dict[str, Any]] = {}  # written here; what is said when all have
        self._to_commit: list[Complete] = []
        self._over_since = 0.0
        self._said = ""
        super().__init__(members, disk, replace(status, replicated_step=-1), sink, permit)
        names = self._stage.tier.names()
        ours = {name for name in names if self._session_of(name) == members.session}
        self._inherited = set(names) - ours
        self._inherited_replicas = {
            (tier.name, name) for tier in self._stage.replica_tiers() for name in tier.names()
        }
        for name in sorted(ours):
            self._member.made(_step(name))

    def _session_of(self, name: str) -> str:
        with contextlib.suppress(OutlastError, OSError), self._stage.tier.open(name) as folder:
            return read_manifest(folder, name)[0].session
        return ""

    def close(self) -> None:
        """Make way for the keeper of the next generation."""
        if self.team is not None:
            self.team.close()

    @property
    def idle(self) -> bool:
        """Whether nothing is owed to the disk or to other nodes, or they were waited for in vain."""
        if self.team is None:
            return True
        if not super().idle or self._disk.task is not None:
            return False
        if not (self._told or self._to_commit or self.team.waits()):
            return True
        return bool(self._over_since) and time.monotonic() - self._over_since > _LAST_WORD_SECONDS

    def look(self) -> None:
        """Do what there is to do; before the table of nodes is there, nothing is committed."""
        together = self.members.together
        if together is None or not together.nodes:
            return
        if self.team is None:
            self.team = Team(self.members, self.status.durable_step, self._ties)
        for answer in self.team.answers():
            self._hear(answer)
        self._to_commit += self.team.completed()
        super().look()
        self._replicate(self.team)
        self.team.tell(self._member.report)
        self._drop_replicas()

    def finish(self) -> None:
        """Have the newest copies in memory written to disk; one of them is what all nodes have."""
        super().finish()
        self._over_since = self._over_since or time.monotonic()

    def _newest(self) -> list[str]:
        """Leave out what is older than a copy that all nodes have brought to disk: nobody waits for it."""
        ours, durable = self.members.generation, self.status.durable_step
        return [name for name in super()._newest() if not _is_older(name, ours, durable)]

    def _sweep(self) -> list[str]:
        together = self.members.together
        assert together is not None
        return self._tier.sweep(self.members.session) if self.members.leads or not together.shared else []

    def _take(self, name: str, session: str) -> bool:
        newest = self.status.memory_step
        taken = super()._take(name, session)
        if taken and self.status.memory_step > newest:
            self._member.made(self.status.memory_step)
        return taken

    def _lost(self, step: int, why: str, staged: Any) -> None:
        """Tell the others when it was to go to disk: they must not wait for this node's part."""
        if any(record.get("durable") for record in staged.values()):
            name, session = copy_name(step, self.members.generation), self.members.session
            self._member.wrote(Written(name, step, error=why, session=session))
        elif not self.members.leads:
            self._note(f"step {step} is not in memory: {why}")
        else:
            super()._lost(step, why, staged)

    def _kept(self, names: list[str]) -> Collection[str]:
        ours = {name: _step(name) for name in names if name not in self._inherited}
        steps = self._member.keep(ours.values())
        kept = {name for name, step in ours.items() if step in steps} | self._told.keys()
        return (
            kept if self._supersedes() else kept | {name for name in self._inherited if self._may_serve(name)}
        )

    def _may_serve(self, name: str) -> bool:
        """Say whether what an earlier session left may still be loaded: by now only what this one began with.

        All of it would take the buffers that this session needs to make something better.
        """
        return self.members.loaded in (None, name)

    def _supersedes(self) -> bool:
        together = self.members.together
        assert together is not None
        return self._member.supersedes(bool(together.holders))

    def _write(self, name: str) -> Callable[[], Any]:
        together = self.members.together
        assert together is not None
        if not together.shared:
            return super()._write(name)
        names = [peer.name for peer in together.nodes]
        place = (names.index(self._node), len(names))
        return partial(write_part, name, self._stage.tier, self._tier, place)

    def _settle(self) -> None:
        if self._disk.task is None and self._to_commit:
            self._commit_next()
        super()._settle()

    def _commit_next(self) -> None:
        """Finish the oldest copy for which every node has done its part."""
        complete = self._to_commit.pop(0)
        together = self.members.together
        assert together is not None
        if complete.errors:
            self._give_up_copy(complete, "; ".join(complete.errors))
        elif together.shared:
            job = partial(commit_parts, complete.name, self._stage.tier, self._tier, complete.files)
            self._disk.begin(Task("commit", complete.name, lambda: (complete, job())))
        else:
            self._have(complete)

    def _have(self, complete: Complete) -> None:
        assert self.team is not None
        record = {**self._told.pop(complete.name, {"step": complete.step}), "blocked": complete.blocked}
        self._saved(complete.name, sum(entry.nbytes for entry in complete.files), record)
        self.team.settled(complete)

    def _give_up_copy(self, complete: Complete, why: str) -> None:
        assert self.team is not None
        self._told.pop(complete.name, None)
        with contextlib.suppress(OSError):
            self._tier.discard(self._tier.begin(complete.name, complete.session))
        super()._lost(complete.step, why, {0: {"blocked": complete.blocked}})
        self.team.settled(complete, why)

    def _done(self, done: Done) -> None:
        if done.task.kind != "commit":
            super()._done(done)
        elif done.error:
            step = _step(done.task.name)
            self._give_up_copy(Complete(done.task.name, step, (), 0.0, (), ""), done.error)
        else:
            self._have(done.value[0])

    def _written(self, done: Done) -> None:
        """Tell the leading node that this one has done its part, or why not."""
        name = done.task.name
        record = self._wanted.pop(name, None) or {"step": _step(name)}
        if _is_older(name, self.members.generation, self.status.durable_step):
            return  # all nodes have brought a later one to disk meanwhile
        files = () if done.error else self._entries(name)
        self._told[name] = record
        blocked, session = record.get("blocked", 0.0), self._session_of(name)
        self._member.wrote(Written(name, _step(name), files, blocked, done.error, session))

    def _entries(self, name: str) -> Any:
        with self._stage.tier.open(name) as folder:
            return read_manifest(folder, name)[0].files

    def _hear(self, answer: Answer) -> None:
        self._member.hear(answer)
        over = max(answer.durable_step, answer.lost_step)
        for name in [name for name in self._told if _step(name) <= over and not self.members.leads]:
            del self._told[name]
        if not self.members.leads:
            if answer.durable_step > self.status.durable_step:
                self._prune_own()
            self.status = replace(
                self.status,
                durable_step=answer.durable_step,
                lost_step=answer.lost_step,
                failures=answer.failures,
                error=answer.error,
            )
        apart = self.status.apart
        if answer.apart and ALL not in apart:
            apart = (*apart, ALL)
        self.status = replace(self.status, replicated_step=self._member.answer.replicated, apart=apart)

    def _prune_own(self) -> None:
        together = self.members.together
        assert together is not None
        if not together.shared:
            self._pruner.prune({self.members.loaded or ""}, self.members.avoid)

    def _replicate(self, team: Team) -> None:
        """Send what is to be sent, and take note of how it went."""
        done = self._sender.result()
        if done is not None:
            self._member.sent(_step(done.task.name), not done.error)
            if done.error and done.error != self._said:
                self._said = done.error
                self._note(f"{done.task.name} was not replicated: {done.error}")
        if self._sender.task is not None or not team.together.holders:
            return
        held = {_step(name): name for name in self._stage.tier.names() if name not in self._inherited}
        step = self._member.wanted(held.keys())
        if step >= 0:
            name = held[step]
            self._sender.begin(Task("send", name, partial(team.send, name, self._stage.tier)))

    def _drop_replicas(self) -> None:
        """Remove what other nodes have sent and do not need any more."""
        replicated = self._member.answer.replicated
        better = self._supersedes()
        for tier in self._stage.replica_tiers():
            names = tier.names()
            ours = sorted(_step(name) for name in names if (tier.name, name) not in self._inherited_replicas)
            kept = {*ours[-_ROUNDS:], replicated}  # the others are of rounds that came to nothing
            for name in names:
                old = (tier.name, name) in self._inherited_replicas
                step = _step(name)
                gone = (better or not self._may_serve(name)) if old else step < replicated or step not in kept
                if gone:
                    with contextlib.suppress(OSError):
                        tier.discard(name)

    def _note(self, text: str) -> None:
        now = {"time": time.time(), "clock": time.monotonic()}
        self._sink(Note(**now, generation=self.members.generation, reason=f"node {self._node}: {text}"))


def _step(name: str) -> int:
    return (parse_copy_name(name) or (-1, -1))[0]


def _is_older(name: str, generation: int, step: int) -> bool:
    place = parse_copy_name(name) or (-1, -1)
    return place[1] == generation and place[0] < step
