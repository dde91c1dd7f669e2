"""What the writers of several nodes agree on: which copy goes to other nodes next, and when one is on disk.

The writer of the node with rank 0 leads; all others tell it how far they are, again and again, and take
from its answers what comes next. Nothing is lost when one of them is killed and starts again.

Replicas. What has gone to other nodes helps only if every node's part of the same step has. So the leader
opens a round: each node sends the first copy that it made after a given step. When all have, that step is
replicated, and what was kept for the step before may go. A node that hears of a round too late has missed
it; the next one begins a little further ahead. While no node makes copies, as in a long evaluation, the
leader opens a round for the newest one that all nodes have.

Disk. Every node writes its files of a copy; when all have, the leader commits it. Its answer to a node names
what it has of that node, and the next report leaves that out. A node alone is its own leader.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from outlast import codec
from outlast.checkpoint.policy.manifest import Contents, Row, are_runs, expanded, nbytes_of, place_of, some
from outlast.codec import Malformed, Meta

_RECENT = 256
_MOST_AHEAD = 64  # steps
_AT_REST = 3  # reports in a row from which nothing has changed
_MOST_WRITTEN = 64  # copies on their way to disk
_MOST_TEXT = 2000  # characters of an error
_Text = Annotated[str, Meta(max_length=4096)]
_Number = Annotated[int, Meta(ge=-1, le=(1 << 62) - 1)]


@dataclass(frozen=True)
class Written:
    """What a node has done for a copy that goes to disk.

    Args:
        name: of the copy.
        own: rows of the node's ranks, each with the rank.
        blocked: seconds that its ranks stood still for it, at most.
        error: why the files are not there; empty: they are.
        session: of the ranks that staged it; parts of two sessions are never put together.
        shared: rows of the files that all ranks share.
        contents: of the documents of the node's ranks.
        ends: how many times the copy had ended before, if its step cannot show its end (it is of an earlier
            generation, or was lost before); -1: its step shows it.
    """

    name: _Text
    own: tuple[tuple[_Number, Row], ...] = ()
    blocked: Annotated[float, Meta(ge=0, le=1 << 62)] = 0.0
    error: _Text = ""
    session: _Text = ""
    shared: tuple[Row, ...] = ()
    contents: Contents = field(default_factory=dict)
    ends: _Number = -1

    @property
    def step(self) -> int:
        """Completed steps."""
        return place_of(self.name)[0]

    @property
    def mark(self) -> str:
        """Names this report in :attr:`Answer.heard`, where a leader lists the reports that it has."""
        return f"{self.name}~{self.session}{'!' if self.error else ''}"

    def is_over(self, answer: Answer) -> bool:
        """Return whether a leader's answer has the end of the copy."""
        if self.ends >= 0:
            return self.ends < answer.ended.get(self.name, 0)
        return self.step <= max(answer.durable_step, answer.lost_step)


@dataclass(frozen=True)
class Report:
    """How far a node is.

    Args:
        node: its name.
        session: of its ranks.
        newest: step of its newest copy in memory; -1: none.
        round: of replicas, the one that it is in; 0: none yet.
        replicated: the step that it has sent in that round; -1: none yet.
        missed: it cannot take part in that round.
        written: copies on their way to disk whose reports the leader does not have.
    """

    node: _Text
    session: _Text
    newest: _Number = -1
    round: _Number = 0
    replicated: _Number = -1
    missed: bool = False
    written: Annotated[tuple[Written, ...], Meta(max_length=_MOST_WRITTEN)] = ()

    def to_values(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        values: dict[str, Any] = codec.values_of(self)
        return values

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Report:
        """Read what :meth:`to_values` returned, through JSON.

        Raises:
            Malformed: it is no report.
        """
        report = codec.convert(values, cls)
        if report.to_values() != values:
            raise Malformed("a report with unknown or missing fields")
        if not all(are_runs(one.contents, len(one.own)) for one in report.written):
            raise Malformed("a report with contents of other documents")
        return report


@dataclass(frozen=True)
class Answer:
    """What a node has to know.

    Args:
        round: of replicas, the present one; 0: none yet.
        after: in it each node sends the first copy that it makes after this step.
        replicated: the newest step of which every node's part is on other nodes; -1: none.
        durable_step: the newest step that is on disk whole; -1: none.
        lost_step: the newest step that was to be, and is not; -1: none.
        failures: copies lost in a row.
        failing: seconds from the first of them to the latest.
        error: why the latest was.
        ended: how often copies ended whose step cannot show that, the latest ones; see :class:`Written`.
        heard: marks of what the leader has of the node that it answers, of copies that have not ended.
    """

    round: int = 0
    after: int = -1
    replicated: int = -1
    durable_step: int = -1
    lost_step: int = -1
    failures: int = 0
    failing: float = 0.0
    error: str = ""
    ended: Mapping[str, int] = field(default_factory=dict)
    heard: tuple[str, ...] = ()


@dataclass(frozen=True)
class Complete:
    """Every node has done its part for a copy on disk, or reported why it cannot.

    Args:
        name: of the copy.
        own: row and digests of contents of each rank.
        shared: rows of the files that all ranks share.
        blocked: seconds that a rank stood still for it, at most.
        errors: of the nodes that failed, each with the node's name; empty: it can be committed.
        session: of the ranks that staged it.
        ends: see :class:`Written`.
    """

    name: str
    own: dict[int, tuple[Row, dict[str, str]]] = field(default_factory=dict)
    shared: tuple[Row, ...] = ()
    blocked: float = 0.0
    errors: tuple[str, ...] = ()
    session: str = ""
    ends: int = -1

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return nbytes_of((*(row for row, _ in self.own.values()), *self.shared))


class Leader:
    """Hears all nodes of a session.

    Args:
        nodes: their names.
        replicate: copies go to other nodes.
        answer: what is on disk already, and how it went before.
        now: monotonic time.
    """

    def __init__(
        self, nodes: Collection[str], replicate: bool, answer: Answer = Answer(), now: float = 0.0
    ) -> None:
        self._nodes = frozenset(nodes)
        self._replicate = replicate
        self._reports: dict[str, Report] = {}
        self._written: dict[tuple[str, str], dict[str, Written]] = {}
        self._unchanged: dict[str, int] = {}  # reports in a row, by node
        self._waiting: dict[str, bool] = {}  # nodes that were not told yet how all their copies ended
        self._ahead = 1
        self._failing_since = now - answer.failing
        self.answer = answer

    def hear(self, report: Report) -> tuple[Complete, ...]:
        """Take a report; return the copies on disk for which it was the last one missing.

        Raises:
            ValueError: it is of no node of this session.
        """
        if report.node not in self._nodes:
            raise ValueError(f"a node of this session expected, {report.node!r} found")
        same = self._reports.get(report.node) == report
        self._unchanged[report.node] = self._unchanged[report.node] + 1 if same else 0
        self._reports[report.node] = report
        if self._replicate and len(self._reports) == len(self._nodes):
            self._turn()
        found = []
        for written in report.written:
            if written.is_over(self.answer):
                continue
            told = self._written.setdefault((written.name, written.session), {})
            new = report.node not in told
            told[report.node] = written
            if new and len(told) == len(self._nodes):
                found.append(_complete(told))
        self._waiting[report.node] = bool(self.answer_to(report.node).heard)
        return tuple(found)

    def answer_to(self, node: str) -> Answer:
        """Return what a node has to know."""
        parts = [told[node] for told in self._written.values() if node in told]
        return replace(self.answer, heard=tuple(one.mark for one in parts if not one.is_over(self.answer)))

    @property
    def waits(self) -> bool:
        """Whether a node was not told yet, by an answer, how a copy on its way to disk ended."""
        return any(self._waiting.values())

    @property
    def lacking(self) -> frozenset[str]:
        """The nodes that have not reported their part of a copy that others have reported."""
        copies = [told for told in self._written.values() if not _any(told).is_over(self.answer)]
        return frozenset(node for told in copies for node in self._nodes - told.keys())

    def _turn(self) -> None:
        """Open the next round when this one is over."""
        answer, reports = self.answer, self._reports.values()
        newest, all_have = (choose(one.newest for one in reports) for choose in (max, min))
        highest = max(one.round for one in reports)
        here = [one for one in reports if one.round == answer.round]
        if highest > answer.round or (answer.round == 0 and newest >= 0):  # higher: of a leader before this
            number, after = highest + 1, newest + self._ahead - 1
        elif len(here) == len(reports) and all(one.missed or one.replicated >= 0 for one in here):
            sent = {one.replicated for one in here}
            if len(sent) == 1 and not any(one.missed for one in here):
                answer = replace(answer, replicated=max(answer.replicated, sent.pop()))
                self._ahead = max(1, self._ahead // 2)
            else:
                self._ahead = min(2 * self._ahead, _MOST_AHEAD)
            number, after = answer.round + 1, newest + self._ahead - 1
        elif self._is_at_rest() and all_have > answer.replicated:
            number, after = answer.round + 1, all_have - 1
        else:
            return
        self.answer = replace(answer, round=number, after=after)

    def _is_at_rest(self) -> bool:
        """Return whether no node makes copies any more, and one has none to send in this round."""
        reports = self._reports.values()
        return any(report.newest <= self.answer.after for report in reports) and all(
            self._unchanged[report.node] >= _AT_REST and report.round == self.answer.round
            for report in reports
        )

    def settled(self, complete: Complete, error: str = "", now: float = 0.0, counts: bool = True) -> None:
        """Record how the commit of a copy ended, or that it was aborted.

        Args:
            complete: the copy.
            error: why it was lost; empty: it was not.
            now: monotonic time.
            counts: its step is one of those that this generation is to save.
        """
        before, ended = self.answer, self.answer.ended
        if complete.ends >= 0 or not counts:
            others = [one for one in ended.items() if one[0] != complete.name]
            ended = dict([*others, (complete.name, ended.get(complete.name, 0) + 1)][-_MOST_WRITTEN:])
        step = place_of(complete.name)[0] if counts else -1
        for key in [key for key in self._written if key[0] == complete.name]:
            del self._written[key]
        if error:
            if not before.failures:
                self._failing_since = now
            self.answer = replace(
                before,
                ended=ended,
                lost_step=max(before.lost_step, step),
                failures=before.failures + 1,
                failing=now - self._failing_since,
                error=error,
            )
        else:
            step = max(before.durable_step, step)
            self.answer = replace(before, ended=ended, durable_step=step, failures=0, failing=0.0, error="")


def _any(told: Mapping[str, Written]) -> Written:
    return next(iter(told.values()))


def _complete(told: Mapping[str, Written]) -> Complete:
    first = _any(told)
    errors = [f"{node and f'node {node}: '}{one.error}" for node, one in sorted(told.items()) if one.error]
    written = [node for node in sorted(told) if not told[node].error]
    own: dict[int, tuple[Row, dict[str, str]]] = {}
    for node in written:
        pairs = zip(told[node].own, expanded(told[node].contents), strict=True)
        mine = {rank: (row, contents) for (rank, row), contents in pairs}
        if own.keys() & mine.keys():
            errors.append(f"node {node} has written files of rank {some(own.keys() & mine.keys())}, too")
        own |= mine
    unlike = [node for node in written if told[node].shared != told[written[0]].shared]
    if unlike:
        errors.append(
            f"the shared files of nodes {written[0]} and {some(unlike)} differ, though their ranks held the"
            " same tensors; the copy is not used"
        )
    return Complete(
        first.name,
        own,
        told[written[0]].shared if written else (),
        max(one.blocked for one in told.values()),
        tuple(errors),
        first.session,
        max(one.ends for one in told.values()),
    )


class Member:
    """One node's part, the leading one's too.

    Args:
        node: its name.
        session: of its ranks.
        copies: number of the newest copies in memory that must stay.
    """

    def __init__(self, node: str, session: str, copies: int = 2) -> None:
        self._node = node
        self.copies = copies
        self._session = session
        self._made: deque[int] = deque(maxlen=_RECENT)
        self._taken = -1
        self._sent: bool | None = None  # whether it could be sent; None: it may be under way
        self._written: dict[str, Written] = {}
        self.answer = Answer()

    @property
    def report(self) -> Report:
        """What the leader has to know."""
        return Report(
            self._node,
            self._session,
            max(self._made, default=-1),
            self.answer.round,
            self._taken if self._sent else -1,
            self._sent is False,
            tuple(one for one in self._written.values() if one.mark not in self.answer.heard),
        )

    def made(self, step: int) -> None:
        """Take note of a new copy in memory."""
        if step not in self._made:
            self._made.append(step)

    def wrote(self, written: Written) -> None:
        """Take note that this node has done its part for a copy on disk.

        Of very many that no leader has answered for, the newest are told: a longer report is not read.
        """
        self._written[written.name] = replace(written, error=written.error[:_MOST_TEXT])
        for old in list(self._written)[:-_MOST_WRITTEN]:
            del self._written[old]

    def hear(self, answer: Answer) -> None:
        """Take an answer of the leader."""
        if answer.round > self.answer.round:
            self._taken, self._sent = -1, None
        else:  # a lower one comes from a leader that has begun anew and has not heard of us yet
            answer = replace(answer, round=self.answer.round, after=self.answer.after)
        answer = replace(answer, replicated=max(answer.replicated, self.answer.replicated))
        self._written = {name: one for name, one in self._written.items() if not one.is_over(answer)}
        self.answer = answer

    def ends(self, name: str) -> int:
        """Return how often a copy has ended; see :class:`Written`."""
        return self.answer.ended.get(name, 0)

    @property
    def pending(self) -> Collection[str]:
        """The copies whose part this node has reported and whose end no leader has reported."""
        return self._written.keys()

    def wanted(self, held: Collection[int]) -> int:
        """Return the step whose copy is to be sent to other nodes now; -1: none.

        Args:
            held: steps of the copies in memory.
        """
        if self.answer.round == 0 or self._sent is not None:
            return -1
        if self._taken < 0:
            later = [step for step in self._made if step > self.answer.after]
            self._taken = min(later, default=-1)
        if self._taken >= 0 and self._taken not in held:
            self._taken, self._sent = -1, False
        return self._taken

    def sent(self, step: int, fine: bool) -> None:
        """Take note of how sending a copy went."""
        if step == self._taken:
            self._sent = fine

    def keep(self, held: Collection[int]) -> frozenset[int]:
        """Return which copies in memory must stay.

        Ranks of different nodes are at most one save apart, so one of a node's newest two is the newest that
        all nodes have.

        Args:
            held: steps of the copies in memory that this session made.
        """
        kept = {*sorted(held)[-self.copies :], self._taken, self.answer.replicated}
        return frozenset(kept & set(held))

    def supersedes(self, replicate: bool) -> bool:
        """Return whether what earlier sessions left in memory may go: this one has made something better.

        Args:
            replicate: copies go to other nodes.
        """
        return self.answer.replicated >= 0 if replicate else len(self._made) >= self.copies
