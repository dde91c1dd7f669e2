"""Set up a session's checkpointer: the exchange between ranks, the claim on the run folder, the saver."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import weakref
from pathlib import Path

import torch.distributed as dist

from outlast import _torch_compat, files, settings
from outlast.checkpoint.checkpointer import Checkpointer, Identity
from outlast.checkpoint.replica.handshake import BadToken, Credentials, derive, make_token, read_token
from outlast.checkpoint.save.rendezvous import Place
from outlast.checkpoint.tiers.memory_folder import MemoryFolder, default_root
from outlast.checkpoint.tiers.tier import DirectoryTier
from outlast.checkpoint.writer_process import SaverProcess
from outlast.config import CheckpointOptions
from outlast.errors import OutlastError, RunFolderBusy, RunFolderUnusable, UsageError
from outlast.hang.policy.timeouts import STORAGE
from outlast.hang.worker import heartbeat
from outlast.inprocess.worker.cleanup import when_left
from outlast.ipc.exchange import Seal, SoloExchange, StoreExchange, SystemClock
from outlast.ipc.heartbeat_page import Section
from outlast.ipc.processes import identity
from outlast.observe.run_folder import RunFolder
from outlast.parallelism.policy.degrees import Layout
from outlast.ports import Exchange
from outlast.worker.reporting import Reporting

_LOG = logging.getLogger("outlast")
_open: weakref.WeakSet[Opening] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """Close in a forked child what it would hold after this process has ended.

    The lock of the run folder, the owner's byte of the memory folder and the pipe to the checkpoint writer.
    """
    for one in list(_open):
        one.close()


os.register_at_fork(after_in_child=_leave_to_parent)


class Opening:
    """Opens the parts that a rank saves with.

    Args:
        context: what the launcher said.
        options: of checkpoints.
        folder: the run folder.
        reporting: takes records.
        training: its name; empty: the script has one.
    """

    def __init__(
        self,
        context: settings.WorkerContext,
        options: CheckpointOptions,
        folder: RunFolder,
        reporting: Reporting,
        training: str = "",
    ) -> None:
        self._context = context
        self._options = options
        self._folder = folder
        self._reporting = reporting
        self._training = training
        self._clock = SystemClock()
        self._saver: SaverProcess | None = None
        _open.add(self)
        self._run_id, self._generation = context.run_id, context.generation
        self.seal = Seal()  # of what the ranks set in their store
        self.layout = Layout.parse(context.parallelism) if context.parallelism else None

    def close(self) -> None:
        """Release the saver and the run folder, if this process holds them."""
        if self._saver is not None:
            self._saver.hang_up()
        if not self._context.launched:
            self._folder.release()

    def exchange(self) -> Exchange:
        """Return the exchange between the ranks; claim the run folder if no launcher has.

        Raises:
            UsageError: there is no process group, or the ranks have no key in common.
            RunFolderBusy: another run holds the run folder.
            RunFolderUnusable: it cannot be written.
        """
        open_to_all = self._over_the_store(Seal())
        if not self._context.launched:
            self._run_id, self._generation = self._claim(open_to_all)
        if self._context.world_size == 1:
            return open_to_all
        credentials = self._credentials()
        if not credentials.key:
            raise UsageError(
                "session.restore: ranks authenticate each other by a token, and this rank found none;"
                f" set {settings.TOKEN_VARIABLE} or {settings.TOKEN_FILE_VARIABLE} to the same token on"
                " every node, or put run_dir on a folder that all nodes share"
            )
        self.seal = Seal(credentials.key)
        return self._over_the_store(self.seal)

    def _over_the_store(self, seal: Seal) -> Exchange:
        world = self._context.world_size
        if world == 1:
            return SoloExchange()
        store = _torch_compat.default_store()
        if store is None and not dist.is_available():
            raise UsageError(
                f"session.restore: {world} ranks must agree on a checkpoint, but this torch was built without"
                " torch.distributed; it trains one rank: --nproc-per-node 1"
            )
        if store is None:
            raise UsageError(
                f"session.restore: {world} ranks must agree on a checkpoint, but there is no process group; "
                "call torch.distributed.init_process_group first"
            )
        return StoreExchange(store, self._context.rank, world, self._context.generation, seal=seal)

    def checkpointer(self, exchange: Exchange) -> Checkpointer:
        """Return the checkpointer of this rank."""
        context, run_id = self._context, self._run_id
        identity = Identity(run_id, self._generation, context.rank, context.world_size, self.layout)
        if self._training:
            with contextlib.suppress(OSError):  # a save tells why
                files.make_below(self._folder.root, self._folder.checkpoints)
        folder = self._folder.training(self._training)
        tier = DirectoryTier(folder, lease=context.lease_path, linked=not self._training)
        base = self._options.non_persistent_local_ckpt_dir
        credentials = self._credentials()
        root = Path(context.memory_path or default_root(run_id, self._folder.root, context.node, base))
        if not context.memory_path:
            self._saver = SaverProcess(root, "", self._folder.events, credentials)
            if context.rank == 0:
                self._folder.note_memory(root)
        master = context.store_host or context.master_addr
        found = Checkpointer(
            tier,
            identity,
            exchange,
            self._options,
            self._clock,
            self._reporting.record,
            MemoryFolder(root),
            self._call_saver,
            Place.of(context.node, context.domains, master, credentials),
            _waiting,
            self._training,
        )
        when_left(found.close)
        return found

    def _credentials(self) -> Credentials:
        """Return this node's credentials; without a launcher they are derived from a token.

        Raises:
            UsageError: the given token cannot be read.
        """
        context, run_id = self._context, self._run_id
        if context.launched:
            return Credentials.read(context.credentials_path)
        try:
            if context.token_file:
                return Credentials(derive(read_token(Path(context.token_file)), run_id))
        except BadToken as error:
            raise UsageError(f"{settings.TOKEN_FILE_VARIABLE}: {error}; nothing was started") from error
        if context.token:
            return Credentials(derive(context.token, run_id))
        with contextlib.suppress(BadToken):  # nodes that do not share the folder need a given token
            return Credentials(derive(read_token(self._folder.token), run_id))
        return Credentials()

    def _call_saver(self) -> None:
        """Start the saver, which one rank of each node owns if there is no launcher."""
        if self._saver is not None:
            self._saver.ensure()

    def _make_token(self) -> None:
        """Write a token for ranks that share the run folder, if none was given."""
        context = self._context
        if context.world_size == 1:
            return
        if not (context.token or context.token_file):
            with contextlib.suppress(OSError):  # the ranks report that there is none
                make_token(self._folder.token)

    def _claim(self, exchange: Exchange) -> tuple[str, int]:
        """Claim the run folder in rank 0, without a launcher; every rank gets run id and generation.

        Each session of such a run is a generation: what one saves is told from what others have saved.
        """
        answer = ""
        if self._context.rank == 0:
            try:
                run_id = self._folder.claim(who=identity())
                if differs := self._folder.other_launch(sys.argv):
                    _LOG.warning("%s", differs)
                answer = f"ok {self._folder.next_generation()} {run_id}"
                self._make_token()
            except OutlastError as error:
                answer = f"{type(error).__name__} {error}"
        verdict, _, text = exchange.gather("claim", answer, self._options.timeout)[0].partition(" ")
        if verdict != "ok":
            raise {"RunFolderBusy": RunFolderBusy, "RunFolderUnusable": RunFolderUnusable}[verdict](text)
        number, _, run_id = text.partition(" ")
        self._reporting.generation = int(number)
        if self._context.rank == 0:
            self._reporting.open_log(run_id, self._context.world_size, self._clock)
        return run_id, int(number)


def _waiting() -> Section:
    """Return the section for waits on storage, to which no other timeout of hang detection applies."""
    return heartbeat.attach(None).section(STORAGE)
