"""What the ranks import is imported ahead of a restart, and what must not be is left to them, by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import SCRIPTS, Run, running

pytestmark = pytest.mark.timeout(420)  # zygotes import torch one after the other

HEAD = "import os\nPID = os.getpid()\n"


@pytest.fixture
def lib(tmp_path: Path) -> Path:
    """Return a folder into which packages were installed."""
    folder = tmp_path / "lib"
    (folder / "some-1.0.dist-info").mkdir(parents=True)
    return folder


def install(lib: Path, **sources: str) -> None:
    for name, source in sources.items():
        (lib / f"{name}.py").write_text(HEAD + source)


def launch(
    tmp_path: Path,
    *words: str,
    last: int = 2,
    ranks: int = 1,
    code: int = 0,
    names_torch: bool = True,
    **environment: str,
) -> Run:
    """Run the script to its end; each word is as the script takes it."""
    folder = tmp_path / "facts"
    folder.mkdir(exist_ok=True)
    script = tmp_path / "train.py"  # in a folder without other modules
    source = (SCRIPTS / "warm_imports.py").read_text()
    if not names_torch:  # its first ranks do not wait for the import of torch
        source = source.replace("import importlib\n", "").replace("importlib.import_module", "__import__")
        source = source.replace("import torch", 't = __import__("tor" + "ch")').replace("torch.", "t.")
    script.write_text(source)
    run = Run(
        tmp_path / "run",
        str(script),
        *(str(folder), str(last), *words),
        options=(f"--nproc-per-node={ranks}", "--max-restarts=5", "--warm-imports"),
    )
    with running(run, PYTHONPATH=str(tmp_path / "lib"), **environment):
        assert run.finish(250) == code, run.console()
    return run


def imported(tmp_path: Path, generation: int, rank: int = 0) -> dict[str, Any]:
    """Return for each module whether a zygote imported it, and its value."""
    found: dict[str, Any] = json.loads((tmp_path / "facts" / f"facts-{generation}-{rank}.json").read_text())
    return {name: (one["ahead"], one["value"]) for name, one in found["modules"].items()}


def test_a_restart_is_forked_from_a_zygote_that_has_imported_what_the_ranks_import(
    tmp_path: Path, lib: Path
) -> None:
    install(lib, plain="", late="", only_one="", RANK_reader="VALUE = os.environ.get('RANK')\n")
    (lib / "package").mkdir()
    (lib / "package" / "__init__.py").write_text(HEAD)
    (lib / "package" / "part.py").write_text(HEAD + "import RANK_reader\n")
    words = ("plain", "package", "package.part", "RANK_reader", "only_one@1", "~late")
    run = launch(tmp_path, *words, ranks=2)
    names = ("plain", "package", "package.part", "RANK_reader", "late")
    for rank in range(2):
        first, second = imported(tmp_path, 1, rank), imported(tmp_path, 2, rank)
        assert {name: first[name][0] for name in names} == dict.fromkeys(names, False)
        ahead = dict.fromkeys(names, True) | {"package.part": False, "RANK_reader": False}
        assert {name: second[name][0] for name in names} == ahead
        assert second["RANK_reader"][1] == str(rank)
    assert imported(tmp_path, 2, 1)["only_one"][0] is False, "rank 0 does not import it"
    [record] = run.records("imported_ahead")
    assert record["left_out"].keys() == {"RANK_reader", "package.part"}
    assert record["modules"] >= 3
    before = json.loads((tmp_path / "facts" / "facts-2-0.json").read_text())["before"]
    assert not {"plain", "package", "torch", "late"} & set(before), (
        "nothing is there that the script did not import"
    )


@pytest.mark.long
def test_what_must_not_be_inherited_by_a_fork_is_left_out_by_name(tmp_path: Path, lib: Path) -> None:
    install(
        lib,
        good="",
        thread="from threading import *\nThread(target=Event().wait, name='mine', daemon=True).start()\n",
        opens="FILE = open(__file__)\n",
        opens_for_a_moment="with open(__file__) as file:\n    import good\n",
        connects="import socket\nPAIR = socket.socketpair()\n",
        forks="if os.fork() == 0:\n    import time\n    time.sleep(1e6)\n",
        comes_back_twice="import sys\nif hasattr(sys.modules['__main__'], 'Seat'):\n    os.fork()\n",
        handles="import signal\nsignal.signal(signal.SIGUSR2, signal.SIG_IGN)\n",
        hooks="import sys\nsys.excepthook = lambda *_: None\n",
        needs_thread="import thread\n",
    )
    names = [path.stem for path in sorted(lib.glob("*.py")) if path.stem not in ("comes_back_twice", "forks")]
    run = launch(tmp_path, *names, "~forks", "~comes_back_twice")
    left_out = run.records("imported_ahead")[-1]["left_out"]
    second = imported(tmp_path, 2)
    assert {name for name, (ahead, _) in second.items() if ahead} == {"good", "opens_for_a_moment"}
    because = {
        "thread": "mine",
        "needs_thread": "thread",
        "opens": str(lib / "opens.py"),
        "connects": "socket:",
    }
    for name in ("forks", "handles", "hooks", *because):
        assert because.get(name, "") in left_out[name], left_out


@pytest.mark.long
def test_what_ends_a_zygote_or_its_forks_is_left_out_by_name(tmp_path: Path, lib: Path) -> None:
    in_zygote = "import sys\nif hasattr(sys.modules['__main__'], 'Seat'):\n    "
    install(
        lib,
        good="",
        raises=in_zygote + "raise RuntimeError('here')\n",
        ends=in_zygote + "os._exit(3)\n",
        dies_in_forks=in_zygote + "os.register_at_fork(after_in_child=lambda: os._exit(1))\n",
    )
    run = launch(tmp_path, "dies_in_forks", "good", "raises", "ends")
    left_out = run.records("imported_ahead")[-1]["left_out"]
    second = imported(tmp_path, 2)
    assert {name for name, (ahead, _) in second.items() if ahead} == {"good"}
    assert {"ends", "raises", "dies_in_forks"} <= left_out.keys()
    assert "RuntimeError: here" in left_out["raises"]


@pytest.mark.long
def test_a_script_that_sets_variables_before_its_imports_is_served_right(tmp_path: Path, lib: Path) -> None:
    install(
        lib,
        fixed="VALUE = os.environ.get('FIXED')\n",
        other="VALUE = os.environ.get('OTHER')\n",
        changing="VALUE = os.environ.get('CHANGING')\n",
    )
    words = ("fixed", "OTHER=later", "other", "CHANGING=GENERATION", "changing")
    run = launch(tmp_path, *words, last=3)
    assert imported(tmp_path, 1) == {
        "fixed": (False, None),
        "other": (False, "later"),
        "changing": (False, "1"),
    }
    assert {name: value for name, (_, value) in imported(tmp_path, 2).items()} == {
        "fixed": None,
        "other": "later",
        "changing": "2",
    }
    assert imported(tmp_path, 3) == {
        "fixed": (True, None),
        "other": (True, "later"),
        "changing": (False, "3"),
    }
    [again] = run.records("started_again")
    assert (again["generation"], again["package"], again["variables"]) == (2, "changing", ["CHANGING"])
    assert [one["start"] for one in run.records("generation_started")] == ["zygote"] * 3
    kept = json.loads((tmp_path / "run" / "imports.json").read_text())
    assert kept["names"] == ["fixed"], "values of variables are not kept"


@pytest.mark.long
def test_the_next_launch_imports_ahead_what_an_earlier_one_has_learned(tmp_path: Path, lib: Path) -> None:
    install(lib, plain="")
    launch(tmp_path, "plain")
    run = launch(tmp_path, "plain", last=3)
    assert imported(tmp_path, 3)["plain"][0], "in the first generation of the second launch"
    kept = tmp_path / "run" / "imports.json"
    assert kept.stat().st_mode & 0o777 == 0o600
    kept.chmod(0o666)
    run = launch(tmp_path, "plain", last=4)
    assert not imported(tmp_path, 4)["plain"][0]
    assert any(str(kept) in line and "666" in line for line in run.console().splitlines())


@pytest.mark.long
def test_what_was_learned_is_imported_ahead_for_a_script_that_does_not_name_torch(
    tmp_path: Path, lib: Path
) -> None:
    install(lib, plain="")
    launch(tmp_path, "plain", names_torch=False)
    assert not imported(tmp_path, 1)["plain"][0]
    run = launch(tmp_path, "plain", last=4, names_torch=False)
    assert "Traceback" not in run.console()
    assert imported(tmp_path, 3)["plain"][0]
    assert imported(tmp_path, 4)["plain"][0]
