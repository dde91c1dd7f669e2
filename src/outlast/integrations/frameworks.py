"""Training loops that a framework owns: restored, saved and watched through its own hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from outlast import plugins
from outlast.errors import UsageError
from outlast.integrations.announcing import AnnouncedLoop
from outlast.ports import Framework
from outlast.worker.session import Session, start


@contextmanager
def follow(trainer: object, framework: Framework | None = None, **options: Any) -> Iterator[Session | None]:
    """Restore a trainer's state and save it while its own loop runs, which is the body of the ``with``.

    Args:
        trainer: an object of the framework.
        framework: whose it is; default the first registered one that says so.
        options: of :func:`outlast.start`.

    Yields:
        The session; None where the framework has checkpoints of its own: then its progress is announced.

    Raises:
        UsageError: no registered framework owns the trainer, or an option has no effect.
        OutlastError: as :meth:`Session.restore` does.
    """
    framework = framework or _owner(trainer)
    state = framework.state(trainer)
    if not state:
        if options:
            raise UsageError(
                f"follow: {framework.name} saves by itself; {', '.join(options)} would have no effect"
            )
        with AnnouncedLoop(framework.name) as loop:
            framework.attach(trainer, loop)
            yield None
        return
    with start(**options) as session:
        framework.resume(trainer, session.restore(**state))
        framework.attach(trainer, _Saved(session))
        yield session


def _owner(trainer: object) -> Framework:
    names = plugins.names(plugins.FRAMEWORKS)
    for name in names:
        found: Framework = plugins.load(plugins.FRAMEWORKS, name)()
        if found.owns(trainer):
            return found
    kind = f"{type(trainer).__module__}.{type(trainer).__qualname__}"
    raise UsageError(f"follow: no framework knows a {kind}; registered are {', '.join(names) or 'none'}")


class _Saved:
    """The loop of a framework whose state a session saves."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def should_stop(self) -> bool:
        return self._session.should_stop

    def step_done(self, step: int) -> int:
        return self._session.step_done(step)

    def saved(self, step: int) -> None:
        del step  # the session's own are what is restored
