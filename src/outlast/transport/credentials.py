"""What savers and ranks of a job's nodes prove to each other, and how each process gets it.

The agents of a job know a token. Each agent derives a key for the run from it and hands the key over on its
own node only: to the saver through a pipe, to the ranks in a file of the runtime folder, which only this user
can read. Neither the token nor the key goes through torch's store, a command line or a variable. Without an
agent (plain torchrun) each process derives the key itself, from a token that it reads.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import os
import secrets
import ssl
from dataclasses import asdict, dataclass
from pathlib import Path

from outlast import files
from outlast.core.errors import OutlastError
from outlast.transport.channel_auth import Security, contexts

CREDENTIALS_BYTES = 4096  # a pipe takes them without a reader


class BadToken(OutlastError):
    """A token cannot be read."""


@dataclass(frozen=True)
class Tls:
    """How connections between savers are encrypted.

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
    """What a process of this node proves to savers of other nodes.

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
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Credentials:
        """Read what :meth:`to_json` returned; what is none gives credentials without a key."""
        try:
            found = json.loads(text)
            return cls(str(found["key"]), str(found["host"]), tuple(map(str, found["tls"])))
        except (ValueError, KeyError, TypeError):
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
