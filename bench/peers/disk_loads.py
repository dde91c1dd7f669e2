"""Loads from disk alone, as on a node whose memory is empty; shared by benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from outlast.agreement.worker.reports import Rounds
from outlast.checkpoint.content.state import LiveState
from outlast.checkpoint.context import SaveContext
from outlast.checkpoint.load.restorer import Restored, Restorer
from outlast.checkpoint.policy.manifest import Identity
from outlast.checkpoint.tiers.tier import DirectoryTier
from outlast.config import CheckpointOptions
from outlast.ipc.exchange import SystemClock
from outlast.ports import Exchange
from outlast.recovery.policy.events import Record


def load(
    folder: Path,
    identity: Identity,
    exchange: Exchange,
    settings: CheckpointOptions,
    state: Mapping[str, object],
    record: Callable[[Record], None] = lambda _: None,
) -> Restored | None:
    """Restore the newest copy in a folder; every rank calls it."""
    rounds = Rounds(exchange, settings.timeout)
    around = SaveContext(DirectoryTier(folder), identity, rounds, settings, SystemClock(), record)
    return Restorer(around, LiveState(state), ()).restore()
