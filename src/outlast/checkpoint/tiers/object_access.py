"""How an object store is reached, how long it is waited for, and what its refusals mean.

What a store answers may quote credentials: S3 repeats an expired token and the string that was
signed, Azure has signatures in its URLs. So no text of a store goes into a message, only the status,
the error code and the number of retries.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any, TypeVar

from outlast import plugins
from outlast.errors import UsageError
from outlast.fields import Damage, DamagedCopy

T = TypeVar("T")
_MOST_PARTS = 10_000  # of one S3 upload


class Failure(str, Enum):
    """Why the store did not do it."""

    MISSING = "missing"
    REFUSED = "refused"
    THROTTLED = "throttled"
    TIMED_OUT = "timed out"
    UNREACHABLE = "unreachable"
    CONFLICT = "conflict"
    FAILED = "failed"


_LATER = "this attempt has ended; committed copies are unchanged, and a later attempt may succeed"
_FOR_GOOD = {
    Failure.MISSING: "nothing was changed",
    Failure.REFUSED: "not tried again; renew the credentials of this tier, or its permissions",
    Failure.CONFLICT: "what is there stays as it is, nothing was overwritten",
    Failure.FAILED: "this attempt has ended; committed copies are unchanged",
}


class ObjectStoreError(OSError):
    """The object store did not do what it was asked for.

    Args:
        kind: why, for programs.
        tier: name of the tier.
        place: URL of the object.
        found: what was tried and what came back.

    ``passes`` says whether a later attempt may go through.
    """

    def __init__(self, kind: Failure, tier: str, place: str, found: str) -> None:
        self.kind = kind
        self.passes = kind not in _FOR_GOOD
        super().__init__(f"{tier} tier, {place}: {found} ({kind.value}); {_FOR_GOOD.get(kind, _LATER)}")


@dataclass(frozen=True)
class Limits:
    """How long to wait, and how much to have in flight.

    Args:
        connect: seconds until a connection stands.
        request: seconds of one request, from its connection to the last byte of the answer.
        retries: how often a request is repeated when the store is busy or does not answer.
        retry_for: seconds from the first try, after which none is repeated; S3 and Azure stop
            believing a signed request after some minutes.
        pace: bytes a second; a transfer that is slower than this is aborted.
        part_bytes: size of a part; whole chunks, and at least the 5 MiB that S3 wants.
        parts: how many are on their way at a time.
    """

    connect: float = 10.0
    request: float = 60.0
    retries: int = 8
    retry_for: float = 120.0
    pace: float = 1e6
    part_bytes: int = 8 << 20
    parts: int = 8

    def patience(self, nbytes: int) -> float:
        """Return seconds after which a piece of work that moves so many bytes is aborted."""
        return self.retry_for + self.request + nbytes / self.pace


class Store:
    """An object store below a URL: requests, each bounded and its failure explained.

    The coroutines raise ObjectStoreError when the store does not answer, or refuses.

    Args:
        url: see :func:`connect`, like the rest and what is raised.
        options: of the store.
        tier: what messages call it.
        limits: how long to wait, and how much to have in flight.
    """

    def __init__(self, url: str, options: Mapping[str, Any], tier: str, limits: Limits) -> None:
        self._url = url.rstrip("/")
        self._options = options
        self._tier = tier
        self._limits = limits
        self._api, self._store = connect(tier, url, options, limits)

    def run(self, work: Awaitable[T], nbytes: int = 0) -> T:
        """Carry out requests that move so many bytes, within their time."""
        seconds = self._limits.patience(nbytes)

        async def bounded() -> T:
            task = asyncio.ensure_future(work)
            done, _ = await asyncio.wait({task}, timeout=seconds)
            if done:  # not wait_for: a local disk may have raised a TimeoutError, too
                return task.result()
            raise self.error(Failure.TIMED_OUT, "", f"not done after {seconds:.0f} s")

        return asyncio.run(bounded())

    async def _ask(self, doing: str, path: str, answer: Awaitable[T]) -> T:
        """Await the store's answer; what obstore raises may quote credentials and is not passed on."""
        try:
            return await answer
        except (FileNotFoundError, ValueError, self._api.exceptions.BaseError) as error:
            kind, found = explain(error, self._options)
        raise self.error(kind, path, f"{doing}: {found}")

    def error(self, kind: Failure, path: str, found: str) -> ObjectStoreError:
        """Return the error that says what was found at a path."""
        return ObjectStoreError(kind, self._tier, f"{self._url}/{path}".rstrip("/"), found)

    async def _attempt(self, doing: str, path: str, answer: Awaitable[object], unless: Failure) -> bool:
        """Return whether the store did what it was asked for; False: it could not, for the given reason."""
        try:
            await self._ask(doing, path, answer)
        except ObjectStoreError as error:
            if error.kind is not unless:
                raise
            return False
        return True

    async def folders(self) -> list[str]:
        """Return the names of the folders directly below the URL."""
        found = await self._ask("list", "", self._api.list_with_delimiter_async(self._store))
        return [path.rpartition("/")[2] for path in found["common_prefixes"]]

    async def listing(self, folder: str) -> dict[str, int]:
        """Return the files in a folder, each with its size."""

        async def collect() -> list[Any]:
            stream = self._api.list(self._store, folder, chunk_size=1000)
            return [meta async for batch in stream for meta in batch]

        found = await self._ask("list", folder, collect())
        return {meta["path"][len(folder) + 1 :]: meta["size"] for meta in found}

    async def exists(self, path: str) -> bool:
        """Return whether an object is there."""
        return await self._attempt("head", path, self._api.head_async(self._store, path), Failure.MISSING)

    async def content(self, path: str) -> bytes:
        """Return the whole content of a small object."""
        answer = await self._ask("get", path, self._api.get_async(self._store, path))
        return bytes(await self._ask("get", path, answer.bytes_async()))

    async def stream(self, path: str, nbytes: int, take: Callable[[memoryview], None]) -> None:
        """Give an object's content away in order, some parts being on their way meanwhile.

        Raises:
            DamagedCopy: it is of another size.
        """
        step, coming = self._limits.part_bytes, deque[asyncio.Task[memoryview]]()
        try:
            for begin in range(0, nbytes, step):
                part = self._part(path, begin, min(begin + step, nbytes), nbytes)
                coming.append(asyncio.create_task(part))
                if len(coming) == self._limits.parts:
                    take(await coming.popleft())
            while coming:
                take(await coming.popleft())
        finally:
            for task in coming:
                task.cancel()
            await asyncio.gather(*coming, return_exceptions=True)

    async def _part(self, path: str, begin: int, end: int, nbytes: int) -> memoryview:
        async def receive() -> tuple[int, memoryview]:
            answer = await self._api.get_async(self._store, path, options={"range": (begin, end)})
            return answer.meta["size"], memoryview(await answer.bytes_async())

        size, content = await self._ask("get", path, receive())
        if size != nbytes or len(content) != end - begin:
            found = f"{size} bytes, of which {len(content)} from byte {begin} on"
            raise DamagedCopy(Damage(path.rpartition("/")[2], f"{nbytes} bytes", found))
        return content

    async def put(self, path: str, content: memoryview) -> None:
        """Put an object, whatever was there; a large one in parts, some at a time."""
        part = max(self._limits.part_bytes, -(-content.nbytes // _MOST_PARTS))
        many = content.nbytes > part
        sending = {"use_multipart": many, "chunk_size": part, "max_concurrency": self._limits.parts}
        await self._ask("put", path, self._api.put_async(self._store, path, content, **sending))

    async def create(self, path: str, content: bytes) -> bool:
        """Put an object where none is, and return whether none was."""
        put = self._api.put_async(self._store, path, content, mode="create", use_multipart=False)
        return await self._attempt("put", path, put, Failure.CONFLICT)

    async def delete(self, paths: list[str]) -> None:
        """Remove objects."""
        if paths:
            await self._ask("delete", paths[0], self._api.delete_async(self._store, paths))


# obstore takes these apart from the store's own settings, and panics when they are among them.
_CLIENT_OPTIONS = frozenset(
    {
        *("allow_http", "allow_invalid_certificates", "default_headers", "http1_only", "http2_only"),
        *("proxy_url", "proxy_ca_certificate", "proxy_excludes", "root_certificate", "user_agent"),
    }
)
_SCHEMES = ("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "file", "memory")


def connect(tier: str, url: str, options: Mapping[str, Any], limits: Limits) -> tuple[Any, Any]:
    """Return obstore and its store of a URL; nothing is asked of the store yet.

    Raises:
        UsageError: obstore is not installed, the URL is not one of a store, or an option is unknown.
    """
    try:
        import obstore
        from obstore.store import MemoryStore, from_url
    except ImportError as error:
        raise UsageError(
            f"{tier} tier: copies in an object store need the package obstore, which is not installed here"
            f" ({error.name}); install it with: pip install 'outlast[s3]'"
        ) from None
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in _SCHEMES:
        found = f"a URL of the scheme {scheme!r}" if separator else "no URL"
        raise UsageError(
            f"{tier} tier: found {found}, expected one of the schemes"
            f" {', '.join([*_SCHEMES, *plugins.names(plugins.TIERS)])}"
        )
    if "@" in rest or "?" in rest:
        raise UsageError(
            f"{tier} tier: found a {scheme} URL with a user, password or query, expected one like"
            " s3://bucket/prefix; credentials belong in options or the environment"
        )
    if scheme == "memory":
        return obstore, MemoryStore()
    try:
        of_folder = {"mkdir": True, "automatic_cleanup": True}
        given = of_folder if scheme == "file" else _settings(scheme, options, limits)
        return obstore, from_url(url, **given)
    except (ValueError, obstore.exceptions.BaseError) as error:
        found = explain(error, options)[1]
    named = ", ".join(sorted(options)) or "none"
    raise UsageError(f"{tier} tier, {url}: {found}; options given: {named}; nothing was started")


def _settings(scheme: str, options: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
    client = {key: value for key, value in options.items() if key in _CLIENT_OPTIONS}
    config = {key: value for key, value in options.items() if key not in _CLIENT_OPTIONS}
    if scheme in ("s3", "s3a"):
        config.setdefault("checksum_algorithm", "sha256")
        if config["checksum_algorithm"] == "none":
            del config["checksum_algorithm"]
    times = {"connect_timeout": limits.connect, "timeout": limits.request}
    pauses = {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=10), "base": 2}
    retries = {"max_retries": limits.retries, "retry_timeout": timedelta(seconds=limits.retry_for)}
    return {
        "config": config,
        "client_options": {name: timedelta(seconds=time) for name, time in times.items()} | client,
        "retry_config": retries | {"backoff": pauses},
    }


_STATUS = re.compile(r"status code: (\d{3})((?: [A-Z][a-z]+)*)")
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
_RETRIES = re.compile(r"after (\d+) retries")
_TIMED_OUT = re.compile(r"timed out|deadline has elapsed", re.IGNORECASE)
_CREDENTIALS = re.compile(r"://(169\.254\.|metadata\.google|oauth2\.googleapis|login\.microsoftonline|sts\.)")
_KINDS = {  # by error code, obstore's exception, or status
    **dict.fromkeys(("NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted"), Failure.FAILED),
    **dict.fromkeys(
        (
            *(
                "PermissionDeniedError",
                "UnauthenticatedError",
                "401",
                "403",
                "AccessDenied",
                "AccountProblem",
            ),
            *("AllAccessDisabled", "AuthenticationFailed", "AuthenticationRequired", "AuthorizationFailure"),
            *("AuthorizationHeaderMalformed", "AuthorizationPermissionMismatch", "ExpiredToken"),
            *("InvalidAccessKeyId", "InvalidAuthenticationInfo", "InvalidSecurity", "InvalidToken"),
            *("NoAuthenticationInformation", "RequestTimeTooSkewed", "SignatureDoesNotMatch"),
            "TokenRefreshRequired",
        ),
        Failure.REFUSED,
    ),
    **dict.fromkeys(
        ("429", "503", "SlowDown", "ServerBusy", "RequestLimitExceeded", "Throttling", "TooManyRequests"),
        Failure.THROTTLED,
    ),
    **dict.fromkeys(("FileNotFoundError", "404"), Failure.MISSING),
    "AlreadyExistsError": Failure.CONFLICT,
}


def explain(error: Exception, options: Mapping[str, Any]) -> tuple[Failure, str]:
    """Return what an error of obstore means, in words that quote no secret.

    Args:
        error: what obstore raised.
        options: of the store; none of their values is quoted.
    """
    text = str(error).partition("\n\nDebug source")[0]
    status, code, retries = _STATUS.search(text), _CODE.search(text), _RETRIES.search(text)
    kind = _kind(type(error).__name__, text, status[1] if status else "", code[1] if code else "")
    if status:
        words = [status[1] + status[2], code[1] if code else ""]
    elif kind is Failure.REFUSED:
        words = ["no credentials were found in the options, the environment or the node's own service"]
    else:
        words = [
            _scrubbed(text.splitlines()[0].rpartition(" - ")[2] if text else type(error).__name__, options)
        ]
    if retries:
        words.append(f"after {retries[1]} retries")
    return kind, ", ".join(word for word in words if word)


def _kind(raised: str, text: str, status: str, code: str) -> Failure:
    if code not in _KINDS and _CREDENTIALS.search(text):
        return Failure.REFUSED
    for known in (code, raised, status):
        if known in _KINDS:
            return _KINDS[known]
    if _TIMED_OUT.search(text) and not status:
        return Failure.TIMED_OUT
    return Failure.UNREACHABLE if "HTTP error" in text and not status else Failure.FAILED


def _scrubbed(text: str, options: Mapping[str, Any]) -> str:
    for value in sorted(map(str, options.values()), key=len, reverse=True):
        if len(value) > 3:
            text = text.replace(value, "***")
    text = re.sub(r'"[^"]*"', '"***"', text)
    return re.sub(r"[\w+/=%~-]{24,}", "***", text)[:200]
