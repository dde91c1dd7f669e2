"""How a table of options is read from words and variables, with every problem at once.

argparse cuts the words into options, script and the script's own arguments, so that this is done
exactly as under torchrun: options end at the script, unambiguous abbreviations are understood. What
the texts mean is decided here, because argparse stops at the first one that is wrong.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn

_HELP_COLUMN = 34


class Kind(Enum):
    """How an option takes its value."""

    VALUE = "--name VALUE"
    SWITCH = "--name"
    TOGGLE = "--name or --no-name"
    LIST = "--name VALUE, several times"


@dataclass(frozen=True)
class Option:
    """One option of the command line.

    Args:
        name: the spelling with dashes; the one with underscores is derived from it.
        help: half a sentence for ``--help``; "" hides the option there.
        read: makes the value from its text; a ValueError says what is wrong with it.
        default: the value when neither words nor variables name one.
        kind: how the value is taken.
        also: further spellings, with their leading dashes.
        variables: where a default may come from, the first one that is set; None: ``PET_<NAME>``.
    """

    name: str
    help: str
    read: Callable[[str], Any] = str
    default: Any = None
    kind: Kind = Kind.VALUE
    also: tuple[str, ...] = ()
    variables: tuple[str, ...] | None = None

    @property
    def dest(self) -> str:
        """The name of the value."""
        return self.name.replace("-", "_")

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every way to write it; NVRx's documents mix both styles: ``--ft-rank_section_timeouts``."""
        found = [f"--{self.name}", f"--{self.dest}"]
        if self.name.startswith("ft-"):
            found.append(f"--ft-{self.name[3:].replace('-', '_')}")
        return tuple(dict.fromkeys([*self.also, *found]))

    def text_in(self, environment: Mapping[str, str]) -> tuple[str, str] | None:
        """Return the variable that gives a default, with its text."""
        names = (f"PET_{self.dest.upper()}",) if self.variables is None else self.variables
        return next(((name, environment[name]) for name in names if name in environment), None)


class Unreadable(Exception):
    """argparse could not cut the words into options and a script."""


class Parser(argparse.ArgumentParser):
    """argparse with the table's help, and exceptions in place of an exit.

    Args:
        usage: the first line of the help.
        groups: a title for each table of options.
    """

    def __init__(self, usage: str, groups: Mapping[str, Sequence[Option]]) -> None:
        super().__init__(usage=usage, argument_default=argparse.SUPPRESS)
        self.groups = groups
        for option in (one for options in groups.values() for one in options):
            self.add_argument(*option.spellings, dest=option.dest, **_ACTIONS[option.kind])
        self.add_argument("training_script")
        self.add_argument("training_script_args", nargs=argparse.REMAINDER)

    def error(self, message: str) -> NoReturn:
        """Leave the reporting to the caller, who knows of more problems."""
        raise Unreadable(message)

    def format_help(self) -> str:
        """Return the table; the spelling with underscores goes without saying."""
        lines = [
            f"usage: {self.usage}",
            "",
            "Each option is also taken with underscores, and from PET_<NAME>.",
        ]
        for title, options in self.groups.items():
            shown = [option for option in options if option.help]
            lines += ["", f"{title}:"] if shown else []
            for option in shown:
                short = [word for word in option.also if not word.startswith("--")]
                words = ", ".join([*short, f"--{option.name}"])
                lines.append(f"  {words:<{_HELP_COLUMN}} {option.help}")
        return "\n".join(lines) + "\n"

    def unknown(self, words: Sequence[str]) -> Iterator[str]:
        """Yield a line for each unknown option before the script, with the closest known one."""
        place = 0
        while place < len(words):
            word = words[place]
            place += 1
            if not word.startswith("-") or word in ("-", "--") or word[1:2].isdigit():
                return
            action, attached = self._action_of(word)
            if action is None:
                yield f"{word.partition('=')[0]}: unknown option{self._close_to(word.partition('=')[0])}"
                if "=" not in word and place < len(words) and not words[place].startswith("-"):
                    return  # its value or the script: nobody can tell
            elif action.nargs is None and not attached:
                place += 1

    def _action_of(self, word: str) -> tuple[argparse.Action | None, bool]:
        """Return what an option word stands for, and whether its value is attached to it."""
        known = self._option_string_actions
        if not word.startswith("--"):
            for at, letter in enumerate(word[1:], 1):
                action = known.get(f"-{letter}")
                if action is None or action.nargs is None or at == len(word) - 1:
                    return action, at < len(word) - 1
        name, equals, _ = word.partition("=")
        if name in known:
            return known[name], bool(equals)
        return next((known[one] for one in known if one.startswith(name)), None), bool(equals)

    def _close_to(self, name: str) -> str:
        import difflib

        words = {one.name for options in self.groups.values() for one in options if one.help}
        wanted = name.lstrip("-").replace("_", "-")
        close = difflib.get_close_matches(wanted, sorted(words), n=1)
        return f"; did you mean --{close[0]}?" if close else "; outlast run --help lists them"


_ACTIONS: Mapping[Kind, Mapping[str, Any]] = {
    Kind.VALUE: {},
    Kind.SWITCH: {"action": "store_true"},
    Kind.TOGGLE: {"action": argparse.BooleanOptionalAction},
    Kind.LIST: {"action": "append"},
}


class Values:
    """What the words and the variables say, read; what could not be read is in ``problems``.

    Args:
        parser: the tables.
        words: the command line.
        environment: variables that give defaults; a word always wins.
    """

    def __init__(self, parser: Parser, words: Sequence[str], environment: Mapping[str, str]) -> None:
        self.problems = list(parser.unknown(words))
        self.script = ""
        self.script_args: tuple[str, ...] = ()
        self._values: dict[str, Any] = {}
        self._origins: dict[str, str] = {}
        namespace = argparse.Namespace()
        try:
            parser.parse_args(list(words), namespace)
        except Unreadable as error:
            if not self.problems:
                missing = "training_script" in str(error)
                self.problems.append(f"no training script: {parser.usage}" if missing else str(error))
        found = vars(namespace)
        if not self.problems:
            self.script, self.script_args = found["training_script"], tuple(found["training_script_args"])
        for option in (one for options in parser.groups.values() for one in options):
            self._take(option, found, environment)

    def _take(self, option: Option, found: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        """Read one option from where it is given."""
        self._values[option.dest] = option.default
        if option.dest in found:
            given, origin = found[option.dest], f"--{option.name}"
        else:
            variable = option.text_in(environment)
            if variable is None:
                return
            origin, given = variable
        try:
            self._values[option.dest] = _READERS[option.kind](option, given)
            self._origins[option.dest] = origin
        except ValueError as error:
            self.problems.append(
                f"{origin}={given}: {error}" if isinstance(given, str) else f"{origin}: {error}"
            )

    def __getitem__(self, dest: str) -> Any:
        return self._values[dest]

    def given(self, dest: str) -> bool:
        """Say whether a word or a variable named the option, and could be read."""
        return dest in self._origins

    def origin(self, dest: str) -> str:
        """Return the word or the variable that named the option."""
        return self._origins[dest]

    def refuse(self, dest: str, why: str) -> None:
        """Note that an option cannot be carried out together with the others."""
        self.problems.append(f"{self._origins[dest]}: {why}")


def _switched(option: Option, given: Any) -> bool:
    """Read a switch; a variable holds a number, as torchrun's ``check_env`` has it."""
    option.read("")
    try:
        return bool(int(given))
    except ValueError:
        raise ValueError("expected 1 or 0") from None


def _listed(option: Option, given: Any) -> tuple[Any, ...]:
    """Read an option that may be given several times; a variable separates with commas."""
    entries = given.split(",") if isinstance(given, str) else given
    return tuple(option.read(entry) for entry in entries if entry)


_READERS: Mapping[Kind, Callable[[Option, Any], Any]] = {
    Kind.VALUE: lambda option, given: option.read(given),
    Kind.SWITCH: _switched,
    Kind.TOGGLE: _switched,
    Kind.LIST: _listed,
}
