"""The channel under TLS, with certificates made by openssl."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from outlast.cluster.rpc.channel import BadSecurity, Post, Security
from tests.support.posts import DEADLINE, TOKEN, boxes, meet, still_well


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Security]:
    """Return what makes a certificate that an authority signed."""
    root = tmp_path_factory.mktemp("tls")

    def openssl(*words: str) -> None:
        command = ["openssl", *words]
        subprocess.run(command, check=True, capture_output=True, cwd=root, timeout=DEADLINE)

    def make(name: str, authority: str) -> Security:
        key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-batch")
        if not (root / f"{authority}.pem").exists():
            subject = ("-subj", f"/CN={authority}", "-keyout", f"{authority}.key", "-out", f"{authority}.pem")
            openssl("req", "-x509", *key, *subject)
        if not (root / f"{name}.pem").exists():
            signer = ("-CA", f"{authority}.pem", "-CAkey", f"{authority}.key")
            files = ("-keyout", f"{name}.key", "-out", f"{name}.pem")
            openssl("req", "-x509", *key, *signer, "-subj", f"/CN={name}", *files)
        return Security(root / f"{name}.pem", root / f"{name}.key", root / f"{authority}.pem")

    return make


def test_tls_carries_messages_and_refuses_who_has_none(certificates: Callable[[str, str], Security]) -> None:
    ours = certificates("node", "ours")
    with boxes("a", "b", security=ours) as (a, b), boxes("c", patience=5.0) as (c,):
        meet(a, b)
        b.post.send("a", {"n": "long", "x": "y" * (3 << 20)})
        a.gets("b", "long")
        c.post.knock(a.address, {"n": 1})
        c.until(lambda box: box.refused)
        a.until(lambda box: box.refused)
        assert "TLS" in a.refused[0]
        a.post.knock(c.address, {"n": 1})
        a.until(lambda box: len(box.refused) == 2)
        c.until(lambda box: len(box.refused) == 2)
        a.post.close()
        b.until(lambda box: box.gone)


def test_another_authority_is_refused(certificates: Callable[[str, str], Security]) -> None:
    ours, theirs = certificates("node", "ours"), certificates("other-node", "theirs")
    with boxes("a", security=ours) as (a,), boxes("b", security=theirs) as (b,):
        b.post.knock(a.address, {"n": 1})
        b.until(lambda box: box.refused)
        a.until(lambda box: box.refused)
        assert all("TLS" in one for box in (a, b) for one in box.refused)


def test_who_ends_tls_in_between_is_found_out(certificates: Callable[[str, str], Security]) -> None:
    def alone(name: str) -> Security:
        made = certificates(name, "ours")
        return Security(made.certificate, made.key)

    with boxes("a", security=alone("node")) as (a,), boxes("b", security=alone("node")) as (b,):
        meet(a, b)
        with boxes("c", security=alone("node")) as (c,), _between(alone("middle"), a.post.port) as address:
            c.post.knock(address, {"n": 1})
            c.until(lambda box: box.refused)
            assert c.post.counters().refused == {"token": 1}
        still_well(a, b)


@contextmanager
def _between(security: Security, port: int) -> Iterator[str]:
    """Take one TLS connection, open another one, and pass on what comes."""
    mine, theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    mine.load_cert_chain(security.certificate, security.key)
    theirs.check_hostname, theirs.verify_mode = False, ssl.CERT_NONE
    with socket.create_server(("127.0.0.1", 0)) as server:

        def work() -> None:
            near = mine.wrap_socket(server.accept()[0], server_side=True)
            far = theirs.wrap_socket(socket.create_connection(("127.0.0.1", port)))
            with near, far, suppress(ConnectionError, ssl.SSLError):
                near.settimeout(0.01)
                far.settimeout(0.01)
                while True:  # one thread: OpenSSL takes no two on one connection
                    for source, sink in ((near, far), (far, near)):
                        with suppress(TimeoutError):
                            data = source.recv(65536)
                            if not data:
                                return
                            sink.sendall(data)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join(DEADLINE)


def test_files_that_are_no_certificates_are_named(tmp_path: Path) -> None:
    (tmp_path / "x.pem").write_text("nothing")
    for path in (tmp_path / "x.pem", tmp_path / "missing.pem"):
        with pytest.raises(BadSecurity, match=f"TLS: {path} "):
            Post("a", "127.0.0.1", 0, TOKEN, security=Security(path, path))
    assert os.listdir(tmp_path) == ["x.pem"]
