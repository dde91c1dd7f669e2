"""A rank in a new interpreter, without preloaded modules; to the agent it looks like a forked one.

The command line is a JSON object, then the script and its arguments. :mod:`outlast.worker.preloading`
replaces a forked rank by this program.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path[0:1] = []  # do not import from the folder of this file

import json
import os

from outlast import settings
from outlast.hang.worker import heartbeat
from outlast.worker import bootstrap


def main() -> None:
    """Continue as the user's script."""
    told = json.loads(sys.argv[1])
    sys.argv[:] = sys.argv[2:]
    first = os.path.dirname(os.path.realpath(sys.argv[0])) if told["kind"] == "file" else os.getcwd()
    sys.path.insert(0, first)
    bootstrap.take(settings.inherited(), told["stdout"], told["stderr"], told["stacks"])
    heartbeat.attach(told["heartbeat"])
    bootstrap.run(told["kind"], sys.argv[0])


if __name__ == "__main__":
    main()
