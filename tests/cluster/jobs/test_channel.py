"""Messages between agents: real sockets, real processes that are killed and stopped."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections import Counter

import pytest

from outlast.cluster.rpc.channel import MessageTooLong, Outgoing, Post, Refused
from tests.support.launching import until
from tests.support.posts import DEADLINE, TOKEN, Box, Link, boxes, child, meet, said, sockets, still_well
from tests.support.processes import state_of


def test_messages_pass_both_ways_in_order_over_one_connection() -> None:
    before = sockets()
    with boxes("a", "b") as (a, b):
        a.post.send("b", {"n": 0}, b.address)
        b.gets("a", 0)
        for n in range(1, 1000):
            a.post.send("b", {"n": n}, "an address that is not looked at:1")
            b.post.send("a", {"n": n})
        a.gets("b", 999)
        b.gets("a", 999)
        assert a.messages == [("b", n) for n in range(1, 1000)]
        assert b.messages == [("a", n) for n in range(1000)]
        a.until(lambda _: len(sockets() - before) == 2)
        counters = a.post.counters()
        assert (counters.sent, counters.received, counters.dropped, counters.refused) == (1000, 999, 0, {})
        assert counters.sent_bytes > 1000 * len('{"n":0}')


def test_messages_that_are_sent_together_arrive_in_order_at_each_peer() -> None:
    with boxes("a", "b", "c") as (a, *others):
        together = [
            Outgoing(other.post.name, b'{"n": %d}' % n, other.address) for n in range(50) for other in others
        ]
        a.post.send_all(together)
        for other in others:
            other.gets("a", 49)
            assert other.messages == [("a", n) for n in range(50)]
        assert a.post.counters().dropped == 0
        a.post.send_all(())


def test_a_large_membership_reaches_many_at_once() -> None:
    with boxes("a", "b", "c", "d") as (a, *others):
        for other in others:
            meet(a, other)
        nodes = [
            {"node": f"n{number:05d}", "address": "10.0.0.1:29400", "x": "y" * 350} for number in range(1250)
        ]
        for name in ("b", "c", "d"):
            a.post.send(name, {"n": "all", "nodes": nodes})
        for other in others:
            other.gets("a", "all")
            assert said(other.seen[-1])["nodes"] == nodes
        with pytest.raises(MessageTooLong, match=r"4194304.*4194"):
            a.post.send("b", {"x": "y" * (4 << 20)})
        still_well(a, others[0])


def test_messages_of_every_form_of_length_pass_both_ways() -> None:
    with boxes("a", "b") as (a, b):
        meet(a, b)
        for size in (124, 125, 126, 127, 65535, 65536):
            text = "y" * (size - len('{"n": }') - len(str(size)) - len(', "x": ""'))
            for one, other in ((a, b), (b, a)):
                one.post.send(other.post.name, {"n": size, "x": text})
                other.gets(one.post.name, size)
                assert said(other.seen[-1])["x"] == text


@pytest.mark.parametrize("first", ["a", "b"])
def test_two_that_dial_each_other_at_once_have_one_connection(first: str) -> None:
    before = sockets()
    for attempt in range(25):
        with boxes("a", "b") as pair:
            by_name = {box.post.name: box for box in pair}
            one = by_name.pop(first)
            (other,) = by_name.values()
            one.post.send(other.post.name, {"n": attempt}, other.address)
            other.post.send(one.post.name, {"n": attempt}, one.address)
            one.gets(other.post.name, attempt)
            other.gets(one.post.name, attempt)
            one.until(lambda _: len(sockets() - before) == 2)
            still_well(one, other)
            still_well(other, one)
            assert one.refused == other.refused == []
            one.post.close()
            other.until(lambda box: box.gone)
            assert [one.peer for one in other.gone] == [first]
            assert len(one.messages) == len(other.messages) == 2


def test_a_knock_at_a_known_peer_uses_the_connection_that_there_is() -> None:
    before = sockets()
    with boxes("a", "b") as (a, b):
        meet(b, a)
        for n in range(3):
            a.post.knock(b.address, {"n": n})
            b.post.knock(a.address, {"n": n})
            b.gets("a", n)
            a.gets("b", n)
        a.until(lambda _: len(sockets() - before) == 2)
        still_well(a, b)
        assert a.refused == b.refused == []


def test_a_claim_that_was_under_way_when_another_connection_opened_is_refused() -> None:
    with boxes("a", "b") as (a, b), Link(a.post.port, hold_at=b'"boot"') as link:
        b.post.send("a", {"n": 1}, link.address)
        b.until(lambda _: link.kept)
        a.post.send("b", {"n": 2}, b.address)
        b.gets("a", 2)
        a.gets("b", 1)
        before = a.post.counters().received_bytes
        link.passes = 1
        a.until(lambda box: box.post.counters().received_bytes > before)
        still_well(a, b)
        still_well(b, a)


def test_a_connection_that_one_side_has_lost_gives_way_to_a_new_one() -> None:
    with boxes("a", "b") as (a, b), Link(b.post.port) as link:
        a.post.send("b", {"n": 1}, link.address)
        b.gets("a", 1)
        link.held = link.mute = True
        b.post.drop("a")
        b.post.send("a", {"n": 2}, a.address)
        a.gets("b", 2)
        still_well(a, b)
        assert b.refused == []


def test_a_killed_process_is_gone_once_and_at_once() -> None:
    with boxes("a", "b") as (a, b), child("c", a.address) as process:
        meet(a, b)
        a.gets("c", "child")
        process.kill()
        a.until(lambda box: box.gone)
        a.post.send("c", {"n": "late"})
        a.until(lambda box: box.post.counters().dropped == 1)
        assert [gone.peer for gone in a.gone] == ["c"]
        assert b.gone == []


def test_a_fork_of_a_killed_process_does_not_hide_its_end() -> None:
    with boxes("a") as (a,), child("c", a.address, fork="fork") as process:
        assert process.stdout is not None
        a.gets("c", "child")
        a.post.send("c", {"n": "echo"})
        a.gets("c", "echo")
        forked = json.loads(process.stdout.readline())["forked"]
        process.kill()
        a.until(lambda box: box.gone)
        os.kill(forked, 0)


def test_a_fork_at_any_moment_holds_no_socket_of_its_parent() -> None:
    ended, others = threading.Event(), _descriptors_of_a_fork()  # as of groups of other tests
    with boxes("a") as (a,):

        def come_and_go() -> None:
            while not ended.is_set():
                with Post("b", "127.0.0.1", 0, TOKEN) as post:
                    post.knock(a.address, b'{"n": 1}')

        thread = threading.Thread(target=come_and_go)
        thread.start()
        found = [_descriptors_of_a_fork() for _ in range(15)]
        ended.set()
        thread.join(DEADLINE)
        assert [one - others for one in found] == [Counter()] * 15


def _descriptors_of_a_fork() -> Counter[str]:
    near, far = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            names = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
            links = [os.readlink(name) for name in names if os.path.lexists(name)]
            os.write(
                far, " ".join(link for link in links if link.startswith(("socket:", "anon_inode:"))).encode()
            )
        finally:
            os._exit(0)
    os.close(far)
    with open(near, encoding="ascii") as answer:
        said = answer.read()
    os.waitpid(pid, 0)
    return Counter(said.split())


def test_a_stopped_process_is_not_gone_and_blocks_nobody() -> None:
    with boxes("a", "b") as (a, b), child("c", a.address) as process:
        meet(a, b)
        a.gets("c", "child")
        process.send_signal(signal.SIGSTOP)
        try:
            for n in range(60):
                a.post.send("c", {"n": n, "x": "y" * (1 << 20)})
            a.until(lambda box: box.post.counters().dropped > 0)
            still_well(a, b)
            still_well(b, a)
            longer = time.monotonic() + 3  # than the 2 s after which TCP gives up what nobody answers
            a.until(lambda box: box.gone or time.monotonic() > longer)
        finally:
            process.send_signal(signal.SIGCONT)
        a.gets("c", 59)  # the newest is never the one that was dropped
        assert a.gone == []


def test_a_ping_is_answered_for_an_owner_that_is_busy_and_not_by_a_stopped_process() -> None:
    with boxes("a", "b") as (a, b), child("c", a.address) as process:
        a.gets("c", "child")
        process.send_signal(signal.SIGSTOP)
        until(lambda: state_of(process.pid) == "T", "a stopped process")
        try:
            a.post.ping("c")
            idle = [0.0]
            for _ in range(3):  # the owner of b takes nothing meanwhile
                a.seen.clear()
                a.post.ping("b", b.address)
                a.until(lambda box: box.pongs)
                assert [one.peer for one in a.pongs] == ["b"]
                idle.append(a.pongs[0].idle)
            assert idle == sorted(idle)
        finally:
            process.send_signal(signal.SIGCONT)
        a.until(lambda box: [one for one in box.pongs if one.peer == "c"])
        still_well(a, b)


def test_a_dial_tells_an_address_where_the_peer_is_no_more_from_one_that_does_not_answer() -> None:
    with boxes("a") as (a,), boxes("b") as (b,):
        meet(a, b)
        port = b.post.port
        b.post.close()
        a.until(lambda box: box.gone)
        a.post.ping("b", b.address)
        a.until(lambda box: box.refused)
        assert [one.vacant for one in a.seen if isinstance(one, Refused)] == [True]
        other = Box("b, again", port=port)
        try:
            a.seen.clear()
            a.until(lambda box: box.post.ping("b", b.address) or box.refused)
            assert {one.vacant for one in a.seen if isinstance(one, Refused)} == {True}
        finally:
            other.post.close()
    with socket.create_server(("127.0.0.1", 0)) as silent, boxes("a", patience=0.2) as (a,):
        a.post.ping("b", f"127.0.0.1:{silent.getsockname()[1]}")
        a.until(lambda box: box.refused)
        assert [one.vacant for one in a.seen if isinstance(one, Refused)] == [False]


def test_what_a_socket_does_not_take_at_once_follows_though_the_peer_says_nothing() -> None:
    for _ in range(8):
        with boxes("a", "b") as (a, b):
            meet(a, b)
            for n in range(7):  # a box holds 8 MiB
                a.post.send("b", {"n": n, "x": "y" * (1 << 20)})
            b.gets("a", 6)


def test_a_process_that_comes_back_takes_the_place_of_the_older_one() -> None:
    with boxes("a", "b", "b") as (a, old, new):
        meet(a, old)
        meet(new, a)
        old.until(lambda box: box.gone)
        still_well(a, new)
        still_well(new, a)
        assert a.gone == []
        new.post.close()
        a.until(lambda box: box.gone)
        assert len(a.gone) == 1


@pytest.mark.parametrize("dropper", ["a", "b"])
@pytest.mark.parametrize("dialler", ["a", "b"])
def test_a_dropped_connection_can_be_opened_again_from_either_side(dropper: str, dialler: str) -> None:
    for redials in ("a", "b"):
        with boxes("a", "b") as pair:
            by_name = {box.post.name: box for box in pair}
            (rest,) = set(by_name) - {dialler}
            meet(by_name[dialler], by_name[rest])
            (dropped,) = set(by_name) - {dropper}
            by_name[dropper].post.drop(dropped)
            by_name[dropped].until(lambda box: box.gone)
            (waits,) = set(by_name) - {redials}
            by_name[redials].post.send(waits, {"n": "again"}, by_name[waits].address)
            by_name[waits].gets(redials, "again")
            by_name[waits].post.send(redials, {"n": "and back"})
            by_name[redials].gets(waits, "and back")
            assert [one.peer for one in by_name[dropped].gone] == [dropper]
            assert by_name[dropper].gone == []


def test_a_peer_that_listens_later_is_reached_by_a_later_message() -> None:
    with boxes("a") as (a,), boxes("b") as (first,):
        port = first.post.port
        first.post.close()
        a.post.send("b", {"n": "lost"}, first.address)
        a.until(lambda box: box.refused)
        later = Box("b", port=port)
        try:
            end = time.monotonic() + DEADLINE
            while not later.messages and time.monotonic() < end:
                a.post.send("b", {"n": "found"}, first.address)
                later.seen += later.post.arrived()
            assert ("a", "found") in later.messages
            assert ("a", "lost") not in later.messages
            assert a.post.counters().dropped >= 1
        finally:
            later.post.close()


def test_a_closed_post_leaves_nothing_and_takes_nothing() -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    with boxes("a", "b") as (a, b):
        meet(a, b)
        for n in range(100):
            a.post.send("b", {"n": n})
        a.post.close()
        a.post.close()
        a.post.send("b", {"n": "late"})
        assert a.post.arrived() == []
        b.gets("a", 99)
        b.until(lambda box: box.gone)
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    with Post("a", "localhost", 0, TOKEN) as post:
        assert post.port
