"""Waiting for a child and for signals."""

from __future__ import annotations

import os
import resource
import sys

from outlast.integrations.slurm.commands import Child, Noted


def test_a_process_with_more_than_1024_files_open_waits_for_its_child() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(2048, most[0]), most[1]))
    held = [os.dup(2) for _ in range(1100)]
    try:
        with Noted() as noted:
            assert Child((sys.executable, "-c", "raise SystemExit(7)")).wait(noted, 60.0) == 7
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
