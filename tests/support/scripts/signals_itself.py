"""Five processes, one after another, signal themselves, ask their ShutdownHandler at once, and then hang.

Prints the exit code of each and the seconds that it lived after the signal.

arguments: the handler's timeout_sec, and the seconds after which a process is killed
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time

from outlast.compat import ShutdownHandler

timeout, patience = map(float, sys.argv[1:])
importlib.import_module("outlast.agreement.worker.vote")
for _ in range(5):
    child = os.fork()
    if not child:
        handler = ShutdownHandler(timeout_sec=timeout)
        handler.register()
        time.sleep(0.2)  # until the listener sleeps
        os.kill(os.getpid(), signal.SIGTERM)
        while not handler.should_shutdown():
            pass  # at once, and again
        handler.should_shutdown()  # takes nothing, and must not take a wake-up either
        time.sleep(3600)
    began = time.monotonic()
    killer = threading.Timer(patience, os.kill, (child, signal.SIGKILL))
    killer.start()
    _, status = os.waitpid(child, 0)
    killer.cancel()
    killer.join()
    print(json.dumps([os.waitstatus_to_exitcode(status), time.monotonic() - began]), flush=True)
