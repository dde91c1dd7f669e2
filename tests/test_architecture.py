"""The rules of ARCHITECTURE.md, checked on the source; each check is shown to catch what it forbids."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.source_tree import CODE_FOLDERS, ROOT, dotted, sources

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

POLICY = "policy"
# The first level of the package; a unit imports from those below its own, and capabilities from each other.
# A policy is below all of them, whichever capability it belongs to.
LAYERS = (
    {"codec", "errors", "fields", "ports", "config", POLICY},
    {"_lazy", "_torch_compat", "_version"},
    {"files", "plugins", "strangers"},
    {"settings"},
    {"ipc", "observe"},
    {
        *("agreement", "checkpoint", "cluster", "consistency", "hang", "health", "inprocess", "launcher"),
        *("numerics", "parallelism", "preemption", "recovery", "rerun", "stragglers", "worker"),
    },
    {"chaos", "integrations"},
    {"compat", "completion", "doctor", "examples"},
    {"cli"},
    {"__main__"},
)
LEVEL = {unit: level for level, units in enumerate(LAYERS) for unit in units}
TOGETHER = {LEVEL["errors"], LEVEL["hang"]}
PURE_UNITS = LAYERS[0]

PURE_MODULES = {
    *(
        "__future__",
        "abc",
        "bisect",
        "collections",
        "contextlib",
        "dataclasses",
        "enum",
        "functools",
        "hashlib",
    ),
    *("heapq", "itertools", "json", "math", "msgspec", "operator", "random", "re", "statistics", "string"),
    *("struct", "textwrap", "types", "typing"),
}
IMPURE_CALLS = {"open", "print", "input", "exec", "eval", "__import__", "breakpoint"}

# Packages of the user: touched only where a script has brought them, or where the user names them.
THE_USERS = {"megatron", "mlflow", "numpy", "opentelemetry", "tensorboard", "torchtitan", "wandb"}
ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.putenv"}

UNPICKLE = {"cloudpickle", "dill", "marshal", "pickle", "shelve"}
COLLECTIVE_OF_OBJECTS = re.compile(r"(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?")
# Read checkpoints of DCP with a table of the classes that are allowed.
MAY_READ_PICKLES = {"outlast.checkpoint.tools.convert", "outlast.checkpoint.tools.dcp_reader"}

FORBIDDEN_STEMS = {"utils", "common", "helpers", "misc", "base", "constants", "manager"}
UNFINISHED = ("TO" + "DO", "FIX" + "ME", "XX" + "X", "NotImplemented" + "Error")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

# Its forks become launchers and ranks in processes of their own; a scenario sees what those do.
BEGINS_AS_THE_COMMAND = "tests/support/warm.py"

REASONED = re.compile(r"# noqa:[^-]*\bBLE001\b[^-]* - \S+ \S+")
BROAD = {"Exception", "BaseException"}


def _unit(name: str) -> str:
    """Return what has a layer: ``policy`` for any policy, else the first level of a dotted module."""
    parts = name.split(".")
    return POLICY if POLICY in parts[2:3] else [*parts, ""][1]


def _side(name: str) -> str:
    """Return where a module runs: ``agent`` once on a node, ``worker`` in a rank, or nothing."""
    parts = ["agent" if part == "launcher" else part for part in name.split(".")[1:3]]
    return next((part for part in parts if part in ("agent", "worker")), "")


def layers_point_down(root: Path) -> list[str]:
    found = []
    for source in sources(root, "src"):
        if source.name == "outlast":
            continue
        unit, side = _unit(source.name), _side(source.name)
        level = LEVEL.get(unit)
        if level is None:
            found.append(f"{source.path}: '{unit}' has no layer")
            continue
        for node, target in source.imports:
            if target.split(".")[0] != "outlast":
                continue
            theirs = _unit(target)
            other = LEVEL.get(theirs)
            if other is None:
                if level < LEVEL["chaos"]:
                    found.append(f"{source.at(node)}: imports the package root ({target})")
            elif other > level or (other == level and theirs != unit and level not in TOGETHER):
                found.append(f"{source.at(node)}: {unit} imports {target}, which is not below it")
            elif side and theirs != POLICY and _side(target) not in ("", side):
                found.append(f"{source.at(node)}: {side} imports {target}, which is another process")
    return found


def policies_are_pure(root: Path) -> list[str]:
    found = []
    for source in sources(root, "src"):
        unit = _unit(source.name)
        if unit not in PURE_UNITS:
            continue
        for node, target in source.imports:
            if target.split(".")[0] not in PURE_MODULES | {"outlast"}:
                found.append(f"{source.at(node)}: {unit} imports {target}")
        for node in source.nodes:
            if isinstance(node, ast.Call) and dotted(node.func) in IMPURE_CALLS:
                found.append(f"{source.at(node)}: {unit} calls {dotted(node.func)}()")
            if isinstance(node, ast.Attribute) and re.fullmatch(r"random\.(?!Random\b)\w+", dotted(node)):
                found.append(f"{source.at(node)}: {unit} draws from the global generator, {dotted(node)}")
    return found


def only_settings_uses_the_environment(root: Path) -> list[str]:
    found = []
    for source in sources(root, "src"):
        if source.name == "outlast.settings":
            continue
        named = [(node, dotted(node)) for node in source.nodes if isinstance(node, ast.Attribute)]
        found += [
            f"{source.at(node)}: {name}" for node, name in (*source.imports, *named) if name in ENVIRONMENT
        ]
    return found


def file_names_say_what_is_inside(root: Path) -> list[str]:
    return [
        f"{source.path}: '{Path(source.path).stem}' says nothing about what is inside"
        for source in sources(root, *CODE_FOLDERS)
        if FORBIDDEN_STEMS & {Path(source.path).stem, Path(source.path).parent.name}
    ]


def broad_excepts_give_a_reason(root: Path) -> list[str]:
    found = []
    for source in sources(root, "src"):
        lines = source.text.splitlines()
        for node in source.nodes:
            if isinstance(node, ast.ExceptHandler):
                caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
                broad = any(one is None or dotted(one) in BROAD for one in caught)
                raised = [inner for inner in ast.walk(node) if isinstance(inner, ast.Raise)]
                again = any(inner.exc is None or inner.cause is not None for inner in raised)
                if broad and not again and not REASONED.search(lines[node.lineno - 1]):
                    found.append(f"{source.at(node)}: a broad except without '# noqa: BLE001 - why'")
            suppresses = isinstance(node, ast.Call) and dotted(node.func).endswith("suppress")
            if suppresses and BROAD & {dotted(arg) for arg in node.args}:
                found.append(f"{source.at(node)}: suppresses every exception")
    return found


def _public(node: ast.AST) -> bool:
    return isinstance(node, (*FUNCTIONS, ast.ClassDef)) and not node.name.startswith("_")


def public_names_are_documented(root: Path) -> list[str]:
    found = []
    for source in sources(root, "src"):
        outer = [node for node in source.tree.body if _public(node)]
        inner = [node for cls in outer if isinstance(cls, ast.ClassDef) for node in cls.body if _public(node)]
        for node in [source.tree, *outer, *inner]:
            if not ast.get_docstring(node):
                found.append(f"{source.at(node)}: {getattr(node, 'name', 'the module')} has no docstring")
    return found


def nothing_is_unfinished(root: Path) -> list[str]:
    return [
        f"{source.path}:{number}: {word}"
        for source in sources(root, *CODE_FOLDERS)
        for number, line in enumerate(source.text.splitlines(), 1)
        for word in UNFINISHED
        if re.search(rf"\b{word}\b", line)
    ]


def torch_is_left_as_it_is(root: Path) -> list[str]:
    """No assignment to torch's attributes; private names of torch only in _torch_compat.py."""
    found = []
    private = re.compile(r"torch(\.\w+)*\._(?!_)\w*")
    for source in sources(root, "src"):
        named = list(source.imports)
        for node in source.nodes:
            if isinstance(node, ast.Attribute) and dotted(node).startswith("torch."):
                named.append((node, dotted(node)))
                if not isinstance(node.ctx, ast.Load):
                    found.append(f"{source.at(node)}: assigns {dotted(node)}")
        found += [
            f"{source.at(node)}: private {name} outside _torch_compat.py"
            for node, name in named
            if private.match(name) and source.unit != "_torch_compat"
        ]
    return found


def every_wait_has_a_deadline(root: Path) -> list[str]:
    return [
        f"{source.at(node)}: .{node.func.attr}() waits without a deadline"
        for source in sources(root, "src")
        for node in source.nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in {"wait", "join", "communicate"}
        and not node.args
        and not node.keywords
    ]


def no_wait_is_bound_to_small_descriptors(root: Path) -> list[str]:
    return [
        f"{source.at(node)}: select.select() fails with descriptors beyond 1023; use files.readable"
        for source in sources(root, "src")
        for node in source.nodes
        if isinstance(node, ast.Attribute) and dotted(node) == "select.select"
    ]


def nothing_is_unpickled(root: Path) -> list[str]:
    """Return imports of what unpickles, and collectives of objects, which unpickle what a peer sends."""
    found = []
    for source in sources(root, "src"):
        for node, target in source.imports:
            if target.split(".")[0] in UNPICKLE and source.name not in MAY_READ_PICKLES:
                found.append(f"{source.at(node)}: imports {target}, which runs what it reads")
            if COLLECTIVE_OF_OBJECTS.fullmatch(target.split(".")[-1]):
                found.append(f"{source.at(node)}: {target} unpickles; use integrations.collectives")
        for node in source.nodes:
            name = str(getattr(node, "attr", getattr(node, "id", "")))  # of an attribute, of a name
            if COLLECTIVE_OF_OBJECTS.fullmatch(name):
                found.append(f"{source.at(node)}: {name} unpickles; use integrations.collectives")
    return found


def scenarios_know_no_class(root: Path) -> list[str]:
    """Return imports of outlast in tests/scenarios and in all that they import from tests/."""
    files = {source.path: source for source in sources(root, "tests")}
    paths = [path for path in files if path.startswith("tests/scenarios/")]
    found = []
    for path in paths:
        for node, target in files[path].imports:
            if target.split(".")[0] == "outlast" and path != BEGINS_AS_THE_COMMAND:
                found.append(f"{files[path].at(node)}: imports outlast")
            named = [f"{name.replace('.', '/')}.py" for name in (target, target.rpartition(".")[0])]
            paths += [name for name in named if name in files and name not in paths]
    return found


def _package(line: str) -> str:
    return re.split(r"[^\w-]", line)[0].lower()


def dependencies_are_those_in_use(root: Path) -> list[str]:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {_package(line) for line in project["dependencies"]}
    extras = project.get("optional-dependencies", {})
    optional = {_package(line) for name, lines in extras.items() if name != "dev" for line in lines}
    stdlib = set(sys.stdlib_module_names) | {"outlast", "tomllib"} | THE_USERS
    named = (target for source in sources(root, "src") for _, target in source.imports)
    used = {target.split(".")[0] for target in named} - stdlib
    return [f"pyproject.toml: {name} is declared and not imported" for name in sorted(declared - used)] + [
        f"pyproject.toml: {name} is imported and not declared" for name in sorted(used - declared - optional)
    ]


Check = Callable[[Path], list[str]]
RULE, AGENT, WORKER = "src/outlast/hang/policy/x.py", "src/outlast/hang/agent/x.py", "src/outlast/worker/x.py"
SCENARIO = "tests/scenarios/hang/test_x.py"
TRY = "try:\n    x = 1\n"
PLANTS: dict[Check, list[tuple[str, str, str]]] = {
    layers_point_down: [
        (AGENT, "from outlast.worker import session\n", "agent imports outlast.worker.session"),
        (AGENT, "from outlast.rerun.worker import data\n", "agent imports outlast.rerun.worker.data"),
        (WORKER, "def f():\n    import outlast.launcher.agent\n", "worker imports outlast.launcher.agent"),
        (RULE, "from outlast import settings\n", "policy imports outlast.settings"),
        (RULE, "from outlast.hang.agent import monitor\n", "policy imports outlast.hang.agent.monitor"),
        ("src/outlast/ipc/x.py", "import outlast.observe.recorder\n", "not below it"),
        ("src/outlast/files.py", "import outlast.hang.worker.heartbeat\n", "not below it"),
        (AGENT, "from outlast import start\n", "imports the package root"),
        ("src/outlast/extra.py", "", "'extra' has no layer"),
    ],
    policies_are_pure: [
        (RULE, "def f():\n    import time\n", "policy imports time"),
        (RULE, "from os import path\n", "policy imports os.path"),
        (RULE, "x = open('y')\n", "policy calls open()"),
        (RULE, "import random\nx = random.random()\n", "global generator"),
        ("src/outlast/config.py", "import os\n", "config imports os"),
    ],
    only_settings_uses_the_environment: [
        (AGENT, "import os\nx = os.environ.get('A')\n", "os.environ"),
        (AGENT, "import os\nx = dict(os.environ)\n", "os.environ"),
        (AGENT, "from os import environ\n", "os.environ"),
        (AGENT, "import os\nx = os.getenv('A')\n", "os.getenv"),
        (AGENT, "import os\nos.environ['A'] = 'b'\n", "os.environ"),
    ],
    file_names_say_what_is_inside: [
        ("src/outlast/hang/agent/utils.py", "", "'utils' says nothing"),
        ("src/outlast/common/__init__.py", "", "says nothing"),
    ],
    broad_excepts_give_a_reason: [
        (AGENT, TRY + "except:\n    pass\n", "a broad except"),
        (AGENT, TRY + "except (OSError, Exception):\n    pass\n", "a broad except"),
        (AGENT, TRY + "except Exception:  # noqa: BLE001\n    pass\n", "a broad except"),
        (AGENT, "with contextlib.suppress(Exception):\n    x = 1\n", "suppresses"),
    ],
    public_names_are_documented: [
        (AGENT, "x = 1\n", "the module has no docstring"),
        (AGENT, '"""M."""\ndef f(): ...\n', "f has no docstring"),
        (AGENT, '"""M."""\nclass A:\n    """A."""\n    def f(self): ...\n', "f has no docstring"),
    ],
    nothing_is_unfinished: [(AGENT, f"# {UNFINISHED[0]}: later\n", UNFINISHED[0])],
    torch_is_left_as_it_is: [
        (AGENT, "import torch\ntorch.save = None\n", "assigns torch.save"),
        (AGENT, "import torch.distributed as d\nx = torch.distributed._world.pg\n", "torch.distributed._w"),
        (AGENT, "from torch._C import f\n", "private torch._C"),
    ],
    every_wait_has_a_deadline: [(AGENT, "def f(p):\n    p.wait()\n", "waits without a deadline")],
    no_wait_is_bound_to_small_descriptors: [
        (AGENT, "import select\nselect.select([0], [], [], 1.0)\n", "use files.readable")
    ],
    nothing_is_unpickled: [
        (WORKER, "import pickle\n", "imports pickle"),
        (WORKER, "from marshal import loads\n", "imports marshal"),
        (WORKER, "import torch.distributed as d\nd.all_gather_object([], 1)\n", "all_gather_object"),
        (WORKER, "from torch.distributed import broadcast_object_list as b\nb([])\n", "unpickles"),
    ],
    scenarios_know_no_class: [
        (SCENARIO, "def f():\n    from outlast.config import NodeOptions\n", "imports outlast"),
        ("tests/scenarios/warm.py", "import outlast\n", "imports outlast"),
    ],
    dependencies_are_those_in_use: [
        (AGENT, "import requests\n", "requests is imported and not declared"),
        (AGENT, "x = 1\n", "torch is declared and not imported"),
    ],
}
INNOCENT = '''"""A module that comes close to every rule and breaks none."""
import contextlib
import os
import torch
from outlast.recovery.policy import events


def send(p, *, names):
    """Send."""
    with contextlib.suppress(OSError):
        p.wait(timeout=1.0)
    try:
        return ",".join(names)
    except Exception:  # noqa: BLE001 - a user's callable may raise anything
        return os.path.join(torch.__version__, "outlast")
    except BaseException:
        raise
'''
EACH_CHECK = pytest.mark.parametrize("check", PLANTS, ids=lambda check: check.__name__)
EACH_PLANT = pytest.mark.parametrize(
    ("check", "path", "text", "expected"),
    [pytest.param(check, *plant, id=check.__name__) for check, plants in PLANTS.items() for plant in plants],
)


def _plant(folder: Path, path: str, text: str) -> None:
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_text(text, encoding="utf-8")
    (folder / "pyproject.toml").write_text('[project]\ndependencies = ["torch>=2.4"]\n', encoding="utf-8")


@EACH_CHECK
def test_the_source_keeps_the_rule(check: Check) -> None:
    assert check(ROOT) == []


@EACH_PLANT
def test_a_planted_violation_is_found(
    check: Check, path: str, text: str, expected: str, tmp_path: Path
) -> None:
    _plant(tmp_path, path, text)
    found = check(tmp_path)
    assert any(expected in line and (path in line or "pyproject" in line) for line in found), found


@EACH_CHECK
def test_code_that_only_comes_close_is_not_reported(check: Check, tmp_path: Path) -> None:
    _plant(tmp_path, WORKER, INNOCENT)
    assert check(tmp_path) == []


def test_an_import_of_ours_is_found_behind_the_helpers_of_a_scenario(tmp_path: Path) -> None:
    _plant(tmp_path, SCENARIO, "from tests.support.launching import Run\nimport json\n")
    _plant(tmp_path, "tests/support/launching.py", "from tests.support import agents\n")
    _plant(tmp_path, "tests/support/agents.py", "import outlast.files\n")
    _plant(tmp_path, "tests/support/jobs.py", "import outlast\n")
    (found,) = scenarios_know_no_class(tmp_path)
    assert found.startswith("tests/support/agents.py:1: ")


def _of_a_node() -> list[str]:
    return [source.name for source in sources(ROOT, "src") if _side(source.name) == "agent"]


def _below_it() -> list[str]:
    units = {*PURE_UNITS, "ipc", "observe", "settings"}
    return [source.name for source in sources(ROOT, "src") if _unit(source.name) in units]


def _loaded(names: list[str], heavy: list[str]) -> list[str]:
    """Import modules in a fresh interpreter; return which of the heavy ones came along."""
    script = f"import sys, {', '.join(names)}; print(*[n for n in {heavy} if n in sys.modules])"
    command = [sys.executable, "-B", "-c", script]
    run = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


def test_the_launcher_starts_without_heavy_imports() -> None:
    heavy = ["torch", "numpy", "rich"]
    assert _loaded(["outlast", "outlast.cli", *_of_a_node()], heavy) == []


def test_what_the_agent_uses_never_imports_torch() -> None:
    assert _loaded([*_below_it(), *_of_a_node()], ["torch", "numpy"]) == []


def test_a_heavy_import_would_be_seen() -> None:
    assert _loaded(["outlast", "rich"], ["torch", "rich"]) == ["rich"]
