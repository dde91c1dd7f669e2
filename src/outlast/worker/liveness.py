"""The rank's side of liveness: which page it writes, and pulses for scripts that know nothing of them.

A script that never calls :func:`outlast.start` still pulses when it was forked from the zygote:
each optimizer step counts as a step, through torch's own global post-step hook.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from outlast.transport.pulse import PAGE_BYTES, PulsePage, RankState

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

_page: PulsePage | None = None
_hook: RemovableHandle | None = None


def attach(path: str | None) -> PulsePage:
    """Open this process's page once; without a launcher it is memory that nobody reads."""
    global _page, _hook
    if _page is not None:
        return _page
    _page = PulsePage.open(path) if path else PulsePage(bytearray(PAGE_BYTES))
    _page.words[3] = os.getpid()
    _page.mark("started")
    if path and "torch.optim" in sys.modules:
        _hook = _pulse_with_optimizers(_page)
    return _page


def take_over() -> None:
    """Stop counting optimizer steps: from here on the session says what a step is."""
    global _hook
    if _hook is not None:
        _hook.remove()
        _hook = None


def _pulse_with_optimizers(page: PulsePage) -> RemovableHandle:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    steps = 0

    def count(*_: Any) -> None:
        nonlocal steps
        steps += 1
        page.mark("first_step")
        page.set_state(RankState.RUNNING)
        page.outside()
        page.pulse(steps)
        page.touch()

    return register_optimizer_step_post_hook(count)
