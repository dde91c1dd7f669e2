"""Attacks from the network on a job of two nodes: nothing is taken over or lost, and the job goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from outlast.checkpoint.content.digest import commit_line, file_digest
from outlast.checkpoint.policy.manifest import COMMIT, MANIFEST, copy_name, rank_files
from outlast.checkpoint.replica.client import PeerClient
from outlast.checkpoint.replica.frames import Channel, Kind, PeerError, PeerRefused, Refusal
from outlast.checkpoint.replica.handshake import Credentials, Party, derive, greet
from outlast.cluster.rpc.handshake import PROTOCOL, Greeting
from outlast.errors import UsageError
from tests.support import hosts as testbed
from tests.support import warm
from tests.support.agents import agents
from tests.support.attacks import EVERY_STEP, Strangers, Victim, listeners, victim
from tests.support.hosts import Host, Hosts
from tests.support.launching import SCRIPTS, until
from tests.support.peer_node import frame, left_in
from tests.support.ports import free_port
from tests.support.posts import boxes, meet, still_well
from tests.support.teams import TOKEN, Team, TeamNode

pytestmark = pytest.mark.long
SHARD, _, DOCUMENT = rank_files(0, 2)
RESTORES = """
import sys, torch, torch.distributed as dist, outlast
dist.init_process_group("gloo")
with outlast.start(sys.argv[1], checkpoints=outlast.CheckpointOptions(timeout=5.0)) as session:
    session.restore(model=torch.nn.Linear(2, 2))
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """Give a job that every attack of this file is made on, and that runs at the end as at the beginning."""
    with victim(tmp_path_factory.mktemp("victim")) as found:
        yield found
        found.trains()
        found.replicates()
        assert not found.faults(), found.agents.consoles()


@pytest.fixture
def team_of(tmp_path: Path) -> Callable[..., Team]:
    return lambda *nodes, **options: Team(tmp_path, nodes, **options)


class Overheard:
    """A store and everything that was ever put into it."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self.texts: list[str] = []

    def set(self, key: str, value: str) -> None:
        self.texts += [key, value]
        self._store.set(key, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def saver_of(job: Victim, node: str) -> tuple[str, int]:
    """Return where the saver of a node listens."""
    found = next(one for one in job.members("a").together.nodes if one.name == node)  # type: ignore[union-attr]
    return found.host, found.port


def party_of(job: Victim, node: str) -> Party:
    """Return what a node of the job proves to others: somebody has stolen its credentials."""
    agent = job.agents.agents[node].pid
    (path,) = Path("/dev/shm").glob(f"outlast-{agent}-*/credentials")
    assert path.stat().st_mode & 0o077 == 0
    return job.members(node).party(Credentials.read(str(path)))


def forged(generation: int, size: int = 1000, step: int = 1 << 20) -> tuple[str, dict[str, Any]]:
    """Return a copy with bytes of somebody's choice, and its name."""
    files: dict[str, bytes] = {
        SHARD: b"6" * size,
        MANIFEST: b"{}",
        COMMIT: commit_line(1, "0" * 32),
    }
    return copy_name(step, generation), {name: (one, file_digest(one)) for name, one in files.items()}


def refusal(call: Callable[[], object]) -> PeerRefused:
    with pytest.raises(PeerRefused) as caught:
        call()
    return caught.value


def test_the_job_listens_at_one_address_only(job: Victim) -> None:
    job.agents.until(lambda: len(job.stores()) == 3, "one store that is in use, and one ready on each node")
    assert {address for address, _ in job.ports()} == {"127.0.0.1"}, job.ports()


def test_nothing_that_goes_through_the_store_opens_a_saver(team_of: Callable[..., Team]) -> None:
    team = team_of("a", "b")
    team.store = store = Overheard()
    team.start()
    team.replicated(1)
    members = team.nodes[0].memory.members()
    assert members is not None
    assert members.together is not None
    words = {word for text in store.texts for word in re.findall(r"[0-9A-Za-z_.-]{4,}", text)} | {""}
    assert {"session", members.session} <= words, "the ranks did meet through this store"
    for peer, other in zip(members.together.nodes, ("b", "a"), strict=True):
        for word in words:
            stranger = Party(other, word, members.run_id, members.generation, members.session, peer.host)
            client = PeerClient((peer.host, peer.port), stranger, 20.0)
            name, copy = forged(members.generation)
            assert refusal(lambda: client.send(other, name, copy)).refusal is Refusal.TOKEN  # noqa: B023
    team.train(3)
    assert team.right()


class Thief:
    """Somebody who has stolen the credentials of node b, and turns to the saver of node a."""

    def __init__(self, job: Victim) -> None:
        self.target, self.mine = saver_of(job, "a"), party_of(job, "b")
        self.replicas = job.memory("a").root / "replica"

    def client(self, **changed: Any) -> PeerClient:
        return PeerClient(self.target, dataclasses.replace(self.mine, **changed), 20.0)

    def puts(self, source: str = "b", size: int = 1000, generation: int = 1, **changed: Any) -> PeerRefused:
        """Try to plant a copy; return why it was refused."""
        name, copy = forged(generation, size)
        return refusal(lambda: self.client(**changed).send(source, name, copy))


def test_nodes_that_were_never_there_put_nothing(job: Victim) -> None:
    thief = Thief(job)
    job.replicates()
    before = left_in(thief.replicas)
    for ghost in ("ghost-1", "ghost-2", "c"):
        found = thief.puts(ghost, node=ghost)
        assert found.refusal is Refusal.NODE
        assert re.search(f"a, b.*{ghost}", found.text)
        assert refusal(lambda: thief.client(node=ghost).greet()).refusal is Refusal.NODE  # noqa: B023
    assert left_in(thief.replicas) == before


def test_a_node_speaks_from_its_own_address_and_for_itself(job: Victim) -> None:
    thief = Thief(job)
    report = {"node": "a", "session": thief.mine.session, "newest": 1 << 40, "written": []}
    elsewhere = thief.puts(host="127.0.0.2")
    assert re.search(r"127\.0\.0\.1.*127\.0\.0\.2", elsewhere.text)
    found = [elsewhere, thief.puts("a"), refusal(lambda: thief.client().ask(report))]
    assert {one.refusal for one in found} == {Refusal.NODE}


def test_a_report_of_nonsense_does_not_stop_the_leader(job: Victim) -> None:
    thief = Thief(job)
    for lie in ({"newest": "x"}, {"round": 1 << 70}, {"written": [{}]}, {"written": [None] * 1000}):
        report = {"node": "b", "session": thief.mine.session, "newest": 1, "written": [], **lie}
        found = refusal(lambda: thief.client().ask(report))  # noqa: B023
        assert found.refusal is Refusal.MALFORMED, found
    job.replicates()


def test_a_lie_about_the_generation_is_refused_with_what_was_expected(job: Victim) -> None:
    thief = Thief(job)
    for changed in ({"generation": 0}, {"generation": 2}, {"session": "0" * 12}):
        found = refusal(lambda: thief.client(**changed).greet())  # noqa: B023
        assert found.refusal is Refusal.GENERATION
        assert re.search(f"1.*{thief.mine.session}", found.text)
    later = thief.puts(generation=2)
    assert later.refusal is Refusal.GENERATION
    assert re.search(f"1.*{re.escape(copy_name(1 << 20, 2))}", later.text)


def test_another_job_and_another_version_are_refused_by_name(job: Victim) -> None:
    thief = Thief(job)
    found = thief.puts(run="another-job")
    assert (found.refusal, "'another-job'" in found.text) == (Refusal.JOB, True)
    assert thief.puts(key=derive("the token of this job", "another-job")).refusal is Refusal.TOKEN
    with socket.create_connection(thief.target, 10) as connection:
        channel = Channel(connection, "the saver", 20.0)
        mine = thief.mine.greeting(dials=True)
        older = dataclasses.replace(mine._mine, version="0.0.1")
        greeting = Greeting(older, thief.mine.key, True, b"outlast peer")
        channel.send(Kind.HELLO, greeting.hello())
        greeting.take_hello(channel.receive(Kind.HELLO))
        channel.send(Kind.PROOF, greeting.proof())
        refused = refusal(lambda: channel.receive(Kind.PROOF))
    assert refused.refusal is Refusal.JOB
    assert re.search(r"0\.0\.1.* b", refused.text)


def test_what_a_node_may_hold_is_bounded(team_of: Callable[..., Team]) -> None:
    team = team_of("a", "b", "c", domains={"a": {"rack": "1"}, "b": {"rack": "2"}, "c": {"rack": "3"}})
    team.start()
    team.train(2)
    members = [node.memory.members() for node in team.nodes]
    (holder,) = members[0].together.holders  # type: ignore[union-attr]
    stranger = next(name for name in "bc" if name != holder)
    credentials = Credentials(derive(TOKEN, "run-a"))
    table = {peer.name: peer for peer in members[0].together.nodes}  # type: ignore[union-attr]
    mine = members[0].party(credentials)  # type: ignore[union-attr]

    def put(to: str, step: int, size: int = 1000) -> None:
        name, copy = forged(1, size, step)
        PeerClient((table[to].host, table[to].port), mine, 20.0).send("a", name, copy)

    assert refusal(lambda: put(stranger, 100)).refusal is Refusal.NODE
    assert refusal(lambda: put(holder, 100, 70 << 20)).refusal is Refusal.LIMIT
    shelf = team.nodes["abc".index(holder)].stage.replica("a")

    def fill() -> None:
        for step in range(1000, 1100):
            with contextlib.suppress(PeerRefused):
                put(holder, step)
            assert len(shelf.names()) <= 8, shelf.names()

    fill()
    idle = []
    for _ in range(20):
        with contextlib.suppress(PeerError):
            connection = socket.create_connection((table[holder].host, table[holder].port), 10)
            idle.append(connection)
            greet(Channel(connection, "the saver", 20.0), mine)
    until(lambda: sum(map(_is_open, idle)) == 8, "the end of all but 8", 20.0)  # at 30 s all are given up
    team.train(3)
    for one in idle:
        one.close()
    assert team.right()


def _is_open(connection: socket.socket) -> bool:
    """Say whether the other side has kept a connection."""
    connection.setblocking(False)
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except OSError:
        return False


def test_a_hundred_slow_strangers_on_each_port_keep_nobody_waiting(job: Victim) -> None:
    ours = {place for pid in (*job.savers().values(), *_agents(job)) for place in listeners([pid])[pid]}
    assert len(ours) == 4
    with Strangers(ours, 100, 0.5) as strangers:
        strangers.last(15.0)
        for _ in range(3):
            job.replicates()
            job.trains()
        until(lambda: strangers.bytes > 2000, "the strangers to have said something at each port")
    assert not job.faults()


def _agents(job: Victim) -> list[int]:
    return [agent.pid for agent in job.agents.agents.values()]


def test_ranks_meet_while_strangers_crowd_the_savers(team_of: Callable[..., Team]) -> None:
    team = team_of("a", "b")
    team.start()
    team.train(2)
    ports = {place for node in team.nodes for place in listeners([node.saver.pid])[node.saver.pid]}
    with Strangers(ports, 300, 0.2) as strangers:
        strangers.last(3.0)
        for _ in range(2):
            team.start()
            team.replicated(team.step + 1)
        assert team.right()


@pytest.mark.parametrize("which", ["saver", "agent"])
def test_rubbish_is_refused_and_stops_nothing(job: Victim, which: str) -> None:
    pid = job.savers()["a"] if which == "saver" else job.agents.agents["a"].pid
    (place,) = listeners([pid])[pid]
    draw = random.Random(5)
    deep = frame(Kind.HELLO, b"[" * 4000)
    rubbish = (
        draw.randbytes(1 << 20),
        b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\n\r\n",
        frame(Kind.HELLO, b"{}") * 1000,
        frame(Kind.REQUEST, b'{"op": "get", "folder": "memory"}'),
        deep,
        frame(Kind.HELLO, b'{"protocol": %d, "name": "' % PROTOCOL + b"x" * 3000 + b'"}'),
        bytes(1 << 20),
    )
    for said in rubbish:
        with socket.create_connection(place, 10) as line, contextlib.suppress(OSError):
            line.settimeout(20)
            line.sendall(said)
            line.shutdown(socket.SHUT_WR)
            received = 0
            while got := line.recv(1 << 16):
                received += len(got)
                assert received < 1 << 20
    job.trains()


def test_a_recorded_greeting_opens_no_saver(job: Victim) -> None:
    thief = Thief(job)
    seen = _recorded(thief.target, lambda address: PeerClient(address, thief.mine, 20.0).greet())
    with socket.create_connection(thief.target, 10) as connection:
        channel = Channel(connection, "the saver", 20.0)
        with contextlib.suppress(OSError):
            connection.sendall(seen)
        channel.receive(Kind.HELLO)
        assert refusal(lambda: channel.receive(Kind.PROOF)).refusal is Refusal.TOKEN


def test_a_recorded_greeting_opens_no_agent() -> None:
    with boxes("a", "b") as (a, b):

        def talk(address: tuple[str, int]) -> None:
            b.post.knock(f"{address[0]}:{address[1]}", {"n": 1})
            a.gets("b", 1)
            b.post.drop("a")
            a.until(lambda box: box.gone)

        seen = _recorded(("127.0.0.1", a.post.port), talk)
        a.seen.clear()
        with socket.create_connection(("127.0.0.1", a.post.port), 10) as line:
            line.sendall(seen)
            line.settimeout(20)
            with contextlib.suppress(OSError):
                while line.recv(1 << 16):
                    pass
        a.until(lambda box: box.refused)
        assert (len(a.refused), a.messages) == (1, [])
        a.seen.clear()
        meet(a, b)
        still_well(a, b)


def _recorded(target: tuple[str, int], talk: Callable[[tuple[str, int]], object]) -> bytes:
    """Return all that a client says while it talks to a server."""
    seen = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pump(source: socket.socket, sink: socket.socket, keep: bool) -> None:
            with contextlib.suppress(OSError):
                while got := source.recv(1 << 16):
                    if keep:
                        seen.extend(got)
                    sink.sendall(got)
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_WR)

        def run() -> None:
            near, _ = listener.accept()
            with near, socket.create_connection(target) as far:
                up = threading.Thread(target=pump, args=(near, far, True), daemon=True)
                up.start()
                pump(far, near, False)
                up.join(20)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        talk(listener.getsockname())
        thread.join(20)
    return bytes(seen)


def test_nodes_with_different_tokens_do_not_save_together(
    team_of: Callable[..., Team], tmp_path: Path
) -> None:
    team = team_of("a", "b")
    team.nodes[1] = TeamNode(tmp_path, "b", team.nodes[1].durable, {}, "another token")
    with pytest.raises(UsageError, match=r"b.* a "):
        team.start()


@pytest.mark.leaves("outlast-memory-")
def test_ranks_without_a_token_in_common_do_not_agree_on_a_checkpoint(tmp_path: Path) -> None:
    """Two nodes without a launcher, a shared run folder and a token; rank 0 makes one in its own folder."""
    script, port = tmp_path / "rank.py", free_port()
    script.write_text(RESTORES)
    output = tmp_path / "output"
    with open(output, "wb") as file:
        found = [
            warm.start(
                [script, str(tmp_path / f"run-{rank}")],
                file,
                file,
                {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
                | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            )
            for rank in range(2)
        ]
        assert all(rank.wait(120) != 0 for rank in found)
    assert "UsageError" in output.read_text()


@pytest.mark.skipif(bool(testbed.why_not()), reason=testbed.why_not() or "hosts can be started")
def test_on_a_network_everything_listens_at_the_nodes_address(tmp_path: Path) -> None:
    config, trace, run = tmp_path / "outlast.toml", tmp_path / "trace", tmp_path / "run"
    config.write_text(EVERY_STEP)
    options = [
        "--nnodes=2",
        "--rdzv-endpoint=n0:29400",
        "--rdzv-id=job",
        f"--run-dir={run}",
        "--preflight=off",
    ]
    script = [str(SCRIPTS / "counting.py"), str(trace), "1000000", "1000"]
    with Hosts(2, tmp_path / "hosts") as hosts:
        for host in hosts:
            log = tmp_path / f"{host.name}.log"
            command = [sys.executable, "-m", "outlast", "run", *options, f"--config={config}", *script]
            host.start(command, log=log)

        def said() -> str:
            return "\n".join(path.read_text(errors="replace") for path in tmp_path.glob("n?.log"))

        until(lambda: all(_lines(trace / f"rank-{rank}") > 20 for rank in (0, 1)), said)
        for host in hosts:
            until(lambda: len(_places(host)) >= 3, "an agent, a saver and a store")  # noqa: B023
            found = _places(host)
            assert {address for address, _ in found} == {host.address}, found


def _places(host: Host) -> set[tuple[str, int]]:
    return {place for each in listeners(host.processes()).values() for place in each}


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_nothing_that_authenticates_is_in_an_environment_or_a_command_line(job: Victim) -> None:
    keys = {party_of(job, node).key for node in "ab"} | {(job.agents.run / "token").read_text().strip()}
    assert len(keys) == 2
    for pid in job.pids():
        for name in ("environ", "cmdline"):
            with contextlib.suppress(OSError):
                content = Path(f"/proc/{pid}/{name}").read_bytes()
                assert not any(key.encode() in content for key in keys), (pid, name)
    told = [job.memory("a").root / f"{name}.json" for name in ("members", "status")]
    for path in told:
        assert not any(key in path.read_text() for key in keys), path


def test_an_exception_of_any_size_reaches_whoever_coordinates(tmp_path: Path) -> None:
    script = tmp_path / "shouting.py"
    script.write_text(
        "import os, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    raise RuntimeError('x' * 10_000_000)\n"
        "time.sleep(600)\n"
    )
    options = ("--max-restarts", "0")
    with agents(tmp_path / "job", "2:2", script=(str(script),), options=options) as found:
        found.start("a")
        found.until(lambda: found.records("a", "note"), "a to be there")
        found.start("b")
        assert set(found.finish().values()) == {1}, "both end, with what the rank's exception stands for"
