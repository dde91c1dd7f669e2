"""Trains with FSDP2 and torch.distributed.checkpoint; goes on from the newest whole checkpoint.

arguments: folder of results, WAY (killed: rank 0 is killed in its save of the fatal step; damaged: the newest
           checkpoint is damaged before the kill; none), the step, the seconds that a step takes at least
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from outlast.integrations.announcing import AnnouncedLoop
from outlast.integrations.dcp import OutlastStorageReader, OutlastStorageWriter, newest_whole

folder, way, fatal, pace = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
checkpoints = folder / "checkpoints"


class Dies(dcp.DefaultSavePlanner):
    """Ends its process in the middle of a save."""

    def resolve_data(self, item: object) -> object:
        os.kill(os.getpid(), signal.SIGKILL)
        return item


dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 1))
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)


def state() -> dict[str, object]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


done = 0
if (newest := newest_whole(checkpoints)) is not None:
    found = {**state(), "step": 0}
    dcp.load(found, storage_reader=OutlastStorageReader(newest))
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    done = int(found["step"])
    (folder / f"resumed-{dist.get_rank()}").write_text(newest.name)
with AnnouncedLoop() as job:
    while done < 12 and not job.should_stop:
        torch.manual_seed(done)
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        job.step_done(done)
        if done % 3 == 0 or job.should_save:
            dies = first and dist.get_rank() == 0 and done == fatal
            if way == "damaged" and dies:
                (data, *_) = sorted((checkpoints / f"step-{done - 3:03}").glob("*.distcp"))
                data.write_bytes(data.read_bytes()[:-1])
            writer = OutlastStorageWriter(checkpoints / f"step-{done:03}")
            dcp.save({**state(), "step": done}, storage_writer=writer, planner=Dies() if dies else None)
            job.saved(done)
        time.sleep(pace)
    weights = torch.cat([one.full_tensor().flatten() for one in model.parameters()])
    digest = hashlib.sha256(weights.detach().numpy().tobytes()).hexdigest()
    (folder / f"weights-{dist.get_rank()}").write_text(digest)
dist.destroy_process_group()
