"""How far a script without a session is: ``outlast.progress``."""

from __future__ import annotations

import operator
import time

from outlast import settings
from outlast.core import codec
from outlast.core.errors import UsageError
from outlast.core.events import ScriptSaved
from outlast.transport.control import Reporter
from outlast.worker import liveness

_MOST = 1 << 62


def progress(step: int, saved: bool = False) -> None:
    """Announce how far a script without a session is; for ``outlast run``, else nothing happens.

    Call it on the main thread of every rank, after each step or every few steps. It moves, reads and deletes
    no checkpoint. A step that is lower than the one before is taken as it is: the script went back.

    Args:
        step: completed steps, counted over all restarts.
        saved: a checkpoint of the script's own exists at that step, complete. It may be of an earlier step
            than the one announced last, which stays. One rank is enough to say so.

    Raises:
        UsageError: the step is no whole number from 0 on, or this process has a session, which announces
            its steps by itself.
    """
    done = _checked(step)
    if not isinstance(saved, bool):
        raise UsageError(
            f"outlast.progress: saved is {saved!r}, expected True or False; nothing was announced"
        )
    context = settings.worker_context() if saved or not liveness.announces() else None
    if context is not None and not context.pulse_path:
        return
    if context is not None:
        liveness.begin_announcing(context.pulse_path, context.num_warmup_iterations)
    liveness.announce(done, stays=saved)
    if saved and context is not None:
        record = ScriptSaved(
            time=time.time(), clock=time.monotonic(), generation=context.generation, step=done
        )
        Reporter(context.control_path).send(codec.encode(record))


def _checked(step: object) -> int:
    try:
        done = -1 if isinstance(step, bool) else operator.index(step)  # type: ignore[arg-type]  # anything
    except TypeError:
        done = -1
    if not 0 <= done < _MOST:
        raise UsageError(
            f"outlast.progress: step is {step!r:.80}, expected a whole number from 0 on;"
            " nothing was announced"
        )
    return done
