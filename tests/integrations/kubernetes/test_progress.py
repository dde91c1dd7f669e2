"""Progress reaches Kubeflow's server, and nothing that goes wrong there reaches the training."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outlast.errors import UsageError
from outlast.integrations.kubernetes.progress import StatusServer, TrainJobProgress, status_server
from tests.integrations.kubernetes.status_server import Controller
from tests.support.launching import until


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    with Controller(tmp_path) as started:
        yield started


def server(controller: Controller, timeout: float = 5.0) -> StatusServer:
    environment = {
        "KUBEFLOW_TRAINER_SERVER_URL": controller.url,
        "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(controller.ca),
        "KUBEFLOW_TRAINER_SERVER_TOKEN": str(controller.token),
    }
    found = status_server(environment)
    assert found is not None
    return StatusServer(found.url, found.ca_file, found.token_file, timeout)


def test_the_newest_status_is_posted_as_the_schema_wants_it(controller: Controller) -> None:
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed"
    )
    progress = TrainJobProgress(200, server(controller), every=0.0)
    progress.completed(10)
    until(lambda: progress.sent == 1, "the first post")
    progress.completed(50, {"loss": 0.5, "tokens": 7, **{f"m{at}": at for at in range(1000)}})
    progress.close()
    assert (progress.sent, progress.failed) == (2, 0)
    authorization, body = controller.posts[-1]
    assert authorization == "Bearer first"
    request = models.TrainerV1alpha1UpdateTrainJobStatusRequest.from_dict(body)
    status = request.trainer_status
    assert (status.progress_percentage, status.last_updated_time is not None) == (25, True)
    assert [(one.name, one.value) for one in status.metrics[:2]] == [("loss", "0.5"), ("tokens", "7")]
    assert len(status.metrics) == 256
    assert status.estimated_remaining_seconds >= 0


def test_what_was_overtaken_is_not_posted(controller: Controller) -> None:
    controller.hold.clear()
    progress = TrainJobProgress(100, server(controller), every=0.0)
    progress.completed(1)
    until(lambda: len(controller.posts) == 1, "the first post")
    for step in range(2, 50):
        progress.completed(step)
    controller.hold.set()
    progress.close()
    assert [one["progressPercentage"] for one in controller.statuses] == [1, 49]


def test_the_last_status_is_posted_at_the_end_whatever_the_interval(controller: Controller) -> None:
    progress = TrainJobProgress(3, server(controller), every=3600.0)
    progress.completed(1)
    until(lambda: progress.sent == 1, "the first post")
    progress.completed(3)
    progress.close()
    assert [one["progressPercentage"] for one in controller.statuses] == [33, 100]


def test_a_renewed_token_is_used(controller: Controller) -> None:
    progress = TrainJobProgress(10, server(controller), every=0.0)
    progress.completed(1)
    until(lambda: progress.sent == 1, "the first post")
    controller.token.write_text("second")
    progress.completed(2)
    progress.close()
    assert [token for token, _ in controller.posts] == ["Bearer first", "Bearer second"]


class Lost(str):
    def __str__(self) -> str:
        raise RuntimeError("device lost")


@pytest.mark.parametrize(
    ("answer", "metrics"),
    [
        ((403, {}), {}),
        ((500, {}), {}),
        ((302, {"Location": "https://127.0.0.1:1/"}), {}),
        ((200, {}), {"loss": Lost()}),  # it cannot be written
    ],
)
def test_a_post_that_fails_is_counted_and_the_next_one_is_sent(
    controller: Controller, answer: tuple[int, dict[str, str]], metrics: dict[str, Any]
) -> None:
    controller.answer = answer
    progress = TrainJobProgress(10, server(controller), every=0.0)
    progress.completed(1, metrics)
    until(lambda: progress.failed == 1, "the failure")
    assert metrics or str(answer[0]) in progress.last_failure
    controller.answer = (200, {})
    progress.completed(2)
    until(lambda: progress.sent == 1, "the next post")
    progress.close()


def test_a_server_that_never_answers_holds_nothing_up(controller: Controller) -> None:
    controller.hold.clear()
    progress = TrainJobProgress(10, server(controller, timeout=0.2), every=0.0)
    progress.completed(1)
    until(lambda: progress.failed == 1, "the timeout")
    progress.close(timeout=0.0)
    assert progress.sent == 0


@pytest.mark.parametrize("wrong", ["server", "token", "certificate", "http"])
def test_what_cannot_be_posted_is_counted(controller: Controller, tmp_path: Path, wrong: str) -> None:
    known = server(controller)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        servers = {
            "server": StatusServer(f"https://127.0.0.1:{closed.getsockname()[1]}/", known.ca_file),
            "token": StatusServer(known.url, known.ca_file, str(tmp_path / "none")),
            "certificate": StatusServer(known.url, "", known.token_file),
            "http": StatusServer(known.url.replace("https", "http"), "", known.token_file),
        }
        progress = TrainJobProgress(10, servers[wrong], every=0.0)
        progress.completed(1)
        until(lambda: progress.failed == 1, "the failure")
        progress.close()
    assert (progress.sent, controller.posts) == (0, [])


def test_outside_of_a_trainjob_nothing_is_started_and_no_steps_are_refused() -> None:
    before = threading.active_count()
    progress = TrainJobProgress(10, status_server({}))
    progress.completed(1)
    progress.close()
    assert (threading.active_count(), progress.sent, progress.failed) == (before, 0, 0)
    with pytest.raises(UsageError, match="total_steps=0"):
        TrainJobProgress(0, None)
