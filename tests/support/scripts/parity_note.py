"""Writes down what this rank sees, then does what its arguments say; imports nothing of torch."""

import json
import os
import signal
import sys
import time

rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
note = {
    "environment": dict(os.environ),
    "argv": sys.argv,
    "cwd": os.getcwd(),
    "path": sys.path[0],
    "name": __name__,
    "pid": os.getpid(),
    "leads_session": os.getsid(0) == os.getpid(),
    "unbuffered": "-u" in sys.orig_argv,
}
folder = os.environ.get("PARITY_FOLDER", ".")
with open(f"{folder}/.note-{attempt}-{rank}", "w") as file:
    json.dump(note, file)
os.rename(f"{folder}/.note-{attempt}-{rank}", f"{folder}/note-{attempt}-{rank}.json")

does = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
if "until_attempt" in does and int(attempt) >= int(does["until_attempt"]):
    sys.exit(0)
if does.get("rank", rank) != rank:
    time.sleep(float(does.get("others_sleep", 0)))
    sys.exit(0)
if "says" in does:
    message = {
        "message": "ValueError: " + does["says"],
        "extraInfo": {"py_callstack": "a\nb", "timestamp": "7"},
    }
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        json.dump({"message": message}, file)
if "timer" in does:
    ends = time.time() + float(does["timer"])
    request = {"version": 1, "pid": os.getpid(), "scope_id": "step", "expiration_time": ends}
    with open(os.environ["TORCHELASTIC_TIMER_FILE"], "w") as file:
        file.write(json.dumps({**request, "signal": int(signal.SIGKILL)}) + "\n")
        if "released" in does:
            file.write(json.dumps({**request, "expiration_time": -1, "signal": 0}) + "\n")
    time.sleep(float(does.pop("sleep")))
    open(f"{folder}/slept-{rank}", "w").close()
if "signal" in does:
    os.kill(os.getpid(), getattr(signal, does["signal"]))
if "sleep" in does:
    time.sleep(float(does["sleep"]))
if "raise" in does:
    raise RuntimeError(does["raise"])
sys.exit(int(does.get("exit", 0)))
