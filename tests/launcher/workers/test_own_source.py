"""Which scripts may use torch, as far as their source says."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from outlast import settings
from outlast.launcher.command.options import parse_run
from outlast.launcher.workers.own_source import may_use_torch, needless


def script(folder: Path, text: str, name: str = "train.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "import os, sys\nfrom collections import abc\n",
        "import beside\n",
        "def main():\n    import json.decoder\n",
        "from __future__ import annotations\n",
    ],
)
def test_python_s_own_modules_and_files_beside_need_nothing(tmp_path: Path, text: str) -> None:
    script(tmp_path, "import beside\nimport math\n", "beside.py")
    assert not may_use_torch(script(tmp_path, text))


@pytest.mark.parametrize(
    "text",
    [
        "import torch",
        "def main():\n    from torch import nn\n",
        "import importlib\nimportlib.import_module(name)",
        "exec('import torch')",
        "import numpy",
        "import os\nimport transformers",
        "from . import model",
        "import package",
        "import uses",
        "import runpy",
        "this is no Python",
        "x = " + "(" * 100_000,
        "#" * (2 << 20),
    ],
)
def test_what_may_reach_torch_waits_for_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "package").mkdir()
    script(tmp_path, "import torch", "uses.py")
    assert may_use_torch(script(tmp_path, text))


def test_a_file_beside_hides_a_module_of_python(tmp_path: Path) -> None:
    script(tmp_path, "import torch", "queue.py")
    assert may_use_torch(script(tmp_path, "import queue"))


def test_what_is_no_source_waits(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "train.zip", "w") as archive:
        archive.writestr("__main__.py", "")
    for path in (tmp_path / "train.zip", tmp_path, tmp_path / "absent.py"):
        assert may_use_torch(str(path))


def test_a_chain_of_files_has_an_end(tmp_path: Path) -> None:
    for number in range(60):
        script(tmp_path, f"import part{number + 1}", f"part{number}.py")
    assert may_use_torch(str(tmp_path / "part0.py"))


COMPILER, SESSION = "torch._dynamo", "outlast.worker.session"


@pytest.mark.parametrize(
    ("text", "left_out"),
    [
        ("import torch, numpy", {COMPILER, SESSION}),
        ("import torch\ntorch.optim.SGD([])", {SESSION}),
        ("from torch.nn.parallel import DistributedDataParallel", {SESSION}),
        ("from torch.distributed.fsdp import FSDP", {SESSION}),
        ("import torch, uses_compiler", {SESSION}),
        ("import torch, outlast", {COMPILER}),
        ("import torch, transformers", set()),
        ("this is no Python", set()),
    ],
)
def test_what_the_source_does_not_use_is_not_imported_by_the_zygote(
    tmp_path: Path, text: str, left_out: set[str]
) -> None:
    script(tmp_path, "import torch\n@torch.compile\ndef f(): ...\n", "uses_compiler.py")
    options = parse_run(["--run-dir", str(tmp_path), script(tmp_path, text)], settings.inherited())
    assert set(needless(options)) == left_out


def test_of_a_module_nothing_is_known(tmp_path: Path) -> None:
    options = parse_run(["--run-dir", str(tmp_path), "-m", "json.tool"], settings.inherited())
    assert needless(options) == ()
