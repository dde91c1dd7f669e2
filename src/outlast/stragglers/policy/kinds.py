"""What the name of a section says about what a rank does in it."""

from __future__ import annotations

import re

from outlast.stragglers.policy.rows import Kind

# The words of Megatron-LM's timers ("batch-generator", "all-grads-sync", "forward-recv"), of torch's
# collectives, and of DataLoaders; a word is what stands between characters that are no letters.
_WORDS = {
    Kind.DATA: {
        "batch",
        "data",
        "dataload",
        "dataloader",
        "dataloading",
        "dataset",
        "fetch",
        "loader",
        "loading",
    },
    Kind.COMMUNICATION: {
        *("allgather", "allreduce", "alltoall", "barrier", "broadcast", "collective", "comm", "communicate"),
        *("communication", "gather", "recv", "reduce", "scatter", "send", "sync", "synchronize"),
    },
}
_BREAKS = re.compile(r"[^a-z]+")


def kind_of(name: str) -> Kind:
    """Return the kind of a section by the words of its name; COMPUTE if none of them is known."""
    words = set(_BREAKS.split(name.lower()))
    return next((kind for kind, known in _WORDS.items() if words & known), Kind.COMPUTE)
