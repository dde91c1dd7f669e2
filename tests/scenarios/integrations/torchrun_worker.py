"""A worker under torchrun: says who it is, and waits to be told to end; "sum": after one gloo all-reduce."""

import json
import os
import sys
import time
from pathlib import Path

folder = Path(sys.argv[1])
said = {key: os.environ[key] for key in ("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")}
parent = os.getppid()
if "sum" in sys.argv[2:]:
    import torch
    import torch.distributed

    torch.distributed.init_process_group("gloo")
    total = torch.ones(1) * (1 + torch.distributed.get_rank())
    torch.distributed.all_reduce(total)
    said["sum"] = str(int(total))
with open(folder / "starts", "a", encoding="utf-8") as file:
    file.write(json.dumps({"node": os.environ["NODE"], "pid": os.getpid(), **said}) + "\n")
while not (folder / "go").exists():
    time.sleep(0.02)
    if os.getppid() != parent:
        sys.exit("torchrun is gone")
