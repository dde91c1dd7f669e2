"""Timeouts of hang detection: set by the user, or learned from what the ranks measured.

A learned timeout is ``max(LEARNED_FLOOR, safety_factor * p99, 1.5 * longest)`` over the ranks. NVRx takes
``safety_factor * longest``: one long step then slows every later detection. Here the factor applies to the
99th percentile, and the longest span only keeps a rare long step (an evaluation) from being taken for a hang.

A section that is seldom opened (a save) is learned from its third sample on, then as in NVRx. A timeout is
learned again when the number of samples has doubled, or at once when a span came close to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from math import frexp
from typing import TYPE_CHECKING, Any

from outlast.config import LEARNED_FLOOR, LEARNED_INITIAL_START, LEARNED_SILENCE_START

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from outlast.config import FaultToleranceOptions

BUCKETS = 480  # from a microsecond to 2 ** 30 of them, 18 minutes
_PER_OCTAVE = 16
MIN_SAMPLES = 16  # Megatron Bridge, _MIN_ITERS_FOR_STEP_TIMEOUT_UPDATE
_OURS = "outlast."  # begins the names of places that no script opened
_THEIRS = "user."  # put before a script's own name that begins like one of ours
INITIAL = _OURS + "initial"
OUT_OF_SECTION = _OURS + "out_of_section"
WARMUP = _OURS + "warmup"
FINISHING = _OURS + "finishing"
STORAGE = _OURS + "waiting_for_storage"  # has a bound of its own: checkpoints.timeout
OTHER_SECTIONS = _OURS + "other_sections"
SETUP = "setup"  # from the spawn to the first heartbeat, where the user has set a timeout for it
NAME_BYTES = 32  # of a section's name, in a heartbeat page
INITIAL_FLOOR = 30.0
LONGEST_MARGIN = 1.5
RARE_SAMPLES = 3  # sections that come seldom (a save) teach from their longest, as NVRx does
RARE_FLOOR = 5.0
EMA = 0.5  # NVRx timeouts_calc.py: weight of the new value when the current one was computed, too
_NEWS = 0.1  # a change by less than this share is not worth a record
_FAR = 1e9  # seconds, 30 years
_SOURCE = "ft_state.json"
_KEYS = ("current_timeouts", "samples", "doubled")
_BEAT_KEYS = ("initial", "subsequent", "were_calculated")
_SECTION_KEYS = ("section", "out_of_section", "calculated_sections", "is_out_of_section_calculated")


def section_of_user(name: str) -> str:
    """Return the stored name of a script's section, distinct from the reserved ones."""
    return _THEIRS + name if not name or name.startswith((_OURS, _THEIRS)) else name


def name_for_user(place: str) -> str | None:
    """Return the name that a script gave to a stored section; None: no script opened it."""
    return None if place.startswith(_OURS) else place.removeprefix(_THEIRS)


def stored_name(name: str) -> str:
    """Return a section's name, cut to what a heartbeat page holds."""
    encoded = name.replace("\0", "?").encode(errors="replace")
    return encoded[:NAME_BYTES].decode(errors="ignore")


def bucket_of(seconds: float) -> int:
    """Return the histogram bucket of a duration: 16 buckets an octave, linear within it.

    It runs in every step of every worker; literals cost a third less than named numbers here.
    """
    scaled = seconds * 1e6
    if 1.0 <= scaled < 1073741824.0:
        mantissa, exponent = frexp(scaled)
        return exponent * 16 + int(mantissa * 32) - 32
    return 479 if scaled >= 1073741824.0 else 0


def seconds_of(bucket: int) -> float:
    """Return the geometric middle of a bucket, in seconds."""
    octave, part = divmod(bucket, _PER_OCTAVE)
    low, high = 1 + part / _PER_OCTAVE, 1 + (part + 1) / _PER_OCTAVE
    return (1 << octave) * math.sqrt(low * high) / 1e6


@dataclass(frozen=True)
class Durations:
    """What one rank measured of one section, in seconds."""

    count: int
    p99: float
    longest: float


def summarise(counts: Sequence[int], longest: float) -> Durations:
    """Return count, 99th percentile and longest of a histogram."""
    total = sum(counts)
    beyond = total // 100
    seen = 0
    for bucket in reversed(range(len(counts))):
        seen += counts[bucket]
        if seen > beyond:
            return Durations(total, min(seconds_of(bucket), longest), longest)
    return Durations(0, 0.0, 0.0)


class Timeouts:
    """The current timeouts.

    Args:
        config: fixed values, the safety factor, and whether to learn at all.
    """

    def __init__(self, config: FaultToleranceOptions) -> None:
        self._config = config
        self._sections = {stored_name(name): limit for name, limit in config.rank_section_timeouts.items()}
        self._learned: dict[str, float] = {}
        self._samples: dict[str, int] = {}
        self._doubled: set[str] = set()

    def fix(self, silence: float) -> None:
        """Take the timeout that a script asks for, if the launcher was given none."""
        if self._config.rank_heartbeat_timeout is None:
            self._config = replace(self._config, rank_heartbeat_timeout=silence)

    def is_fixed(self, section: str | None) -> bool:
        """Say whether the user has set the limit of a section (None: outside of all)."""
        return self._fixed(OUT_OF_SECTION if section is None else section) is not None

    def _fixed(self, place: str) -> float | None:
        config = self._config
        if place == INITIAL:
            return config.initial_rank_heartbeat_timeout
        outside = place == OUT_OF_SECTION
        own = config.rank_out_of_section_timeout if outside else self._sections.get(place)
        return config.rank_heartbeat_timeout if own is None and place not in {FINISHING, STORAGE} else own

    def _limit(self, place: str) -> float:
        fixed = self._fixed(place)
        if fixed is not None:
            return fixed
        if place == STORAGE:
            return math.inf
        start = LEARNED_INITIAL_START if place in {INITIAL, FINISHING} else LEARNED_SILENCE_START
        return self._learned.get(place, start)

    def limit(self, section: str | None) -> float:
        """Return the seconds that a section may be open, or that may pass outside of all."""
        return self._limit(OUT_OF_SECTION if section is None else section)

    def initial(self) -> float:
        """Return the seconds between the spawn of a rank and its first heartbeat."""
        return self._limit(INITIAL)

    def setup(self) -> float | None:
        """Return the seconds between spawn and first heartbeat that the user has set for ``setup``."""
        return self._config.rank_section_timeouts.get(SETUP)

    def finishing(self) -> float:
        """Return the seconds that a rank may take between its last heartbeat and its end."""
        return self._limit(FINISHING)

    def stopped(self, place: str, limit: float) -> float:
        """Return how long a process may be stopped: it cannot be busy, whatever it was doing."""
        return limit if self._fixed(place) is not None else min(limit, LEARNED_FLOOR)

    def origin(self, section: str | None) -> str:
        """Return where the limit comes from, for people."""
        place = OUT_OF_SECTION if section is None else section
        if self._fixed(place) is not None:
            return "fixed"
        if place in self._doubled:
            return "doubled after a repeated hang"
        if place not in self._learned:
            return "default"
        samples = self._samples.get(place)
        return f"learned from {samples} samples" if samples else "learned from earlier starts"

    def option(self, section: str | None) -> str:
        """Return the option that sets a limit, as it is written on the command line."""
        if section == INITIAL:
            return "--ft-initial-rank-heartbeat-timeout=SECONDS"
        if section in {None, OUT_OF_SECTION}:
            name = "out-of-section" if self._sets_sections_apart() else "heartbeat"
            return f"--ft-rank-{name}-timeout=SECONDS"
        return f"--ft-rank-section-timeouts={section}:SECONDS"

    def _sets_sections_apart(self) -> bool:
        """Say whether the limit outside of sections is one of its own, and not that of every silence."""
        config = self._config
        if config.rank_out_of_section_timeout is not None or config.rank_heartbeat_timeout is not None:
            return config.rank_out_of_section_timeout is not None
        return any(not name.startswith(_OURS) for name in (*self._sections, *self._learned))

    def learn(self, observed: Mapping[str, Durations]) -> dict[str, float]:
        """Compute anew what is not fixed; return the limits that changed by more than a tenth.

        Args:
            observed: by section, the largest over ranks; time between sections as ``OUT_OF_SECTION``.
        """
        changed: dict[str, float] = {}
        for place, one in observed.items():
            if (
                not self._config.calc_ft_timeouts
                or place in {WARMUP, STORAGE}
                or self._fixed(place) is not None
            ):
                continue
            close = place in self._learned and LONGEST_MARGIN * one.longest > self._learned[place]
            enough = one.count >= max(RARE_SAMPLES, 2 * self._samples.get(place, 0))
            if not enough and not close:
                continue
            self._samples[place] = one.count
            floor = max(LEARNED_FLOOR, LONGEST_MARGIN * one.longest)
            if one.count < MIN_SAMPLES:
                floor = max(RARE_FLOOR, self._config.safety_factor * one.longest)
            if self._renew(place, floor, self._config.safety_factor * one.p99):
                changed[place] = self._learned[place]
        return changed

    def learn_initial(self, longest: float, loaded: str | None) -> float | None:
        """Learn from the slowest start of a generation; return the new limit if it changed.

        Only a generation that loaded a checkpoint teaches (Megatron Bridge updates ``setup`` only
        then): a start with nothing to load is faster than every later one.

        Args:
            longest: seconds from the spawn to the first heartbeat, the largest over ranks.
            loaded: name of the checkpoint that was loaded.
        """
        fixed = self._config.initial_rank_heartbeat_timeout is not None
        if loaded is None or fixed or not self._config.calc_ft_timeouts:
            return None
        floor = max(INITIAL_FLOOR, LONGEST_MARGIN * longest)
        moved = self._renew(INITIAL, floor, self._config.safety_factor * longest)
        return self._learned[INITIAL] if moved else None

    def _renew(self, place: str, floor: float, wanted: float) -> bool:
        """Put a limit in force, halfway from a learned one; say whether it moved enough to be told."""
        current = self._learned.get(place)
        if current is not None:
            wanted = EMA * wanted + (1 - EMA) * current
        new = self._learned[place] = max(floor, wanted)
        self._doubled.discard(place)
        return current is None or abs(new - current) > _NEWS * current

    def double(self, place: str) -> float | None:
        """Allow twice the time from now on, since a hang came back there at the same step.

        A limit that is too short for one step would else kill the job there again and again. That it came
        back is known from the fault history (:mod:`outlast.recovery.policy.fault_history`).

        Args:
            place: the section, ``OUT_OF_SECTION`` or ``INITIAL``.

        Returns:
            The doubled limit; None when nothing changes, because the user has fixed it.
        """
        if self._fixed(place) is not None:
            return None
        self._learned[place] = 2 * self._limit(place)
        self._samples.setdefault(place, 0)
        self._doubled.add(place)
        return self._learned[place]

    def state(self) -> dict[str, Any]:
        """Return the limits in the shape of NVRx's ``ft_state.json``, and what only we need besides."""
        places = {INITIAL, OUT_OF_SECTION}
        sections = {name: value for name, value in self._learned.items() if name not in places}
        initial, outside = self._learned.get(INITIAL), self._learned.get(OUT_OF_SECTION)
        return {
            "current_timeouts": {
                "heartbeat": {
                    "initial": initial,
                    "subsequent": outside,
                    "were_calculated": initial is not None or outside is not None,
                },
                "section": {
                    "section": sections,
                    "out_of_section": outside,
                    "calculated_sections": sorted(sections),
                    "is_out_of_section_calculated": outside is not None,
                },
            },
            "samples": dict(self._samples),
            "doubled": sorted(self._doubled),
        }

    def restore(self, state: object) -> list[str]:
        """Take over limits that were learned before; return a line for each part that is not taken over.

        Args:
            state: what :meth:`state` returned, or a file that NVRx wrote.
        """
        if not self._config.calc_ft_timeouts:
            return [f"{_SOURCE}: ignored, because calc_ft_timeouts is off"]
        reader = _Reader()
        top = reader.table(state, "the file", _KEYS)
        if not isinstance(state, dict):
            return reader.problems
        current = reader.table(top.get("current_timeouts"), "current_timeouts", ("heartbeat", "section"))
        beat = reader.table(current.get("heartbeat"), "heartbeat", _BEAT_KEYS)
        section = reader.table(current.get("section"), "section", _SECTION_KEYS)
        named = reader.table(section.get("section"), "section.section", ())
        calculated = reader.names(section.get("calculated_sections", []), "calculated_sections")
        by_beat = beat.get("were_calculated") is True
        found = {name: reader.limit(value, name, name in calculated) for name, value in named.items()}
        found[INITIAL] = reader.limit(beat.get("initial"), "initial", by_beat)
        if section.get("out_of_section") is not None:
            own = section.get("is_out_of_section_calculated") is True
            found[OUT_OF_SECTION] = reader.limit(section["out_of_section"], OUT_OF_SECTION, own)
        else:
            found[OUT_OF_SECTION] = reader.limit(beat.get("subsequent"), "subsequent", by_beat)
        samples = reader.table(top.get("samples", {}), "samples", ())
        doubled = reader.names(top.get("doubled", []), "doubled")
        for place, value in found.items():
            if value is None:
                continue
            self._learned[place] = max(value, INITIAL_FLOOR if place == INITIAL else LEARNED_FLOOR)
            if place != INITIAL:
                self._samples[place] = reader.count(samples.get(place, MIN_SAMPLES), f"samples.{place}")
            if place in doubled:
                self._doubled.add(place)
        return reader.problems


class _Reader:
    """Reads untrusted values and collects a message for each invalid one."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def _odd(self, place: str, found: object, expected: str) -> None:
        self.problems.append(f"{_SOURCE}: {place} is {found!r:.80}, expected {expected}; learning again")

    def table(self, value: object, place: str, known: Sequence[str]) -> dict[str, Any]:
        """Return a table; ``known`` empty: its keys are free."""
        if value is None and place in {"heartbeat", "section", "section.section"}:
            return {}
        if not isinstance(value, dict):
            self._odd(place, value, "a table")
            return {}
        strange = sorted(str(key) for key in value if key not in known) if known else []
        if strange:
            self.problems.append(f"{_SOURCE}: {place} has unknown {', '.join(strange)}; ignored")
        return {str(key): one for key, one in value.items()}

    def limit(self, value: object, place: str, learned: bool) -> float | None:
        """Return a limit in seconds that was learned, None where there is none."""
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < _FAR:
            self._odd(place, value, "a positive number of seconds")
            return None
        if not learned:
            self.problems.append(f"{_SOURCE}: {place} was {value:g} s, set and not learned; not taken over")
            return None
        return float(value)

    def names(self, value: object, place: str) -> list[object]:
        """Return a list of names."""
        if isinstance(value, list):
            return value
        self._odd(place, value, "a list of sections")
        return []

    def count(self, value: object, place: str) -> int:
        """Return a number of samples."""
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
        self._odd(place, value, "a number of samples")
        return MIN_SAMPLES
