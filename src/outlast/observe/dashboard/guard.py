"""Who may ask the dashboard for what: host, method, tokens, and the time that a request may take.

A page of another site may ask a server on this machine under a name that it points to 127.0.0.1 (DNS
rebinding). So a request names the host by an IP address, as localhost, or by this machine's name.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
import secrets
from dataclasses import dataclass
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

PATIENCE = 10.0  # seconds for a client to send a request or to take an answer, and for a read of the logs
_ADDRESS_BYTES = 2048
_MOST_FIELDS = 20
_PLAIN = "default-src 'none'; sandbox; frame-ancestors 'none'"
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Connection": "close",  # a connection has one request, so one time limit bounds it
}


def plain(text: str, status: int) -> Response:
    """Return an answer of plain text, in which a browser finds nothing to run."""
    return PlainTextResponse(text, status, {"Content-Security-Policy": _PLAIN})


class Impatient(H11Protocol):
    """Closes a connection on which no request came in time."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self.loop.call_later(PATIENCE, self._close_without_request)

    def _close_without_request(self) -> None:
        if getattr(self, "cycle", None) is None and not self.transport.is_closing():
            self.transport.close()


@dataclass(frozen=True)
class Tokens:
    """What a request has to have, as ``Authorization: Bearer`` or once as ``?token=``; a cookie answers that.

    Args:
        read: for every request; empty: none.
        act: for one that asks a job for something, and good for all others; empty: none may.
    """

    read: str = ""
    act: str = ""


def acts(scope: Scope) -> bool:
    """Return whether a request that the guard has let in may ask jobs for something."""
    return bool(scope["state"]["acts"])


class Guard:
    """Refuses what is no request for this server, and adds headers to every answer.

    Args:
        app: the application behind it.
        hosts: names of this machine.
        tokens: see :class:`Tokens`.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str], tokens: Tokens) -> None:
        self._app = app
        self._hosts = hosts | {"localhost"}
        self._tokens = tokens
        self._key = secrets.token_hex(8)  # cookies of a host are those of all its ports
        self._secrets = {token: secrets.token_urlsafe(32) for token in (tokens.read, tokens.act) if token}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        headers = Headers(scope=scope)
        scope["state"] = {"acts": self._has(headers, self._tokens.act)}
        answer = self._refusal(scope, headers)
        await (answer or self._app)(scope, receive, guarded)

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        if scope["method"] not in ("GET", "HEAD", "POST") or (
            scope["method"] == "POST" and not self._tokens.act
        ):
            return plain("The dashboard only reads: GET and HEAD are answered.", 405)
        if len(scope["raw_path"]) + len(scope["query_string"]) > _ADDRESS_BYTES:
            return plain(f"No address of the dashboard has more than {_ADDRESS_BYTES} bytes.", 414)
        if not self._is_own(headers.get("host", "")):
            return plain("This server is not the host that was asked for; use its IP address or name.", 421)
        if scope["method"] == "POST":
            return _refusal_to_act(scope, headers)
        try:
            fields = parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=_MOST_FIELDS)
        except ValueError:
            return plain(f"No address of the dashboard has more than {_MOST_FIELDS} fields.", 400)
        given = fields.get("token", [""])[0]
        token = next((one for one in self._secrets if _equal(given, one)), "")
        if token and not self._has(headers, token):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(f"outlast-{self._key}", self._secrets[token], httponly=True, samesite="strict")
            return answer
        if not self._tokens.read or acts(scope) or self._has(headers, self._tokens.read):
            return None
        return plain("A token is needed: open the address with ?token= and what is in the token file.", 401)

    def _is_own(self, host: str) -> bool:
        found = re.fullmatch(r"(?:\[([^\]]*)\]|([^:]*))(?::[0-9]*)?", host)
        name = (found[1] or found[2] or "") if found else ""
        if name.lower() in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _has(self, headers: Headers, token: str) -> bool:
        """Return whether a request has a token, or the cookie that it was answered with."""
        if not token:
            return False
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and _equal(given, token):
            return True
        # Not by SimpleCookie, which finds none beside another site's that it cannot read.
        pairs = (one.strip().partition("=") for one in headers.get("cookie", "").split(";"))
        secret = self._secrets[token]
        return any(name == f"outlast-{self._key}" and _equal(value, secret) for name, _, value in pairs)


def _refusal_to_act(scope: Scope, headers: Headers) -> Response | None:
    """Refuse whoever has not the token for it, and pages of other sites, which send the browser's cookies."""
    if not acts(scope):
        return plain("A token that allows requests to jobs is needed: see --act-token-file.", 401)
    origin = headers.get("origin")
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none") or (
        origin is not None and origin.partition("://")[2] != headers.get("host")
    ):
        return plain("Only the dashboard's own pages may ask a job for something.", 403)
    return None


def _equal(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())
