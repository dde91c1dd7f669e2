"""The only reader of the environment and of configuration files.

Order of precedence: a flag, then a ``PET_*`` variable, then the TOML file, then the default.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from outlast.core.config import Checkpoints, Config, FaultTolerance, Preemption
from outlast.core.errors import ConfigError, UsageError
from outlast.core.numerics import Numerics
from outlast.core.reentry import InProcessRestart
from outlast.core.rerun_options import Rerun
from outlast.core.tripwire import TripwireOptions

TABLES: Mapping[str, type] = {
    "fault_tolerance": FaultTolerance,
    "checkpoints": Checkpoints,
    "preemption": Preemption,
    "numerics": Numerics,
    "tripwire": TripwireOptions,
    "inprocess_restart": InProcessRestart,
    "rerun": Rerun,
}


def load_config(path: str | os.PathLike[str] | None, overrides: Mapping[str, object]) -> Config:
    """Return the configuration of a run, complete and checked.

    Args:
        path: a TOML file with the tables of :class:`Config`; None: defaults only.
        overrides: values of ``fault_tolerance`` from the command line; they win.

    Raises:
        ConfigError: everything that is wrong, each with the path of its key.
    """
    document: dict[str, Any] = {} if path is None else _read_toml(Path(path))
    if path is not None:
        problems = [*_unknown_keys(document), *_type_problems(document)]
        if problems:
            raise ConfigError(str(path), tuple(problems))
    tables: dict[str, Any] = {}
    for name, kind in TABLES.items():
        values = dict(document.get(name, {}))
        if name == "fault_tolerance":
            values.update(overrides)
        tables[name] = kind(**values)
    config = _with_time_to_leave(Config(**tables), document.get("preemption", {}))
    problems = [*config.problems(), *_timeouts_of_zero(config.fault_tolerance)]
    if problems:
        raise ConfigError(str(path) if path is not None else "command line", tuple(problems))
    return config


def _with_time_to_leave(config: Config, named: Mapping[str, Any]) -> Config:
    """Return a configuration in which preempted workers have at least what stopped ones have."""
    mine, given = config.preemption, config.fault_tolerance.workers_stop_timeout
    if {"preempt_time", "enable_exit_handler"} & named.keys() or not mine.preempt_time < given < math.inf:
        return config
    return dataclasses.replace(config, preemption=dataclasses.replace(mine, preempt_time=given))


def _timeouts_of_zero(config: FaultTolerance) -> list[str]:
    names = ("initial_rank_heartbeat_timeout", "rank_heartbeat_timeout", "rank_out_of_section_timeout")
    return [
        f"fault_tolerance.{name}: 0 would take every rank for hung; inf (off, as a flag) watches nothing"
        for name in names
        if getattr(config, name) == 0
    ]


def _read_toml(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        document: dict[str, Any] = tomllib.loads(path.read_text())
        return document
    except OSError as error:
        raise ConfigError(str(path), (f"cannot be read: {error.strerror}",)) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(path), (f"is no TOML: {error}",)) from error


def _unknown_keys(document: Mapping[str, Any]) -> list[str]:
    found = [f"{name}: unknown table{_near(name, TABLES)}" for name in document if name not in TABLES]
    for name, kind in TABLES.items():
        table = document.get(name, {})
        if not isinstance(table, dict):
            found.append(f"{name}: found {table!r}, expected a table")
            continue
        known = [spec.name for spec in fields(kind)]
        found += [f"{name}.{key}: unknown key{_near(key, known)}" for key in table if key not in known]
    return found


def _near(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else f"; known are {', '.join(known)}"


def _type_problems(document: Mapping[str, Any]) -> list[str]:
    from pydantic import TypeAdapter, ValidationError

    found: list[str] = []
    for name, kind in TABLES.items():
        table = document.get(name)
        types = get_type_hints(kind)
        for key, value in table.items() if isinstance(table, dict) else ():
            if key not in types:
                continue
            try:
                TypeAdapter(types[key]).validate_python(value, strict=True)
            except ValidationError as error:
                for one in error.errors():
                    path = ".".join(map(str, (name, key, *_inner(one["loc"], value))))
                    found.append(f"{path}: found {one['input']!r}; {one['msg'].lower()}")
    return found


def _inner(location: tuple[Any, ...], value: object) -> list[str]:
    """Return the part of an error's location that is in the document: the keys of an inner table."""
    return [str(part) for part in location if isinstance(value, dict) and part in value]


@dataclass(frozen=True)
class WorkerContext:
    """What a rank's environment says about its place in the job.

    Without a launcher every text is empty and the rank is 0 of 1; under torchrun only the
    ranks are known.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    generation: int = 0
    restart_count: int = 0
    run_dir: str = ""
    run_id: str = ""
    pulse_path: str = ""
    control_path: str = ""
    memory_path: str = ""
    permit_path: str = ""
    gate_path: str = ""
    node: str = ""
    replaceable: int = 0  # 1: a spare may take this node's place, or the job may go on without it
    failure_domains: str = ""
    master_addr: str = ""
    avoid: tuple[str, ...] = ()
    checkpoints: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    preemption: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    numerics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tripwire: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    inprocess_restart: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rerun: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    job_end_time: int = 0
    grace_period: int = 0
    num_warmup_iterations: int = FaultTolerance.num_warmup_iterations

    @property
    def launched(self) -> bool:
        """Say whether ``outlast run`` started this rank."""
        return bool(self.run_id)

    @property
    def domains(self) -> dict[str, str]:
        """What fails as a whole and this node is in, by kind.

        Raises:
            UsageError: ``OUTLAST_FAILURE_DOMAINS`` is no list like "rack=r7,power=f2".
        """
        found = {}
        for item in filter(None, self.failure_domains.split(",")):
            kind, equals, name = item.partition("=")
            if not (kind and equals and name) or kind in found:
                raise UsageError(
                    f"OUTLAST_FAILURE_DOMAINS={self.failure_domains!r}: a list like rack=r7,power=f2"
                    f" expected, {item!r} found"
                )
            found[kind] = name
        return found


_VARIABLES = {
    "generation": "OUTLAST_GENERATION",
    "run_dir": "OUTLAST_RUN_DIR",
    "run_id": "OUTLAST_RUN_ID",
    "pulse_path": "OUTLAST_PULSE",
    "control_path": "OUTLAST_CONTROL",
    "memory_path": "OUTLAST_MEMORY",
    "permit_path": "OUTLAST_PERMIT",
    "gate_path": "OUTLAST_GATE",
    "node": "OUTLAST_NODE",
    "replaceable": "OUTLAST_REPLACEABLE",
    "failure_domains": "OUTLAST_FAILURE_DOMAINS",
    "master_addr": "MASTER_ADDR",
    "rank": "RANK",
    "local_rank": "LOCAL_RANK",
    "world_size": "WORLD_SIZE",
    "restart_count": "TORCHELASTIC_RESTART_COUNT",
    "num_warmup_iterations": "OUTLAST_WARMUP",
    "job_end_time": "SLURM_JOB_END_TIME",
    "grace_period": "OUTLAST_GRACE_PERIOD",
}


def worker_context(environment: Mapping[str, str] | None = None) -> WorkerContext:
    """Read this rank's place in the job.

    Raises:
        UsageError: a variable is not what it should be.
    """
    source = os.environ if environment is None else environment
    values: dict[str, Any] = {}
    for spec in fields(WorkerContext):
        text = source.get(_VARIABLES.get(spec.name, ""))
        if text is None:
            continue
        try:
            values[spec.name] = int(text) if str(spec.type) == "int" else text
        except ValueError:
            raise UsageError(f"{_VARIABLES[spec.name]}={text!r}: expected a whole number") from None
    values["avoid"] = tuple(filter(None, source.get("OUTLAST_AVOID", "").split(",")))
    values["checkpoints"] = json.loads(source.get("OUTLAST_CHECKPOINTS", "{}"))
    values["preemption"] = json.loads(source.get("OUTLAST_PREEMPTION", "{}"))
    values["numerics"] = json.loads(source.get("OUTLAST_NUMERICS", "{}"))
    values["tripwire"] = json.loads(source.get("OUTLAST_TRIPWIRE", "{}"))
    values["inprocess_restart"] = json.loads(source.get("OUTLAST_INPROCESS_RESTART", "{}"))
    values["rerun"] = json.loads(source.get("OUTLAST_RERUN", "{}"))
    return WorkerContext(**values)


def worker_variables(context: WorkerContext) -> dict[str, str]:
    """Return the variables that :func:`worker_context` reads, ranks aside."""
    variables = {
        _VARIABLES[name]: str(getattr(context, name))
        for name in (
            *("generation", "run_dir", "run_id", "pulse_path", "control_path", "memory_path"),
            *("permit_path", "gate_path", "node", "replaceable", "num_warmup_iterations"),
        )
    }
    variables["OUTLAST_AVOID"] = ",".join(context.avoid)
    variables["OUTLAST_CHECKPOINTS"] = json.dumps(dict(context.checkpoints))
    variables["OUTLAST_PREEMPTION"] = json.dumps(dict(context.preemption))
    variables["OUTLAST_NUMERICS"] = json.dumps(dict(context.numerics))
    variables["OUTLAST_TRIPWIRE"] = json.dumps(dict(context.tripwire))
    variables["OUTLAST_INPROCESS_RESTART"] = json.dumps(dict(context.inprocess_restart))
    variables["OUTLAST_RERUN"] = json.dumps(dict(context.rerun))
    return variables


def named_checkpoints(config: Checkpoints) -> dict[str, Any]:
    """Return the checkpoint options that differ from their defaults: what the launcher was told."""
    return _named(config, Checkpoints())


def named_preemption(config: Preemption) -> dict[str, Any]:
    """Return the options of preemption that differ from their defaults."""
    return _named(config, Preemption())


def named_numerics(config: Numerics) -> dict[str, Any]:
    """Return the options of a guard that differ from their defaults."""
    return _named(config, Numerics())


def named_tripwire(config: TripwireOptions) -> dict[str, Any]:
    """Return the tripwire's options that differ from their defaults."""
    return _named(config, TripwireOptions())


def named_inprocess_restart(config: InProcessRestart) -> dict[str, Any]:
    """Return the options of in-process restart that differ from their defaults."""
    return _named(config, InProcessRestart())


def named_rerun(config: Rerun) -> dict[str, Any]:
    """Return the options of reruns that differ from their defaults."""
    return _named(config, Rerun())


def _named(config: Any, standard: Any) -> dict[str, Any]:
    return {
        spec.name: getattr(config, spec.name)
        for spec in fields(config)
        if getattr(config, spec.name) != getattr(standard, spec.name)
    }


def checkpoints_in_force(script: Checkpoints, context: WorkerContext) -> Checkpoints:
    """Combine what the script asked for with the launcher's file, which wins."""
    return dataclasses.replace(script, **context.checkpoints)


def numerics_in_force(script: Numerics, context: WorkerContext) -> Numerics:
    """Combine what the script asked of its guard with the launcher's file, which wins."""
    return dataclasses.replace(script, **context.numerics)


def rerun_in_force(script: Rerun, context: WorkerContext) -> Rerun:
    """Combine what the script asked of its reruns with the launcher's file, which wins."""
    return dataclasses.replace(script, **context.rerun)


def inherited() -> dict[str, str]:
    """Return a copy of this process's environment."""
    return dict(os.environ)


def export(variables: Mapping[str, str]) -> None:
    """Add variables to this process's environment."""
    os.environ.update(variables)


def error_file() -> str:
    """Return where this rank leaves its exception, empty without a launcher."""
    return os.environ.get("TORCHELASTIC_ERROR_FILE", "")


def default_run_dir() -> str:
    """Return the run folder of a script that was told none."""
    return os.path.join("outlast-runs", Path(sys.argv[0]).stem or "interactive")
