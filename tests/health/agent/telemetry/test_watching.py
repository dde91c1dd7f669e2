"""Which source the option names, and what cannot take effect."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from outlast.errors import NodeUnfit, UsageError
from outlast.health.agent.telemetry import nvml
from outlast.health.agent.telemetry.watching import chosen
from outlast.health.policy.telemetry import Notice, to_line


@pytest.fixture
def nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without a driver."""
    monkeypatch.setattr(nvml, "_FOLDERS", ())
    monkeypatch.setattr(nvml, "_CACHE", Path("/nowhere"))


@pytest.fixture
def library(tmp_path: Path) -> str:
    (tmp_path / nvml.LIBRARY).touch()
    return f"/other:{tmp_path}"


@pytest.mark.usefixtures("nothing")
class TestNvml:
    def test_auto_starts_nothing_without_the_library(self) -> None:
        assert chosen("auto", "") == ""

    def test_nvml_without_the_library_is_an_error(self) -> None:
        with pytest.raises(NodeUnfit, match=r"libnvidia-ml\.so\.1"):
            chosen("nvml", "")

    def test_a_library_in_the_path_of_the_collector_is_used(self, library: str) -> None:
        pytest.importorskip("pynvml")
        assert (chosen("auto", library), chosen("nvml", library)) == ("nvml", "nvml")

    def test_a_library_in_the_linkers_cache_is_used(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("pynvml")
        (tmp_path / "cache").write_bytes(b"ld.so\0libm.so.6\0libnvidia-ml.so.1\0/usr/lib\0")
        monkeypatch.setattr(nvml, "_CACHE", tmp_path / "cache")
        assert chosen("auto", "") == "nvml"

    def test_without_the_package_it_says_what_to_install(
        self, library: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "path", [])
        monkeypatch.delitem(sys.modules, "pynvml", raising=False)
        assert chosen("auto", library) == ""
        with pytest.raises(NodeUnfit, match=r"pip install 'outlast\[gpu\]'"):
            chosen("nvml", library)


def test_off_and_simulate_are_what_they_say() -> None:
    assert chosen("off", "") == ""
    assert chosen("simulate:xid", "") == "simulate:xid"


def test_a_replay_needs_a_file_with_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for content in (None, "", "hello\n"):
        if content is not None:
            (tmp_path / "a.jsonl").write_text(content)
        with pytest.raises(UsageError):
            chosen("replay:a.jsonl", "")
    (tmp_path / "a.jsonl").write_text(to_line(Notice(1.0, "n", "text")) + "\n")
    assert chosen("replay:a.jsonl", "") == f"replay:{tmp_path}/a.jsonl"
