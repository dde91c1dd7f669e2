"""NVRx's straggler detection, for scripts that call it already: sections, scores, reports.

Names, parameters and defaults are those of ``nvidia_resiliency_ext.attribution.straggler`` 0.6. A report is a
collective call of all ranks. It needs neither CUDA nor CUPTI. What differs:

- Where NVRx measures kernels, a section with ``profile_cuda`` counts as one kernel: its time on the device
  by a pair of events, and without CUDA its time on the host. With ``profile_kernels`` kernels are measured.
- All wrapped callables are restored, and those that are called after ``shutdown`` run unmeasured.
- A section that took no time has the score nan; NVRx divides by zero. Nodes are asked each time.

``outlast run`` finds stragglers without these calls and without a collective (how-to/find-stragglers.md).
"""

from __future__ import annotations

import enum
import functools
import inspect
import math
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median_low, stdev
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from outlast.fields import Fields
from outlast.integrations.collectives import from_all_ranks, group_device
from outlast.stragglers.policy.nvrx import (
    ESTIMATED_STEPS,
    THRESHOLD,
    BestTimes,
    Kernel,
    below,
    gpu_score,
    relative_references,
    section_scores,
    steps_between_reports,
)
from outlast.stragglers.worker.kernels import MOST_KERNELS, Kernels

RELATIVE, INDIVIDUAL = "relative_perf_scores", "individual_perf_scores"
_KEPT = 8192  # times of a section until a report
_CALLS = 4096  # times of a kernel, likewise
_MOST_STEPS = 1 << 31  # between two reports
_MOST_TOLD = 128  # kernels that a rank tells the others of


class Statistic(enum.Enum):
    """What a summary of times has."""

    MIN = enum.auto()
    MAX = enum.auto()
    MED = enum.auto()
    AVG = enum.auto()
    STD = enum.auto()
    NUM = enum.auto()

    def __str__(self) -> str:
        return self.name


Summary = Mapping[Statistic, float]


@dataclass(frozen=True)
class StragglerId:
    """A rank that is slow, and its node."""

    rank: int
    node: str


@dataclass(frozen=True)
class CallableId:
    """A callable to be timed: an attribute of an object.

    Args:
        arg_filter_fn, extra_args_fn, ignored_args: of NVRx, which does not read them either.
    """

    obj: object
    name: str
    arg_filter_fn: Callable[[inspect.BoundArguments], bool] | None = None
    extra_args_fn: Callable[[inspect.BoundArguments], dict[str, Any]] | None = None
    ignored_args: tuple[str, ...] | None = None

    def __str__(self) -> str:
        if inspect.ismodule(self.obj):
            return f"{self.obj.__name__}.{self.name}"
        if inspect.isclass(self.obj):
            return f"{self.obj.__module__}.{self.obj.__name__}.{self.name}"
        return f"{type(self.obj).__name__}.{self.name}"


@dataclass(frozen=True)
class Report:
    """The scores of one interval.

    With ``gather_on_rank0`` rank 0 has those of all ranks, and the others have no report; otherwise each has
    its own. Empty: not asked for.

    Args:
        gpu_relative_perf_scores, gpu_individual_perf_scores: by rank.
        section_relative_perf_scores, section_individual_perf_scores: by section, then by rank.
        local_section_summaries, local_kernel_summaries: of this rank, in milliseconds; kernels are sections
            unless ``profile_kernels`` has found some.
        generate_report_elapsed_time: in milliseconds.
        rank: of this process.
    """

    gpu_relative_perf_scores: Mapping[int, float]
    section_relative_perf_scores: Mapping[str, Mapping[int, float]]
    gpu_individual_perf_scores: Mapping[int, float]
    section_individual_perf_scores: Mapping[str, Mapping[int, float]]
    rank_to_node: Mapping[int, str]
    local_section_summaries: Mapping[str, Summary]
    local_kernel_summaries: Mapping[str, Summary]
    generate_report_elapsed_time: float
    gather_on_rank0: bool
    rank: int | None

    def identify_stragglers(
        self,
        gpu_rel_threshold: float = THRESHOLD,
        section_rel_threshold: float = THRESHOLD,
        gpu_indiv_threshold: float = THRESHOLD,
        section_indiv_threshold: float = THRESHOLD,
    ) -> dict[str, Any]:
        """Return the ranks whose scores are below the thresholds.

        Returns:
            ``straggler_gpus_relative`` and ``straggler_gpus_individual``: sets of StragglerId;
            ``straggler_sections_relative`` and ``straggler_sections_individual``: such a set for each section
            that has one.
        """

        def named(scores: Mapping[int, float], threshold: float) -> set[StragglerId]:
            return {StragglerId(rank, self.rank_to_node[rank]) for rank in below(scores, threshold)}

        def sections(all_scores: Mapping[str, Mapping[int, float]], threshold: float) -> dict[str, Any]:
            found = {section: named(scores, threshold) for section, scores in all_scores.items()}
            return {section: slow for section, slow in found.items() if slow}

        return {
            "straggler_gpus_relative": named(self.gpu_relative_perf_scores, gpu_rel_threshold),
            "straggler_gpus_individual": named(self.gpu_individual_perf_scores, gpu_indiv_threshold),
            "straggler_sections_relative": sections(self.section_relative_perf_scores, section_rel_threshold),
            "straggler_sections_individual": sections(
                self.section_individual_perf_scores, section_indiv_threshold
            ),
        }


class _Times:
    """The times of one section since the last report, in milliseconds."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.entries = 0
        self.host: deque[float] = deque(maxlen=_KEPT)
        self.device: deque[float] = deque(maxlen=_KEPT)
        self.events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=_KEPT)

    def read_events(self) -> None:
        """Take the times on the device; it has passed all events."""
        self.device.extend(begin.elapsed_time(end) for begin, end in self.events)
        self.events.clear()


class _Look:
    """The times of single kernels since the last report, in milliseconds."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.times: dict[str, deque[float]] = {}

    def end(self, whole: bool) -> None:
        """Take what ran in an entry, unless it was left by an exception."""
        found = self.kernels.end()
        for name, taken in found.items() if whole else ():
            if name in self.times or len(self.times) < MOST_KERNELS:
                kept = self.times.setdefault(name, deque(maxlen=_CALLS))
                kept.extend(seconds * 1e3 for seconds in taken)

    def take(self) -> dict[str, Summary]:
        """Return the summaries, and begin anew."""
        found = {name: _summary(taken) for name, taken in self.times.items()}
        self.times = {}
        return found


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class _Section:
    """One entry of a section."""

    __slots__ = ("_begin", "_cuda", "_look", "_started", "_times")

    def __init__(self, times: _Times, cuda: bool, look: _Look | None) -> None:
        self._times = times
        self._cuda = cuda
        self._look = look

    def __enter__(self) -> _Section:
        if self._look is not None and not self._look.kernels.begin():
            self._look = None
        self._begin: torch.cuda.Event | None = None
        if self._cuda and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._begin = _recorded()
        self._started = time.perf_counter_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        taken = (time.perf_counter_ns() - self._started) * 1e-6
        if kind is None:
            self._times.host.append(taken)
            if self._begin is not None:
                self._times.events.append((self._begin, _recorded()))
            elif self._cuda:
                self._times.device.append(taken)
        if self._look is not None:
            self._look.end(kind is None)


class _Unmeasured:
    """An entry that the profiling interval leaves out."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


_UNMEASURED = _Unmeasured()


@dataclass
class _Interval:
    """Counts steps; after 16 of them it is agreed how many make the interval, and that stays."""

    seconds: float
    least: int
    step: int = 0
    steps: int | None = None
    _started: float | None = None
    _taken: list[float] = field(default_factory=list)

    def count(self) -> None:
        """Count a step."""
        self.step += 1
        if self.steps is not None:
            return
        now = time.monotonic()
        if self._started is not None:
            self._taken.append(now - self._started)
        self._started = now
        if len(self._taken) == ESTIMATED_STEPS:
            wanted = max(_reduced(steps_between_reports(self._taken, self.seconds)), self.least)
            self.steps = int(min(wanted, _MOST_STEPS))

    @property
    def elapsed(self) -> bool:
        """This step ends an interval."""
        return self.steps is not None and self.step % self.steps == 0


@dataclass
class _Message:
    """What a rank tells the others for a report.

    Args:
        on_device: sections that count as kernels where a rank has no kernels.
    """

    node: str
    sections: dict[str, float]
    on_device: dict[str, Kernel]
    kernels: dict[str, Kernel]
    individual_gpu: float
    individual_sections: dict[str, float]

    def fields(self) -> dict[str, Any]:
        """Return what is sent."""
        kernels = {
            name: {each: [float(one.median), float(one.weight)] for each, one in found.items()}
            for name, found in (("on_device", self.on_device), ("kernels", self.kernels))
        }
        return {**vars(self), **kernels, "individual_gpu": float(self.individual_gpu)}

    @classmethod
    def of(cls, sent: object, rank: int) -> _Message:
        """Return what a rank has sent.

        Raises:
            DamagedCopy: it is no message.
        """
        fields = Fields(f"a report of stragglers of rank {rank}", sent)

        def times(name: str) -> dict[str, float]:
            found = fields.mapping(name)
            if not all(type(key) is str and type(each) in (int, float) for key, each in found.items()):
                fields.refuse(name, "times by name", repr(found))
            return found

        def kernels(name: str) -> dict[str, Kernel]:
            found = fields.mapping(name)
            for key, each in found.items():
                if type(key) is not str or type(each) is not list or [*map(type, each)] != [float, float]:
                    fields.refuse(name, "two times by name", repr({key: each}))
            return {key: Kernel(*each) for key, each in found.items()}

        return cls(
            fields.text("node"),
            times("sections"),
            kernels("on_device"),
            kernels("kernels"),
            fields.value("individual_gpu", float),
            times("individual_sections"),
        )


class Detector:
    """Times sections and compares the ranks; one for each process, and never an instance."""

    initialized: bool = False
    scores_to_compute: Sequence[str] = ()
    gather_on_rank0: bool = True
    profiling_interval: int = 1
    _originals: dict[tuple[int, str], tuple[CallableId, Any]]
    _node = ""
    _sections: dict[str, _Times]
    _interval: _Interval
    _best_sections: BestTimes
    _best_kernels: BestTimes
    _look: _Look | None = None

    def __new__(cls) -> Detector:
        """Refuse."""
        raise RuntimeError(f"class {cls.__name__} should not be instantiated; call its class methods")

    @classmethod
    def initialize(
        cls,
        scores_to_compute: Sequence[str] | str = "all",
        gather_on_rank0: bool = True,
        profiling_interval: int = 1,
        report_time_interval: float = 60,
        node_name: str | None = None,
        profile_kernels: bool | Kernels = False,
    ) -> None:
        """Begin.

        Args:
            scores_to_compute: some of "relative_perf_scores" and "individual_perf_scores", or "all".
            gather_on_rank0: rank 0 gets the scores of all ranks; otherwise each rank gets its own.
            profiling_interval: entries of a section of which one is timed.
            report_time_interval: seconds between reports of :meth:`generate_report_if_interval_elapsed`.
            node_name: in reports; None: the name of the host.
            profile_kernels: ours; the entries that are timed have their kernels timed, one by one, by
                torch's profiler. Each then ends with a synchronisation: give a ``profiling_interval``, too.

        Raises:
            RuntimeError: it has begun already.
            ValueError: a score is unknown, or the profiling interval is below 1.
        """
        if cls.initialized:
            raise RuntimeError("Detector is initialized already; call Detector.shutdown() first")
        scores = [RELATIVE, INDIVIDUAL] if scores_to_compute == "all" else list(scores_to_compute)
        if unknown := set(scores) - {RELATIVE, INDIVIDUAL}:
            raise ValueError(f"scores_to_compute: {min(unknown)!r} is none of '{RELATIVE}', '{INDIVIDUAL}'")
        if profiling_interval < 1:
            raise ValueError(f"profiling_interval: {profiling_interval} is not a positive number of entries")
        cls.scores_to_compute = scores
        cls.gather_on_rank0 = gather_on_rank0
        cls.profiling_interval = profiling_interval
        cls._originals = {}
        cls._node = node_name or socket.gethostname()
        cls._sections = {}
        cls._interval = _Interval(report_time_interval, profiling_interval)
        cls._best_sections, cls._best_kernels = BestTimes(), BestTimes()
        chosen = Kernels() if profile_kernels is True else profile_kernels
        cls._look = _Look(chosen) if chosen else None
        cls.initialized = True

    @classmethod
    def shutdown(cls) -> None:
        """End, and restore what was wrapped."""
        cls._check()
        cls.restore_original_callables()
        cls.initialized = False

    @classmethod
    def detection_section(cls, name: str | None = None, profile_cuda: bool = True) -> _Section | _Unmeasured:
        """Return a context manager that times what runs in it.

        Args:
            name: None: the file and line of the caller.
            profile_cuda: it counts for the GPU score, too.

        Raises:
            RuntimeError: the detector is not initialized.
        """
        cls._check()
        if name is None:
            caller = sys._getframe(1)
            name = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        times = cls._sections.get(name)
        if times is None:
            times = cls._sections[name] = _Times(name)
        times.entries += 1
        if (times.entries - 1) % cls.profiling_interval:
            return _UNMEASURED
        return _Section(times, profile_cuda, cls._look if profile_cuda else None)

    @classmethod
    def wrap_callables(cls, callable_ids: list[CallableId], profile_cuda: bool = True) -> None:
        """Replace callables by ones whose calls are sections, named after object and attribute."""
        cls._check()
        for one in callable_ids:
            original = getattr(one.obj, one.name)
            cls._originals.setdefault((id(one.obj), one.name), (one, original))
            setattr(one.obj, one.name, cls._wrapped(original, str(one), profile_cuda))

    @classmethod
    def _wrapped(cls, original: Callable[..., Any], name: str, profile_cuda: bool) -> Callable[..., Any]:
        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not cls.initialized:
                return original(*args, **kwargs)
            with cls.detection_section(name, profile_cuda):
                return original(*args, **kwargs)

        return timed

    @classmethod
    def restore_original_callables(cls) -> None:
        """Put back what was wrapped."""
        cls._check()
        for one, original in cls._originals.values():
            setattr(one.obj, one.name, original)
        cls._originals = {}

    @classmethod
    def generate_report_if_interval_elapsed(cls) -> Report | None:
        """Count a step, and return a report if it ends an interval; every rank calls it in each step.

        The interval is counted in steps, so that it ends after the same step on all ranks.
        """
        cls._check()
        cls._interval.count()
        return cls.generate_report() if cls._interval.elapsed else None

    @classmethod
    def is_interval_elapsed(cls) -> bool:
        """Say whether the last call of :meth:`generate_report_if_interval_elapsed` ended an interval."""
        cls._check()
        return cls._interval.elapsed

    @classmethod
    def generate_report(cls) -> Report | None:
        """Compare the ranks since the last report; every rank calls it.

        Returns:
            None on ranks other than 0 if reports are gathered there.
        """
        cls._check()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        started = time.perf_counter()
        sections, on_device = cls._take()
        kernels = cls._look.take() if cls._look is not None else {}
        own = cls._message(sections, on_device, kernels)
        rank, messages = _exchanged(own, cls.gather_on_rank0)
        if messages is None:
            return None
        ranks = range(len(messages)) if cls.gather_on_rank0 else [rank]
        scores = _Scores(messages, ranks)
        relative, individual = RELATIVE in cls.scores_to_compute, INDIVIDUAL in cls.scores_to_compute
        return Report(
            gpu_relative_perf_scores=scores.gpu_relative() if relative else {},
            section_relative_perf_scores=scores.sections_relative() if relative else {},
            gpu_individual_perf_scores=scores.gpu_individual() if individual else {},
            section_individual_perf_scores=scores.sections_individual() if individual else {},
            rank_to_node={at: one.node for at, one in enumerate(messages)},
            local_section_summaries=sections,
            local_kernel_summaries=kernels or on_device,
            generate_report_elapsed_time=(time.perf_counter() - started) * 1e3,
            gather_on_rank0=cls.gather_on_rank0,
            rank=rank,
        )

    @classmethod
    def _take(cls) -> tuple[dict[str, Summary], dict[str, Summary]]:
        """Return the summaries since the last report, of sections and of what counts as kernels."""
        for times in cls._sections.values():
            times.read_events()
        sections = {name: _summary(times.host) for name, times in cls._sections.items() if times.host}
        on_device = {name: _summary(times.device) for name, times in cls._sections.items() if times.device}
        for times in cls._sections.values():
            times.host.clear()
            times.device.clear()
        return sections, on_device

    @classmethod
    def _message(
        cls,
        sections: Mapping[str, Summary],
        on_device: Mapping[str, Summary],
        kernels: Mapping[str, Summary],
    ) -> _Message:
        of_sections = {name: one[Statistic.MED] for name, one in sections.items()}
        of_device, of_kernels = _heaviest(on_device), _heaviest(kernels)
        compared = of_kernels or of_device
        best = cls._best_kernels.references({name: one.median for name, one in compared.items()})
        own = section_scores(of_sections, cls._best_sections.references(of_sections))
        return _Message(cls._node, of_sections, of_device, of_kernels, gpu_score(compared, best), own)

    @classmethod
    def _check(cls) -> None:
        if not cls.initialized:
            raise RuntimeError("Detector is not initialized.")


@dataclass(frozen=True)
class _Scores:
    """The scores of some ranks."""

    messages: Sequence[_Message]
    ranks: Sequence[int]

    def gpu_relative(self) -> dict[int, float]:
        every = all(one.kernels for one in self.messages)
        compared = [one.kernels if every else one.on_device for one in self.messages]
        medians = [{name: one.median for name, one in each.items()} for each in compared]
        references = relative_references(medians)
        return {rank: gpu_score(compared[rank], references) for rank in self.ranks}

    def gpu_individual(self) -> dict[int, float]:
        return {rank: self.messages[rank].individual_gpu for rank in self.ranks}

    def sections_relative(self) -> dict[str, dict[int, float]]:
        references = relative_references([one.sections for one in self.messages])
        return self._by_section([section_scores(one.sections, references) for one in self.messages])

    def sections_individual(self) -> dict[str, dict[int, float]]:
        return self._by_section([one.individual_sections for one in self.messages])

    def _by_section(self, scores: Sequence[Mapping[str, float]]) -> dict[str, dict[int, float]]:
        names = sorted(set().union(*(scores[rank] for rank in self.ranks)))
        return {name: {rank: scores[rank].get(name, math.nan) for rank in self.ranks} for name in names}


def _summary(taken: Sequence[float]) -> Summary:
    return {
        Statistic.MIN: min(taken),
        Statistic.MAX: max(taken),
        Statistic.MED: median_low(taken),
        Statistic.AVG: fmean(taken),
        Statistic.STD: stdev(taken) if len(taken) > 1 else math.nan,
        Statistic.NUM: len(taken),
    }


def _heaviest(summaries: Mapping[str, Summary]) -> dict[str, Kernel]:
    """Return the kernels that take the most time."""
    found = {
        name: Kernel(one[Statistic.MED], one[Statistic.NUM] * one[Statistic.AVG])
        for name, one in summaries.items()
    }
    most = sorted(found, key=lambda name: found[name].weight, reverse=True)[:_MOST_TOLD]
    return {name: found[name] for name in most}


def _grouped() -> bool:
    return dist.is_available() and dist.is_initialized()


def _exchanged(own: _Message, on_rank0: bool) -> tuple[int, list[_Message] | None]:
    """Return this rank, and the messages of all ranks; None where they are not gathered."""
    if not _grouped():
        return 0, [own]
    every = from_all_ranks(own.fields(), "a report of stragglers", only_rank0=on_rank0)
    if every is None:
        return dist.get_rank(), None
    return dist.get_rank(), [_Message.of(one, rank) for rank, one in enumerate(every)]


def _reduced(value: float) -> float:
    """Return the largest value over all ranks."""
    if not _grouped():
        return value
    number = torch.tensor([value], device=group_device())
    dist.all_reduce(number, op=dist.ReduceOp.MAX)
    return float(number.item())
