"""What an object store refuses, or never answers: told once, in bounded time, and without a secret."""

from __future__ import annotations

import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from functools import partial

import pytest

pytest.importorskip("obstore", reason="object stores need the extra: pip install 'outlast[s3]'")
pytest.importorskip("moto.server", reason="the S3 server of these tests is moto: pip install 'moto[server]'")

from outlast.checkpoint.policy.manifest import copy_name, rank_files
from outlast.checkpoint.policy.resolve import CopyState
from outlast.checkpoint.tiers.inventory import inspect
from outlast.checkpoint.tiers.object_access import Failure, Limits, ObjectStoreError
from outlast.checkpoint.tiers.remote import ObjectTier
from outlast.errors import UsageError
from tests.support.jobs import DEADLINE
from tests.support.s3_bucket import COPY, QUICK, SECRETS, Answer, Bucket, proxy, put, s3_server, written

SHARD, _, DOCUMENT = rank_files(0, 1)


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    with s3_server() as port:
        yield port


@pytest.fixture
def bucket(server: int) -> Bucket:
    bucket = Bucket(server)
    bucket.create()
    return bucket


def refusal(code: str) -> bytes:
    """Answer as S3 does, with everything in it that must not be passed on."""
    secrets = f"<Token-0>{SECRETS[1]}</Token-0><StringToSign>x-amz-security-token:{SECRETS[1]}</StringToSign>"
    return f"<Error><Code>{code}</Code><Message>for {SECRETS[0]}</Message>{secrets}</Error>".encode()


def test_a_busy_store_is_asked_again_within_bounds(bucket: Bucket) -> None:
    files, left = written(b"x" * 100), [2]

    def answer(method: str, path: str) -> Answer | None:
        if method != "PUT" or left[0] == 0:
            return None
        left[0] -= 1
        return 503, refusal("SlowDown")

    with proxy(bucket.port, answer) as (port, asked):
        put(bucket.tier(port=port), files)
        assert sum(each.startswith("PUT") for each in asked) == 5 + 2
        assert bucket.tier().names() == [COPY]
        left[0], before = 1000, len(asked)
        with pytest.raises(ObjectStoreError) as caught:
            bucket.tier(port=port).upload(copy_name(6, 1), {SHARD: b"y"})
        assert sum(each.startswith("PUT") for each in asked[before:]) == 1 + QUICK.retries
    assert caught.value.kind is Failure.THROTTLED
    place = f"{bucket.url}/{copy_name(6, 1)}/{SHARD}"
    assert all(word in str(caught.value) for word in (place, "503", "3"))


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, "ExpiredToken"),
        (403, "SignatureDoesNotMatch"),
        (403, "AccessDenied"),
        (403, "InvalidAccessKeyId"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "PUT", "POST"])
def test_refused_credentials_are_told_at_once_and_never_quoted(
    bucket: Bucket, status: int, code: str, method: str
) -> None:
    put(bucket.tier(), written(b"x" * 100))

    def answer(asked: str, path: str) -> Answer | None:
        return (status, refusal(code)) if asked == method else None

    with proxy(bucket.port, answer) as (port, asked):
        tier = bucket.tier(QUICK, port)
        uploading = partial(tier.upload, copy_name(6, 1), {SHARD: b"y" * 100})
        act = partial(tier.discard, COPY) if method == "POST" else uploading
        with pytest.raises(ObjectStoreError) as caught:
            act()
        assert sum(each.startswith(method) for each in asked) == 1
    assert caught.value.kind is Failure.REFUSED
    assert code in str(caught.value)
    told = "".join(traceback.format_exception(caught.value)) + repr(caught.value) + repr(vars(caught.value))
    for secret in (*SECRETS, "StringToSign", "Token-0"):
        assert secret not in told
    assert (caught.value.__cause__, caught.value.__context__) == (None, None)
    if method == "GET":
        with proxy(bucket.port, answer) as (port, _):
            with pytest.raises(ObjectStoreError):
                bucket.tier(port=port).names()
            assert inspect(bucket.tier(port=port), COPY, None).state is CopyState.UNREADABLE


def test_a_store_that_never_answers_is_given_up(bucket: Bucket) -> None:
    hold = threading.Event()

    def answer(method: str, path: str) -> Answer | None:
        hold.wait(DEADLINE)
        return 500, b""

    with proxy(bucket.port, answer) as (port, asked):
        with pytest.raises(ObjectStoreError) as caught:
            bucket.tier(Limits(request=0.2, retries=1, retry_for=5.0), port).names()
        hold.set()
        assert len(asked) <= 4
    assert caught.value.kind in (Failure.TIMED_OUT, Failure.UNREACHABLE)
    with pytest.raises(ObjectStoreError) as caught:
        bucket.tier(Limits(retries=1, retry_for=1.0), port).names()
    assert caught.value.kind is Failure.UNREACHABLE


def test_a_put_that_was_answered_and_not_done_is_found(bucket: Bucket) -> None:
    def answer(method: str, path: str) -> Answer | None:
        return (200, b"") if method == "PUT" and path.endswith(".json") else None

    files = written(b"x" * 100)
    with proxy(bucket.port, answer) as (port, _), pytest.raises(ObjectStoreError) as caught:
        put(bucket.tier(port=port), files)
    assert all(word in str(caught.value) for word in (DOCUMENT, "100"))
    assert bucket.tier().names() == []


def test_a_removal_that_is_cut_short_leaves_no_copy(bucket: Bucket) -> None:
    put(bucket.tier(), written(b"x" * 100))
    removals = []

    def answer(method: str, path: str) -> Answer | None:
        removals.extend([path] if method == "POST" else [])
        return (403, refusal("AccessDenied")) if len(removals) > 1 else None

    with proxy(bucket.port, answer) as (port, _):
        with pytest.raises(ObjectStoreError):
            bucket.tier(port=port).discard(COPY)
        assert (bucket.tier().names(), len(bucket.paths())) == ([], 4)
    bucket.tier().discard(COPY)
    assert bucket.paths() == []


def test_a_signature_in_a_url_is_not_quoted(bucket: Bucket) -> None:
    signature = "SignatureOfTheTest0123456789"
    options = {"account_name": "account", "sas_key": f"sv=2024-01-01&sig={signature}", "allow_http": True}

    def answer(method: str, path: str) -> Answer | None:
        assert signature in path
        return 403, refusal("AuthenticationFailed")

    with proxy(bucket.port, answer) as (port, asked):
        options["endpoint"] = f"http://127.0.0.1:{port}"
        tier = ObjectTier("az://container/runs", options, limits=Limits(retries=0, retry_for=1.0))
        with pytest.raises(ObjectStoreError, match=r"403.*AuthenticationFailed") as refused:
            tier.names()
    with pytest.raises(ObjectStoreError) as lost:
        ObjectTier("az://container/runs", options, limits=Limits(retries=0, retry_for=1.0)).names()
    assert (refused.value.kind, bool(asked)) == (Failure.REFUSED, True)
    for error in (refused.value, lost.value):
        assert signature not in "".join(traceback.format_exception(error)) + repr(error)


def test_a_listing_without_an_end_is_given_up(bucket: Bucket) -> None:
    page = (
        "<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>on</NextContinuationToken>"
    )
    content = (
        "<Contents><Key>k</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><Size>1</Size></Contents>"
    )

    def answer(method: str, path: str) -> Answer | None:
        return 200, f"{page}{content}</ListBucketResult>".encode()

    with proxy(bucket.port, answer) as (port, asked):
        with pytest.raises(ObjectStoreError, match="4") as caught:
            bucket.tier(Limits(request=3.5, retries=1, retry_for=0.5), port).names()
        assert len(asked) > 2
    assert caught.value.kind is Failure.TIMED_OUT


def test_what_is_wrong_with_a_tier_is_told_when_it_is_made_or_asked(server: int) -> None:
    options = Bucket(server).options()
    with pytest.raises(ObjectStoreError, match=r"404.*NoSuchBucket") as caught:
        Bucket(server, "bucket-that-is-not-there").tier().names()
    assert caught.value.kind is Failure.FAILED
    for key, found in (("frobnicate", "frobnicate"), ("conditional_put", "Failed to parse")):
        with pytest.raises(UsageError, match=found) as unknown:
            ObjectTier("s3://some-bucket/a", {**options, key: "Sesame-0123"})
        assert all(secret not in str(unknown.value) for secret in (*SECRETS, "Sesame-0123"))
    for url in (
        "s4://some-bucket/a",
        "/a/folder",
        f"s3://key:{SECRETS[0]}@some-bucket/a",
        "az://a/b?sig=0123",
    ):
        with pytest.raises(UsageError) as wrong:
            ObjectTier(url)
        assert SECRETS[0] not in str(wrong.value)
    code = (
        "import sys; sys.modules['obstore'] = None\nfrom outlast.checkpoint.tiers.remote import ObjectTier\n"
        "ObjectTier('s3://bucket/a')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert "pip install 'outlast[s3]'" in done.stderr
