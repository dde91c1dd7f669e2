from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from outlast.ipc.exchange import Seal, SoloExchange, StoreExchange, SystemClock
from outlast.ports import ExchangeFailed
from tests.support import warm
from tests.support.jobs import DEADLINE, together

RANK = """
import sys, json
import torch.distributed as dist
from outlast.ipc.exchange import StoreExchange
port, rank, world = map(int, sys.argv[1:4])
store = dist.TCPStore("127.0.0.1", port, None, False)
exchange = StoreExchange(store, rank, world, 4)
print(json.dumps([exchange.gather(topic, f"{topic} of {rank}", 60.0) for topic in "aba"]), flush=True)
"""


class Hurried(SystemClock):
    """A clock for a rank that waits for nobody, which it would do five seconds longer than rank 0."""

    def monotonic(self) -> float:
        return 20 * super().monotonic()


def test_every_rank_gets_every_answer_in_the_order_of_ranks() -> None:
    def part(exchange: StoreExchange) -> list[list[str]]:
        return [exchange.gather(topic, f"{topic}{exchange.rank} é\n", DEADLINE) for topic in ("x", "y", "x")]

    expected = [[f"{topic}{rank} é\n" for rank in range(4)] for topic in ("x", "y", "x")]
    assert together(4, part) == [expected] * 4


def test_one_rank_needs_no_store() -> None:
    assert SoloExchange().gather("x", "mine", 0.0) == ["mine"]


def test_real_processes_exchange_over_a_tcp_store(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    script, said = tmp_path / "rank.py", [tmp_path / f"said-{rank}" for rank in (1, 2)]
    script.write_text(RANK)
    others = []
    for rank, path in enumerate(said, 1):
        with open(path, "w") as output:
            others.append(warm.start([script, str(store.port), str(rank), "3"], output, output))
    exchange = StoreExchange(store, 0, 3, 4)
    mine = [exchange.gather(topic, f"{topic} of 0", DEADLINE) for topic in "aba"]
    assert [other.wait(DEADLINE) for other in others] == [0, 0]
    assert [json.loads(path.read_text()) for path in said] == [mine, mine]
    assert mine[1] == ["b of 0", "b of 1", "b of 2"]


@pytest.mark.parametrize("absent", [0, 2])
def test_ranks_that_do_not_answer_are_named_to_all_others(absent: int) -> None:
    def part(exchange: StoreExchange) -> list[str]:
        if exchange.rank == absent:
            return []
        return exchange.gather("verdict", "x", 3.0)

    answers = together(3, part)
    assert answers.pop(absent) == []
    for answer in answers:
        assert isinstance(answer, ExchangeFailed)
        assert [one for one in ("'verdict'", f"rank {absent}", "3 s") if one not in str(answer)] == []


def test_a_wait_longer_than_one_slice_still_ends_with_the_answers() -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    waited: list[list[str]] = []
    exchange = StoreExchange(store, 0, 2, 1)
    waiting = threading.Thread(target=lambda: waited.append(exchange.gather("x", "a", DEADLINE)), daemon=True)
    begun = time.monotonic()
    waiting.start()
    waiting.join(timeout=1.5)
    assert waiting.is_alive()
    assert time.monotonic() - begun > 1.0
    other = StoreExchange(dist.TCPStore("127.0.0.1", store.port, None, False), 1, 2, 1)
    assert other.gather("x", "b", DEADLINE) == ["a", "b"]
    waiting.join(timeout=DEADLINE)
    assert waited == [["a", "b"]]


def test_generations_on_one_store_never_read_each_other() -> None:
    store = dist.HashStore()
    old = StoreExchange(store, 1, 2, 1, Hurried())
    with pytest.raises(ExchangeFailed, match="rank 0"):
        old.gather("x", "of the old generation", 0.01)
    with pytest.raises(ExchangeFailed, match="rank 1"):
        StoreExchange(store, 0, 2, 2).gather("x", "of the new one", 0.01)


def test_a_second_exchange_on_a_store_does_not_read_the_first_ones_keys() -> None:
    def part(exchange: StoreExchange) -> list[list[str]]:
        first = exchange.gather("x", f"first {exchange.rank}", DEADLINE)
        again = StoreExchange(exchange._store, exchange.rank, 2, 1)
        return [first, again.gather("x", f"second {exchange.rank}", DEADLINE)]

    assert together(2, part) == [[["first 0", "first 1"], ["second 0", "second 1"]]] * 2


def test_keys_of_past_rounds_are_deleted(tmp_path: Path) -> None:
    store = dist.HashStore()

    def rounds(exchange: StoreExchange) -> int:
        for _ in range(20):
            exchange.gather("x", "y", DEADLINE)
        return 20

    threads = [
        threading.Thread(target=rounds, args=(StoreExchange(store, rank, 2, 1),), daemon=True)
        for rank in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=DEADLINE)
    assert store.num_keys() <= 2 + 2  # who opened it, and the last round


def test_a_store_that_is_gone_is_an_error() -> None:
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, None, False, timeout=timedelta(seconds=5))
    exchange = StoreExchange(client, 1, 2, 1)
    del server
    with pytest.raises(ExchangeFailed):
        exchange.gather("x", "y", DEADLINE)


class Altered:
    """A store in which somebody has changed what a rank reads.

    Args:
        store: of the ranks.
        change: gets the name of a key and its value, and returns what is found there instead.
    """

    def __init__(self, store: dist.Store, change: Callable[[str, bytes], bytes]) -> None:
        self._store, self._change = store, change

    def get(self, key: str) -> bytes:
        return self._change(key, self._store.get(key))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def forged(key: str, value: bytes) -> bytes:
    """Return what an account would plant that knows the format and not the key of the job."""
    said = json.loads(value[value.index(b"{") :])
    if "answers" in said:
        said["answers"] = [f"forged {number}" for number, _ in enumerate(said["answers"])]
    else:
        said["answer"] = "forged"
    return value[: value.index(b"{")] + json.dumps(said).encode()


ATTACKS: dict[str, Callable[[str, bytes], bytes]] = {
    "another answer": forged,
    "without a code": lambda _, value: value[value.index(b"{") :],
    "under another key": lambda key, value: Seal("other").close(key, "{}").encode(),
    "nothing": lambda _, value: b"",
    "cut off": lambda _, value: value[:-1],
    "no text": lambda _, value: b"\xff\xfe" * 100,
    "brackets": lambda _, value: b"[" * 100_000,
    "number": lambda _, value: b"1" * 100_000,
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("victim", [0, 1])
def test_no_rank_believes_an_answer_that_another_account_has_planted(attack: str, victim: int) -> None:
    def part(exchange: StoreExchange) -> list[str]:
        store: Any = exchange._store
        if exchange.rank == victim:
            store = Altered(store, ATTACKS[attack])
        sealed = StoreExchange(store, exchange.rank, 2, 1, Hurried(), Seal("secret of the job"))
        return sealed.gather("inventory", f"of {exchange.rank}", 5.0)

    found = together(2, part)
    assert isinstance(found[victim], ExchangeFailed)
    assert found[1 - victim] == ["of 0", "of 1"] or isinstance(found[1 - victim], ExchangeFailed)


@pytest.mark.parametrize("attack", [attack for attack in ATTACKS if attack != "another answer"])
def test_without_a_key_what_is_malformed_is_one_kind_of_error(attack: str) -> None:
    def part(exchange: StoreExchange) -> list[str]:
        store: Any = Altered(exchange._store, ATTACKS[attack]) if exchange.rank else exchange._store
        return StoreExchange(store, exchange.rank, 2, 1).gather("inventory", "mine", DEADLINE)

    found = together(2, part)
    assert found[1] == ["mine", "mine"] or isinstance(found[1], ExchangeFailed)


def test_an_answer_of_an_earlier_round_is_not_taken_for_this_one() -> None:
    """Counters in the store are open to all: a second exchange may be made to read the keys of the first."""
    kept: dict[str, bytes] = {}

    def replay(key: str, value: bytes) -> bytes:
        return kept.setdefault(key, value)

    class Rewound(Altered):
        def add(self, key: str, amount: int) -> int:
            return 1

    def part(exchange: StoreExchange) -> list[str]:
        seal, store = Seal("secret of the job"), Rewound(exchange._store, replay)
        StoreExchange(store, exchange.rank, 2, 1, seal=seal).gather("x", f"old {exchange.rank}", DEADLINE)
        again = StoreExchange(store, exchange.rank, 2, 1, seal=seal)
        return again.gather("x", f"new {exchange.rank}", DEADLINE)

    assert isinstance(together(2, part)[1], ExchangeFailed)
