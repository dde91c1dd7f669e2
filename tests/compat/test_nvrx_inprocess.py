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
    with pytest.warns(UserWarning, match="returned None, called with"):
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
    with pytest.raises(RestartAbort, match="1 restarts, max_iterations is 1"):
        RetryController(max_iterations=1)(STATE)
    for few in ({"min_world_size": 3}, {"min_active_world_size": 3}):
        with pytest.raises(RestartAbort, match="found 2 ranks, at least 3 needed"):
            RetryController(**few)(STATE)


def test_a_finalize_in_a_thread_has_a_time_and_its_error_is_seen() -> None:
    found: list[object] = []
    call = ThreadedFinalize(timedelta(seconds=30), lambda *a, **k: found.append((a, k)), (1,), {"b": 2})
    assert call(STATE) is STATE
    assert found == [((1,), {"b": 2})]
    never = threading.Event()
    with pytest.raises(plugins.TimeoutError, match=r"ThreadedFinalize: not done after 0\.05 s"):
        ThreadedFinalize(timedelta(seconds=0.05), lambda: never.wait(60))(STATE)
    never.set()
    with pytest.raises(ZeroDivisionError):
        ThreadedFinalize(timedelta(seconds=30), lambda: 1 / 0)(STATE)
    assert CudaHealthCheck()(STATE) is STATE


def test_a_folder_for_traces_is_refused() -> None:
    assert AbortTorchDistributed()(STATE) is STATE
    with pytest.raises(outlast.UsageError, match="torch_fr_trace_path='/tmp/x' has no effect here"):
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
    with pytest.raises(outlast.UsageError, match="there is no agent; start the script with outlast run"):
        wrapped()


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"soft_timeout": 60}, "soft_timeout: found 60, expected a datetime.timedelta"),
        ({"soft_time": 60}, "soft_time: unknown; expected some of abort, barrier_timeout"),
        ({"abort": 3}, "abort: found 3, expected an object that takes the state"),
        (
            {"soft_timeout": timedelta(seconds=60), "hard_timeout": timedelta(seconds=30)},
            "hard_timeout: 30.0 is not more than hang_timeout",
        ),
        ({"last_call_wait": timedelta(seconds=1), "store_kwargs": {}}, "last_call_wait has no effect here"),
        ({"last_call_wait": timedelta(seconds=1), "store_kwargs": {}}, "store_kwargs has no effect here"),
    ],
)
def test_what_cannot_take_effect_is_refused(named: dict[str, Any], said: str) -> None:
    with pytest.raises(outlast.UsageError, match=re.escape(said)):
        Wrapper(**named)


def table() -> dict[str, str]:
    """Return the answers of the page's first table by parameter."""
    text = PAGE.read_text(encoding="utf-8").partition("| NVRx `inprocess.Wrapper` |")[2]
    found = {}
    for line in text.partition("\n\n")[0].splitlines()[2:]:
        names, _, answer = (cell.strip() for cell in line.strip("|").split("|"))
        said = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", answer).replace("`", "")
        found |= dict.fromkeys(re.findall(r"`(\w+)`", names), said)
    return found


def test_the_page_says_the_same_of_every_parameter() -> None:
    page = table()
    absent = {name: said.removeprefix("absent: ") for name, said in page.items() if said.startswith("absent")}
    assert absent == dict(ABSENT)
    for name in page.keys() - absent.keys():
        value = (
            timedelta(seconds=100) if name.endswith("timeout") else False if name == "enabled" else Compose()
        )
        Wrapper(**{name: value})
