"""NVRx's in-process Wrapper and its plug-ins without an agent: what is taken and refused, in which order."""

from __future__ import annotations

import re
import threading
import typing
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import outlast
from outlast.compat.nvrx import plugins
from outlast.compat.nvrx.plugins import (
    Abort,
    AbortTorchDistributed,
    Compose,
    CudaHealthCheck,
    FrozenState,
    RestartAbort,
    RetryController,
    ThreadedFinalize,
)
from outlast.compat.nvrx.wrapper import ABSENT, Wrapper
from outlast.inprocess import CallWrapper

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "in-process-restart.md"
STATE = FrozenState(0, 2, 0, 2, 0, 2, iteration=1)


class Noting(Abort):
    def __init__(self, name: str, said: list[str], returns: bool = True) -> None:
        self.name, self.said, self.returns = name, said, returns

    def __call__(self, state: FrozenState) -> Any:
        self.said.append(self.name)
        return state if self.returns else None


def test_the_plug_in_listed_last_is_called_first() -> None:
    said: list[str] = []
    composed = Compose(Noting("a", said), Compose(Noting("b", said), Noting("c", said)))
    assert composed(STATE) is STATE
    assert said == ["c", "b", "a"]
    with pytest.warns(UserWarning, match="None"):
        assert Compose(Noting("a", said, returns=False))(STATE) is STATE


def test_what_is_composed_takes_and_returns_any_values() -> None:
    class Own:
        def __call__(self, first: int, second: int) -> tuple[int, int]:
            return first + 1, second * 2

    composed = Compose(Own(), Own())
    assert composed(1, 1) == (3, 4)
    assert isinstance(composed, Own)
    assert Compose(lambda: 7)() == 7


def test_composed_plug_ins_are_an_instance_of_what_all_of_them_are() -> None:
    noting, aborting = Noting("a", []), AbortTorchDistributed()
    for composed in (
        Compose(noting, aborting),
        Compose(Compose(noting, aborting), aborting),
        Compose(Compose(noting, aborting), Compose(aborting, noting)),
    ):
        assert isinstance(composed, Compose)
        assert isinstance(composed, Abort)
        assert not isinstance(composed, (Noting, AbortTorchDistributed))
        assert composed(STATE) is STATE
    assert isinstance(Compose(noting, noting), Noting)
    assert not isinstance(Compose(noting, CudaHealthCheck()), Abort)
    unaltered = partial(lambda state: state)  # no class can derive from Compose and from partial
    for plain in (
        Compose(),
        Compose(lambda state: state, noting),
        Compose(noting, lambda state: state),
        Compose(unaltered, unaltered),
    ):
        assert type(plain) is Compose
        assert plain(STATE) is STATE


def test_the_retry_controller_ends_the_job() -> None:
    assert RetryController(max_iterations=2, min_world_size=2)(STATE) is STATE
    with pytest.raises(RestartAbort, match=r"max_iterations.*1"):
        RetryController(max_iterations=1)(STATE)
    for few in ({"min_world_size": 3}, {"min_active_world_size": 3}):
        with pytest.raises(RestartAbort, match=r"2.*3"):
            RetryController(**few)(STATE)


def test_a_finalize_in_a_thread_has_a_time_and_its_error_is_seen() -> None:
    found: list[object] = []
    call = ThreadedFinalize(timedelta(seconds=30), lambda *a, **k: found.append((a, k)), (1,), {"b": 2})
    assert call(STATE) is STATE
    assert found == [((1,), {"b": 2})]
    never = threading.Event()
    with pytest.raises(plugins.TimeoutError, match=r"ThreadedFinalize.*0\.05"):
        ThreadedFinalize(timedelta(seconds=0.05), lambda: never.wait(60))(STATE)
    never.set()
    with pytest.raises(ZeroDivisionError):
        ThreadedFinalize(timedelta(seconds=30), lambda: 1 / 0)(STATE)
    assert CudaHealthCheck()(STATE) is AbortTorchDistributed()(STATE) is STATE
    with pytest.raises(outlast.UsageError, match="torch_fr_trace_path='/tmp/x'"):
        AbortTorchDistributed("/tmp/x")


def plain(call: CallWrapper) -> CallWrapper:
    return call


def optional(call: CallWrapper | None = None) -> CallWrapper | None:
    return call


def evaluated(call: Any = None) -> Any:
    return call


evaluated.__annotations__["call"] = typing.Optional[CallWrapper]  # noqa: UP045 - as Megatron-LM writes it


@pytest.mark.parametrize("function", [plain, optional, evaluated])
def test_a_parameter_that_may_be_none_gets_the_call_too(function: Callable[[], Any]) -> None:
    for wrap in (Wrapper(enabled=False), outlast.resilient(enabled=False)):
        found = wrap(function)()
        assert isinstance(found, CallWrapper)
        found.ping()


def test_it_needs_an_agent() -> None:
    wrapped = Wrapper(soft_timeout=timedelta(seconds=60), abort=AbortTorchDistributed(), finalize=None)(plain)
    with pytest.raises(outlast.UsageError, match="outlast run"):
        wrapped()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"soft_timeout": 60}, r"soft_timeout.*60.*datetime\.timedelta"),
        ({"soft_time": 60}, "soft_time.*abort, barrier_timeout"),
        ({"abort": 3}, "abort.*3"),
        (
            {"soft_timeout": timedelta(seconds=60), "hard_timeout": timedelta(seconds=30)},
            "hard_timeout.*30.0.*hang_timeout",
        ),
        ({"last_call_wait": timedelta(seconds=1), "store_kwargs": {}}, "(?s)last_call_wait.*store_kwargs"),
    ],
)
def test_what_cannot_take_effect_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(outlast.UsageError, match=named):
        Wrapper(**options)


def test_the_page_has_every_parameter_and_those_that_are_absent() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("| NVRx `inprocess.Wrapper` |")[2]
    found = {}
    for line in text.partition("\n\n")[0].splitlines()[2:]:
        names, _, answer = (cell.strip() for cell in line.strip("|").split("|"))
        found |= dict.fromkeys(re.findall(r"`(\w+)`", names), answer.startswith("absent"))
    assert {name for name, absent in found.items() if absent} == set(ABSENT)
    for name in found.keys() - set(ABSENT):
        value: Any = timedelta(seconds=100) if name.endswith("timeout") else Compose()
        Wrapper(**{name: False if name == "enabled" else value})
