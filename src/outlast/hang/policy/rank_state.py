"""The state of a rank, from the kernel and its stacks, and its position in the order of collectives.

A silent rank may compute, wait for storage, for the network or for a child process, sleep, or be idle. This
decides whether silence beyond a timeout that the user did not set is a hang.

Each rank numbers the collectives of a group as it enters them, and all ranks of a group enter the same ones
in the same order. A rank that waits in number 7 waits for those that have not entered number 7. The culprit
is the rank that others wait for and that does not wait itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

_BUSY_SHARE = 0.3  # of one processor, the time that it waited for one included
_INNER = 6  # innermost frames in which a library is looked for

_LIBRARIES = (
    "torch/serialization.py",
    "torch/distributed/checkpoint/",
    "<frozen importlib._bootstrap_external>",
    "/shutil.py",
    "/zipfile.py",
    "/tarfile.py",
    "/gzip.py",
    "safetensors/",
    "/h5py/",
)
_STORAGE = ("outlast/checkpoint/", *_LIBRARIES)  # threads of ours are idle there most of the time
_NETWORK = (
    "/socket.py",
    "/ssl.py",
    "/http/client.py",
    "/urllib/request.py",
    "/urllib3/",
    "/requests/",
    "/botocore/",
    "/aiohttp/",
    "/httpx/",
    "/fsspec/",
    "/huggingface_hub/",
)
_LOADER = ("torch/utils/data/dataloader.py",)
_CHILD = ("/subprocess.py", "/multiprocessing/popen_fork.py", "torch/multiprocessing/spawn.py")
_DEBUGGER = ("/pdb.py", "/bdb.py", "/debugpy/", "/pydevd.py", "/IPython/")
_ON_DISK = (
    "nfs",
    "rpc_wait",
    "fuse",
    "request_wait_answer",
    "ceph",
    "ll_",
    "cl_sync",
    "jbd2",
    "io_schedule",
    "folio_wait",
)


class Doing(Enum):
    """What a rank does; the value completes a sentence about it."""

    STOPPED = "is stopped"
    LIMITED = "is stopped and continued again and again, as by cpulimit"
    DEBUGGED = "is held by a debugger"
    STORAGE = "waits for storage: a disk or file system is slow"
    NETWORK = "waits for the network"
    LOADER = "waits for its data loader"
    CHILD = "waits for a process that it started"
    COLLECTIVE = "waits in a collective"
    COMPUTES = "computes"
    SLEEPS = "sleeps until a timer ends"
    NOTHING = "is idle, and waits for nothing that outlast can see"


class Call(Enum):
    """The system call that a thread is in."""

    NONE = ""
    FILE = "a file"  # read, write or sync of a regular file
    SOCKET = "a socket"
    SLEEP = "a sleep"  # or any wait with a time limit and nothing else to wake it
    CHILD = "the end of a child, or what one writes into a pipe"


@dataclass(frozen=True)
class Facts:
    """The facts about one rank.

    Args:
        states: letters of /proc/PID/stat, of the main thread, of each look.
        traced: another process traces it.
        call: the system call that its main thread is in.
        kernel: the kernel's function that its main thread sleeps in (wchan); "" if unknown.
        share: processors that it used or waited for; of a process that uses a GPU it says nothing.
        io: bytes that it read or wrote while it was watched.
        gpu: it has opened a GPU.
        stack: of its main thread, innermost last, "file:function".
        others: stacks of its other threads.
        waiting: its main thread waits for other ranks.
    """

    states: tuple[str, ...]
    traced: bool = False
    call: Call = Call.NONE
    kernel: str = ""
    share: float = 0.0
    io: int = 0
    gpu: bool = False
    stack: tuple[str, ...] = ()
    others: tuple[tuple[str, ...], ...] = ()
    waiting: bool = False


def _within(stack: Sequence[str], places: Iterable[str]) -> bool:
    return any(place in frame for frame in stack[-_INNER:] for place in places)


_SIGNS: tuple[tuple[Doing, Callable[[Facts], bool]], ...] = (
    (Doing.DEBUGGED, lambda seen: seen.traced or "t" in seen.states),
    (Doing.LIMITED, lambda seen: seen.states[-1:] == ("T",) and seen.share > 0),
    (Doing.STOPPED, lambda seen: seen.states[-1:] == ("T",)),
    (Doing.COLLECTIVE, lambda seen: seen.waiting),
    (Doing.STORAGE, lambda seen: "D" in seen.states or seen.kernel.startswith(_ON_DISK)),
    (Doing.STORAGE, lambda seen: seen.call is Call.FILE),
    (Doing.LOADER, lambda seen: _within(seen.stack, _LOADER)),
    (Doing.STORAGE, lambda seen: _within(seen.stack[-2:], _STORAGE)),
    (Doing.COMPUTES, lambda seen: not seen.gpu and seen.share > _BUSY_SHARE),
    (Doing.CHILD, lambda seen: seen.call is Call.CHILD or _within(seen.stack, _CHILD)),
    (Doing.DEBUGGED, lambda seen: _within(seen.stack, _DEBUGGER)),
    (Doing.NETWORK, lambda seen: seen.call is Call.SOCKET or _within(seen.stack[-3:], _NETWORK)),
    (Doing.STORAGE, lambda seen: seen.io > 0),
    (Doing.SLEEPS, lambda seen: seen.call is Call.SLEEP),
    # The main thread waits for one of the others, or may.
    (Doing.STORAGE, lambda seen: any(_within(one[-1:], _LIBRARIES) for one in seen.others)),
    (Doing.NETWORK, lambda seen: any(_within(one[-1:], _NETWORK) for one in seen.others)),
)


def doing_of(facts: Facts) -> Doing:
    """Return what a rank does; the first matching sign counts."""
    return next((doing for doing, shows in _SIGNS if shows(facts)), Doing.NOTHING)


@dataclass(frozen=True)
class GroupState:
    """The position of one rank in one group.

    Args:
        group: name of the group, the same on all its ranks.
        ranks: members, by their numbers in the world.
        entered: number of the last collective that the rank has entered.
        pending: number of the first one that it has entered and not left; 0: there is none.
        operations: number and name of the latest ones.
    """

    group: str
    ranks: tuple[int, ...]
    entered: int
    pending: int = 0
    operations: tuple[tuple[int, str], ...] = ()

    def operation(self, number: int) -> str:
        """Return the name of a collective; "" if it is not recorded any more."""
        return dict(self.operations).get(number, "")


@dataclass(frozen=True)
class OrderVerdict:
    """The culprit by the order of collectives (-1: undetermined), the reason, and the ranks that wait."""

    rank: int
    reason: str
    waiting: tuple[int, ...]


_States = Mapping[int, Sequence[GroupState] | None]
_Behind = dict[tuple[str, int, tuple[int, ...]], dict[int, GroupState]]


def blame_by_order(states: _States, outside: Collection[int] = ()) -> OrderVerdict | None:
    """Return the rank that is behind; None if the sequence numbers do not show it.

    Args:
        states: of each rank that was looked at; None for one that did not answer.
        outside: ranks that were seen outside of every collective, so they do not wait.
    """
    known = {
        rank: {one.group: one for one in groups} for rank, groups in states.items() if groups is not None
    }
    behind: _Behind = {}
    waits = {
        rank: {} if rank in outside else _waits_for(groups, known, behind) for rank, groups in known.items()
    }
    awaited = sorted({other for found in waits.values() for other in found})
    if awaited:
        return _behind(awaited, waits, known, states, outside)
    stuck = {rank: _first_pending(groups) for rank, groups in known.items() if rank not in outside}
    return _all_inside({rank: one for rank, one in stuck.items() if one is not None}, known, states)


def _first_pending(groups: Mapping[str, GroupState]) -> GroupState | None:
    return next((one for one in groups.values() if one.pending), None)


def _waits_for(
    groups: Mapping[str, GroupState], known: Mapping[int, Mapping[str, GroupState]], behind: _Behind
) -> dict[int, GroupState]:
    """Return the ranks that have not entered what a rank waits in, and the state of one that waits there.

    Args:
        groups: of the rank that waits.
        known: all ranks.
        behind: what was found for others that wait in the same collectives; what is found is added.
    """
    found: dict[int, GroupState] = {}
    for mine in groups.values():
        if not mine.pending:
            continue
        place = (mine.group, mine.pending, mine.ranks)
        if place not in behind:
            behind[place] = {
                other: mine
                for other in mine.ranks
                if other in known and _entered(known[other], mine.group) < mine.pending
            }
        found |= behind[place]
    return found


def _entered(groups: Mapping[str, GroupState], group: str) -> int:
    return groups[group].entered if group in groups else 0


def _behind(
    awaited: Sequence[int],
    waits: Mapping[int, Mapping[int, GroupState]],
    known: Mapping[int, Mapping[str, GroupState]],
    states: _States,
    outside: Collection[int],
) -> OrderVerdict | None:
    causes = [rank for rank in awaited if not waits[rank]]
    if not causes:
        names = ", ".join(map(str, awaited))
        return OrderVerdict(-1, f"ranks {names} wait for each other in collectives of different groups", ())
    first = min(causes, key=lambda rank: (_distance(rank, waits, known), rank))
    waiters = tuple(sorted(rank for rank, found in waits.items() if first in found))
    theirs = waits[waiters[0]][first]
    mine = known[first].get(theirs.group)
    held_up_in = None if first in outside else _first_pending(known[first])
    absent = [] if held_up_in is None else _absent(held_up_in, states)
    if any(other in states for other in absent):
        return None  # one of this node did not answer: stacks and process states tell more
    if held_up_in is not None and absent:
        what = f"rank {first} is behind, but waits itself in {_name(held_up_in, held_up_in.pending)}"
        return _elsewhere(what, held_up_in, absent)
    everybody = tuple(sorted(rank for rank in known if waits[rank]))
    others = [rank for rank in causes if rank != first]
    also = f"; so {'are' if len(others) > 1 else 'is'} {_ranks(others)}" if others else ""
    entered = _name(mine, mine.entered) if mine else "none"
    reason = (
        f"rank {first} is behind in the order of collectives: it has entered {entered} of group"
        f" {theirs.group}, rank {waiters[0]} waits in {_name(theirs, theirs.pending)}{also}"
    )
    return OrderVerdict(first, reason, everybody)


def _distance(
    rank: int, waits: Mapping[int, Mapping[int, GroupState]], known: Mapping[int, Mapping[str, GroupState]]
) -> int:
    """Return minus the number of collectives by which a rank is behind the one that waits longest for it."""
    theirs = [found[rank] for found in waits.values() if rank in found]
    return -max(one.pending - _entered(known[rank], one.group) for one in theirs)


def _absent(state: GroupState, states: _States) -> list[int]:
    """Return the ranks of a group without evidence: no answer, or on other nodes."""
    return [rank for rank in state.ranks if states.get(rank) is None]


def _elsewhere(what: str, state: GroupState, absent: Sequence[int]) -> OrderVerdict:
    some = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
    return OrderVerdict(-1, f"{what} of group {state.group}, for ranks of other nodes ({some})", ())


def _all_inside(
    stuck: Mapping[int, GroupState], known: Mapping[int, Mapping[str, GroupState]], states: _States
) -> OrderVerdict | None:
    """Decide about ranks that have all entered what the others wait in."""
    if not stuck:
        return None
    one = stuck[min(stuck)]
    members = {rank: known[rank][one.group] for rank in known if one.group in known[rank]}
    names: dict[str, list[int]] = {}
    for rank, state in members.items():
        names.setdefault(state.operation(one.pending), []).append(rank)
    if len(names) > 1 and "" not in names:
        return _mismatch(one, names)
    absent = _absent(one, states)
    if absent and stuck.keys() >= states.keys():
        return _elsewhere(f"every rank of this node waits in {_name(one, one.pending)}", one, absent)
    if not stuck.keys() >= {*one.ranks}:
        return None
    what = f"every rank has entered {_name(one, one.pending)} of group {one.group}, and none has left it"
    return OrderVerdict(-1, f"{what}: a link is down?", ())


def _mismatch(one: GroupState, names: Mapping[str, list[int]]) -> OrderVerdict:
    sides = sorted(names.items(), key=lambda side: (len(side[1]), side[1]))
    told = "; ".join(f"{name} on {_ranks(ranks)}" for name, ranks in sides)
    what = f"collective {one.pending} of group {one.group} is not the same on all ranks: {told}"
    (_, odd), (_, next_odd) = sides[:2]
    if len(odd) == len(next_odd):
        return OrderVerdict(-1, f"{what}; which side is wrong is not known", ())
    waiting = tuple(sorted(rank for ranks in names.values() for rank in ranks if rank not in odd))
    return OrderVerdict(odd[0], f"rank {odd[0]} is in another collective: {what}", waiting)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def _name(state: GroupState, number: int) -> str:
    operation = state.operation(number)
    return f"number {number} ({operation})" if operation else f"number {number}"
