"""A value that nothing but a rank reads is refused before a rank is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from outlast import plugins
from outlast.errors import UsageError
from outlast.launcher.command.options import LaunchOptions, parse_run
from tests.support.plugging import install


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)


def parse(*words: str, **environment: str) -> LaunchOptions:
    return parse_run([*words, "train.py"], environment)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('global_url = "vault://archive/gpt"', r"checkpoints\.global_url.*'vault'.*s3, .*memory, attic"),
        ('global_url = "s3://user:secret@bucket/gpt"', "s3"),
        ('global_url = "s3://bucket/gpt"\nglobal_options = {regoin = "x"}', "'regoin'"),
    ],
)
def test_a_tier_that_cannot_be_reached_by_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, named: str
) -> None:
    site = install(tmp_path / "site", plugins.TIERS, "attic", "", "Attic")
    monkeypatch.syspath_prepend(site)
    Path("c.toml").write_text(f"[checkpoints]\n{text}\n")
    with pytest.raises(UsageError, match=named) as caught:
        parse("--config=c.toml")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["attic://a", "s3://bucket/prefix", "gs://bucket", "file:///absent/folder", "/absent/folder"]
)
def test_known_tiers_are_taken_and_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    site = install(tmp_path / "site", plugins.TIERS, "attic", "raise RuntimeError", "Attic")
    monkeypatch.syspath_prepend(site)
    Path("c.toml").write_text(f'[checkpoints]\nglobal_url = "{url}"\n')
    assert parse("--config=c.toml").config.checkpoints.global_url == url
    assert not Path("/absent").exists()


def test_a_group_of_replicas_names_ranks_that_the_job_has() -> None:
    Path("c.toml").write_text("[tripwire]\ntripwire_interval = 5\ntripwire_replicas = [[0, 2], [1, 3]]\n")
    assert parse("--config=c.toml", "--nproc-per-node=4").config.tripwire.tripwire_replicas
    with pytest.raises(UsageError, match=r"tripwire_replicas.*rank 2"):
        parse("--config=c.toml", "--nproc-per-node=2")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OUTLAST_GRACE_PERIOD", "soon"),
        ("OUTLAST_JOB_END_TIME", "noon"),
        ("SLURM_JOB_END_TIME", "x"),
        ("OUTLAST_FAILURE_DOMAINS", "rack"),
        ("OUTLAST_FAILURE_DOMAINS", "rack=r1,rack=r2"),
    ],
)
def test_a_variable_that_a_rank_could_not_read_is_refused(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"{name}='{value}'"):
        parse(**{name: value})


def test_ranks_list_their_imports_where_a_zygote_can_import_them() -> None:
    assert parse("--warm-imports").warm_imports
    with pytest.raises(UsageError, match="--warm-imports"):
        parse("--warm-imports", "--no-zygote")
