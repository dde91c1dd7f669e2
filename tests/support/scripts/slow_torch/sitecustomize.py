"""Holds the zygote's import of torch until a file exists, so that a test can say what does not wait for it.

``HELD_BY`` names the file; ``IMPORT_BEGAN`` the one that is written when the zygote may go on.
``STARTS_THREAD`` has the import start a thread, after which the zygote must not fork; ``DIES`` has it end the
zygote. ``NO_HOST`` has the import fail in a cold store host.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from importlib.abc import MetaPathFinder
from pathlib import Path


class _Holds(MetaPathFinder):
    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname != "torch" or "RANK" in os.environ:
            return
        if "NO_HOST" in os.environ and "store_host.py" in " ".join(sys.orig_argv):
            raise ImportError("not here")
        if "zygote.py" not in " ".join(sys.orig_argv):
            return
        sys.meta_path.remove(self)
        end = time.monotonic() + 80
        while not Path(os.environ["HELD_BY"]).exists() and time.monotonic() < end:
            time.sleep(0.01)
        Path(os.environ["IMPORT_BEGAN"]).touch()
        if "DIES" in os.environ:
            os._exit(1)
        if "STARTS_THREAD" in os.environ:
            threading.Thread(target=time.sleep, args=(80,), daemon=True).start()


if "HELD_BY" in os.environ:
    sys.meta_path.insert(0, _Holds())
