"""A save for which there is no time in the global tier, an object store, goes to the disk."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from tests.support.launching import until
from tests.support.ranks import copies, ranks
from tests.support.s3_bucket import Bucket, proxy, s3_server

pytestmark = [pytest.mark.long, pytest.mark.leaves("outlast.checkpoint.writer", "outlast-memory-")]
KEYS = {"AWS_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "a-test", "AWS_SECRET_ACCESS_KEY": "a-secret"}


@pytest.mark.parametrize(("slow", "measured"), [(4.0, True), (60.0, False)])
def test_a_tier_that_is_slower_than_the_lead_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: float, measured: bool
) -> None:
    def hold_up(method: str, path: str) -> None:
        if method == "PUT" and path.endswith("COMMIT"):
            time.sleep(slow)

    with s3_server() as server, proxy(server, hold_up) as (front, _):
        for name, value in {**KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{front}"}.items():
            monkeypatch.setenv(name, value)
        bucket = Bucket(server)
        bucket.create()
        where = {"global_url": bucket.url, "global_options": {"allow_http": "true"}}
        given = {"preempt_time": 9.0, "margin": 5.0}
        words = [f"config={json.dumps(given)}", f"checkpoints={json.dumps(where)}"]
        with ranks(tmp_path, *words, "interval=3" if measured else "interval=100000") as job:
            job.reach(6)
            if measured:
                until(lambda: any("COMMIT" in path for path in bucket.paths()), "the first copy there")
                until(lambda: "preempt_time" in job.output(), "word of the time it took")
            job.send(0)
            assert job.finish() == [75, 75], job.output()
            ends = [job.lines(rank)[-1]["ended"] for rank in (0, 1)]
    assert set(ends) == {copies(job.run)[-1]}
    text = job.outputs[0].read_text()
    saved_in, kept_in = re.findall(r"\b(global|local|memory) tier", text)[-2:]
    if measured:  # on a busy host the disk may be too slow, too
        assert saved_in == kept_in != "global", text
    else:
        assert (saved_in, kept_in) == ("global", "local"), text
