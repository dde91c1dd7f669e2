"""Which layout a job has at a number of ranks: the table ``[parallelism]``.

A layout says how many ranks work along each dimension. The names are those of torch's device meshes and of
Megatron-LM: tp, pp, dp, cp, ep.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields

from outlast.errors import UsageError


@dataclass(frozen=True, order=True)
class Layout:
    """Ranks along each dimension.

    Args:
        tp: ranks that divide each tensor.
        pp: stages of the pipeline.
        dp: data-parallel copies of the model.
        cp: ranks that divide a sequence.
        ep: ranks among the dp x cp ones of a stage that divide a layer's experts; it divides their number and
            adds no ranks (Megatron-LM).
        virtual: chunks of layers that a rank of the pipeline has (Megatron-LM's interleaved schedule).
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    virtual: int = 1

    @property
    def ranks(self) -> int:
        """Ranks of the job."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def shape(self) -> Layout:
        """The same with one data-parallel copy: what the parts of the model depend on."""
        return Layout(self.tp, self.pp, 1, self.cp, self.ep, self.virtual)

    @property
    def text(self) -> str:
        """What :meth:`parse` reads, such as "tp=2,pp=2,dp=2,cp=1,ep=1,virtual=1"."""
        return ",".join(f"{name}={ranks}" for name, ranks in vars(self).items())

    def problem(self) -> str:
        """Return why there is no such layout; empty: there is one."""
        for name, ranks in vars(self).items():
            if type(ranks) is not int or ranks < 1:
                return f"{name} = {ranks!r} is not a positive whole number"
        if self.dp * self.cp % self.ep:
            return f"ep = {self.ep} does not divide the {self.dp * self.cp} ranks of dp and cp"
        if self.virtual > 1 and self.pp == 1:
            return f"virtual = {self.virtual} needs pp of at least 2"
        return ""

    def __str__(self) -> str:
        further = (("cp", self.cp), ("ep", self.ep), ("virtual stages", self.virtual))
        words = [f"tp {self.tp}", f"pp {self.pp}", f"dp {self.dp}"]
        return ", ".join(words + [f"{name} {count}" for name, count in further if count > 1])

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read a layout from a text.

        Raises:
            UsageError: it is none.
        """
        pairs = [item.partition("=") for item in text.split(",")]
        values = {name: int(ranks) for name, _, ranks in pairs if name in NAMES and ranks.isdecimal()}
        found = cls(**values)
        if len(values) != len(pairs) or found.problem():
            raise UsageError(f"{text!r} is no layout; expected ranks by dimension, like tp=2,pp=2,dp=2")
        return found


MAY_BE_FIXED = ("tp", "pp", "cp", "ep")
NAMES = tuple(spec.name for spec in fields(Layout))


@dataclass(frozen=True)
class ParallelismOptions:
    """The table ``[parallelism]``.

    Args:
        layouts: one for each number of ranks at which the job may run, with the dimensions that are not 1:
            ``[{tp = 2, pp = 2, dp = 2}, {tp = 2, pp = 2}, {tp = 2}, {}]`` for 8, 4, 2 and 1 ranks. Empty: the
            job runs with any number of ranks, and the script alone knows its layout.
        model: preset, ``config.json`` or TOML file, as for ``outlast plan``. The planner then makes the
            layouts when the job starts; the next options are for it.
        sequence: tokens of a sample; 0: the most that the model takes.
        global_batch: samples of a step.
        micro_batch: samples that a rank computes at a time.
        memory: GiB of a device; 0: not checked.
        preferred: layout with all nodes, which is kept as far as that is good; ``dp`` left out: all copies
            that fit. Empty: the planner's best.
        fixed: dimensions that stay as they are in ``preferred``.
        even: every data-parallel copy computes as many micro-batches.
        recompute: activations are computed again in the backward pass.
        replicated_optimizer: every copy keeps all of the optimizer's state.
    """

    layouts: list[dict[str, int]] = field(default_factory=list)
    model: str = ""
    sequence: int = 0
    global_batch: int = 0
    micro_batch: int = 1
    memory: float = 0.0
    preferred: dict[str, int] = field(default_factory=dict)
    fixed: list[str] = field(default_factory=list)
    even: bool = False
    recompute: bool = False
    replicated_optimizer: bool = False

    @property
    def chosen(self) -> tuple[Layout, ...]:
        """The layouts."""
        return tuple(Layout(**given) for given in self.layouts)

    def problems(self) -> tuple[str, ...]:
        """Return one line for each invalid value."""
        found = self._problems_of_plan()
        seen: dict[int, int] = {}
        for place, given in enumerate(self.layouts):
            unknown = sorted(given.keys() - set(NAMES))
            if unknown:
                known = ", ".join(NAMES)
                found.append(f"layouts.{place}: found {', '.join(unknown)}, expected some of {known}")
                continue
            layout = Layout(**given)
            if problem := layout.problem():
                found.append(f"layouts.{place}: {problem}")
                continue
            other = seen.setdefault(layout.ranks, place)
            if other != place:
                found.append(
                    f"layouts.{place}: it has {layout.ranks} ranks, and so has layouts.{other};"
                    " one layout for each number of ranks is expected"
                )
        return tuple(found)

    def _problems_of_plan(self) -> list[str]:
        if not self.model:
            return [
                f"{spec.name}: has no effect without model; name one, or leave {spec.name} out"
                for spec in fields(self)
                if spec.name != "layouts" and getattr(self, spec.name) != getattr(_NO_PLAN, spec.name)
            ]
        if self.layouts:
            return ["layouts, model: found both; give the layouts, or the model for which they are planned"]
        found = []
        if not self.global_batch:
            found.append("global_batch: missing; the planner needs the samples of a step")
        least = {"sequence": 0, "global_batch": 0, "micro_batch": 1, "memory": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if not low <= value < math.inf:
                found.append(f"{name}: found {value}, expected at least {low}")
        found += [
            f"preferred.{name}: found {ranks}, expected ranks of {', '.join(NAMES)}, at least 1"
            for name, ranks in self.preferred.items()
            if name not in NAMES or ranks < 1
        ]
        if unknown := sorted(set(self.fixed) - set(MAY_BE_FIXED)):
            found.append(f"fixed: found {', '.join(unknown)}, expected some of {', '.join(MAY_BE_FIXED)}")
        if self.fixed and not self.preferred:
            found.append("fixed: has no effect without preferred, which says at what")
        return found


_NO_PLAN = ParallelismOptions()


def layout_for(layouts: Collection[Layout], world_size: int) -> Layout | None:
    """Return the layout for a number of ranks; None: there is none."""
    return next((one for one in layouts if one.ranks == world_size), None)


def refusals(layouts: Sequence[Layout], ranks_of: Mapping[str, int]) -> list[str]:
    """Return a line for each number of nodes that was asked for and at which there is no layout.

    Args:
        layouts: empty: any number of ranks will do.
        ranks_of: number of ranks, by what asks for it.
    """
    sizes = ", ".join(str(size) for size in sorted({one.ranks for one in layouts}))
    return [
        f"{what}: there is no layout for {ranks} ranks in [parallelism]; it has layouts for {sizes}"
        for what, ranks in ranks_of.items()
        if layouts and layout_for(layouts, ranks) is None
    ]
