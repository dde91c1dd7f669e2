"""How two agents get to know each other: who they are, which protocol, and proof that both know the token.

After the WebSocket handshake each side sends two JSON texts, the one that dialled first::

    hello    protocol, version of outlast, name, boot (random, of this process), nonce
    proof    HMAC-SHA256 under the token of the role, both hellos, the certificate; and of the dialler,
             the nonce of the last connection that it knew with this peer

No proof can be sent back as one's own, nor passed on through somebody who ends TLS with another certificate.
The proofs cover the beginning of a connection; without TLS, what follows is as safe from forgers as the
network.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import secrets
import ssl
from dataclasses import asdict, dataclass
from enum import IntEnum
from importlib import metadata
from pathlib import Path
from typing import Any

from outlast.errors import OutlastError

PROTOCOL = 4  # of the greeting and of the messages; a change of either raises it
_NONCE_BYTES = 16
_MOST_NAME = 256


class Reason(IntEnum):
    """Why a connection came to nothing or ended; the number is the code of the WebSocket close frame."""

    GOODBYE = 1001  # registered: going away
    NOT_JSON = 1007  # registered: invalid data
    TOO_LONG = 1009  # registered: message too big
    TOKEN = 4001
    PROTOCOL = 4002
    MALFORMED = 4003
    DEADLINE = 4004
    OTHER_NAME = 4005
    ITSELF = 4006
    CROSSED = 4007  # both dialled; the other connection is kept
    REPLACED = 4008  # a newer connection of the same name
    DROPPED = 4009
    FAILED = 4010
    OTHER_JOB = 4011
    NO_WEBSOCKET = 4101  # those from here on are never sent
    TLS = 4102
    NAME = 4103
    UNREACHABLE = 4104
    DESCRIPTORS = 4105
    ENDED = 4106


class Refusal(OutlastError):
    """A connection is of no use; the text is for both sides."""

    def __init__(self, reason: Reason, text: str) -> None:
        self.reason = reason
        self.text = text
        super().__init__(text)


class BadSecurity(OutlastError):
    """A certificate, key or authority cannot be used; nothing is listened to."""


@dataclass(frozen=True)
class Security:
    """Files in PEM that give TLS; with an authority, both sides must show a certificate that it signed.

    Without one, the proofs still bind a connection to the certificate of the side that was dialled.
    Names in certificates are not compared with addresses: one certificate may serve a whole job.
    """

    certificate: Path
    key: Path
    authority: Path | None = None


@dataclass(frozen=True)
class Hello:
    """Who one side is.

    Args:
        name: of an agent or, between savers, of a node.
        boot: random, of this process.
        nonce: random, of this connection.
        version: of outlast.
        protocol: of the greeting and of what follows.
        run: id of the run; agents leave it out and compare it when a node joins.
        generation, session: of the ranks that a saver serves; agents leave them out.
    """

    name: str
    boot: str
    nonce: str
    version: str
    protocol: int = PROTOCOL
    run: str = ""
    generation: int = 0
    session: str = ""


def contexts(security: Security) -> tuple[ssl.SSLContext, ssl.SSLContext, bytes]:
    """Return the contexts for the side that is dialled and that which dials, and the own certificate (DER).

    Raises:
        BadSecurity: a file is missing, no PEM, or key and certificate do not fit.
    """
    sides = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    what = security.certificate
    try:
        for context in sides:
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            what = security.certificate
            context.load_cert_chain(security.certificate, security.key)
            if security.authority is not None:
                what = security.authority
                context.load_verify_locations(security.authority)
                context.verify_mode = ssl.CERT_REQUIRED
        what = security.certificate
        text = security.certificate.read_text(encoding="ascii", errors="replace")
        begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
        first = text[text.index(begin) : text.index(end) + len(end)]
        return *sides, ssl.PEM_cert_to_DER_cert(first)
    except (OSError, ValueError) as error:
        raise BadSecurity(f"TLS: {what} cannot be used: {error}; nothing is listened to") from error


class Greeting:
    """One side of the greeting, without I/O: texts go in, texts to send come out.

    Args:
        mine: this side's hello; its nonce names the connection if this side dials.
        token: what both sides know.
        dials: whether this side opened the connection.
        purpose: what the connection is for; a proof for one purpose is none for another.
    """

    def __init__(self, mine: Hello, token: str, dials: bool, purpose: bytes = b"outlast channel") -> None:
        self.peer: Hello | None = None
        self.last = ""  # nonce of the last connection that the dialler knew with the other side
        self.certificate = b""  # that of the side that was dialled, where there is TLS
        self._token = token
        self._dials = dials
        self._purpose = purpose
        self._mine = mine
        self._my_text = json.dumps(asdict(mine)).encode()
        self._their_text = b""

    @property
    def nonce(self) -> str:
        """The name of the connection: the dialler's nonce."""
        return self._mine.nonce if self._dials or self.peer is None else self.peer.nonce

    def hello(self) -> bytes:
        """Return this side's first text."""
        return self._my_text

    def take_hello(self, text: bytes | bytearray) -> Hello:
        """Read the other side's first text.

        Raises:
            Refusal: it is no hello, one of another protocol, or this process's own.
        """
        found = parse(text)
        if found.get("protocol") != PROTOCOL:
            raise Refusal(
                Reason.PROTOCOL,
                f"protocol {PROTOCOL} (outlast {self._mine.version}) expected,"
                f" {str(found.get('protocol'))[:9]} (outlast {str(found.get('version'))[:20]}) found",
            )
        try:
            peer = Hello(**found)
        except TypeError:
            raise Refusal(Reason.MALFORMED, "a hello expected, another object found") from None
        texts = (peer.name, peer.boot, peer.nonce, peer.version)
        if not all(isinstance(each, str) and 0 < len(each) <= _MOST_NAME for each in texts):
            raise Refusal(Reason.MALFORMED, "a hello expected, one without names found")
        if not all(isinstance(each, str) and len(each) <= _MOST_NAME for each in (peer.run, peer.session)):
            raise Refusal(Reason.MALFORMED, "a hello expected, one with another run or session found")
        if type(peer.generation) is not int or not 0 <= peer.generation < 1 << 63:
            raise Refusal(Reason.MALFORMED, "a hello expected, one with another generation found")
        if peer.boot == self._mine.boot:
            raise Refusal(Reason.ITSELF, f"another agent expected, {peer.name} itself found")
        if peer.name == self._mine.name:
            raise Refusal(
                Reason.OTHER_NAME, f"two agents are called {peer.name[:60]}; each needs its own name"
            )
        if peer.run != self._mine.run:
            raise Refusal(Reason.OTHER_JOB, f"{peer.name[:50]} is of run {peer.run[:50]!r}, not of this one")
        self.peer, self._their_text = peer, bytes(text)
        return peer

    def proof(self, last: str = "") -> bytes:
        """Return this side's second text; ``last`` counts for the dialler only."""
        if self._dials:
            self.last = last
        said = {"proof": self._proof(self._dials)}
        return json.dumps({**said, "last": last} if self._dials else said).encode()

    def take_proof(self, text: bytes | bytearray) -> None:
        """Check the other side's second text.

        Raises:
            Refusal: the other side does not know the token.
        """
        found = parse(text)
        if not self._dials:
            self.last = str(found.get("last", ""))
        said, expected = str(found.get("proof")), self._proof(not self._dials)
        if not hmac.compare_digest(said.encode(errors="replace"), expected.encode()):
            raise Refusal(Reason.TOKEN, "the two sides do not have the same token")

    def _proof(self, of_dialler: bool) -> str:
        texts = (self._my_text, self._their_text) if self._dials else (self._their_text, self._my_text)
        role = b"dialler" if of_dialler else b"dialled"
        parts = (role, *texts, self.certificate, self.last.encode(errors="replace"))
        seen = b"".join(hashlib.sha256(part).digest() for part in parts)
        return hmac.new(self._token.encode(), self._purpose + seen, "sha256").hexdigest()


def parse(text: bytes | bytearray) -> dict[str, Any]:
    """Return the JSON object that a text is.

    Raises:
        Refusal: it is none.
    """
    try:
        value = json.loads(str(text, "utf-8"))
    except ValueError as error:
        raise Refusal(Reason.NOT_JSON, f"a JSON object expected: {str(error)[:70]}") from error
    except RecursionError as error:
        raise Refusal(
            Reason.NOT_JSON, "a JSON object expected, one that is nested too deeply found"
        ) from error
    if not isinstance(value, dict):
        raise Refusal(Reason.NOT_JSON, f"a JSON object expected, {type(value).__name__} found")
    return value


def new_nonce() -> str:
    """Return random text that names a process or a connection."""
    return secrets.token_hex(_NONCE_BYTES)


@functools.cache
def own_version() -> str:
    """Return the version of this outlast."""
    try:
        return metadata.version("outlast")
    except (metadata.PackageNotFoundError, OSError):
        return "unknown"
