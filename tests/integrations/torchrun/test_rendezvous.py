"""What torchrun hands to our rendezvous, and the entry point by which it finds it."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from outlast.errors import UsageError
from outlast.integrations.torchrun.rendezvous import meeting


def parameters(endpoint: str = "127.0.0.1:29400", **conf: str) -> RendezvousParameters:
    return RendezvousParameters("outlast", endpoint, "job", 2, 3, **conf)


@pytest.mark.parametrize(
    ("endpoint", "conf", "named"),
    [
        ("127.0.0.1:29400", {"spare": "1"}, "spare.*outlast"),
        ("127.0.0.1:29400", {"spares": "one"}, "spares=one"),
        ("127.0.0.1:29400", {"ping_timeout": "0.1"}, "ping_timeout.*1 "),
        ("127.0.0.1:29400", {"ping_timeout": "4", "keep_alive_interval": "1"}, "ping_timeout.*keep_alive"),
        ("127.0.0.1:29400", {"token_file": "/no/such/file"}, "token_file=/no/such/file"),
        ("127.0.0.1:29400", {"node_name": "a b"}, "node_name=a b"),
        ("10.1.2.3:29400", {}, "token_file"),  # others reach it
        ("here:there", {}, "HOST:PORT"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(
    endpoint: str, conf: dict[str, str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OUTLAST_TOKEN", raising=False)
    with pytest.raises(UsageError, match=named):
        meeting(parameters(endpoint, **conf))


def test_torchruns_own_settings_keep_their_meaning() -> None:
    found = meeting(parameters(timeout="70", keep_alive_interval="2", keep_alive_max_attempt="4"))
    assert (found.join_timeout, found.ping_timeout, found.grace) == (70.0, 8.0, 30.0)
    assert meeting(parameters(timeout="900", join_timeout="50")).join_timeout == 50.0
    assert meeting(parameters("127.0.0.1:1,127.0.0.1")).seeds[1] == "127.0.0.1:29400"


def test_the_entry_point_names_what_torchs_registry_calls() -> None:
    (found,) = entry_points(group="torchrun.handlers", name="outlast")
    assert callable(found.load()())
