"""``outlast completion``: what a shell needs to complete ``outlast`` commands, made from their parsers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from outlast.errors import ExitCode

Command = Callable[[list[str]], int]
SHELLS = ("bash", "zsh", "fish")
BELOW = (("chaos", "run"), ("health", "fit"), ("health", "ledger"))  # subcommands with parsers of their own
HIDDEN = {"slurm step"}  # what `outlast slurm supervise` starts; nobody else does
_EXAMPLES = """\
examples:
  outlast completion bash > ~/.local/share/bash-completion/completions/outlast
  outlast completion zsh > ~/.outlast.zsh     and, after compinit in ~/.zshrc: source ~/.outlast.zsh
  outlast completion fish > ~/.config/fish/completions/outlast.fish"""


@dataclass(frozen=True)
class Page:
    """What may follow a command.

    Args:
        path: the command and its subcommand, without ``outlast``.
        below: its subcommands, with their help.
        options: each spelling of an option without underscores, with its help.
        choices: of an option with a closed set of values.
    """

    path: str
    below: Mapping[str, str]
    options: Mapping[str, str]
    choices: Mapping[str, Sequence[str]]


def main(arguments: Sequence[str], commands: Mapping[str, Command]) -> int:
    """Carry out ``outlast completion ...`` and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="outlast completion",
        description="Print a script that completes commands and options in a shell.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash, zsh or fish")
    shell = parser.parse_args(arguments).shell
    found = list(pages(commands))
    sys.stdout.write(_fish(found) if shell == "fish" else _bash(found, shell == "zsh"))
    return ExitCode.OK


class _Reached(Exception):
    """Carries the parser of a command that was about to read its words."""


def parser_of(words: Sequence[str], commands: Mapping[str, Command]) -> argparse.ArgumentParser:
    """Return the parser with which a command would read its words; the command goes no further."""

    def stop(parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        raise _Reached(parser)

    kept = {name: getattr(argparse.ArgumentParser, name) for name in ("parse_args", "parse_known_args")}
    for name in kept:
        setattr(argparse.ArgumentParser, name, stop)
    try:
        commands[words[0]](list(words[1:]))
    except _Reached as reached:
        found: argparse.ArgumentParser = reached.args[0]
        return found
    finally:
        for name, function in kept.items():
            setattr(argparse.ArgumentParser, name, function)
    raise LookupError(f"outlast {' '.join(words)} reads its words without a parser")


def leaves(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield a command and its parser, and those of its subcommands."""
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, inner in action.choices.items():
                yield from leaves(f"{name} {word}", inner)


def pages(commands: Mapping[str, Command]) -> Iterator[Page]:
    """Yield what may follow ``outlast`` and each of its commands."""
    yield Page("", dict.fromkeys(commands, ""), {"--help": "", "--version": ""}, {})
    below: dict[str, dict[str, str]] = {}
    for name, word in BELOW:
        below.setdefault(name, {})[word] = ""
        yield _page(f"{name} {word}", parser_of((name, word), commands), {})
    for name in commands:
        for path, parser in leaves(name, parser_of([name], commands)):
            if path not in HIDDEN and path not in {" ".join(one) for one in BELOW}:
                yield _page(path, parser, below.get(path, {}))


def _page(path: str, parser: argparse.ArgumentParser, below: Mapping[str, str]) -> Page:
    words = dict(below)
    options: dict[str, str] = {}
    choices: dict[str, Sequence[str]] = {}
    formatter = parser._get_formatter()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            shown = {one.dest: one.help or "" for one in action._choices_actions}
            words |= {word: shown.get(word, "") for word in action.choices if f"{path} {word}" not in HIDDEN}
            continue
        names = [one for one in action.option_strings if "_" not in one]
        if action.help is not argparse.SUPPRESS:
            options |= dict.fromkeys(names, formatter._expand_help(action) if action.help else "")
        if action.choices is not None:
            taken = list(map(str, action.choices))
            choices |= dict.fromkeys(names or [""], taken)
    return Page(path, words, options, choices)


def _bash(found: Sequence[Page], zsh: bool) -> str:
    """Return a function for bash; zsh runs it through its bashcompinit."""
    two = "|".join(f'"{one.path}"' for one in found if " " in one.path)
    lines = ["autoload -U +X bashcompinit && bashcompinit"] if zsh else []
    lines += [
        "_outlast() {",
        '  local cur="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"',
        '  local path="" words="" taken=""',
        '  [ "$COMP_CWORD" -gt 1 ] && path="${COMP_WORDS[1]}"',
        '  if [ "$COMP_CWORD" -gt 2 ]; then',
        f'    case "$path ${{COMP_WORDS[2]}}" in {two}) path="$path ${{COMP_WORDS[2]}}" ;; esac',
        "  fi",
        '  case "$path" in',
    ]
    for one in found:
        options, free = " ".join(one.options), " ".join(_free(one))
        lines.append(f'    "{one.path}") words="{options}"; taken="{free}" ;;')
    lines += ["  esac", '  case "$path $before" in']
    for one in found:
        for option, values in one.choices.items():
            if option:
                lines.append(f'    "{one.path} {option}") words=""; taken="{" ".join(values)}" ;;')
    lines += [
        "  esac",
        '  case "$cur" in -*) taken="$words" ;; esac',
        '  COMPREPLY=($(compgen -W "$taken" -- "$cur"))',
        "}",
        "complete -o default -F _outlast outlast",
    ]
    return "\n".join(lines) + "\n"


def _free(one: Page) -> Sequence[str]:
    """Return the words that may stand where no option does; none: files are completed."""
    return [*one.below, *one.choices.get("", ())]


def _fish(found: Sequence[Page]) -> str:
    lines = ["complete -c outlast -e"]
    for one in found:
        words = one.path.split()
        where = " and ".join(f"__fish_seen_subcommand_from {word}" for word in words)
        where = where.replace(" and ", "; and ") or "__fish_use_subcommand"
        start = f"complete -c outlast -n {_quoted(where)}"
        below = f"{where}; and not __fish_seen_subcommand_from {' '.join(one.below)}" if words else where
        for word in _free(one):
            told = f" -d {_quoted(one.below[word])}" if one.below.get(word) else ""
            lines.append(
                f"complete -c outlast -n {_quoted(below if one.below else where)} -f -a {word}{told}"
            )
        for option, text in one.options.items():
            kind = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            taken = f" -x -a {_quoted(' '.join(one.choices[option]))}" if option in one.choices else ""
            lines.append(f"{start} {kind}{taken}" + (f" -d {_quoted(text)}" if text else ""))
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    escaped = " ".join(text.split()).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
