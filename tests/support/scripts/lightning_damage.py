"""Lightning's checkpoints with digests: damaged, missing, replaced by ones without a digest."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from outlast.errors import NoUsableCheckpoint, UsageError
from outlast.integrations.lightning import OutlastCheckpointIO

folder = Path(sys.argv[1])
store = OutlastCheckpointIO()


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


first, last = folder / "step=3.ckpt", folder / "last.ckpt"
synced: list[int] = []
fsync = os.fsync
os.fsync = lambda number: (synced.append(number), fsync(number))[1]
store.save_checkpoint({"global_step": 3}, first)
assert len(synced) == 2, "the checkpoint and its digest"
os.fsync = fsync
large = {"weight": torch.arange(1 << 20)}  # 8 MiB: written in several parts
store.save_checkpoint(large, last)
assert store.load_checkpoint(last, weights_only=True)["weight"].equal(large["weight"])
os.utime(first, (1, 1))
store.save_checkpoint({"global_step": 5}, last)
store.save_checkpoint({"global_step": 6}, last)
assert store.load_checkpoint(last, weights_only=True) == {"global_step": 6}
assert not list(folder.glob("*.part"))

older = folder / "step=2.ckpt"
store.save_checkpoint({"global_step": 2}, older)
os.utime(older, (2, 2))  # the clock was set back, or the folder was copied
damage(last)
assert store.load_checkpoint(last, weights_only=True) == {"global_step": 3}, "the newest whole one"
store.remove_checkpoint(older)
assert (folder / "last.ckpt.damaged").exists()

damage(first)
with pytest.raises(NoUsableCheckpoint, match=first.name):
    store.load_checkpoint(first)
assert first.exists(), "what was named is not put aside"
store.save_checkpoint({"global_step": 7}, last)
for text in ("", "7", "{}", "[" * 100_000):
    (folder / ".last.ckpt.digests.json").write_text(text)
    with pytest.raises(NoUsableCheckpoint, match=last.name):
        store.load_checkpoint(last)
    (folder / "last.ckpt.damaged").rename(last)
(folder / ".last.ckpt.digests.json").write_text("[" * 100_000)
store.save_checkpoint({"global_step": 7}, last)
assert store.load_checkpoint(last, weights_only=True) == {"global_step": 7}
with pytest.raises(FileNotFoundError):
    store.load_checkpoint(folder / "none.ckpt")

link = folder / "linked.ckpt"
store.save_checkpoint({"global_step": 9}, first)
link.symlink_to(first.name)
assert store.load_checkpoint(link, weights_only=True) == {"global_step": 9}
store.save_checkpoint({"global_step": 10}, link)
assert store.load_checkpoint(first, weights_only=True) == {"global_step": 9}, "a link is replaced"
assert store.load_checkpoint(link, weights_only=True) == {"global_step": 10}
store.remove_checkpoint(first)
assert not list(folder.glob(f"*{first.name}*digests*"))
with pytest.raises(UsageError, match="s3://bucket"):
    store.save_checkpoint({}, "s3://bucket/last.ckpt")


class Fatal:
    def __reduce__(self) -> str:
        os.kill(os.getpid(), signal.SIGKILL)
        return ""


child = os.fork()
if child == 0:
    store.save_checkpoint({"global_step": 11, "fatal": Fatal()}, folder / "step=11.ckpt")
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
assert len(list(folder.glob("*.part"))) == 1
store.save_checkpoint({"global_step": 12}, last)
assert not list(folder.glob("*.part")), "what the killed process has left"


def replace_or_die(source: str, target: Path) -> None:
    if target == last:
        os.kill(os.getpid(), signal.SIGKILL)
    os.rename(source, target)


for step in (13, 14):  # each is killed when its digest is noted, before its file has its name
    child = os.fork()
    if child == 0:
        os.replace = replace_or_die
        store.save_checkpoint({"global_step": step}, last)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
assert store.load_checkpoint(last, weights_only=True) == {"global_step": 12}, "set aside, though it is whole"
store.save_checkpoint({"global_step": 15}, last)
assert store.load_checkpoint(last, weights_only=True) == {"global_step": 15}
