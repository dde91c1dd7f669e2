"""How long imports stay behind the ranks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
from outlast.worker.ahead import behind_the_ranks

def priority():
    try:
        import there_is_no_such_module
    except ImportError:
        return os.getpriority(os.PRIO_PROCESS, 0)

print(priority())
with behind_the_ranks(float(sys.argv[1])):
    print(priority())
print(priority())
"""


def priorities(at_most: float) -> list[int]:
    """Return the priority before, within and after the imports."""
    command = [sys.executable, "-c", SCRIPT, str(at_most)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    return [int(one) for one in done.stdout.split()]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may raise a priority again")
def test_imports_have_the_lowest_priority() -> None:
    usual, within, after = priorities(1e6)
    assert within == 19
    assert after == usual


def test_imports_go_on_as_usual_after_a_while() -> None:
    usual, within, after = priorities(0.0)
    assert within == after == usual
