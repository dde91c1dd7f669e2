"""The only reader of the environment and of configuration files.

Order of precedence: a flag, then a ``PET_*`` variable, then the file, then the default. The file is TOML, or
YAML as NVRx's ft_launcher reads it.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import importlib
import itertools
import json
import logging
import math
import os
import re
import stat
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from outlast.config import (
    CheckpointOptions,
    Config,
    FaultToleranceOptions,
    HealthOptions,
    InProcessOptions,
    NumericsOptions,
    ParallelismOptions,
    PreemptionOptions,
    RerunOptions,
    StragglerOptions,
    TripwireOptions,
)
from outlast.errors import ConfigError, UsageError

TOKEN_VARIABLE, TOKEN_FILE_VARIABLE = "OUTLAST_TOKEN", "OUTLAST_TOKEN_FILE"
LAUNCHER_VARIABLE = "OUTLAST_LAUNCHER"  # in the environment of workers: which launcher has started them
_CONFIG_BYTES = 1 << 20
_MOST_VALUES = 1 << 16
_MOST_BITS, _SHOWN = 1000, 300  # of a number, and characters of what is quoted
_YAML_SECTION = re.compile(r"^\w+:\s*(#.*)?$", re.MULTILINE)  # no line of TOML is like that

Options = TypeVar("Options")  # one of the classes below
TABLES: Mapping[str, type] = {
    "fault_tolerance": FaultToleranceOptions,
    "checkpoints": CheckpointOptions,
    "preemption": PreemptionOptions,
    "numerics": NumericsOptions,
    "tripwire": TripwireOptions,
    "inprocess_restart": InProcessOptions,
    "rerun": RerunOptions,
    "stragglers": StragglerOptions,
    "health": HealthOptions,
    "parallelism": ParallelismOptions,
}


def load_config(path: str | os.PathLike[str] | None, overrides: Mapping[str, object]) -> Config:
    """Return the configuration of a run, complete and checked.

    Args:
        path: a TOML or YAML file with the tables of :class:`Config`; None: defaults only.
        overrides: values of ``fault_tolerance`` from the command line; they win.

    Raises:
        ConfigError: everything that is wrong, each with the path of its key.
    """
    document: dict[str, Any] = {} if path is None else _read(Path(path))
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
    config = Config(**tables)
    problems = [*config.problems(), *_timeouts_of_zero(config.fault_tolerance)]
    if problems:
        raise ConfigError(str(path) if path is not None else "command line", tuple(problems))
    return config


def _timeouts_of_zero(config: FaultToleranceOptions) -> list[str]:
    names = (
        *("initial_rank_heartbeat_timeout", "rank_heartbeat_timeout", "rank_out_of_section_timeout"),
        "busy_rank_timeout",
    )
    return [
        f"fault_tolerance.{name}: 0 would take every rank for hung; inf (off, as a flag) watches nothing"
        for name in names
        if getattr(config, name) == 0
    ]


def _read(path: Path) -> dict[str, Any]:
    """Parse a file as TOML, or as YAML if its name or content says so."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    text = _text_of(path)
    try:
        if path.suffix in (".yaml", ".yml"):
            return _parse_yaml(path, text)
        try:
            document: dict[str, Any] = tomllib.loads(text)
            if large := _too_large(document):
                raise ConfigError(str(path), (f"has a number of {large} bits, too large for any option",))
        except ValueError as error:  # TOMLDecodeError, or a number of too many digits
            if path.suffix != ".toml" and _YAML_SECTION.search(text):
                return _parse_yaml(path, text)
            raise ConfigError(str(path), (f"is no TOML: {error}",)) from error
        return document
    except RecursionError as error:
        raise ConfigError(str(path), ("is nested too deeply",)) from error


def _text_of(path: Path) -> str:
    """Return the text of a small regular file; reading a FIFO or a device might never end.

    Raises:
        ConfigError: it is not, or cannot be read.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(str(path), ("is no regular file",))
            found = file.read(_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError(str(path), (f"cannot be read: {error.strerror}",)) from error
    if len(found) > _CONFIG_BYTES:
        raise ConfigError(
            str(path), (f"is longer than {_CONFIG_BYTES >> 10} KiB, too long for a configuration",)
        )
    try:
        return found.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), (f"is not UTF-8, which TOML and YAML have to be: {error}",)) from error


def _parse_yaml(path: Path, text: str) -> dict[str, Any]:
    """Return the tables of a YAML file; a null stands for the default, as it does in NVRx's files."""
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        cure = "pip install 'outlast[nvrx]', or write the same keys as TOML"
        raise ConfigError(str(path), (f"is YAML, and PyYAML is not installed; {cure}",)) from None
    try:
        if _values(yaml.compose(text, yaml.SafeLoader), {}) > _MOST_VALUES:
            raise ConfigError(
                str(path), (f"is YAML whose aliases stand for more than {_MOST_VALUES} values",)
            )
        document = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, ArithmeticError) as error:
        # a value that its tag does not fit, such as !!int "": PyYAML has no error of its own for that
        raise ConfigError(str(path), (f"is no YAML: {' '.join(str(error).split())}",)) from error
    if large := _too_large(document):
        raise ConfigError(str(path), (f"has a number of {large} bits, too large for any option",))
    if document is not None and not isinstance(document, dict):
        raise ConfigError(str(path), (f"is YAML, but no map of sections: found {repr(document)[:_SHOWN]}",))
    found: dict[str, Any] = _without_nulls(document or {})
    return found


def _too_large(value: object) -> int:
    """Return how many bits the first number has that is too large to be shown; 0: there is none."""
    if isinstance(value, int):
        return value.bit_length() if value.bit_length() > _MOST_BITS else 0
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return next(filter(None, map(_too_large, inner)), 0)


def _values(node: Any, known: dict[int, int]) -> int:
    """Return how many values a composed YAML document has, with its aliases written out."""
    inner = getattr(node, "value", ())
    if isinstance(inner, str) or not inner:
        return 1
    if id(node) not in known:
        known[id(node)] = 1  # an alias within its own anchor
        below = itertools.chain.from_iterable(one if isinstance(one, tuple) else (one,) for one in inner)
        known[id(node)] += sum(_values(one, known) for one in below)
    return known[id(node)]


def _without_nulls(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {str(name): _without_nulls(one) for name, one in value.items() if one is not None}


_OF_KEMPNERFORGE = {  # what its tables with options of resilience are here; "checkpoint" is close to ours
    "train": (
        "; in KempnerForge's file it has shutdown_timeout_sec, here timeout_sec in [preemption];"
        " nccl_health_check_interval is not needed, since a silent rank is found without it; the rest stays"
        " in that file, for its script"
    ),
    "distributed": (
        "; in KempnerForge's file it has nccl_timeout_sec, which stays there: torch's own"
        " init_process_group(timeout=...)"
    ),
}


def _unknown_keys(document: Mapping[str, Any]) -> list[str]:
    found = [
        f"{name}: unknown table{_OF_KEMPNERFORGE.get(name) or _near(name, TABLES)}"
        for name in document
        if name not in TABLES
    ]
    for name, kind in TABLES.items():
        table = document.get(name, {})
        if not isinstance(table, dict):
            found.append(f"{name}: found {table!r}, expected a table")
            continue
        known = [spec.name for spec in fields(kind)]
        found += [f"{name}.{key}: unknown key{_near(key, known)}" for key in table if key not in known]
    return found


def _near(word: str, known: Iterable[str], tell: bool = True) -> str:
    """Name the closest known word; where there is none, all of them if they are few enough to tell."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; known are {', '.join(names)}" if tell else ""


def _type_problems(document: Mapping[str, Any]) -> list[str]:
    from outlast.codec import (
        Malformed,
        convert,
    )  # msgspec takes a while to import, and most jobs have no file

    found: list[str] = []
    for name, kind in TABLES.items():
        table = document.get(name)
        types = get_type_hints(kind)
        for key, value in table.items() if isinstance(table, dict) else ():
            if key not in types:
                continue
            several = isinstance(value, dict) and get_origin(types[key]) is dict
            inner = {f".{each}": one for each, one in value.items()} if several else {"": value}
            for place, one in inner.items():
                try:
                    convert(one, get_args(types[key])[1] if several else types[key])
                except Malformed as error:
                    expected = str(error).partition(", got")[0]
                    found.append(f"{name}.{key}{place}: found {one!r}, {expected}")
    return found


@dataclass(frozen=True)
class WorkerContext:
    """A rank's place in the job, as its environment says.

    Without a launcher every text is empty and the rank is 0 of 1; under torchrun only the
    ranks are known.
    """

    rank: int = 0
    local_rank: int = 0
    local_world_size: int = 0  # 0: not said
    world_size: int = 1
    generation: int = 0
    restart_count: int = 0
    run_dir: str = ""
    run_id: str = ""
    heartbeat_path: str = ""
    control_path: str = ""
    memory_path: str = ""
    lease_path: str = ""
    gate_path: str = ""
    credentials_path: str = ""  # of a file with what this node proves to others
    token_file: str = ""  # without a launcher: of a file with the token that all nodes know
    token: str = dataclasses.field(default="", repr=False)  # likewise: the token itself
    node: str = ""
    replaceable: int = 0  # 1: a spare may take this node's place, or the job may go on without it
    failure_domains: str = ""
    parallelism: str = ""  # the layout of this generation; empty: the launcher knows none
    master_addr: str = ""
    store_host: str = ""  # address of the node of rank 0; MASTER_ADDR is as the user wrote it
    avoid: tuple[str, ...] = ()
    fault_tolerance: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    checkpoints: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    preemption: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    numerics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tripwire: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    inprocess_restart: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rerun: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    stragglers: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    job_end_time: int = 0
    grace_period: int = 0
    num_warmup_iterations: int = FaultToleranceOptions.num_warmup_iterations
    warm_imports: int = 0  # 1: ranks list what they import

    @property
    def launched(self) -> bool:
        """Whether ``outlast run`` started this rank."""
        return bool(self.run_id)

    @property
    def domains(self) -> dict[str, str]:
        """The failure domains of this node; raises as :func:`failure_domains` does."""
        return failure_domains(self.failure_domains)


def failure_domains(text: str) -> dict[str, str]:
    """Return the failure domains of a node by kind, as ``OUTLAST_FAILURE_DOMAINS`` says them.

    Raises:
        UsageError: the text is no list like "rack=r7,power=f2".
    """
    found: dict[str, str] = {}
    for item in filter(None, text.split(",")):
        kind, equals, name = item.partition("=")
        if not (kind and equals and name) or kind in found:
            raise UsageError(
                f"OUTLAST_FAILURE_DOMAINS={text!r}: found {item!r}, expected a list like rack=r7,power=f2"
                " with each kind once"
            )
        found[kind] = name
    return found


_VARIABLES = {
    "generation": "OUTLAST_GENERATION",
    "run_dir": "OUTLAST_RUN_DIR",
    "run_id": "OUTLAST_RUN_ID",
    "heartbeat_path": "OUTLAST_HEARTBEAT_PAGE",
    "control_path": "OUTLAST_CONTROL",
    "memory_path": "OUTLAST_MEMORY",
    "lease_path": "OUTLAST_LEASE",
    "gate_path": "OUTLAST_GATE",
    "credentials_path": "OUTLAST_CREDENTIALS",
    "token_file": TOKEN_FILE_VARIABLE,
    "token": TOKEN_VARIABLE,
    "node": "OUTLAST_NODE",
    "replaceable": "OUTLAST_REPLACEABLE",
    "failure_domains": "OUTLAST_FAILURE_DOMAINS",
    "parallelism": "OUTLAST_PARALLELISM",
    "master_addr": "MASTER_ADDR",
    "store_host": "OUTLAST_STORE_HOST",
    "rank": "RANK",
    "local_rank": "LOCAL_RANK",
    "local_world_size": "LOCAL_WORLD_SIZE",
    "world_size": "WORLD_SIZE",
    "restart_count": "TORCHELASTIC_RESTART_COUNT",
    "num_warmup_iterations": "OUTLAST_WARMUP",
    "warm_imports": "OUTLAST_WARM_IMPORTS",
    "job_end_time": "OUTLAST_JOB_END_TIME",
    "grace_period": "OUTLAST_GRACE_PERIOD",
}
_OPTIONS_OF_RANKS = {
    table: f"OUTLAST_{table.upper()}"
    for table in (
        *("fault_tolerance", "checkpoints", "preemption", "numerics", "tripwire", "inprocess_restart"),
        *("rerun", "stragglers"),
    )
}


def worker_context(environment: Mapping[str, str] | None = None) -> WorkerContext:
    """Read this rank's place in the job.

    Raises:
        UsageError: a variable is not what it should be.
    """
    source = os.environ if environment is None else environment
    values: dict[str, Any] = {}
    for spec in fields(WorkerContext):
        name = _VARIABLES.get(spec.name, "")
        if spec.name == "job_end_time" and name not in source:
            name = "SLURM_JOB_END_TIME"
        text = source.get(name)
        if text is None:
            continue
        try:
            values[spec.name] = int(text) if str(spec.type) == "int" else text
        except ValueError:
            raise UsageError(f"{name}={text!r}: expected a whole number") from None
    values["avoid"] = tuple(filter(None, source.get("OUTLAST_AVOID", "").split(",")))
    for table, variable in _OPTIONS_OF_RANKS.items():
        values[table] = json.loads(source.get(variable, "{}"))
    return WorkerContext(**values)


def under_launcher() -> bool:
    """Return whether ``outlast run`` started this process; other variables are not read."""
    return _VARIABLES["heartbeat_path"] in os.environ


def unreadable_numbers(environment: Mapping[str, str]) -> list[str]:
    """Return a line for each variable of the user that a rank could not read as a number."""
    found = []
    for name in ("OUTLAST_GRACE_PERIOD", "OUTLAST_JOB_END_TIME", "SLURM_JOB_END_TIME"):
        try:
            worker_context({name: environment[name]} if name in environment else {})
        except UsageError as error:
            found.append(str(error))
    return found


def worker_variables(context: WorkerContext) -> dict[str, str]:
    """Return the variables that :func:`worker_context` reads, ranks aside."""
    variables = {
        _VARIABLES[name]: str(getattr(context, name))
        for name in (
            *("generation", "run_dir", "run_id", "heartbeat_path", "control_path", "memory_path"),
            *("lease_path", "gate_path", "credentials_path", "node", "replaceable", "num_warmup_iterations"),
            *("store_host", "parallelism", "warm_imports"),
        )
    }
    variables["OUTLAST_AVOID"] = ",".join(context.avoid)
    for table, variable in _OPTIONS_OF_RANKS.items():
        variables[variable] = json.dumps(dict(getattr(context, table)))
    return variables


def allocation_variables(ends: float, grace: float) -> dict[str, str]:
    """Return the variables that tell ranks what a scheduler grants.

    Args:
        ends: when it ends the job, seconds since the epoch; infinite: not known.
        grace: seconds from its signal to the kill; 0: not known.
    """
    found = {} if math.isinf(ends) else {_VARIABLES["job_end_time"]: f"{ends:.0f}"}
    return {**found, **({_VARIABLES["grace_period"]: f"{grace:.0f}"} if grace else {})}


def changed(options: object) -> dict[str, Any]:
    """Return the options of one class that differ from their defaults."""
    standard = type(options)()
    return {
        spec.name: getattr(options, spec.name)
        for spec in fields(options)  # type: ignore[arg-type]  # every class of TABLES is a dataclass
        if getattr(options, spec.name) != getattr(standard, spec.name)
    }


def options_of_ranks(config: Config) -> dict[str, Any]:
    """Return by table what the ranks are told: the options that differ from their defaults."""
    return {table: changed(getattr(config, table)) for table in _OPTIONS_OF_RANKS}


def in_force(script: Options, table: str, context: WorkerContext) -> Options:
    """Combine what a script asked for with the launcher's configuration file, which wins.

    Where both name an option and differ, rank 0 logs once which value is used.
    """
    told: Mapping[str, Any] = getattr(context, table)
    asked = changed(script)
    for name in sorted(told.keys() & asked.keys()):
        if told[name] != asked[name] and context.rank == 0:
            _log_once(
                f"[{table}] {name} = {told[name]!r} of the launcher's configuration is used;"
                f" the script asks for {asked[name]!r}"
            )
    combined: Options = dataclasses.replace(script, **told)  # type: ignore[type-var]  # likewise
    return combined


@functools.cache
def _log_once(text: str) -> None:
    logging.getLogger("outlast").warning(text)


FOR_USERS = frozenset(
    ("OUTLAST_NODE", "OUTLAST_FAILURE_DOMAINS", TOKEN_VARIABLE, TOKEN_FILE_VARIABLE, "OUTLAST_GRACE_PERIOD")
)
_OF_RANKS = frozenset(
    (
        *(name for name in _VARIABLES.values() if name.startswith("OUTLAST_")),
        "OUTLAST_AVOID",
        LAUNCHER_VARIABLE,
        *_OPTIONS_OF_RANKS.values(),
    )
)
_OF_TESTS = "OUTLAST_TEST_"


def unknown_variables(environment: Mapping[str, str], options: Iterable[str]) -> list[str]:
    """Return a line for each ``OUTLAST_*`` and ``PET_*`` variable that is not read.

    Variables that a launcher sets for its ranks are known, because a rank may start a launcher.

    Args:
        environment: of the launcher.
        options: names of the command line's options, with underscores.
    """
    pets = frozenset(f"PET_{name.upper()}" for name in options)
    found = []
    for name in sorted(environment):
        if name.startswith(_OF_TESTS) or name in pets | FOR_USERS | _OF_RANKS:
            continue
        if name.startswith("PET_"):
            found.append(f"{name}: there is no such option{_near(name, pets, tell=False)}; it has no effect")
        elif name.startswith("OUTLAST_"):
            found.append(f"{name}: nothing reads it{_near(name, FOR_USERS)}; it has no effect")
    return found


def inherited() -> dict[str, str]:
    """Return a copy of this process's environment."""
    return dict(os.environ)


def in_pod() -> bool:
    """Say whether this process runs in a pod of Kubernetes."""
    return "KUBERNETES_SERVICE_HOST" in os.environ


def variables() -> dict[bytes, bytes]:
    """Return the storage of ``os.environ``."""
    found: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]
    return found


def keep_variables_in(store: dict[bytes, bytes]) -> None:
    """Make another dictionary the storage of ``os.environ``, which sees reads and writes."""
    os.environ._data = store  # type: ignore[attr-defined]
    os.environb._data = store  # type: ignore[attr-defined]


def replace_environment(variables: Mapping[str, str]) -> None:
    """Make this process's environment exactly these variables."""
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


def export(variables: Mapping[str, str]) -> None:
    """Add variables to this process's environment."""
    os.environ.update(variables)


def withdraw_token() -> None:
    """Remove the job's token from this process's environment, which every child inherits."""
    os.environ.pop(TOKEN_VARIABLE, None)


EXITING = ".exiting"  # ends the name of a file beside the error file: the rank ends with an error code


def error_file() -> str:
    """Return the path of this rank's error file; "": there is no launcher."""
    return os.environ.get("TORCHELASTIC_ERROR_FILE", "")


def default_run_dir() -> str:
    """Return the run folder of a script that names none.

    Raises:
        UsageError: the script comes from standard input, and nothing tells it from others.
    """
    program = sys.argv[0]
    if program == "-":
        raise UsageError(
            "outlast.start: the script comes from standard input, so no name tells its run from others: name"
            ' the run folder, outlast.start("my-run")'
        )
    if program == "-c":
        code = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]  # with the interpreter's options
        return os.path.join("outlast-runs", name_of_code("\0".join(code)))
    return os.path.join("outlast-runs", Path(program).stem or "interactive")


def name_of_code(code: str) -> str:
    """Return the name of the run folder of code that stands on the command line."""
    return f"code-{hashlib.sha256(code.encode(errors='surrogateescape')).hexdigest()[:8]}"
