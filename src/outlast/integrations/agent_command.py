"""What the command lines of the schedulers have in common: the part behind ``--``, which is outlast run's."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence

from outlast.errors import UsageError
from outlast.launcher.command import node_options
from outlast.launcher.command.parser import make_parser, refuse_unknown

FLUSH = 30.0  # seconds of the lead that are kept for what follows the ranks' end
SHORTEST_LEAD = 60.0
OURS = (
    *("--nnodes", "--spares", "--node-rank", "--standalone", "--run-dir", "--token-file"),
    *("--rdzv-id", "--rdzv-endpoint", "--rdzv-backend", "--master-addr", "--master-port"),
)
_STOP_OPTIONS = ("--ft-workers-stop-timeout", "--shutdown-timeout")


def carry_out(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> int:
    """Parse what stands before ``--``, and carry it out with the words behind it; return the exit code.

    Raises:
        OutlastError: it cannot be done; each kind has its exit code.
    """
    given = list(arguments)
    cut = given.index("--") if "--" in given else len(given)
    options = parser.parse_args(given[:cut])
    do: Callable[[argparse.Namespace, list[str]], int] = options.carry_out
    return do(options, given[cut + 1 :])


def parse_command(
    command: Sequence[str],
    environment: Mapping[str, str],
    check: Callable[[argparse.Namespace, list[str]], None] = lambda _given, _problems: None,
) -> argparse.Namespace:
    """Return what the user's part of ``outlast run``'s command line says; ``script_at``: where the script is.

    Args:
        command: the words.
        environment: of the job; ``PET_*`` variables are defaults.
        check: adds what else is wrong to the problems.

    Raises:
        UsageError: there is no script, or an option is unknown or malformed.
    """
    if not command:
        raise UsageError("nothing to run: give outlast run's command line after --, as in -- train.py")
    parser = make_parser(environment)
    refuse_unknown(command, parser)
    given = parser.parse_args(list(command))
    check(given, parser.problems)
    if parser.problems:
        raise UsageError(
            "\n".join(["the command line cannot be carried out; nothing was done", *parser.problems])
        )
    given.script_at = len(command) - len(given.training_script_args) - 1
    return given


def node_range(text: str) -> tuple[int, int]:
    """Return the fewest and the most nodes of ``N`` or ``MIN:MAX``.

    Raises:
        UsageError: it is neither.
    """
    problems: list[str] = []
    found = node_options.node_range(text, problems)
    if problems:
        raise UsageError(f"{problems[0]}; nothing was done")
    return found


def option_names(words: Sequence[str]) -> set[str]:
    """Return the names of the options among the words, as they are written with hyphens."""
    return {word.partition("=")[0].replace("_", "-") for word in words if word.startswith("-")}


def given_twice(words: Sequence[str], who: str) -> Iterator[str]:
    """Yield a line for each option of the user that a scheduler's command gives itself.

    Args:
        words: the user's, without the script's.
        who: gives them.
    """
    for name in sorted(option_names(words)):
        ours = [one for one in OURS if name.startswith("--") and one.startswith(name)]
        if ours:
            yield f"{name}: {who} gives {ours[0]} itself; it cannot be given twice"


def with_stop_timeout(command: Sequence[str], script_at: int, lead: float) -> tuple[str, ...]:
    """Give the ranks the lead to save in, where the command line says nothing else.

    Args:
        command: the command line of ``outlast run``.
        script_at: where the script stands in it; what follows are the script's own words.
        lead: seconds from SIGTERM to the time limit.
    """
    options = command[:script_at]
    if option_names(options) & set(_STOP_OPTIONS):
        return tuple(command)
    return (*options, f"{_STOP_OPTIONS[0]}={lead - FLUSH:.0f}", *command[script_at:])
