"""A file of samples: JSON lines or a table; what is wrong in it is said with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from outlast.errors import UsageError
from outlast.health.agent.telemetry.recorded import Recorded, is_table, read, write
from outlast.health.policy import weighted
from outlast.health.policy.telemetry import (
    DeviceSample,
    HostSample,
    Notice,
    Port,
    Sample,
    Silence,
    XidEvent,
    to_line,
)
from tests.support.launching import until

SAMPLES = (
    DeviceSample(100.0, "old", 0, "GPU-a", temperature=40.0, remap_pending=False),
    XidEvent(100.0, "old", "0000:10:00", 0, 79, "lost"),
    DeviceSample(100.3, "old", 0, "GPU-a", error="handle: GPU is lost"),
)


def test_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(to_line(one) + "\n" for one in SAMPLES) + "\n")
    assert tuple(read(path)) == SAMPLES


def test_a_table_is_read(tmp_path: Path) -> None:
    path = tmp_path / "samples.csv"
    path.write_text(
        "time,node,index,uuid,temperature,ecc_corrected,remap_pending,error,remark\n"
        "1.5,a,0,GPU-a,40,7,false,,hello\n"
        "2.5,a,1,,,,True,lost,\n"
    )
    assert list(read(path)) == [
        DeviceSample(1.5, "a", 0, "GPU-a", temperature=40.0, ecc_corrected=7, remap_pending=False),
        DeviceSample(2.5, "a", 1, remap_pending=True, error="lost"),
    ]


@pytest.mark.parametrize("name", ["samples.jsonl", "samples.csv", "SAMPLES.CSV"])
def test_what_was_written_is_read(tmp_path: Path, name: str) -> None:
    port = Port("mlx5_0/1", True, 3)
    samples = [
        *SAMPLES,
        XidEvent(101.0, "", "", -1, 43, 'a, "text"\nof two lines'),
        HostSample(102.0, "old", (port, Port("eth0")), memory_total=2**41, load=0.25),
        Silence(103.0, "old", 7.5, "NVML: device 0, power"),
        Notice(104.0, "old", ""),
        DeviceSample(105.0, "old", 1, power=1e-9, ecc_corrected=2**63, remap_pending=True),
    ]
    path = tmp_path / name
    with path.open("w", newline="") as file:
        assert write(samples, file, is_table(path)) == len(samples)
    assert list(read(path)) == samples


METRICS = f"{','.join(weighted.METRICS)}\n"
ROW = "2026-01-02T03:04:05+00:00,1,H100,550.1,71.5,400,95,50,40960,81920,{errors},0.1\n"


@pytest.mark.parametrize(
    "time", ["2026-01-02T03:04:05+00:00", "2026-01-02 03:04:05", "2026/01/02 03:04:05.000", ""]
)
def test_the_table_of_the_weighted_score_is_read(tmp_path: Path, time: str) -> None:
    path = tmp_path / "gpu_metrics.csv"
    path.write_text(METRICS + ROW.format(errors=0).replace("2026-01-02T03:04:05+00:00", time))
    if not time:
        with pytest.raises(UsageError, match="line 2"):
            list(read(path))
        return
    assert list(read(path)) == [
        DeviceSample(
            *(1767323045.0, "", 1, "", "H100"),
            temperature=71.5,
            power=400.0,
            utilization=0.95,
            memory_used=40 << 30,
            memory_total=80 << 30,
            ecc_uncorrected=0,
        )
    ]


def test_its_errors_are_those_that_come(tmp_path: Path) -> None:
    path = tmp_path / "gpu_metrics.csv"
    path.write_text(METRICS + "".join(ROW.format(errors=one) for one in (2, 2, 3, 1, 2, "")))
    assert [one.ecc_uncorrected for one in read(path) if isinstance(one, DeviceSample)] == [2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("a.jsonl", to_line(SAMPLES[0]) + "\nhello\n", "line 2"),
        ("a.jsonl", '{"kind":"device","time":1}\n', "line 1.*node"),
        ("a.csv", "time,node,index\n1,a,zero\n", "line 2"),
        ("a.csv", "time,node,index\n1,a,-1\n", "line 2.*index.*-1"),
        ("a.csv", "time,node,index,remap_failed\n1,a,0,maybe\n", "remap_failed"),
        ("a.csv", "time,index\n1,0\n", "node"),
        ("a.jsonl", "\udcff", "a.jsonl"),
        ("a.csv", "", "gpu_metrics.csv"),
        ("a.csv", ",".join(weighted.DETAILED) + "\n", "gpu_metrics.csv"),
        ("a.csv", "kind,time,node,index\nfire,1,a,0\n", "line 2.*kind.*device, xid"),
        ("a.csv", "kind,time,node,ports\nhost,1,a," + 5000 * "[" + "\n", "line 2"),
        ("a.csv", METRICS + ROW.format(errors="inf"), "line 2.*errors"),
        ("a.csv", METRICS + ROW.format(errors=0).replace(",1,", ",one,", 1), "line 2"),
        ("a.csv", METRICS + ROW.format(errors=0).replace("40960", "1e308"), "line 2.*memory_used"),
    ],
)
def test_what_is_wrong_is_refused_with_its_line(tmp_path: Path, name: str, text: str, named: str) -> None:
    (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UsageError, match=named):
        list(read(tmp_path / name))


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(UsageError, match=str(path)):
            list(read(path))


def replayed(source: Recorded, count: int) -> list[Sample]:
    found: list[Sample] = []

    def enough() -> bool:
        found.extend(source.sample(7.0))
        return len(found) >= count

    until(enough, f"{count} samples")
    return found


def test_samples_come_in_their_order_with_the_present_time(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(to_line(one) + "\n" for one in SAMPLES))
    source = Recorded(path, "here")
    first = source.sample(7.0)
    assert [type(one) for one in first] == [DeviceSample, XidEvent]
    assert {(one.time, one.node) for one in first} == {(7.0, "here")}
    last, end = replayed(source, 2)
    assert isinstance(last, DeviceSample)
    assert last.error == "handle: GPU is lost"
    assert isinstance(end, Notice)
    assert str(path) in end.text
    assert source.sample(8.0) == []


def test_a_later_collector_skips_what_was_due(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(to_line(one) + "\n" for one in SAMPLES))
    assert Recorded(path, "here", begun=0.001).sample(7.0) == []


def test_a_file_that_is_wrong_later_on_ends_the_replay_with_a_notice(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text(to_line(SAMPLES[0]) + "\nhello\n")
    first, notice = Recorded(path, "here").sample(7.0)
    assert isinstance(first, DeviceSample)
    assert isinstance(notice, Notice)
    assert "line 2" in notice.text
