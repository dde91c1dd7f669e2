"""NVRx's ``RankMonitorClient``: heartbeats and sections of scripts that report them already.

They go to the heartbeat page of this rank, which the agent of ``outlast run`` watches. The agent learns the
timeouts itself, from the same heartbeats and sections and without a collective, so the calls that calculate
them read what it has learned. Without an agent (torchrun, plain Python) nothing watches, and rank 0 says so.

With Megatron-LM its count of iterations is reported as completed steps.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from outlast import settings
from outlast.config import FaultToleranceOptions
from outlast.errors import OutlastError, UsageError
from outlast.hang.policy.timeouts import INITIAL, Timeouts, name_for_user, section_of_user
from outlast.hang.worker import heartbeat
from outlast.ipc.heartbeat_page import HeartbeatPage, RankState
from outlast.observe.run_folder import RunFolder

_LOG = logging.getLogger("outlast")
_STATE = "current_timeouts"
_MEGATRON = "megatron.training.global_vars"


class RankMonitorClientError(OutlastError):
    """A call that does not fit what was called before, or a state that is none."""


@dataclass
class HeartbeatTimeouts:
    """Timeouts of heartbeats, in seconds.

    Args:
        initial: until the first heartbeat; None: no limit.
        subsequent: between two heartbeats; likewise.
        were_calculated: one of them was learned.
    """

    initial: float | None = None
    subsequent: float | None = None
    were_calculated: bool | None = None

    @property
    def are_valid(self) -> bool:
        """Whether both are set."""
        return self.initial is not None and self.subsequent is not None


@dataclass
class SectionTimeouts:
    """Timeouts of sections, in seconds.

    Args:
        section: by name, of those that were set or learned.
        out_of_section: while no section is open; None: no limit.
        calculated_sections: those that were learned.
        is_out_of_section_calculated: it was learned.
    """

    section: Mapping[str, float | None] = field(default_factory=dict)
    out_of_section: float | None = None
    calculated_sections: Collection[str] = field(default_factory=set)
    is_out_of_section_calculated: bool = False

    def __post_init__(self) -> None:
        self.calculated_sections = set(self.calculated_sections)

    @property
    def were_calculated(self) -> bool:
        """Whether all of them were learned."""
        return self.calculated_sections == set(self.section) and self.is_out_of_section_calculated

    @property
    def are_valid(self) -> bool:
        """Whether all of them are set."""
        return self.out_of_section is not None and None not in self.section.values()


class RankMonitorClient:
    """Reports heartbeats and sections of this rank; call it on the main thread.

    ``hb_timeouts`` and ``section_timeouts`` are those in force when monitoring began, or when they were last
    calculated. A section may have any name; one without a set timeout is learned, where NVRx ignores it. The
    sections may overlap in any way; if an outer one ends first, the clock of the inner ones begins again.
    """

    def __init__(self) -> None:
        self.is_initialized = False
        self.hb_timeouts: HeartbeatTimeouts | None = None
        self.section_timeouts: SectionTimeouts | None = None
        self.loaded_hb_timeouts: HeartbeatTimeouts | None = None
        self.loaded_section_timeouts: SectionTimeouts | None = None
        self.logger = _LOG
        self._context = settings.WorkerContext()
        self._page: HeartbeatPage | None = None
        self._open: dict[str, Any] = {}  # by name, from outer to inner
        self._ended = 0
        self._warmup = 0

    def init_workload_monitoring(self, num_warmup_iters: int | None = None) -> None:
        """Begin.

        Args:
            num_warmup_iters: first heartbeats or ends of ``step``, from which no timeout is learned; None:
                ``num_warmup_iterations`` of the launcher.

        Raises:
            RankMonitorClientError: it has begun already.
        """
        if self.is_initialized:
            raise RankMonitorClientError("RankMonitorClient is already initialized")
        context = self._context = settings.worker_context()
        self._warmup = context.num_warmup_iterations if num_warmup_iters is None else num_warmup_iters
        page = self._page = heartbeat.attach(context.heartbeat_path or None)
        if page.beats:
            page.set_state(RankState.RUNNING)  # else a shutdown before would still count
        self.is_initialized, self._open, self._ended = True, {}, 0
        if not context.heartbeat_path and context.rank == 0:
            _say_once(
                "RankMonitorClient: there is no agent, so heartbeats and sections are not watched; start the"
                " script with outlast run"
            )
        self._read_timeouts()

    def shutdown_workload_monitoring(self) -> None:
        """End: this rank sends no more heartbeats, and has until ``outlast.finishing`` to exit."""
        if self.is_initialized:
            self._end_all()
            self._ready().set_state(RankState.DONE)
            self.is_initialized = False

    def send_heartbeat(self) -> None:
        """Say that this rank is alive.

        Raises:
            RankMonitorClientError: it has not begun.
        """
        page = self._ready()
        page.outside()
        self._beat(counts=True)

    def start_section(self, section: str) -> None:
        """Open a section.

        Raises:
            RankMonitorClientError: it is open, or monitoring has not begun.
        """
        page = self._ready()
        if section in self._open:
            raise RankMonitorClientError(f"section {section!r} is open already; end it first")
        page.outside()
        opened = self._open[section] = heartbeat.timed(page.section(section_of_user(section)))
        opened.__enter__()

    def end_section(self, section: str) -> None:
        """Close a section.

        Raises:
            RankMonitorClientError: it is not open, or monitoring has not begun.
        """
        self._ready()
        if section not in self._open:
            raise RankMonitorClientError(f"section {section!r} is not open; found {sorted(self._open)}")
        inner: list[str] = []
        for name in reversed(self._open):
            self._open[name].__exit__(None, None, None)
            if name == section:
                break
            inner.insert(0, name)
        del self._open[section]
        for name in inner:
            self._open[name].__enter__()
        self._beat(section, counts=section == "step")

    def end_all_sections(self) -> None:
        """Close the sections that are open, if any.

        Raises:
            RankMonitorClientError: monitoring has not begun.
        """
        self._ready()
        if self._open:
            self._end_all()
            self._beat()

    def calculate_and_set_hb_timeouts(self, skip_if_not_ready: bool = False) -> bool:  # noqa: ARG002 - theirs
        """Read the timeouts that the agent has learned; it is not a collective call.

        Args:
            skip_if_not_ready: not used, since the agent goes on learning: no error is raised.

        Returns:
            Whether a timeout of heartbeats was learned.

        Raises:
            RankMonitorClientError: monitoring has not begun.
        """
        self._ready()
        self._warn_if_off()
        return bool(self._read_timeouts()[0].were_calculated)

    def calculate_and_set_section_timeouts(
        self,
        selected_sections: Collection[str] | None = None,
        calc_out_of_section: bool = True,
        skip_if_not_ready: bool = False,  # noqa: ARG002 - theirs
    ) -> bool:
        """Read the timeouts that the agent has learned; it is not a collective call.

        Args:
            selected_sections: those that matter to the answer; the agent learns all. None: all.
            calc_out_of_section: the time between sections matters to it, too.
            skip_if_not_ready: not used, since the agent goes on learning: no error is raised.

        Returns:
            Whether they were learned.

        Raises:
            RankMonitorClientError: monitoring has not begun.
        """
        self._ready()
        self._warn_if_off()
        found = self._read_timeouts()[1]
        wanted = found.section if selected_sections is None else selected_sections
        outside = found.is_out_of_section_calculated or not calc_out_of_section
        return outside and set(wanted) <= set(found.calculated_sections)

    def state_dict(self) -> dict[str, Any]:
        """Return the learned timeouts in the shape of NVRx's ``ft_state.json``, and no others.

        Raises:
            RankMonitorClientError: monitoring has not begun.
        """
        beats, sections = self.hb_timeouts, self.section_timeouts
        if beats is None or sections is None:
            raise RankMonitorClientError("RankMonitorClient is not initialized")
        found: dict[str, Any] = {}
        if beats.are_valid and beats.were_calculated:
            found["heartbeat"] = dataclasses.asdict(beats)
        if sections.calculated_sections or sections.is_out_of_section_calculated:
            found["section"] = {
                **dataclasses.asdict(sections),
                "calculated_sections": sorted(sections.calculated_sections),
            }
        return {_STATE: found}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what :meth:`state_dict` returned, at any time.

        The agent's own timeouts stay in force, since it keeps what it has learned in the run folder. To begin
        with timeouts that NVRx has calculated, copy its ``ft_state.json`` to the run folder before the start.

        Raises:
            RankMonitorClientError: the state is none.
        """
        try:
            current = state.get(_STATE, {})
            beats, sections = current.get("heartbeat"), current.get("section")
            loaded = (
                None if beats is None else HeartbeatTimeouts(**beats),
                None if sections is None else SectionTimeouts(**sections),
            )
        except (AttributeError, TypeError) as error:
            raise RankMonitorClientError(
                f"RankMonitorClient.load_state_dict: found {state!r:.80}, expected what state_dict returned"
                f" ({error}); nothing was loaded"
            ) from error
        self.loaded_hb_timeouts, self.loaded_section_timeouts = loaded

    def _ready(self) -> HeartbeatPage:
        if not self.is_initialized or self._page is None:
            raise RankMonitorClientError("RankMonitorClient is not initialized")
        return self._page

    def _warn_if_off(self) -> None:
        if self._context.heartbeat_path and not _options(self._context).calc_ft_timeouts:
            _say_once(
                "RankMonitorClient: no timeouts are calculated, since calc_ft_timeouts of the launcher is off"
            )

    def _end_all(self) -> None:
        for name in reversed(self._open):
            self._open[name].__exit__(None, None, None)
        self._open = {}

    def _beat(self, ended: str = "", counts: bool = False) -> None:
        """Send a heartbeat, with Megatron-LM's count of iterations where it tells one."""
        page = self._ready()
        self._ended += counts
        done = _iterations_of_megatron(ended)
        if done is not None and self._announced(done):
            return
        page.learning = page.learning or self._ended > self._warmup
        page.set_state(RankState.RUNNING)
        page.repeat()
        if not self._open:
            page.touch()

    def _announced(self, done: int) -> bool:
        """Report completed steps; return False if a session reports them."""
        if not self._context.heartbeat_path:
            return False
        try:
            heartbeat.begin_announcing(self._context.heartbeat_path, self._warmup)
        except UsageError:
            return False
        heartbeat.announce(done, stays=False)
        return True

    def _read_timeouts(self) -> tuple[HeartbeatTimeouts, SectionTimeouts]:
        """Take over the timeouts in force: those that were set, and those that the agent has learned."""
        if self._context.heartbeat_path:
            beats, sections = _in_force(self._context)
        else:
            beats = self.loaded_hb_timeouts or HeartbeatTimeouts(were_calculated=False)
            sections = self.loaded_section_timeouts or SectionTimeouts()
        self.hb_timeouts, self.section_timeouts = beats, sections
        return beats, sections


def _options(context: settings.WorkerContext) -> FaultToleranceOptions:
    return settings.in_force(FaultToleranceOptions(), "fault_tolerance", context)


def _in_force(context: settings.WorkerContext) -> tuple[HeartbeatTimeouts, SectionTimeouts]:
    options = _options(context)
    timeouts = Timeouts(options)
    for folder in (RunFolder(context.run_dir, context.node), RunFolder(context.run_dir)):
        found = folder.peek(folder.ft_state)
        if found is not None:
            timeouts.restore(found)
            break
    learned = timeouts.state()[_STATE]
    names = {*options.rank_section_timeouts, *learned["section"]["section"]}
    places = {shown: place for place in names if (shown := name_for_user(place)) is not None}
    fresh = {name for name, place in places.items() if place in learned["section"]["section"]}
    first = learned["heartbeat"]["initial"] is not None and not timeouts.is_fixed(INITIAL)
    outside = learned["section"]["is_out_of_section_calculated"] and not timeouts.is_fixed(None)
    subsequent = _finite(timeouts.limit(None))
    return (
        HeartbeatTimeouts(_finite(timeouts.initial()), subsequent, first or outside),
        SectionTimeouts(
            {name: _finite(timeouts.limit(place)) for name, place in sorted(places.items())},
            subsequent,
            {name for name in fresh if not timeouts.is_fixed(places[name])},
            outside,
        ),
    )


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


def _iterations_of_megatron(ended: str) -> int | None:
    """Return Megatron-LM's completed iterations where a section ends at which they are known.

    It sets ``curr_iteration`` before an iteration, and ``iteration`` when it loads a checkpoint.
    """
    name = {"step": "curr_iteration", "setup": "iteration"}.get(ended)
    arguments = getattr(sys.modules.get(_MEGATRON), "_GLOBAL_ARGS", None)
    found = None if name is None else getattr(arguments, name, None)
    if not isinstance(found, int):
        return None
    return found + 1 if ended == "step" else found


@functools.cache
def _say_once(text: str) -> None:
    _LOG.warning(text)
