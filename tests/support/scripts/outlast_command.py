"""The command of outlast in a process that has imported it already: outlast_command.py WORD..."""

from __future__ import annotations

import runpy

runpy.run_module("outlast", run_name="__main__", alter_sys=True)
