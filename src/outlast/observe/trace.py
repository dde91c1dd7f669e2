"""``outlast report RUN --trace FILE``: a run for Perfetto (https://ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from outlast.errors import UsageError
from outlast.observe.policy import trace
from outlast.observe.policy.goodput import Ledger
from outlast.recovery.policy.events import Record


def write(path: Path, records: Sequence[Record], ledger: Ledger) -> str:
    """Write the trace of a run, replacing the file whole; return what to say about it.

    Raises:
        UsageError: it cannot be written.
    """
    shown, counted = trace.tracks(records, ledger), trace.steps(records)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    count = 0
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
            for count, event in enumerate(trace.trace_events(shown, counted), 1):
                file.write((",\n" if count > 1 else "") + json.dumps(event, allow_nan=False))
            file.write(f'\n],"otherData":{json.dumps({"run": ledger.run_id, "began": ledger.began})}}}\n')
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UsageError(f"--trace {path}: {error.strerror}; the trace was not written") from error
    missing = trace.left_out(shown, counted)
    more = f"; {missing} older slices were left out: {trace.MOST} of a track are kept" if missing else ""
    return f"{path}: {count} events{more}; open it at https://ui.perfetto.dev"
