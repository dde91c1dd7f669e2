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


class _Here:
    """This process's page, and the hook that pulses for scripts without a session."""

    page: PulsePage | None = None
    hook: RemovableHandle | None = None


def attach(path: str | None) -> PulsePage:
    """Open this process's page once; without a launcher it is memory that nobody reads."""
    if _Here.page is not None:
        return _Here.page
    page = _Here.page = PulsePage.open(path) if path else PulsePage(bytearray(PAGE_BYTES))
    page.words[3] = os.getpid()
    page.mark("started")
    if path and "torch.optim" in sys.modules:
        _Here.hook = _pulse_with_optimizers(page)
    return page


def change(path: str) -> PulsePage:
    """Go on with another page: this process has become a rank of another generation."""
    take_over()
    _Here.page = None
    return attach(path)


def take_over() -> None:
    """Stop counting optimizer steps: from here on the session says what a step is."""
    if _Here.hook is not None:
        _Here.hook.remove()
        _Here.hook = None


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
