"""Which formats of checkpoints can be loaded in another layout than the one that saved them."""

from __future__ import annotations

from dataclasses import dataclass

from outlast.parallelism.policy.degrees import Layout

_ALL = frozenset(("tp", "pp", "dp", "cp", "ep", "virtual"))


@dataclass(frozen=True)
class Format:
    """A format of checkpoints.

    Args:
        changes: degrees of parallelism that may differ between the ranks that save and those that load.
        condition: what must be so when it is saved.
        instead: what would allow the other changes.
    """

    changes: frozenset[str]
    condition: str
    instead: str = ""


FORMATS = {
    "outlast": Format(_ALL, "tensors are DTensors, or alike on all ranks; names do not depend on the stage"),
    "dcp": Format(_ALL, "state dicts are made by get_state_dict; names do not depend on the stage"),
    # Megatron-LM, distrib_optimizer.py: the optimizer's default, dp_reshardable, allows another dp only.
    "megatron": Format(frozenset(("dp",)), "", "save with --dist-ckpt-optim-fully-reshardable"),
    "megatron-fully-reshardable": Format(_ALL, "saved with --dist-ckpt-optim-fully-reshardable"),
    "deepspeed": Format(frozenset(), "", "convert it to a universal checkpoint (ds_to_universal.py)"),
    "deepspeed-universal": Format(_ALL - {"ep"}, "converted by ds_to_universal.py", "keep ep"),
    "torch-save": Format(frozenset(), "", "save with outlast or DCP"),
}


@dataclass(frozen=True)
class Loadable:
    """Whether a checkpoint can be loaded in another layout, and on which condition or why not."""

    can: bool
    why: str


def loadable(name: str, today: Layout, layout: Layout) -> Loadable:
    """Return whether a checkpoint can go from today's layout to another one.

    Args:
        name: one of :data:`FORMATS`.
        today: the layout that saved it.
        layout: the layout that is to load it.
    """
    form = FORMATS[name]
    changed = [
        one
        for one in ("tp", "pp", "cp", "ep", "virtual", "dp")
        if getattr(today, one) != getattr(layout, one)
    ]
    refused = [one for one in changed if one not in form.changes]
    if refused:
        allowed = ", ".join(sorted(form.changes)) or "nothing"
        return Loadable(False, f"{name} allows {allowed} to change, not {', '.join(refused)}; {form.instead}")
    return Loadable(True, form.condition if changed else "")
