"""The web server of ``outlast dashboard``: pages, their changes as server-sent events, logs of ranks.

It reads, and passes requests on to running jobs for whoever has the token for that. What a stranger on the
port can make it do is bounded: connections, the size of a request, the time until one is there, streams,
bytes of a log, and how often the runs are read, however many look at them.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import parse_qs

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from outlast.errors import UsageError
from outlast.observe import requests
from outlast.observe.dashboard import document, logs
from outlast.observe.dashboard.guard import PATIENCE, Guard, Impatient, Tokens, acts, plain
from outlast.observe.dashboard.markup import Markup
from outlast.observe.dashboard.reading import Watch
from outlast.observe.requests import What

_EVERY = 0.5  # seconds between two looks at the logs
_AGES_EVERY = 5.0  # seconds between two pages of a run without news: they say how old the newest is
_ALIVE = 15.0  # seconds after which a stream that has nothing to say says so
_LONGEST = 3600.0  # seconds of a stream; the browser then asks again
_CONNECTIONS, _STREAMS = 64, 32
_REQUEST_BYTES, _FORM_BYTES = 16 << 10, 1 << 10


@dataclass(frozen=True)
class _Page:
    """The sections of a page, each with the version at which it changed last."""

    version: int
    sections: Mapping[str, tuple[int, Markup]]


class _Pages:
    """Makes pages in a thread of its own, since reading may take long; at most every ``_EVERY`` seconds."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.boot = secrets.token_hex(4)
        self._thread = ThreadPoolExecutor(1, "dashboard")
        self._polled = -_EVERY
        self._made: dict[str, tuple[tuple[object, ...], _Page]] = {}

    async def get(self, key: str) -> _Page | None:
        """Return a page: that of a run by its number, or "" for that of all runs; None: there is none.

        Raises:
            TimeoutError: the run folders did not answer in time.
        """
        made = asyncio.get_running_loop().run_in_executor(self._thread, self._make, key)
        return await asyncio.wait_for(asyncio.shield(made), PATIENCE)

    def _make(self, key: str) -> _Page | None:
        if time.monotonic() - self._polled >= _EVERY:
            self.watch.poll(time.monotonic)
            self._polled = time.monotonic()
        state = (time.time() // _AGES_EVERY, *(one.state for one in self.watch.readers))
        known, before = self._made.get(key, ((), _Page(0, {})))
        if known == state:
            return before
        found = self._sections(key)
        if found is None:
            return None
        version = before.version + 1
        kept = {
            name: before.sections[name]
            for name in found
            if before.sections.get(name, (0, ""))[1] == found[name]
        }
        if len(kept) == len(found) == len(before.sections):
            version = before.version
        page = _Page(version, {name: kept.get(name, (version, one)) for name, one in found.items()})
        self._made[key] = (state, page)
        return page

    def _sections(self, key: str) -> dict[str, Markup] | None:
        wall, readers = time.time(), self.watch.readers
        if not key:
            return document.cards([one.shown(wall) for one in readers])
        number = int(key)
        return document.sections(readers[number].shown(wall)) if number < len(readers) else None


def application(watch: Watch, hosts: frozenset[str], tokens: Tokens) -> ASGIApp:
    """Return the application.

    Args:
        watch: the runs.
        hosts: names under which the server may be asked for, besides IP addresses and localhost.
        tokens: that requests have to have.
    """
    site = _Site(_Pages(watch))
    routes = [
        Route("/", site.first),
        Route("/run/{run:int}", site.run),
        Route("/run/{run:int}/request", site.request, methods=["POST"]),
        Route("/run/{run:int}/log/{number:int}/{stream}", site.log),
        Route("/events", _Stream(site.pages)),
        Route("/events/{run:int}", _Stream(site.pages)),
    ]
    return Starlette(routes=routes, middleware=[Middleware(Guard, hosts=hosts, tokens=tokens)])


def serve(watch: Watch, listener: socket.socket, hosts: frozenset[str], tokens: Tokens) -> None:
    """Serve until a signal ends it.

    Args:
        watch: the runs.
        listener: bound.
        hosts: see :func:`application`.
        tokens: likewise.
    """
    config = uvicorn.Config(
        application(watch, hosts, tokens),
        loop="asyncio",
        http=Impatient,
        ws="none",
        lifespan="off",
        log_level="critical",
        access_log=False,
        server_header=False,
        limit_concurrency=_CONNECTIONS,
        h11_max_incomplete_event_size=_REQUEST_BYTES,
        timeout_graceful_shutdown=1,
    )
    uvicorn.Server(config).run(sockets=[listener])


class _Site:
    """Answers requests for pages and logs."""

    def __init__(self, pages: _Pages) -> None:
        self.pages = pages
        self._watch = pages.watch

    async def first(self, request: Request) -> Response:
        return await self._page("" if self._watch.several else "0", acts(request.scope))

    async def run(self, request: Request) -> Response:
        return await self._page(str(request.path_params["run"]), acts(request.scope))

    async def request(self, request: Request) -> Response:
        """Pass a request on to a running job."""
        run = request.path_params["run"]
        if run >= len(self._watch.readers):
            return plain("No run has this number.", 404)
        try:
            form = parse_qs(
                (await asyncio.wait_for(_body(request), PATIENCE)).decode("latin-1"), max_num_fields=8
            )
            what, node = What(form.get("what", [""])[0]), form.get("node", [""])[0]
        except asyncio.TimeoutError:
            return plain(f"The form did not arrive within {PATIENCE:.0f} s; nothing was asked.", 400)
        except ValueError:
            expected = f"of up to {_FORM_BYTES} bytes and the field what with save, drain or stop"
            return plain(f"A form {expected} is expected; nothing was asked.", 400)
        name, run_dir = self._watch.readers[run].name, self._watch.readers[run].run_dir
        try:
            asked = asyncio.to_thread(requests.ask, run_dir, what, node)
            taken = await asyncio.wait_for(asked, requests.PATIENCE + PATIENCE)
        except UsageError as error:
            return plain(str(error), 409)
        except asyncio.TimeoutError:
            return plain("The run folder does not answer; whether the request was taken is not known.", 503)
        return plain(
            f"{name}: taken{f' by {taken}' if taken else ''}: {what.value}. The event log says what follows.",
            200,
        )

    async def _page(self, key: str, may_act: bool) -> Response:
        try:
            page = await self.pages.get(key)
        except asyncio.TimeoutError:
            return plain(f"The run folders did not answer within {PATIENCE:.0f} s; try again.", 503)
        if page is None:
            return plain("No run has this number.", 404)
        readers = self._watch.readers
        left_out = f" of {len(readers) + self._watch.left_out}" if self._watch.left_out else ""
        sections = {name: one for name, (_, one) in page.sections.items()}
        may_act = may_act and bool(key)
        shown = document.page(
            f"run {readers[int(key)].name}" if key else f"{len(readers)}{left_out} runs",
            {**sections, "requests": document.requests(f"/run/{key}/request")} if may_act else sections,
            events=f"/events/{key}" if key else "/events",
            version=f"{self.pages.boot}.{page.version}",
            up="/" if key and self._watch.several else "",
            acts=may_act,
        )
        headers = {"Content-Security-Policy": f"{document.policy(may_act)}; frame-ancestors 'none'"}
        return HTMLResponse(shown, headers=headers)

    async def log(self, request: Request) -> Response:
        try:
            return await asyncio.wait_for(asyncio.to_thread(self._log, request), PATIENCE)
        except asyncio.TimeoutError:
            return plain(f"The run folder did not answer within {PATIENCE:.0f} s; try again.", 503)

    def _log(self, request: Request) -> Response:
        """Return the end of a log; the file is looked up in the run, not taken from the request."""
        run, number = request.path_params["run"], request.path_params["number"]
        stream = logs.STREAMS.get(request.path_params["stream"])
        reader = self._watch.readers[run] if run < len(self._watch.readers) else None
        found = reader.incident(number) if reader is not None else None
        if reader is None or found is None or stream is None:
            return plain("The page shows no such log.", 404)
        folder = logs.place(reader.run_dir, found.incident)
        if not folder:
            return plain("The run folder has no log of this rank.", 404)
        try:
            return plain(logs.end(reader.run_dir, (*folder, stream)).decode("utf-8", "replace"), 200)
        except OSError as error:
            return plain(f"{'/'.join((*folder, stream))}: {error.strerror or error}", 404)


class _Stream:
    """Sends the sections of a page that changed, as server-sent events, until the client goes.

    An event is a JSON object of sections by their ids; its id is the version of the page, which a browser
    sends when it asks again.
    """

    def __init__(self, pages: _Pages) -> None:
        self._pages = pages
        self._open: set[object] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            await plain("Only the dashboard's own pages may listen.", 403)(scope, receive, send)
            return
        if len(self._open) >= _STREAMS:
            await plain(f"{_STREAMS} pages listen already; close one.", 503)(scope, receive, send)
            return
        me = object()
        self._open.add(me)
        try:
            await self._serve(request, receive, send)
        except (asyncio.TimeoutError, OSError):
            return  # the client takes nothing any more, or the run folders do not answer: it asks again
        finally:
            self._open.discard(me)

    async def _serve(self, request: Request, receive: Receive, send: Send) -> None:
        key = str(request.path_params.get("run", "" if self._pages.watch.several else "0"))
        if await self._pages.get(key) is None:
            await plain("No run has this number.", 404)(request.scope, receive, send)
            return
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        gone = asyncio.ensure_future(_disconnected(receive))
        since = _version(self._pages.boot, request)
        until = heard = time.monotonic()
        until += _LONGEST
        await _write(send, b": live\n\n")
        try:
            while not gone.done() and time.monotonic() < until:
                page = await self._pages.get(key)
                if page is None:
                    return
                changed = {name: one for name, (at, one) in page.sections.items() if at > since}
                if changed:
                    told = f"id: {self._pages.boot}.{page.version}\ndata: {json.dumps(changed)}\n\n"
                    await _write(send, told.encode())
                    since, heard = page.version, time.monotonic()
                elif time.monotonic() - heard > _ALIVE:
                    await _write(send, b": nothing new\n\n")
                    heard = time.monotonic()
                await asyncio.wait([gone], timeout=_EVERY)
        finally:
            gone.cancel()


async def _body(request: Request) -> bytes:
    """Return what a form has sent.

    Raises:
        ValueError: it is too much.
    """
    found = b""
    async for part in request.stream():
        found += part
        if len(found) > _FORM_BYTES:
            raise ValueError(f"more than {_FORM_BYTES} bytes")
    return found


async def _write(send: Send, body: bytes) -> None:
    await asyncio.wait_for(send({"type": "http.response.body", "body": body, "more_body": True}), PATIENCE)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _version(boot: str, request: Request) -> int:
    """Return the version that the client has; -1: none, or one of another server."""
    told = request.headers.get("last-event-id") or request.query_params.get("since", "")
    server, _, version = told.partition(".")
    return (
        int(version)
        if server == boot and version.isascii() and version.isdigit() and len(version) < 16
        else -1
    )
