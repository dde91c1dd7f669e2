"""The sum of a node's buffers against file systems, control groups and the host's memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from outlast.checkpoint.policy.manifest import copy_name, rank_files
from outlast.checkpoint.save.host_memory import Demand, rooms_of, shortage
from outlast.checkpoint.tiers.tier import DirectoryTier
from outlast.config import CheckpointOptions
from outlast.recovery.policy.events import Note
from tests.support.jobs import Job
from tests.support.launching import until
from tests.support.memory_nodes import Node, train_and_save
from tests.support.mounts import mounted, needs_root
from tests.support.teams import Team

MIB, GB = 1 << 20, 10**9


@contextmanager
def memory(folder: Path, mib: int) -> Iterator[Path]:
    """Give a folder a file system in memory of its own."""
    folder.mkdir()
    with mounted(folder, "-t", "tmpfs", "-o", f"size={mib}m,mode=700", "tmpfs"):
        yield folder


@contextmanager
def control_group(mib: int) -> Iterator[Path]:
    """Make a control group with a limit of memory; skip the test where that is not possible."""
    group, most = Path("/sys/fs/cgroup/memory") / f"outlast-host-{os.getpid()}", "memory.limit_in_bytes"
    if not group.parent.is_dir():
        group, most = Path("/sys/fs/cgroup") / group.name, "memory.max"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        if not (group / most).exists():
            pytest.skip("the memory controller is not on for new control groups")
        (group / most).write_text(str(mib * MIB))
        yield group
    finally:
        until(lambda: (group / "cgroup.procs").read_text() == "", "the control group to be empty")
        group.rmdir()


def host(folder: Path, group: int, free: int) -> dict[str, Path]:
    """Make the files of a process in a control group of version 2, and of the host's memory; in MiB."""
    for name in ("proc", "unified/job"):
        (folder / name).mkdir(parents=True)
    (folder / "proc/mountinfo").write_text(f"30 25 0:26 / {folder}/unified rw - cgroup2 cgroup2 rw\n")
    (folder / "proc/cgroup").write_text("0::/job\n")
    (folder / "unified/job/memory.max").write_text(f"{(group + 100) * MIB}\n")
    (folder / "unified/job/memory.current").write_text(f"{110 * MIB}\n")
    (folder / "unified/job/memory.stat").write_text(f"shmem 0\nactive_file {10 * MIB}\n")
    (folder / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {free << 10} kB\n")
    return {"process": folder / "proc", "meminfo": folder / "meminfo"}


@needs_root
@pytest.mark.parametrize(
    ("files", "group", "free", "least"),
    [(8, 20, 30, 8), (30, 8, 20, 8), (20, 30, 8, 8), (8, 0, 30, 0)],
    ids=["file system", "control group", "host", "nothing left in the group"],
)
def test_the_least_limit_counts_and_what_the_run_has_there_is_free(
    tmp_path: Path, files: int, group: int, free: int, least: int
) -> None:
    with memory(tmp_path / "memory", files) as folder:
        found = rooms_of(folder, **host(tmp_path / "host", group, free))
        assert min(found.values()) == least * MIB
        (folder / "buffer").write_bytes(bytes(2 * MIB))
        os.link(folder / "buffer", folder / "again")
        with open(folder / "planned", "wb") as file:
            file.truncate(5 * MIB)  # without pages
        later = rooms_of(folder, tmp_path / "host/proc", tmp_path / "host/meminfo")
        assert sorted(later.values()) == sorted([files * MIB, (group + 2) * MIB, (free + 2) * MIB])


def test_a_folder_on_a_disk_is_limited_by_its_file_system_alone(tmp_path: Path) -> None:
    if subprocess.check_output(["stat", "-f", "-c", "%T", tmp_path], text=True).strip() in ("tmpfs", "ramfs"):
        pytest.skip("the folder of temporary files is in memory")
    assert list(rooms_of(tmp_path, **host(tmp_path / "host", 1, 1))) == ["file system"]


@needs_root
def test_the_limit_of_a_real_control_group_with_the_pages_that_are_charged_to_it(tmp_path: Path) -> None:
    script = """
import json, sys
from pathlib import Path
from outlast.checkpoint.save.host_memory import rooms_of
folder = Path(sys.argv[1])
before = rooms_of(folder)
(folder / "buffer").write_bytes(bytes(64 << 20))
print(json.dumps([before, rooms_of(folder)]))"""
    with memory(tmp_path / "memory", 300) as folder, control_group(256) as group:
        join = f'echo $$ > {group}/cgroup.procs; exec "$@"'
        words = ["sh", "-ec", join, "sh", sys.executable, "-c", script, str(folder)]
        before, after = json.loads(subprocess.check_output(words, timeout=120))
        (folder / "buffer").unlink()
    assert min(before, key=before.get) == "control group"
    assert 128 * MIB < before["control group"] < 256 * MIB
    assert abs(after["control group"] - before["control group"]) < 16 * MIB


ONE, EIGHT = Demand(1, 10 * GB), Demand(8, 800 * GB)
OF_MANY = Demand(8, 800 * GB, more=3, held=800 * GB)


@pytest.mark.parametrize(
    ("demand", "files", "buffers"),
    [
        (ONE, 30 * GB, 3),
        (ONE, 30 * GB - 1, 2),
        (ONE, 20 * GB - 1, 0),
        (EIGHT, 2400 * GB, 3),
        (EIGHT, 1600 * GB, 2),
        (OF_MANY, 6400 * GB, 3),
        (OF_MANY, 5600 * GB, 2),
        (OF_MANY, 5600 * GB - 1, 0),
        (Demand(1, 0), 0, 3),
    ],
)
def test_two_buffers_are_made_where_three_do_not_fit(demand: Demand, files: int, buffers: int) -> None:
    assert demand.buffers_in({"file system": files, "host": 10**15}, 3) == buffers
    assert demand.buffers_in({"file system": demand.bytes_of(4)}, 4) == 4


@pytest.mark.parametrize("limit", ["control group", "host"])
@pytest.mark.parametrize(
    ("demand", "mib", "buffers"),
    [
        (Demand(1, 100 * MIB), 556, 3),
        (Demand(1, 100 * MIB), 555, 2),
        (Demand(1, 100 * MIB), 400, 2),
        (Demand(1, 100 * MIB), 399, 0),
        (Demand(4, 4000 * MIB), 12_000 + 1024, 3),
        (Demand(4, 4000 * MIB), 12_000 + 1023, 2),
        (Demand(8, 8 * MIB), 48, 3),
    ],
)
def test_memory_is_reserved_for_ranks_and_small_buffers_are_not_refused_for_it(
    limit: str, demand: Demand, mib: int, buffers: int
) -> None:
    assert demand.buffers_in({"file system": 10**15, limit: mib * MIB}, 3) == buffers


@pytest.mark.parametrize("limit", ["file system", "control group", "host"])
def test_the_reason_has_the_numbers_and_the_settings(limit: str) -> None:
    rooms = {**dict.fromkeys(("file system", "control group", "host"), 2**50), limit: 6000 * GB}
    why = shortage(OF_MANY, rooms, 3)
    for part in ("5960.46 GiB", "5587.94 GiB", "8 rank(s) x 6 buffers x 93.13 GiB + 2 x 745.06 GiB", limit):
        assert part in why
    assert "checkpoints.buffers = 2" in why
    assert "checkpoints.replication = false" in why
    assert "checkpoints.buffers" not in shortage(OF_MANY, {**rooms, limit: 0}, 3)


@needs_root
@pytest.mark.parametrize(("mib", "buffers"), [(64, 3), (20, 2), (8, 0)])
def test_ranks_make_as_many_buffers_as_fit_and_stage_on_disk_where_not_even_two_do(
    tmp_path: Path, mib: int, buffers: int
) -> None:
    with memory(tmp_path / "memory", mib) as folder:
        node, job = Node(tmp_path), Job(0, width=600)  # 8.7 MB with the state of the optimizer
        saver = node.join(job)
        content = train_and_save(saver, job, range(1, 5), lambda step: step == 4)
        assert saver.durable(4)
        made = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 8 * MIB]
        assert (0 < len(made) <= buffers) if buffers else not made
        notes = [one for one in node.records if isinstance(one, Note) and str(folder) in one.reason]
        assert len(notes) == (buffers < CheckpointOptions().buffers)
        staged = node.durable / ".staging"
        assert staged.is_dir() == (buffers == 0)
        until(lambda: copy_name(4, 1) in os.listdir(node.durable), "step 4 on disk")
        node.join(other := Job(9, width=600), generation=2)
        assert other.content() == content[4]


@needs_root
def test_one_node_of_two_that_is_short_of_memory_stages_on_disk_and_is_named_once(tmp_path: Path) -> None:
    team = Team(tmp_path, "ab", job=lambda seed: Job(seed, width=600))
    (tmp_path / "b").mkdir()
    with memory(tmp_path / "b/memory", 32):
        team.start(ckpt_fully_parallel_save=False)
        team.train(2, durable=lambda step: step == 2)
        until(lambda: copy_name(2, 1) in team.on_disk(), "step 2 on disk")
        assert os.listdir(team.nodes[0].durable / ".staging") == ["b"]
        notes = [one.reason for one in team.records if isinstance(one, Note) and " on node " in one.reason]
        assert [note.partition(" on node ")[2].partition(":")[0] for note in notes] == ["b"]
        team.start()
        assert team.right()


@needs_root
def test_what_is_staged_on_disk_is_written_once_and_stays_as_it_was(tmp_path: Path) -> None:
    file = rank_files(0, 1).tensors
    with memory(tmp_path / "memory", 8):
        node, job = Node(tmp_path), Job(0, width=600)
        saver = node.join(job, keep_last_n=10)
        assert saver.ready
        content, bytes_of = {}, {}
        for step in range(1, 7):
            content |= train_and_save(saver, job, range(step, step + 1), lambda step: step != 3)
            if step != 3:
                assert saver.durable(step)
                bytes_of[step] = (node.durable / copy_name(step, 1) / file).read_bytes()
        places = {step: node.durable / copy_name(step, 1) / file for step in bytes_of}
        assert len({path.stat().st_ino for path in places.values()}) == 5
        assert {step: path.read_bytes() for step, path in places.items()} == bytes_of
        (staged,) = (node.durable / ".staging").glob(f"*/memory/{copy_name(6, 1)}/{file}")
        assert staged.samefile(places[6])
        reasons = {one["step"]: one["reason"].endswith("staged on disk") for one in node.logged("saved")}
        assert reasons == dict.fromkeys(places, True)
        node.join(other := Job(9, width=600), generation=2)
        assert other.content() == content[6]


@needs_root
def test_a_file_of_another_file_system_gets_no_name_there(tmp_path: Path) -> None:
    tier = DirectoryTier(tmp_path / "tier")
    temporary = tier.begin(copy_name(1, 1))
    place = tier.folder / temporary
    near = tmp_path / "near"
    near.write_bytes(b"content")
    with memory(tmp_path / "far", 1) as far:
        (far / "x").write_bytes(b"content")
        assert not tier.link(temporary, "x", far / "x")
    assert not tier.link(temporary, "x", tmp_path / "missing")
    assert not (place / "x").exists()
    assert tier.link(temporary, "x", near)
    assert (place / "x").samefile(near)
