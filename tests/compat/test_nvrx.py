"""NVRx's modules as a script sees them: what is served, what is refused and why; and the page of both."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from outlast.compat.nvrx.finder import Finder, why_not
from outlast.compat.nvrx.surface import PACKAGE, REFUSED, SERVED

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
    """Return the last line that code writes after an installation."""
    run = python(INSTALL + textwrap.dedent(code), folder)
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
        print('imported')
    """
    assert said(code, tmp_path) == "imported"


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (
            "import nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager",
            "ModuleNotFoundError",
        ),
        ("from nvidia_resiliency_ext.checkpointing.async_ckpt.core import X", "ModuleNotFoundError"),
        ("from nvidia_resiliency_ext.attribution import Analyzer", "ModuleNotFoundError"),
        ("from nvidia_resiliency_ext.straggler import Nobody", "ModuleNotFoundError"),
        ("import nvidia_resiliency_ext as n; n.services", "AttributeError"),
    ],
)
def test_what_is_not_served_is_an_import_error_that_says_what_to_use(
    tmp_path: Path, code: str, error: str
) -> None:
    line = said(code, tmp_path)
    assert line.startswith(f"{error}: nvidia_resiliency_ext.")
    assert "outlast does not serve it: " in line or "docs/reference/nvrx.md" in line


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_an_import_below_what_is_refused_has_the_reason(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As megatron-core imports from ``checkpointing.local``: importlib asks for each package above first."""
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    request.addfinalizer(lambda: [sys.modules.pop(one) for one in list(sys.modules) if PACKAGE in one])
    with pytest.raises(ImportError) as caught:
        importlib.import_module(f"{PACKAGE}.{name}.somewhere")
    assert str(caught.value).endswith(f": outlast does not serve it: {REFUSED[name]}")


def test_a_package_that_is_optional_to_a_script_counts_as_absent(tmp_path: Path) -> None:
    """As Megatron-LM asks for it, see megatron/core/dist_checkpointing/strategies."""
    code = """
        import importlib, importlib.util
        try:
            importlib.import_module('nvidia_resiliency_ext.checkpointing.async_ckpt.core')
        except (ImportError, ModuleNotFoundError):
            print(importlib.util.find_spec('nvidia_resiliency_ext') is not None,
                  hasattr(importlib.import_module('nvidia_resiliency_ext.straggler'), 'nobody'))
    """
    assert said(code, tmp_path) == "True False"


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
    assert (
        "UsageError: outlast.compat.nvrx.install: found nvidia_resiliency_ext imported already" in run.stderr
    )


def test_an_installed_package_is_hidden_and_named_once(tmp_path: Path) -> None:
    installed(tmp_path)
    run = python(f"{INSTALL * 2}import {PACKAGE} as n; print(hasattr(n, 'REAL'))", tmp_path)
    assert run.stdout.strip() == "False"
    assert run.stderr.count(f"the package installed at {tmp_path / PACKAGE / '__init__.py'} is not used") == 1


def test_an_unchanged_script_runs(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'found'\n")
    (tmp_path / "train.py").write_text(
        "import sys, beside\nfrom nvidia_resiliency_ext.straggler import Detector\n"
        "print(__name__, sys.argv[1:], beside.WORD, Detector.__name__)\n"
    )
    for words in (["train.py"], ["-m", "train"]):
        command = [sys.executable, "-m", "outlast.compat.nvrx", *words, "--lr", "1"]
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
        assert run.stdout.strip() == "__main__ ['--lr', '1'] found Detector", run.stderr


def test_a_script_has_the_path_that_python_gives_it(tmp_path: Path) -> None:
    folder, links = tmp_path / "real", tmp_path / "links"
    folder.mkdir()
    links.mkdir()
    (folder / "train.py").write_text("import sys; print(sys.path[0])\n")
    (links / "train.py").symlink_to(folder / "train.py")
    safe = ["-P"] if sys.version_info >= (3, 11) else ["-I"]
    for flags in ([], safe):
        plain, served = (
            subprocess.run(
                [sys.executable, *flags, *words, str(links / "train.py")],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=55,
                check=False,
            )
            for words in ([], ["-m", "outlast.compat.nvrx"])
        )
        assert served.stdout == plain.stdout != "", served.stderr


def test_a_script_is_needed(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "outlast.compat.nvrx"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert "UsageError: outlast.compat.nvrx: found no script" in run.stderr
    assert run.returncode != 0


def test_every_name_leads_to_an_object() -> None:
    for module, names in SERVED.items():
        for name, home in names.items():
            found, _, attribute = home.partition(":")
            if found == "outlast.compat.nemo" and importlib.util.find_spec("lightning") is None:
                continue
            assert hasattr(importlib.import_module(found), attribute), f"{module}.{name}"


def test_nothing_is_served_and_refused() -> None:
    both = [
        name
        for module, names in SERVED.items()
        for name in names
        if f"{module}.{name}".partition(".")[2] in REFUSED
    ]
    assert both == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fault_tolerance.rank_monitor_server.RankMonitorServer", "outlast run is the launcher"),
        ("inprocess.abort.AbortTransformerEngine", "derive from Abort"),
        ("inprocess.abort.Nobody", "inprocess.abort has Abort, AbortTorchDistributed; see docs"),
        ("attribution.straggler.cupti", "attribution.straggler has CallableId, Detector, Report"),
        ("attribution.analyzer.Analyzer", "faults are attributed by the launcher"),
        ("ptl_resiliency.local_checkpoint_callback.LocalCheckpointCallback", "of outlast.compat.nemo"),
        ("nobody.at_all", "nvidia_resiliency_ext has __version__, attribution, fault_tolerance, inprocess"),
    ],
)
def test_the_reason_is_the_closest_one(name: str, said: str) -> None:
    sentence = why_not(f"{PACKAGE}.{name}")
    assert sentence.startswith(f"{PACKAGE}.{name}: outlast does not serve it")
    assert said in sentence


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


def test_the_page_has_what_is_served() -> None:
    found = {module: named(cells[0]) for module, cells in rows("Served").items()}
    shown = {module.removeprefix(f"{PACKAGE}."): set(names) for module, names in SERVED.items() if names}
    assert found == shown


def test_the_page_has_what_is_refused_word_for_word() -> None:
    assert {name: cells[0] for name, cells in rows("Refused").items()} == dict(REFUSED)
