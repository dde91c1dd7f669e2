"""Make torch what a build with USE_DISTRIBUTED=0 is to Python: its C extension has no c10d."""

from __future__ import annotations

import importlib.machinery
import sys
from types import ModuleType


class _Loader(importlib.machinery.ExtensionFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        for name in ("_c10d_init", "_rpc_init"):
            vars(module).pop(name, None)


class _Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        spec = super().find_spec(name, path) if name == "torch._C" else None
        if spec is not None:
            spec.loader = _Loader(name, spec.origin)
        return spec


sys.meta_path.insert(0, _Finder)
