"""Run an unchanged script with NVRx's modules: ``python -m outlast.compat.nvrx SCRIPT [ARGUMENT ...]``.

``-m MODULE`` in place of SCRIPT runs a module.
"""

from __future__ import annotations

import os
import runpy
import sys

from outlast.compat.nvrx import install
from outlast.errors import UsageError


def main() -> None:
    """Install the modules and run the script as ``__main__``.

    Raises:
        UsageError: no script is named.
    """
    words = sys.argv[1:]
    as_module = words[:1] == ["-m"]
    sys.argv = words[1:] if as_module else words
    if not sys.argv:
        raise UsageError(
            "outlast.compat.nvrx: found no script, expected SCRIPT or -m MODULE, then its arguments"
        )
    install()
    if as_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        if not getattr(sys.flags, "safe_path", sys.flags.isolated):  # Python 3.10 has no safe_path
            sys.path[0] = os.path.dirname(os.path.realpath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
