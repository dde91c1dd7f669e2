"""Which modules count as installed, as pip and setuptools leave them on disk; the rest is the user's code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ASKS = """
import importlib, json, site, sys
sys.path[:0] = json.loads(sys.argv[2])
site.addsitedir(sys.argv[1])
from outlast.worker.installed import Installed
names = sys.argv[4:]
for name in names:
    importlib.import_module(name)
installed = Installed(sys.argv[3])
print(json.dumps([name for name in names if installed.has(name)]))
"""
FINDER = """
import sys
from importlib.machinery import PathFinder
MAPPING = {mapping}
class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return PathFinder.find_spec(name, [MAPPING[name]]) if name in MAPPING else None
def install():
    sys.meta_path.append(Finder)
"""


def installed(tmp_path: Path, *names: str, before: tuple[Path, ...] = ()) -> list[str]:
    """Return which of the modules count; ``before``: folders of PYTHONPATH."""
    words = [tmp_path / "site-packages", json.dumps(list(map(str, before))), tmp_path / "script", *names]
    command = [sys.executable, "-c", ASKS, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


def module(folder: Path, name: str, metadata: str = "dist-info") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").touch()
    if metadata:
        (folder / f"{name}-1.0.{metadata}").mkdir()
    return folder


def package(folder: Path, name: str) -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").touch()
    return folder


def test_what_lies_beside_metadata_is_installed(tmp_path: Path) -> None:
    site = module(module(tmp_path / "site-packages", "wheel_of_pip"), "of_distutils", "egg-info")
    package(site, "of_namespace")
    target = module(tmp_path / "target", "with_target")
    assert installed(
        tmp_path, "wheel_of_pip", "of_distutils", "of_namespace", "with_target", before=(target,)
    ) == [
        "wheel_of_pip",
        "of_distutils",
        "of_namespace",
        "with_target",
    ]


def test_the_users_own_code_is_not(tmp_path: Path) -> None:
    own = module(tmp_path / "script", "beside_the_script")
    plain = module(tmp_path / "plain", "without_metadata", "")
    assert installed(tmp_path, "beside_the_script", "without_metadata", before=(own, plain)) == []


def test_an_editable_install_is_the_users_code(tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    for name in ("by_path", "by_finder", "by_url", "beside"):
        module(site, f"meta_of_{name}")
    source = module(package(tmp_path / "one" / "src", "by_path"), "metadata_of_path")
    (site / "__editable__.by_path-1.0.pth").write_text(f"{source}\n")
    module(package(tmp_path / "two", "by_finder"), "metadata_of_it")
    (site / "__editable___by_finder_1_0_finder.py").write_text(
        FINDER.format(mapping={"by_finder": str(tmp_path / "two")})
    )
    (site / "__editable__.by_finder-1.0.pth").write_text(
        "import __editable___by_finder_1_0_finder as finder; finder.install()\n"
    )
    module(tmp_path / "three four" / "lib", "by_url")
    url = (tmp_path / "three four").as_uri()
    (site / "meta_of_by_url-1.0.dist-info" / "direct_url.json").write_text(
        json.dumps({"url": url, "dir_info": {"editable": True}})
    )
    (site / "meta_of_beside-1.0.dist-info" / "direct_url.json").write_text("{torn")
    names = ("by_path", "by_finder", "by_url", "meta_of_by_url")
    before = (tmp_path / "three four" / "lib",)
    assert installed(tmp_path, *names, before=before) == ["meta_of_by_url"]


def test_a_source_tree_on_the_search_path_is_the_users_code(tmp_path: Path) -> None:
    tree = module(package(tmp_path / "src", "in_tree"), "in_tree", "egg-info")
    assert installed(tmp_path, "in_tree", before=(tree,)) == []


def test_an_environment_inside_of_a_project_is_none_of_its_code(tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    module(site, "project")
    inner = module(tmp_path / "root" / ".venv" / "lib" / "site-packages", "inner")
    (site / "inner.pth").write_text(f"\n.\n{inner}\n")
    (site / "project-1.0.dist-info" / "direct_url.json").write_text(
        json.dumps({"url": (tmp_path / "root").as_uri(), "dir_info": {"editable": True}})
    )
    assert installed(tmp_path, "inner") == ["inner"]
