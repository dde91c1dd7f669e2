"""What checkpoint writers and ranks of a job's nodes prove to each other, and how each process gets it.

The agents of a job know a token. Each agent derives a key for the run from it and hands the key over on its
own node only: to the checkpoint writer through a pipe, to the ranks in a file of the runtime folder, which
only this user can read. Neither the token nor the key goes through torch's store, a command line or a
variable. Without an agent (plain torchrun) each process derives the key itself, from a token that it reads.

The proof is the agents' (:mod:`outlast.cluster.rpc.handshake`), under that key: it covers the random numbers
of both sides, so a recorded greeting is of no use, and the run, generation, session, node and version that a
side claims. Who knows the key and is of another generation is refused with a sentence.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
import secrets
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from outlast import codec, files
from outlast.checkpoint.replica.frames import Channel, Kind, PeerRefused, Refusal
from outlast.cluster.rpc.handshake import Greeting, Hello, Reason, Security, contexts, new_nonce, own_version
from outlast.cluster.rpc.handshake import Refusal as NotGreeted
from outlast.errors import OutlastError

CREDENTIALS_BYTES = 4096  # a pipe takes them without a reader


class BadToken(OutlastError):
    """A token cannot be read."""


@dataclass(frozen=True)
class Tls:
    """How connections between writers are encrypted.

    Args:
        serves: for the side that is dialled.
        dials: for the side that dials.
        certificate: this node's, in DER.
    """

    serves: ssl.SSLContext
    dials: ssl.SSLContext
    certificate: bytes


@dataclass(frozen=True)
class Credentials:
    """What a process of this node proves to writers of other nodes.

    Args:
        key: of the run, derived from the job's token; "": none, so there is no connection with other nodes.
        host: the address of this node by which others reach it; "": not known.
        tls: paths of certificate, key and, if there is one, authority; empty: no TLS.
    """

    key: str = ""
    host: str = ""
    tls: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return the text that :meth:`from_json` reads."""
        return codec.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> Credentials:
        """Read what :meth:`to_json` returned; what is none gives credentials without a key."""
        try:
            return codec.decode(text, cls)
        except codec.Malformed:
            return cls()

    def write(self, path: Path) -> None:
        """Write them to a new file that only this user can read.

        Raises:
            OSError: there is such a file, or the file system refused.
        """
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, self.to_json().encode())
        finally:
            os.close(descriptor)

    @classmethod
    def read(cls, path: str) -> Credentials:
        """Read the file that :meth:`write` wrote; where there is none, there is no key."""
        try:
            return cls.from_json(files.read_private(path, CREDENTIALS_BYTES).decode(errors="replace"))
        except OSError:
            return cls()

    def encryption(self) -> Tls | None:
        """Return what TLS needs; None: there is none.

        Raises:
            BadSecurity: a file cannot be used.
        """
        return _tls(self.tls) if self.tls else None


NOBODY = Credentials()  # of a job of one node


@functools.cache
def _tls(files: tuple[str, ...]) -> Tls:
    return Tls(*contexts(Security(*map(Path, files))))


def derive(token: str, run_id: str) -> str:
    """Return the key of a run; the token cannot be found from it, nor the key of another run."""
    text = b"outlast savers" + hashlib.sha256(run_id.encode()).digest()
    return hmac.new(token.encode(), text, "sha256").hexdigest()


def make_token(path: Path) -> None:
    """Make a file with a new random token unless there is one.

    Raises:
        OSError: the file system refused.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(descriptor, secrets.token_hex(32).encode())
    os.close(descriptor)
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        temporary.unlink()


def read_token(path: Path) -> str:
    """Return the token in a file.

    Raises:
        BadToken: the file cannot be read, is empty or too long.
    """
    try:
        token = files.read_text(path, files.TOKEN_BYTES).strip()
    except OSError as error:
        raise BadToken(f"{path}: {error.strerror}") from error
    if not token:
        raise BadToken(f"{path}: is empty, a token expected")
    return token


_PURPOSE = b"outlast peer"
_REFUSALS = {
    Reason.TOKEN: Refusal.TOKEN,
    Reason.OTHER_JOB: Refusal.JOB,
    Reason.PROTOCOL: Refusal.JOB,
    Reason.OTHER_NAME: Refusal.NODE,
    Reason.ITSELF: Refusal.NODE,
}


@dataclass(frozen=True)
class Party:
    """One side of connections between writers.

    Args:
        node: its name; no other side has it.
        key: what all sides of the run know; "" only on a loopback address.
        run: id of the run.
        generation: of the ranks that the side serves, or is one of.
        session: likewise.
        host: the address that it listens at and dials from; "": any.
        tls: None: no TLS.
        boot: random, of this process.
    """

    node: str
    key: str
    run: str = ""
    generation: int = 0
    session: str = ""
    host: str = ""
    tls: Tls | None = None
    boot: str = field(default_factory=new_nonce)

    def greeting(self, dials: bool) -> Greeting:
        """Return this side's part of a greeting; each is used once."""
        of = {"run": self.run, "generation": self.generation, "session": self.session}
        mine = Hello(self.node, self.boot, new_nonce(), own_version(), **of)  # type: ignore[arg-type]
        greeting = Greeting(mine, self.key, dials, _PURPOSE)
        if not dials and self.tls is not None:
            greeting.certificate = self.tls.certificate
        return greeting

    def check(self, peer: Hello) -> None:
        """Check what a peer has proven to be.

        Raises:
            PeerRefused: it is of another version, generation or session.
        """
        version = own_version()
        if peer.version != version:
            raise PeerRefused(
                Refusal.JOB, f"outlast {version} expected, {peer.version[:20]} found on node {peer.name}"
            )
        if (peer.generation, peer.session) != (self.generation, self.session):
            raise PeerRefused(
                Refusal.GENERATION,
                f"generation {self.generation} (session {self.session}) expected, {peer.generation}"
                f" (session {peer.session[:40]}) found on node {peer.name}; nothing was done",
            )


def greet(channel: Channel, party: Party, expected: str = "") -> None:
    """Prove to a server who this side is, and have it prove the same; under TLS if there is any.

    Args:
        channel: a new connection that this side dialled.
        party: this side.
        expected: the other side's node; "": any.

    Raises:
        PeerRefused: one of the two does not know the key, or is not what the other one expects.
        PeerError: see :class:`Channel`.
    """
    greeting = party.greeting(dials=True)
    if party.tls is not None:
        greeting.certificate = channel.encrypt(party.tls.dials, dialled=False)
    deadline = time.monotonic() + channel.timeout
    with _refusing(channel.peer):
        channel.send(Kind.HELLO, greeting.hello(), deadline)
        hello = greeting.take_hello(channel.receive(Kind.HELLO, deadline))
        if expected and hello.name != expected:
            raise PeerRefused(
                Refusal.NODE, f"node {expected} expected, {hello.name[:50]} found", channel.peer
            )
        channel.send(Kind.PROOF, greeting.proof(), deadline)
        greeting.take_proof(channel.receive(Kind.PROOF, deadline))
    channel.node = hello.name


def welcome(channel: Channel, party: Party, admit: Callable[[Hello], None]) -> None:
    """Have who dialled prove what it is, and prove the same to it; under TLS if there is any.

    Args:
        channel: a new connection that the other side dialled.
        party: this side.
        admit: takes what the other side has proven to be; raises before this side has proven anything.

    Raises:
        PeerRefused: the other side does not know the key, or is not what is expected.
        PeerError: see :class:`Channel`.
    """
    greeting = party.greeting(dials=False)
    if party.tls is not None:
        channel.encrypt(party.tls.serves, dialled=True)
    deadline = time.monotonic() + channel.timeout
    with _refusing():
        hello = greeting.take_hello(channel.receive(Kind.HELLO, deadline))
        channel.send(Kind.HELLO, greeting.hello(), deadline)
        greeting.take_proof(channel.receive(Kind.PROOF, deadline))
    admit(hello)
    channel.send(Kind.PROOF, greeting.proof(), deadline)
    channel.node = hello.name


@contextmanager
def _refusing(peer: str = "") -> Iterator[None]:
    """Raise what a greeting objects to as what a peer is told."""
    try:
        yield
    except NotGreeted as error:
        raise PeerRefused(_REFUSALS.get(error.reason, Refusal.MALFORMED), error.text, peer) from error
