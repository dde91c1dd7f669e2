"""The layouts of a job that is about to start: reads its model and asks the planner."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from outlast import files
from outlast.errors import ConfigError, UsageError
from outlast.parallelism.policy.degrees import Layout, ParallelismOptions
from outlast.parallelism.policy.elastic import Nodes, planned_layouts
from outlast.parallelism.policy.limits import PRESETS, ModelLimits, model_of_hugging_face, model_of_table
from outlast.parallelism.policy.memory import Training
from outlast.parallelism.policy.planner import Job

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_MODEL_BYTES = 1 << 20  # of a file that describes a model


def with_layouts(options: ParallelismOptions, nodes: Nodes) -> ParallelismOptions:
    """Return the options with the layouts of their model for each number of nodes.

    Args:
        options: that name a model.
        nodes: that the job may have.

    Raises:
        UsageError: there is no such model, the preferred layout is none, or the least number of nodes has no
            layout; ConfigError where the model's file is wrong.
    """
    model = read_model(options.model, options.sequence, "parallelism.model")
    training = Training(options.micro_batch, options.recompute, not options.replicated_optimizer)
    today = _preferred(options.preferred, nodes) if options.preferred else None
    fixed = frozenset(options.fixed)
    job = Job(model, options.global_batch, training, today, fixed, options.even)
    return replace(options, layouts=[dict(vars(one)) for one in planned_layouts(job, nodes)])


def _preferred(given: Mapping[str, int], nodes: Nodes) -> Layout:
    """Return the preferred layout, with as many copies as fit where it does not say how many.

    Raises:
        UsageError: the launcher cannot start it on these nodes.
    """
    each, ranks = nodes.node.devices, nodes.most * nodes.node.devices
    found = Layout(**given)
    if "dp" not in given:
        found = replace(found, dp=max(1, ranks // found.ranks))
    if each % found.tp:
        raise UsageError(f"preferred: tp {found.tp} does not divide the {each} rank(s) of a node")
    if found.ranks > ranks or found.ranks % (each * nodes.group):
        raise UsageError(
            f"preferred: found {found.ranks} ranks ({found}), expected at most {ranks}, and a multiple of"
            f" {each * nodes.group}, so that nodes are used whole"
        )
    return found


def read_model(name: str, sequence: int, option: str) -> ModelLimits:
    """Return the model of a preset, a TOML file or a Hugging Face ``config.json``.

    Args:
        name: of the preset, or path of the file; a TOML file's table [model] is read if it has one.
        sequence: tokens of a sample; 0: those of the file, which are the most that the model can take.
        option: that named it, for messages.

    Raises:
        UsageError: there is no such preset or file.
        ConfigError: the file is not readable, or fields are missing.
    """
    if name in PRESETS:
        model = PRESETS[name]
    elif Path(name).suffix in (".toml", ".json"):
        model = _model_of_file(name)
    else:
        raise UsageError(
            f"{option} {name}: no preset and no .toml or .json file; presets: {', '.join(PRESETS)}"
        )
    return replace(model, sequence=sequence) if sequence else model


def _model_of_file(name: str) -> ModelLimits:
    try:
        text = files.read_text(name, _MODEL_BYTES)
        document = json.loads(text) if name.endswith(".json") else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(name, (f"cannot be read: {error.strerror}",)) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(name, (f"cannot be parsed: {error}",)) from error
    if not isinstance(document, dict):
        raise ConfigError(name, (f"an object is expected, a {type(document).__name__} was found",))
    table = document if name.endswith(".json") else document.get("model", document)
    if not isinstance(table, dict):
        raise ConfigError(name, (f"model: a table is expected, a {type(table).__name__} was found",))
    try:
        return (model_of_hugging_face if name.endswith(".json") else model_of_table)(table, name)
    except ConfigError:
        raise
    except (ValueError, ArithmeticError) as error:  # a number of thousands of digits, or 0 heads
        raise ConfigError(name, (f"has a number that no model can have: {error}",)) from error
