"""NVRx's modules as a script sees them: what is served, what is refused and why; and the page of both."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from outlast.compat.nvrx.finder import Finder, why_not
from outlast.compat.nvrx.surface import PACKAGE, REFUSED, SERVED
from tests.support import warm

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "nvrx.md").read_text(encoding="utf-8")
INSTALL = "import outlast.compat.nvrx; outlast.compat.nvrx.install()\n"


def python(code: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter whose working folder is on its path."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def said(code: str, folder: Path) -> str:
    """Return the last line that code writes after an installation, in a process that has torch."""
    (folder / "script.py").write_text(INSTALL + textwrap.dedent(code))
    run = warm.run([folder / "script.py"], 110)
    return (run.stdout.strip() or run.stderr.strip()).splitlines()[-1]


def test_served_modules_are_imported_in_every_way(tmp_path: Path) -> None:
    code = """
        import sys
        import nvidia_resiliency_ext as nvrx
        assert 'torch' not in sys.modules
        assert nvrx.__version__ >= '0.6'
        import nvidia_resiliency_ext.attribution.straggler as a
        from nvidia_resiliency_ext import straggler as b
        from nvidia_resiliency_ext.attribution.straggler import Detector, Report
        from nvidia_resiliency_ext.attribution.straggler import *
        from outlast.compat import straggler as ours
        assert a.Detector is b.Detector is Detector is ours.Detector
        assert (Report, Statistic) == (ours.Report, ours.Statistic)
        assert nvrx.attribution.straggler.statistics.Statistic is Statistic
        assert 'Detector' in dir(a)
    """
    done = python(INSTALL + textwrap.dedent(code), tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    yield
    for name in [name for name in sys.modules if name.startswith(PACKAGE)]:
        del sys.modules[name]


@pytest.mark.parametrize(
    "name", ["attribution.Analyzer", "straggler.Nobody", *(f"{name}.somewhere" for name in sorted(REFUSED))]
)
def test_what_is_not_served_is_an_import_error_that_names_it(served: None, name: str) -> None:
    """As megatron-core imports from ``checkpointing.local``: importlib asks for each package above first."""
    with pytest.raises(ModuleNotFoundError, match=rf"{PACKAGE}\."):
        exec(f"from {PACKAGE}.{name.rpartition('.')[0]} import {name.rpartition('.')[2]}")
    with pytest.raises(ModuleNotFoundError, match=rf"{PACKAGE}\."):
        importlib.import_module(f"{PACKAGE}.{name}")


def test_a_package_that_is_optional_to_a_script_counts_as_absent(served: None) -> None:
    """As Megatron-LM asks for it, see megatron/core/dist_checkpointing/strategies."""
    assert importlib.util.find_spec(PACKAGE) is not None
    assert not hasattr(importlib.import_module(f"{PACKAGE}.straggler"), "nobody")
    with pytest.raises(AttributeError):
        importlib.import_module(PACKAGE).services  # noqa: B018


@pytest.mark.long
def test_callbacks_of_a_fit_are_those_of_nemo_and_import_lightning_when_used(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="lightning: not installed; the extra `frameworks` brings it")
    code = """
        import sys
        import nvidia_resiliency_ext.ptl_resiliency.fault_tolerance_callback as below
        assert not {'lightning', 'pytorch_lightning'} & set(sys.modules)
        from nvidia_resiliency_ext.ptl_resiliency import FaultToleranceCallback, SimulatedFaultParams
        from outlast.compat import nemo
        assert below.FaultToleranceCallback is FaultToleranceCallback is nemo.FaultToleranceCallback
        assert SimulatedFaultParams is nemo.SimulatedFaultParams
        print('imported')
    """
    assert said(code, tmp_path) == "imported"


def test_without_lightning_its_callbacks_are_an_import_error(tmp_path: Path) -> None:
    code = """
        import sys
        sys.modules.update({'lightning': None, 'pytorch_lightning': None})
        try:
            from nvidia_resiliency_ext.ptl_resiliency import FaultToleranceCallback
        except ImportError as error:
            print(error)
    """
    assert said(code, tmp_path).startswith("nvidia_resiliency_ext.ptl_resiliency.FaultToleranceCallback: ")


def installed(folder: Path) -> None:
    real = folder / PACKAGE
    real.mkdir()
    (real / "__init__.py").write_text("REAL = True\n")


def test_it_is_refused_where_the_real_package_is_imported_already(tmp_path: Path) -> None:
    installed(tmp_path)
    run = python(f"import {PACKAGE}\n{INSTALL}", tmp_path)
    assert "UsageError: outlast.compat.nvrx.install: " in run.stderr


def test_an_installed_package_is_hidden_and_named_once(tmp_path: Path) -> None:
    installed(tmp_path)
    run = python(f"{INSTALL * 2}import {PACKAGE} as n; print(hasattr(n, 'REAL'))", tmp_path)
    assert run.stdout.strip() == "False"
    assert run.stderr.count(str(tmp_path / PACKAGE / "__init__.py")) == 1


def test_an_unchanged_script_runs(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'found'\n")
    (tmp_path / "train.py").write_text(
        "import sys, beside\nfrom nvidia_resiliency_ext import __version__\n"
        "print(__name__, sys.argv[1:], beside.WORD, bool(__version__))\n"
    )
    for words in (["train.py"], ["-m", "train"]):
        command = [sys.executable, "-m", "outlast.compat.nvrx", *words, "--lr", "1"]
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
        assert run.stdout.strip() == "__main__ ['--lr', '1'] found True", run.stderr


def test_a_script_has_the_path_that_python_gives_it_and_is_needed(tmp_path: Path) -> None:
    def ran(*words: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, *words]
        return subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=55, check=False)

    for name in ("real", "links"):
        (tmp_path / name).mkdir()
    (tmp_path / "real" / "train.py").write_text("import sys; print(sys.path[0])\n")
    (tmp_path / "links" / "train.py").symlink_to(tmp_path / "real" / "train.py")
    for flags in ([], ["-P"] if sys.version_info >= (3, 11) else ["-I"]):
        served = ran(*flags, "-m", "outlast.compat.nvrx", "links/train.py")
        assert served.stdout == ran(*flags, "links/train.py").stdout != "", served.stderr
    refused = ran("-m", "outlast.compat.nvrx")
    assert "UsageError: outlast.compat.nvrx: " in refused.stderr
    assert refused.returncode != 0


def test_every_name_leads_to_an_object_and_none_is_refused() -> None:
    for module, names in SERVED.items():
        for name, home in names.items():
            assert f"{module}.{name}".partition(".")[2] not in REFUSED
            found, _, attribute = home.partition(":")
            if found == "outlast.compat.nemo" and importlib.util.find_spec("lightning") is None:
                continue
            assert hasattr(importlib.import_module(found), attribute), f"{module}.{name}"


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("fault_tolerance.rank_monitor_server.RankMonitorServer", "outlast run"),
        ("inprocess.abort.AbortTransformerEngine", REFUSED["inprocess.abort.AbortTransformerEngine"]),
        ("inprocess.abort.Nobody", "Abort, AbortTorchDistributed"),
        ("attribution.straggler.cupti", "CallableId, Detector, Report"),
        ("attribution.analyzer.Analyzer", REFUSED["attribution"]),
        ("ptl_resiliency.local_checkpoint_callback.LocalCheckpointCallback", "outlast.compat.nemo"),
        ("nobody.at_all", "__version__, attribution, fault_tolerance, inprocess"),
    ],
)
def test_the_reason_is_the_closest_one(name: str, named: str) -> None:
    reason = why_not(f"{PACKAGE}.{name}")
    assert reason.startswith(f"{PACKAGE}.{name}: ")
    assert named in reason


def rows(heading: str) -> dict[str, tuple[str, ...]]:
    """Return the rows of a section's tables by their first cell."""
    section = re.search(rf"^## {heading}\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert section is not None, heading
    cells = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in section[1].splitlines()
        if line.startswith("| `")
    ]
    return {one[0].strip("`"): tuple(one[1:]) for one in cells}


def named(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", text))


def test_the_page_has_what_is_served_and_refused() -> None:
    found = {module: named(cells[0]) for module, cells in rows("Served").items()}
    shown = {module.removeprefix(f"{PACKAGE}."): set(names) for module, names in SERVED.items() if names}
    assert found == shown

    assert rows("Refused").keys() == REFUSED.keys()
