"""A rank as a cold interpreter: runs the script with nothing preloaded; it answers as a forked one does.

The command line is a JSON object, then the script and its arguments. :mod:`outlast.worker.preloading` has
this file take the place of a forked rank.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path[0:1] = []  # the folder of this file is no place to import from

import json
import os

from outlast import settings
from outlast.hang.worker import heartbeat
from outlast.worker import bootstrap


def main() -> None:
    """Go on as the user's script."""
    told = json.loads(sys.argv[1])
    sys.argv[:] = sys.argv[2:]
    first = os.path.dirname(os.path.realpath(sys.argv[0])) if told["kind"] == "file" else os.getcwd()
    sys.path.insert(0, first)
    bootstrap.take(settings.inherited(), told["stdout"], told["stderr"], told["stacks"])
    heartbeat.attach(told["pulse"])
    bootstrap.run(told["kind"], sys.argv[0])


if __name__ == "__main__":
    main()
