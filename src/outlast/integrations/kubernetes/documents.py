"""The documents of a manifest, written and read with PyYAML, and the jobs that are in them."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outlast.errors import UsageError

# PyYAML writes what YAML 1.1 says is a text without quotes; kubectl reads 1e3 as a number, and y as true.
_PLAIN = re.compile(
    r"(?!(true|false|null|yes|no|on|off|y|n|nan|inf)$)[A-Za-z/][A-Za-z0-9_./@:-]*(?<!:)", re.I
)


_MOST_VALUES, _DEEPEST = 100_000, 64  # of a document, with its aliases written out


def _pyyaml() -> Any:
    try:
        return importlib.import_module("yaml")
    except ImportError as error:
        raise UsageError("PyYAML is needed for manifests: pip install 'outlast[k8s]'") from error


def emit(value: Mapping[str, Any]) -> str:
    """Return a document; what any reader could take for something else than a text is quoted.

    Raises:
        UsageError: PyYAML is not installed.
    """
    yaml = _pyyaml()

    class Writer(yaml.SafeDumper):  # type: ignore[name-defined,misc]  # the module is loaded when it is needed
        def ignore_aliases(self, data: Any) -> bool:
            del data
            return True

    def text(writer: Any, content: str) -> Any:
        style = None if _PLAIN.fullmatch(content) else '"'
        return writer.represent_scalar("tag:yaml.org,2002:str", content, style=style)

    Writer.add_representer(str, text)
    written: str = yaml.dump(dict(value), Dumper=Writer, sort_keys=False, width=math.inf)
    return written


@dataclass(frozen=True)
class Document:
    """One document of a file.

    Args:
        content: what it says.
        lines: the line of every mapping's key and every list's item, by path.
    """

    content: Any
    lines: Mapping[tuple[str | int, ...], int]

    def line(self, path: Sequence[str | int]) -> int:
        """Return the line of a path, or of what is nearest above it."""
        for length in range(len(path), -1, -1):
            found = self.lines.get(tuple(path[:length]))
            if found is not None:
                return found
        return 1


def read(text: str) -> list[Document]:
    """Return the documents of a file that are not empty.

    Raises:
        UsageError: it is no YAML, or PyYAML is not installed.
    """
    yaml = _pyyaml()
    try:
        found = []
        for node in yaml.compose_all(text, Loader=yaml.SafeLoader):
            if node is None:
                continue
            loader = yaml.SafeLoader("")
            lines: dict[tuple[str | int, ...], int] = {(): node.start_mark.line + 1}
            for place, line in _lines(node, ()):
                lines[place] = line
                if len(lines) > _MOST_VALUES:
                    raise UsageError(f"YAML of more than {_MOST_VALUES} values; nothing was checked")
            found.append(Document(loader.construct_document(node), lines))
        return [one for one in found if one.content is not None]
    except RecursionError as error:
        raise UsageError("YAML that is nested too deeply; nothing was checked") from error
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, ArithmeticError) as error:
        # a value that its tag does not fit, such as !!int "": PyYAML has no error of its own for that
        raise UsageError(f"no YAML: {' '.join(str(error).split())}; nothing was checked") from error


def _lines(node: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], int]]:
    """Yield the places below a node; aliases are followed."""
    if len(path) > _DEEPEST:
        raise UsageError(f"YAML that is nested more than {_DEEPEST} deep; nothing was checked")
    if node.id == "mapping":
        for key, inner in node.value:
            place = (*path, key.value if isinstance(key.value, str) else key.tag)
            yield place, key.start_mark.line + 1
            yield from _lines(inner, place)
    elif node.id == "sequence":
        for index, inner in enumerate(node.value):
            yield (*path, index), inner.start_mark.line + 1
            yield from _lines(inner, (*path, index))


Path = tuple[str | int, ...]
_SHOWN = 300  # characters of what is quoted
KINDS = ("Job", "JobSet", "TrainingRuntime", "ClusterTrainingRuntime", "TrainJob")
_RUNTIMES = ("TrainingRuntime", "ClusterTrainingRuntime")


@dataclass(frozen=True)
class Workload:
    """A job of pods.

    Args:
        kind: of the object that it is in.
        document: that object.
        above: where the object's own JobSet is; () for a plain Job.
        place: where the job's spec is.
        services: names of the headless services in the file.
        save_seconds: how long a save takes.
        trainer: what a TrainJob in the file says of its runtime's container.
    """

    kind: str
    document: Document
    above: Path
    place: Path
    services: tuple[str, ...]
    save_seconds: float
    trainer: Mapping[str, Any] = field(default_factory=dict)

    def at(self, path: Path, standard: Any = None) -> Any:
        """Return what stands at a path of the document, or the standard."""
        return value_at(self.document.content, path, standard)

    def line(self, *path: str | int) -> int:
        """Return the line of a path below the job's spec, or of what is nearest above it."""
        return self.document.line((*self.place, *path))

    @property
    def job(self) -> Mapping[str, Any]:
        """The job's spec."""
        return mapping(self.at(self.place))

    @property
    def pod(self) -> Mapping[str, Any]:
        """The pod's spec."""
        return mapping(self.at((*self.place, "template", "spec")))

    @property
    def containers(self) -> list[tuple[Path, Mapping[str, Any]]]:
        """The containers of the pod, each with its path below the job's spec."""
        found = [mapping(one) for one in sequence(self.pod.get("containers"))]
        said = {key: self.trainer[key] for key in ("command", "args") if key in self.trainer}
        return [
            (
                ("template", "spec", "containers", index),
                {**one, **(said if one.get("name") == "node" else {})},
            )
            for index, one in enumerate(found)
        ]

    @property
    def size(self) -> int:
        """The number of pods; 1 where it is not said."""
        nodes = self.at(("spec", "mlPolicy", "numNodes"), 1) if self.kind in _RUNTIMES else 1
        found = self.job.get("completions", self.job.get("parallelism", nodes))
        return found if isinstance(found, int) else 1


def mapping(value: Any) -> Mapping[str, Any]:
    """Return it if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def sequence(value: Any) -> Sequence[Any]:
    """Return it if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def value_at(content: Any, path: Path, standard: Any = None) -> Any:
    """Return what stands at a path, or the standard."""
    for part in path:
        listed = isinstance(content, list) and isinstance(part, int) and part < len(content)
        if not listed and not (isinstance(content, Mapping) and part in content):
            return standard
        content = content[part]
    return content


def workloads(documents: Sequence[Document], save_seconds: float) -> list[Workload]:
    """Return every job in the file.

    Raises:
        UsageError: there is none of a known kind, or none has pods.
    """
    objects = [(one, mapping(one.content)) for one in documents]
    kinds = [found if isinstance(found := content.get("kind"), str) else "" for _, content in objects]
    if not set(kinds) & set(KINDS):
        raise UsageError(
            f"no {', '.join(KINDS[:-1])} or {KINDS[-1]} in it, found {str(kinds)[:_SHOWN]}; nothing was"
            " checked"
        )
    services = tuple(
        _name(content)
        for _, content in objects
        if content.get("kind") == "Service" and value_at(content, ("spec", "clusterIP")) == "None"
    )
    trainers = {
        _text_at(content, ("spec", "runtimeRef", "name")): mapping(value_at(content, ("spec", "trainer")))
        for _, content in objects
        if content.get("kind") == "TrainJob"
    }
    found = [
        Workload(kind, document, above, place, services, save_seconds, trainers.get(_name(content), {}))
        for (document, content), kind in zip(objects, kinds, strict=True)
        for above, place in _places(kind, content)
    ]
    if not found:
        raise UsageError("no pods in it; a TrainJob's are in its runtime, which belongs into the same file")
    return found


def _name(content: Mapping[str, Any]) -> str:
    return _text_at(content, ("metadata", "name"))


def _text_at(content: Mapping[str, Any], path: Path) -> str:
    found = value_at(content, path)
    return found if isinstance(found, str) else ""


def _places(kind: str, content: Mapping[str, Any]) -> Iterator[tuple[Path, Path]]:
    if kind == "Job":
        yield (), ("spec",)
        return
    above: Path = ("spec",) if kind == "JobSet" else ("spec", "template", "spec")
    if kind == "JobSet" or kind in _RUNTIMES:
        for index, _ in enumerate(sequence(value_at(content, (*above, "replicatedJobs")))):
            yield above, (*above, "replicatedJobs", index, "template", "spec")


def words_of(container: Mapping[str, Any]) -> list[str]:
    """Return the container's command line."""
    return [str(word) for key in ("command", "args") for word in sequence(container.get(key))]
