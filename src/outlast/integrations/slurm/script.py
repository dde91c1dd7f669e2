"""A batch file taken apart: its ``#SBATCH`` lines, and its commands with what joins them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

_OPERATORS = {";", "&&", "||", "|", "|&", "&", "(", ")", "{", "}", ";;"}
_KEYWORDS = {"if", "then", "else", "elif", "do", "while", "until", "!", "time"}
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")
_SHORT = {"-N": "nodes", "-n": "ntasks", "-t": "time", "-o": "output", "-e": "error", "-c": "cpus-per-task"}
_WITHOUT_VALUE = {"requeue", "no-requeue", "exclusive", "hold"}
_LAUNCHERS = {"torchrun", "ft_launcher", "dlrover-run", "torch.distributed.run", "torch.distributed.launch"}
_STEPS = {"srun", "mpirun", "mpiexec"}
_NOT_TRAINING = {"pip", "venv", "compileall", "ensurepip"}


@dataclass(frozen=True)
class Directive:
    """One option of an ``#SBATCH`` line, by its long name."""

    line: int
    name: str
    value: str


@dataclass(frozen=True)
class Command:
    """One simple command.

    Args:
        line: where it begins, from 1.
        words: without assignments and keywords in front.
        variables: assignments in front of it, or alone.
        after: the operator that follows; empty at the end of a line.
        then: the words of the command behind that operator.
        in_condition: its status is asked for by ``if``, ``while``, ``until`` or ``!``.
    """

    line: int
    words: tuple[str, ...]
    variables: tuple[str, ...] = ()
    after: str = ""
    then: tuple[str, ...] = ()
    in_condition: bool = False

    @property
    def program(self) -> str:
        """The name of the program, without ``exec`` and its path; empty for a mere assignment."""
        words = self.words[1:] if self.words[:1] == ("exec",) else self.words
        return words[0].rsplit("/", 1)[-1] if words else ""

    @property
    def replaces_the_shell(self) -> bool:
        """Say whether the shell becomes this program."""
        return self.words[:1] == ("exec",) and len(self.words) > 1

    @property
    def is_step(self) -> bool:
        """Say whether it starts a step on the allocated nodes."""
        return self.program in _STEPS

    @property
    def launcher(self) -> str:
        """The launcher of ranks that it starts, by itself or through ``srun``; empty: none."""
        names = [word.rsplit("/", 1)[-1] for word in self.words]
        for name, following in zip(names, [*names[1:], ""], strict=False):
            if name in _LAUNCHERS or (name == "accelerate" and following == "launch"):
                return name
            if name == "outlast" and following == "run":
                return "outlast run"
        return ""

    @property
    def is_training(self) -> bool:
        """Say whether it looks like what the job is for."""
        if self.is_step or self.launcher:
            return True
        words = self.words[1:] if self.replaces_the_shell else self.words
        if not re.fullmatch(r"python[\d.]*", self.program):
            return False
        rest = words[1:]
        if "-m" in rest:
            return "".join(rest[rest.index("-m") + 1 :][:1]) not in _NOT_TRAINING
        return any(word.endswith(".py") for word in rest)

    def option(self, *names: str) -> str | None:
        """Return the value of an option, "" for a switch, None where it is not given."""
        for at, word in enumerate(self.words):
            name, equals, value = word.partition("=")
            if name in names:
                following = self.words[at + 1] if at + 1 < len(self.words) else ""
                return value if equals else ("" if following.startswith("-") else following)
        return None


@dataclass(frozen=True)
class Script:
    """A batch file.

    Args:
        text: all of it.
        directives: in their order; the last of a name counts.
        late: ``#SBATCH`` lines that stand behind the first command.
        commands: in their order.
    """

    text: str
    directives: tuple[Directive, ...]
    late: tuple[int, ...]
    commands: tuple[Command, ...]

    def directive(self, name: str) -> Directive | None:
        """Return the directive in force."""
        return next((one for one in reversed(self.directives) if one.name == name), None)

    @cached_property
    def training(self) -> tuple[Command, ...]:
        """The commands that the job is for."""
        return tuple(command for command in self.commands if command.is_training)

    @cached_property
    def supervised(self) -> Command | None:
        """The command that is ``outlast slurm supervise``."""
        wanted = ("slurm", "supervise")
        for command in self.commands:
            if wanted in zip(command.words, command.words[1:], strict=False):
                return command
        return None

    def calls(self, *words: str) -> Command | None:
        """Return the first command that begins with these words."""
        return next((one for one in self.commands if one.words[: len(words)] == words), None)


def parse(text: str) -> Script:
    """Take a batch file apart; what is no shell is passed over, never an error."""
    directives: list[Directive] = []
    late: list[int] = []
    commands: list[Command] = []
    for line, logical in _logical_lines(text):
        if logical.startswith("#SBATCH"):
            if commands:
                late.append(line)
            else:
                directives += _directives(line, logical.removeprefix("#SBATCH"))
        else:
            commands += _commands(line, logical)
    return Script(text, tuple(directives), tuple(late), tuple(commands))


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    lines = iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        whole = line.rstrip()
        while whole.endswith("\\") and not whole.lstrip().startswith("#"):
            _, following = next(lines, (0, ""))
            whole = f"{whole[:-1]} {following.strip()}"
        yield number, whole if whole.startswith("#") else whole.strip()
        heredoc = None if whole.lstrip().startswith("#") else _HEREDOC.search(whole)
        if heredoc is not None:
            for _, body in lines:
                if body.strip() == heredoc[2]:
                    break


def _words(text: str, *, operators: bool) -> list[str]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|(){}" if operators else "")
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError:  # a quote that ends on a later line
        return text.split()


def _directives(line: int, text: str) -> Iterator[Directive]:
    words = _words(text, operators=False)
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.startswith("-"):
            continue
        name, equals, value = word.partition("=")
        if not name.startswith("--") and name[:2] in _SHORT:
            name, value, equals = _SHORT[name[:2]], value if equals else name[2:], equals or name[2:]
        name = name.lstrip("-")
        if not equals and name not in _WITHOUT_VALUE and at < len(words) and not words[at].startswith("-"):
            value = words[at]
            at += 1
        yield Directive(line, name, value)


def _commands(line: int, text: str) -> list[Command]:
    groups: list[tuple[list[str], str]] = [([], "")]
    for word in _words(re.sub(r"(\d?>)&(\d|-)|&>", r"\1\2", text), operators=True):
        if word in _OPERATORS:
            groups[-1] = (groups[-1][0], word)
            groups.append(([], ""))
        else:
            groups[-1][0].append(word)
    found: list[Command] = []
    for words, after in groups:
        if words:
            found.append(_command(line, words, after))
    for at, one in enumerate(found[:-1]):
        found[at] = Command(
            one.line, one.words, one.variables, one.after, found[at + 1].words, one.in_condition
        )
    return found


def _command(line: int, words: Sequence[str], after: str) -> Command:
    at, variables, condition = 0, [], False
    while at < len(words) and (words[at] in _KEYWORDS or _ASSIGNMENT.match(words[at])):
        if words[at] in _KEYWORDS:
            condition = condition or words[at] in ("if", "elif", "while", "until", "!")
        else:
            variables.append(words[at])
        at += 1
    return Command(line, tuple(words[at:]), tuple(variables), after, (), condition)
