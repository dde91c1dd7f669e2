"""A rank that begins before the zygote imports anything: it lets the zygote go on, and fails once.

Arguments: a folder; "meets" to have the ranks meet through a package that this file does not name;
"once" not to fail; "stays" to go on until the file "over" is there.
"""

import gc
import os
import sys
import time
from pathlib import Path

folder, rank = Path(sys.argv[1]), os.environ["RANK"]
again = os.environ["OUTLAST_GENERATION"]
(folder / f"begun-{again}-{rank}").write_text(
    f"{(folder / 'import-began').exists()} {gc.isenabled()} {sorted(os.listdir('/proc/self/fd'))}"
)
end = time.monotonic() + 80
while len(list(folder.glob(f"begun-{again}-*"))) < int(os.environ["WORLD_SIZE"]) and time.monotonic() < end:
    time.sleep(0.01)
(folder / "go-on").touch()
if "meets" in sys.argv[2:]:
    package = "tor" + "ch"
    dist = __import__(f"{package}.distributed").distributed
    dist.init_process_group("gloo")
    dist.barrier()
    (folder / f"met-{again}-{rank}").write_text(os.environ["MASTER_PORT"])
    dist.destroy_process_group()
while not (folder / "import-began").exists() and time.monotonic() < end:
    time.sleep(0.01)
while sys.argv[2:] == ["stays"] and not (folder / "over").exists() and time.monotonic() < end:
    time.sleep(0.01)
if again == "1" and "once" not in sys.argv[2:]:
    sys.exit(7)
