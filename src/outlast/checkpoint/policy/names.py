"""How the names of tensors in a checkpoint differ from those in a job, and the likely cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from outlast.checkpoint.policy.manifest import some

_WRAPPERS = {  # words that a wrapper puts into the names of a module's state
    "_orig_mod": "torch.compile",
    "module": "DistributedDataParallel or DataParallel",
    "_fsdp_wrapped_module": "FullyShardedDataParallel",
    "_checkpoint_wrapped_module": "checkpoint_wrapper",
}
_CURE = (
    "take the change back, or begin a new run in another run folder and load the weights in the script"
    " (outlast ckpt export writes them)"
)


def name_differences(then: Collection[str], now: Collection[str]) -> str:
    """Return which names are only in the checkpoint or only in the job, why that may be, and what to do.

    Args:
        then: names in the checkpoint only.
        now: names in the job only.
    """
    sides = ((then, "the checkpoint"), (now, "this job"))
    found = [
        f"{some(names)} {'is' if len(names) == 1 else 'are'} in {where} only"
        for names, where in sides
        if names
    ]
    return f"{'; '.join(found)}; {likely_cause(then, now)}"


def likely_cause(then: Collection[str], now: Collection[str]) -> str:
    """Return why names may differ, and what to do; see :func:`name_differences`."""
    wrapped = _wrappers(then, now)
    if wrapped:
        return wrapped
    if then and now:
        alike = Counter(map(_last, then)) == Counter(map(_last, now))
        why = "they look renamed" if alike else "the model has changed"
    else:
        why = f"they were {'removed' if then else 'added'} since the checkpoint was saved"
    return f"{why}: {_CURE}"


def _wrappers(then: Collection[str], now: Collection[str]) -> str:
    """Return which wrappers alone make the difference; empty: others do, or none does."""
    if {_bare(name) for name in then} != {_bare(name) for name in now}:
        return ""
    before, here = _words(then), _words(now)
    lines = [
        f"{maker} put {word!r} into the names of {'the checkpoint' if word in before else 'this job'}:"
        f" register the model {'with' if word in before else 'without'} it, as it was saved"
        for word, maker in _WRAPPERS.items()
        if (word in before) != (word in here)
    ]
    return "; ".join(lines)


def _words(names: Iterable[str]) -> set[str]:
    return {word for name in names for word in name.split(".")}


def _bare(name: str) -> str:
    return ".".join(word for word in name.split(".") if word not in _WRAPPERS)


def _last(name: str) -> str:
    return name.rpartition(".")[2]
