"""A server as that of Kubeflow Trainer's controller: TLS, a bearer token, the published schema."""

from __future__ import annotations

import datetime
import ipaddress
import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

x509 = pytest.importorskip("cryptography.x509", reason="cryptography is not installed")


def certificate(folder: Path) -> tuple[Path, Path]:
    """Write a certificate for 127.0.0.1 that signs itself, and its key."""
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kubeflow-trainer")])
    now = datetime.datetime.now(datetime.timezone.utc)
    alternatives = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(alternatives, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    ca, private = folder / "ca.crt", folder / "key.pem"
    ca.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return ca, private


class Controller:
    """Takes posts until the block ends; ``hold`` keeps answers back while it is cleared."""

    def __init__(self, folder: Path) -> None:
        self.ca, key = certificate(folder)
        self.token = folder / "token"
        self.token.write_text("first\n")
        self.answer: tuple[int, dict[str, str]] = (200, {})
        self.posts: list[tuple[str, dict[str, Any]]] = []
        self.hold = threading.Event()
        self.hold.set()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                owner.posts.append((self.headers["Authorization"] or "", json.loads(body)))
                owner.hold.wait(30)
                status, headers = owner.answer
                self.send_response(status)
                for name, value in {**headers, "Content-Length": "2"}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *arguments: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.ca, key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.url = f"https://127.0.0.1:{self._server.server_address[1]}/trainjobs/gpt/status"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    def __enter__(self) -> Controller:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.hold.set()
        self._server.shutdown()
        self._thread.join(10)
        self._server.server_close()

    @property
    def statuses(self) -> list[dict[str, Any]]:
        return [body["trainerStatus"] for _, body in self.posts]
