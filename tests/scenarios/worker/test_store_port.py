"""The port that ranks were told to meet at, while another process still has it."""

from __future__ import annotations

import socket
import threading

from outlast.worker.store_host import listener_at
from tests.support.launching import DEADLINE


def test_a_port_that_the_store_before_still_has_is_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as before:
        port = before.getsockname()[1]
        timer = threading.Timer(0.3, before.close)
        timer.start()
        listener, why = listener_at("127.0.0.1", port, port, patience=DEADLINE)
        timer.join()
    with listener:
        assert (listener.getsockname()[1], why) == (port, "")


def test_another_port_is_used_in_place_of_one_that_stays_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        listener, why = listener_at("127.0.0.1", port, port, patience=0.2)
        with listener:
            assert listener.getsockname()[1] not in (0, port)
            assert why
