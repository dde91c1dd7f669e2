"""The memory folder: where ranks stage and the writer takes over, on tmpfs, so that it outlives both.

Folders, each on the same file system, so that a file goes from one to the next by a rename::

    pool/<rank>/        buffers that nobody uses; their pages are there already
    pool/alike-<n>/     likewise, for a file of tensors that all ranks hold alike
    staged/<copy>~<session>/    being filled: a rank's buffer and document, and last its ``.staged`` record
    memory/<copy>/      the memory tier: complete copies in the format of every other tier
    landing/<copy>/     shared files of a copy on disk, for a load

A buffer that a rank takes from its pool comes back there when the copy that it became a part of is dropped.
Nothing is ever written into a file that has its place in ``memory``.

Beside them: ``members.json``, written by the ranks; ``status.json``, written by the checkpoint writer;
``bell``, a socket that wakes it; ``lock``, held by it; ``owners``, of which each owner of a writer holds a
byte; ``flush``, a request that the newest copy goes to disk now.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from outlast import codec, files
from outlast.checkpoint.policy.manifest import (
    DOCUMENT_BYTES,
    parse_copy_name,
    place_of,
    rank_files,
)
from outlast.checkpoint.replica.handshake import Credentials, Party
from outlast.checkpoint.tiers.tier import DirectoryTier
from outlast.checkpoint.writer_process import BELL, MEMBERS, MEMORY_PREFIX
from outlast.errors import CheckpointError

STAGED = ".staged"
_TRAININGS = "trainings"
_TRIES = 20  # to make a folder that others remove
_ALIKE = "alike"
_STILL_OPEN = {errno.ENOTEMPTY, errno.EBUSY}  # NFS keeps names of open files; the folder is swept later
_FOLDERS = ("pool", "staged", "memory", "replica", "joined", "landing", "wishes")
LANDING = "landing"  # the folder, and the name under which the writer serves it
_SHOWN = 64  # characters of a run id in the name of its memory folder
_SAID_BYTES = 64 << 20  # who the ranks of a large job are, and where their writers listen
_Said = TypeVar("_Said", bound="Members | Status")


class DamagedRecord(CheckpointError):
    """What a rank says of a state that it has staged is not as it was left."""


@dataclass(frozen=True)
class Peer:
    """A node of the job, as the writers of the others know it.

    Args:
        name: of the node.
        ranks: those on it.
        host: where its writer listens.
        port: likewise.
    """

    name: str
    ranks: tuple[int, ...]
    host: str
    port: int


@dataclass(frozen=True)
class Together:
    """What a writer must know of the other nodes' writers.

    Args:
        node: name of its own node.
        host: where it listens.
        shared: the durable folder is one for all nodes; otherwise each has one of its own.
        holders: the nodes to which replicas of this node's part go.
        holds: the nodes of which it takes replicas, each with the most bytes that one may have.
        bandwidth: bytes a second that replicas may take; None: no limit.
        nodes: all of them; empty: the table is not there yet, and nothing is committed before it is.
    """

    node: str
    host: str
    shared: bool = True
    holders: tuple[str, ...] = ()
    holds: Mapping[str, int] = field(default_factory=dict)
    bandwidth: float | None = None
    nodes: tuple[Peer, ...] = ()


@dataclass(frozen=True)
class Members:
    """What the ranks of a generation report to their node's writer.

    Args:
        generation: theirs.
        session: drawn anew whenever ranks meet; what two of them stage is never mixed.
        run_id: of the run.
        world_size: ranks of the job.
        ranks: those on this node.
        tier: folder of the durable copies.
        stage: folder that holds pool, staged and memory.
        keep_last_n: durable copies that retention keeps.
        loaded: name of the copy that this generation loaded; empty: none; None: it has not looked yet.
        avoid: copies that must not be loaded.
        together: the other nodes' writers; None: all ranks are on this node.
        global_url: the global tier; empty: there is none.
        global_options: of its object store.
        global_every: the first of so many durable copies goes there.
        keep_ancestors: older copies kept there.
        nodes: names of all nodes that have ranks.
        left: nodes that had ranks before and have none now, with the last generation in which they had.
        training: its name, where the job has several; empty: it has none.
        patience: seconds for which a disk that refuses the last state is asked again.
        disk_bandwidth: bytes a second that may be written to ``tier`` while ranks train; None: no limit.
    """

    generation: int
    session: str
    run_id: str
    world_size: int
    ranks: tuple[int, ...]
    tier: str
    stage: str
    keep_last_n: int
    loaded: str | None = None
    avoid: tuple[str, ...] = ()
    together: Together | None = None
    global_url: str = ""
    global_options: Mapping[str, str] = field(default_factory=dict)
    global_every: int = 1
    keep_ancestors: int = 0
    nodes: tuple[str, ...] = ()
    left: Mapping[str, int] = field(default_factory=dict)
    training: str = ""
    patience: float = 0.0
    disk_bandwidth: float | None = None

    @property
    def private(self) -> bool:
        """Whether the ranks stage where all accounts of the host may; False: in the run folder, on disk."""
        return Path(self.tier) not in Path(self.stage).parents

    @property
    def leads(self) -> bool:
        """Whether rank 0 is on this node, so that its writer speaks for all of them."""
        return 0 in self.ranks

    def left_by(self, nodes: Collection[str]) -> dict[str, int]:
        """Return ``left`` of the next session, where it has these nodes."""
        had = {**self.left, **dict.fromkeys(self.nodes, self.generation)}
        return {node: generation for node, generation in had.items() if node not in nodes}

    def party(self, credentials: Credentials) -> Party:
        """Return what this node proves to the writers of the others.

        Raises:
            BadSecurity: a file for TLS cannot be used.
        """
        together = self.together
        assert together is not None, "there are other nodes"
        return Party(
            together.node,
            credentials.key,
            self.run_id,
            self.generation,
            self.session,
            together.host,
            credentials.encryption(),
        )


@dataclass(frozen=True)
class Status:
    """How far the writer is.

    Args:
        pid: its process.
        session: the newest that it serves: all that older ones staged is committed or dropped.
        memory_step: of the newest copy in the memory tier; -1: none.
        durable_step: of the newest copy that it wrote to the durable tier for this generation; -1: none.
        lost_step: of the newest durable save of this generation that failed; -1: none.
        failures: durable saves that failed in a row.
        failing: seconds from the first of them to the latest.
        error: why the latest of them failed.
        port: where it listens for other nodes' writers; 0: it does not.
        replicated_step: the newest step of which every node's part is on other nodes, too; -1: none.
        global_step: of the newest copy that it brought to the global tier; -1: none.
    """

    pid: int
    session: str = ""
    memory_step: int = -1
    durable_step: int = -1
    lost_step: int = -1
    failures: int = 0
    failing: float = 0.0
    error: str = ""
    port: int = 0
    replicated_step: int = -1
    global_step: int = -1


def default_root(run_id: str, folder: Path, node: str = "", base: str = "") -> Path:
    """Return where the memory folder of a run is on this node; two runs of one id have one each.

    Args:
        run_id: of the run.
        folder: of the run.
        node: its name, if it was given one: several nodes of a test may be on one host.
        base: folder in which it is; empty: shared memory.
    """
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    where = hashlib.sha256(os.fsencode(f"{os.path.realpath(folder)}\0{run_id}")).hexdigest()[:8]
    shown = re.sub(r"[^A-Za-z0-9._-]", "-", run_id)[:_SHOWN]  # it is the user's, and must lead nowhere
    return Path(base or shared) / f"{MEMORY_PREFIX}{os.geteuid()}-{shown}-{where}{node and f'-{node}'}"


class MemoryFolder:
    """Paths of a memory folder, and the two small files through which ranks and writer talk.

    Args:
        root: made by the first process, readable by its user only.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).absolute()
        self.lock = self.root / "lock"
        self._bell = self.root / BELL
        self._members = self.root / MEMBERS
        self._status = self.root / "status.json"
        self._flush = self.root / "flush"

    def make(self) -> None:
        """Make the folder; a writer that ends may remove it at the same time.

        Raises:
            RunFolderUnusable: what is there is not a private folder of this account.
            OSError: the file system refused.
        """
        for _ in range(_TRIES):
            with contextlib.suppress(FileNotFoundError):  # it was there, and is gone
                files.make_private(self.root)
                return
        files.make_private(self.root)

    def members(self) -> Members | None:
        """Return what the ranks said last, None when they have said nothing yet."""
        return _read(self._members, Members)

    def stage_of(self, training: str) -> Path:
        """Return where the states of a training are staged."""
        return self.root / _TRAININGS / training if training else self.root

    def introduced(self) -> bool:
        """Return whether the ranks have said anything yet."""
        return self._members.exists()

    def introduce(self, members: Members) -> None:
        """Write who the ranks are, and wake the writer."""
        files.write_whole(self._members, codec.encode(members))
        self.ring()

    def status(self) -> Status | None:
        """Return what the writer said last, None when it has said nothing yet."""
        return _read(self._status, Status)

    def publish(self, status: Status) -> None:
        """Write how far the writer is."""
        files.write_whole(self._status, codec.encode(status))

    def ask_to_flush(self) -> None:
        """Ask that the newest copy in memory goes to disk now; what cannot be asked for is not said."""
        with contextlib.suppress(OSError):
            self._flush.touch()
        self.ring()

    def asked_to_flush(self) -> bool:
        """Return whether anybody asked for that since the last call."""
        try:
            self._flush.unlink()
        except OSError:
            return False
        return True

    def ring(self) -> None:
        """Wake the writer; one that does not listen looks by itself a moment later."""
        kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, kind) as bell,
            self._bell_address() as path,
        ):
            bell.sendto(b"!", path)

    def listen(self) -> socket.socket:
        """Return the bell: a datagram socket that can be read after each :meth:`ring`.

        Raises:
            OSError: the file system refused.
        """
        self._bell.unlink(missing_ok=True)
        bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            with self._bell_address() as path:
                bell.bind(path)
        except OSError:
            bell.close()
            raise
        return bell

    @contextlib.contextmanager
    def _bell_address(self) -> Iterator[str]:
        """Yield a short path of the bell: the address of a Unix socket has 107 bytes at most."""
        folder = os.open(self.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield f"/proc/self/fd/{folder}/{self._bell.name}"
        finally:
            os.close(folder)


class Stage:
    """The three folders through which a buffer goes.

    Args:
        root: their common parent.
        private: it is in a place that all accounts of the host share; False: on disk, in the run folder.
    """

    def __init__(self, root: str | os.PathLike[str], private: bool = True) -> None:
        self.root = Path(root).absolute()
        self.private = private
        self.pool = self.root / "pool"
        self.staged = self.root / "staged"
        self.tier = DirectoryTier(self.root / "memory", "memory", private=private)
        self.replicas = self.root / "replica"
        self.joined = DirectoryTier(self.root / "joined", "memory", private=private)
        self.landing = DirectoryTier(self.root / LANDING, LANDING, private=private)
        self.wishes = self.root / "wishes"

    def make(self) -> None:
        """Make the folders.

        Raises:
            RunFolderUnusable: what is there is not a private folder of this account.
            OSError: the file system refused.
        """
        for folder in (self.pool, self.staged, self.tier.folder):
            files.make_folder(folder, self.private)  # a writer that is done may have removed those above

    def remove(self) -> None:
        """Remove all of it; a folder that others share, such as the memory folder, stays."""
        for name in _FOLDERS:
            shutil.rmtree(self.root / name, ignore_errors=True)

    def replica(self, node: str) -> DirectoryTier:
        """Return the tier of the copies that came from another node."""
        return DirectoryTier(self.replicas / node, f"replica/{node}", private=self.private)

    def replica_tiers(self) -> list[DirectoryTier]:
        """Return those of all nodes that anything came from."""
        return [self.replica(path.name) for path in _entries(self.replicas)]

    def drop_joined(self) -> None:
        """Remove what was joined for a load; see :func:`outlast.checkpoint.load.fetching.gather_parts`."""
        shutil.rmtree(self.joined.folder, ignore_errors=True)

    def land(self, name: str, files: Sequence[str]) -> Path:
        """Make the folder in which files of a copy on disk land, with free buffers for them if there are any.

        Raises:
            RunFolderUnusable: what is there is not a private folder of this account.
            OSError: the file system refused.
        """
        self.landing.make()
        place = self.landing.folder / name
        place.mkdir(mode=0o700)
        for file in files:
            for free in self.free(pool_of(file)):
                if not free.name.startswith("."):  # one that was being made when its maker was killed
                    with contextlib.suppress(FileNotFoundError):  # taken meanwhile
                        os.rename(free, place / file)
                        break
            os.close(self.open_buffer(place / file))
        return place

    def drop_landing(self, keep: int = 0) -> None:
        """Make buffers of what has landed; at most so many may lie in each pool, the others are removed."""
        for name in files.names_in(self.landing.folder):
            with contextlib.suppress(OSError):
                place = self.landing.folder / name
                self.give_up(place, {pool_of(file): keep for file in files.names_in(place)})

    def drop_pools(self, first: int) -> None:
        """Remove the buffers for shared files from a number on: this session has no such files."""
        for name in files.names_in(self.pool):
            kind, _, number = name.partition("-")
            if kind == _ALIKE and int(number) >= first:
                shutil.rmtree(self.pool / name, ignore_errors=True)

    def open_buffer(self, path: Path) -> int:
        """Open a buffer, a new one if there is none; on a disk it may become a file of a copy.

        Raises:
            RunFolderUnusable: what is there is not a file of this account's own.
            OSError: the file system refused.
        """
        flags = os.O_RDWR | os.O_CREAT
        return files.open_private(path, flags) if self.private else files.open_regular(path, flags, 0o644)

    def free(self, pool: str) -> list[Path]:
        """Return the buffers of a pool that nobody uses; see :func:`pool_of`."""
        return _entries(self.pool / pool)

    def in_use(self, file: str) -> int:
        """Return how many buffers are a safetensors file of that name in a copy, complete or not."""
        return sum(
            os.path.exists(f"{folder}/{copy}/{file}")
            for folder in (self.staged, self.tier.folder)
            for copy in files.names_in(folder)
        )

    def staging(self, copy: str, session: str) -> Path:
        """Return the folder in which the ranks of a session stage a copy."""
        return self.staged / f"{copy}~{session}"

    def stagings(self) -> list[tuple[str, str]]:
        """Return copy and session of everything that is being staged, the oldest step first."""
        return _by_step(self.staged)

    def record(self, folder: Path, rank: int, world_size: int) -> dict[str, Any] | None:
        """Return a rank's ``.staged`` record, None when it has none yet.

        Raises:
            DamagedRecord: it is not as the rank left it.
            OSError: the file system refused.
        """
        path = folder / staged_file(rank, world_size)
        try:
            return codec.decode(self.read(path), dict[str, Any])
        except FileNotFoundError:
            return None
        except codec.Malformed as error:
            raise DamagedRecord(f"{path.name} is not as rank {rank} left it: {error}") from error

    def read(self, path: Path) -> bytes:
        """Return what a rank left in a small file.

        Raises:
            OSError: the file system refused, or it is too large.
        """
        read = files.read_private if self.private else files.read_whole
        return read(path, DOCUMENT_BYTES)

    def leave_wish(self, copy: str, session: str, wish: Mapping[str, object]) -> None:
        """Order further tiers for a copy that is staged already; its ranks all order the same."""
        files.make_folder(self.wishes, self.private)
        files.write_whole(self.wishes / f"{copy}~{session}", codec.encode(wish))

    def granted(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Yield copy, session and wish of what is not being staged any more; each wish is gone after that."""
        for copy, session in _by_step(self.wishes):
            if not self.staging(copy, session).exists():
                path = self.wishes / f"{copy}~{session}"
                yield copy, session, codec.decode(self.read(path), dict[str, Any])
                path.unlink(missing_ok=True)

    def amend(self, folder: Path, changes: Mapping[str, object]) -> None:
        """Change what the ranks' records say of a copy in memory."""
        for path in folder.glob(f"*{STAGED}"):
            record = codec.decode(self.read(path), dict[str, Any])
            files.write_whole(path, codec.encode({**record, **changes}))

    def give_up(self, folder: Path, keep: Mapping[str, int]) -> None:
        """Take a copy apart: its buffers go back to their pools, the rest is removed.

        Args:
            folder: below ``staged`` or ``memory``; a name that is no copy's is given to it first.
            keep: how many buffers may lie in each pool.
        """
        retired = folder
        if folder.parent == self.tier.folder:
            retired = self.staged / f".retired-{folder.name}"
            os.rename(folder, retired)
        for path in _entries(retired):
            name = pool_of(path.name)
            alone = path.lstat().st_nlink == 1  # else it is a file of a copy on disk, too
            if path.suffix == ".safetensors" and alone and len(self.free(name)) < keep.get(name, 0):
                pool = self.pool / name
                pool.mkdir(mode=0o700, exist_ok=True)
                os.rename(path, pool / f"{os.urandom(8).hex()}")
            else:
                path.unlink(missing_ok=True)
        try:
            retired.rmdir()
        except OSError as error:
            if error.errno not in _STILL_OPEN:
                raise


def staged_file(rank: int, world_size: int) -> str:
    """Return the name of the record that a rank leaves when its buffer is complete."""
    return rank_files(rank, world_size)[0].removesuffix(".safetensors") + STAGED


def _by_step(folder: Path) -> list[tuple[str, str]]:
    """Return copy and session that the entries of a folder are named after, the oldest step first."""
    found = []
    for name in files.names_in(folder):
        copy, _, session = name.partition("~")
        if parse_copy_name(copy):
            found.append((copy, session))
    return sorted(found, key=lambda one: place_of(one[0]))


def pool_of(file: str) -> str:
    """Return the name of the pool whose buffers become safetensors files of a name; empty: none do."""
    kind, _, rest = file.partition("-")
    digits = rest.partition("-")[0]
    if kind not in ("rank", _ALIKE) or not digits.isdigit():
        return ""
    return alike_pool(int(digits)) if kind == _ALIKE else str(int(digits))


def alike_pool(number: int) -> str:
    """Return the name of the pool for one of the files that all ranks share."""
    return f"{_ALIKE}-{number}"


def _entries(folder: Path) -> list[Path]:
    return [folder / name for name in files.names_in(folder)]


def _read(path: Path, kind: type[_Said]) -> _Said | None:
    """Return what a file holds; None: nothing, or what another version wrote."""
    try:
        return codec.decode(files.read_private(path, _SAID_BYTES), kind, exactly=True)
    except (OSError, codec.Malformed):
        return None
