"""Small changes of a source file, one at a time, that a test suite should find.

The name of a mutant says where it is and what was changed, without line numbers, so that it stays valid after
edits elsewhere. Changed are comparisons, arithmetic, boolean operators, constants other than texts, returned
values, branches, and statements without a value (these are removed). Annotations, decorators and
texts are not changed.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
_LEFT_OUT = (ast.AugAssign, ast.Delete, ast.Raise)
_LENGTH = 90  # of a name's parts


@dataclass(frozen=True)
class Mutant:
    """One change.

    Args:
        name: ``function: before => after``, with ``#2`` and so on for repetitions.
        line: first line of the statement that is changed.
    """

    name: str
    line: int
    _tree: ast.Module
    _site: _Site

    @property
    def source(self) -> str:
        """Return the changed file."""
        self._site.apply()
        changed = ast.unparse(ast.fix_missing_locations(self._tree))
        self._site.undo()
        return changed


@dataclass(frozen=True)
class _Site:
    owner: str
    line: int
    before: str
    after: str
    apply: Callable[[], None]
    undo: Callable[[], None]


def mutants(source: str) -> Iterator[Mutant]:
    """Yield every mutant of a module, in the order of the file."""
    tree = ast.parse(source)
    met: Counter[str] = Counter()
    for site in _visit(tree, "module", 0):
        name = f"{site.owner}: {site.before} => {site.after}"
        met[name] += 1
        yield Mutant(name if met[name] == 1 else f"{name} #{met[name]}", site.line, tree, site)


def noted(source: str, module: str) -> str:
    """Return a source that calls ``__hit__((module, line))`` before each statement in a function."""
    tree = ast.parse(source)
    functions = (one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
    for node in {id(node): node for function in functions for node in ast.walk(function)}.values():
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if isinstance(body, list):
                setattr(node, name, [each for one in body for each in (_hit(one, module), one)])
    return ast.unparse(ast.fix_missing_locations(tree))


def _hit(statement: ast.stmt, module: str) -> ast.stmt:
    return ast.parse(f"__hit__({(module, statement.lineno)!r})").body[0]


def _visit(node: ast.AST, owner: str, line: int) -> Iterator[_Site]:
    line = node.lineno if isinstance(node, ast.stmt) else line
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        owner = node.name if owner == "module" else f"{owner}.{node.name}"
    for before, after, apply, undo in _changes(node):
        yield _Site(owner, line, _short(before), _short(after), apply, undo)
    for one, apply, undo in _left_out(node):
        yield _Site(owner, one.lineno, _short(ast.unparse(one)), "pass", apply, undo)
    for child in _children(node):
        yield from _visit(child, owner, line)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the children of a node that may change: no annotations, decorators or type-checking code."""
    if _is_for_types(node):
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "format_spec", "ctx"):
            continue
        for one in value if isinstance(value, list) else (value,):
            if isinstance(one, ast.AST) and not isinstance(one, ast.JoinedStr | ast.pattern):
                yield one
            elif isinstance(one, ast.JoinedStr):
                yield from (part.value for part in one.values if isinstance(part, ast.FormattedValue))


_Change = tuple[str, str, Callable[[], None], Callable[[], None]]  # before, after, apply, undo


def _changes(node: ast.AST) -> Iterator[_Change]:
    match node:
        case ast.Compare():
            for place, op in enumerate(node.ops):
                for other in _COMPARISONS[type(op)]:
                    yield _set_item(node, node.ops, place, other())
        case ast.BinOp() | ast.AugAssign() if type(node.op) in _ARITHMETIC and not _on_texts(node):
            yield _set(node, "op", _ARITHMETIC[type(node.op)]())
        case ast.BoolOp():
            yield _set(node, "op", ast.Or() if isinstance(node.op, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not()):
            yield _set(node, "operand", ast.UnaryOp(ast.Not(), node.operand))
        case ast.Constant(value=bool()):
            yield _set(node, "value", not node.value)
        case ast.Constant(value=int() | float()):
            yield _set(node, "value", node.value + 1)
        case _:
            yield from _branches(node)


def _branches(node: ast.AST) -> Iterator[_Change]:
    match node:
        case ast.Return() if node.value is not None and not _is_none(node.value):
            yield _set(node, "value", ast.Constant(None))
        case ast.If() | ast.IfExp() if not _is_for_types(node):
            for value in (True, False):
                yield _set_test(node, value)
        case ast.comprehension():
            for place in range(len(node.ifs)):
                yield _set_item(node, node.ifs, place, ast.Constant(True))
        case ast.match_case() if node.guard is not None:
            yield _set(node, "guard", ast.Constant(True))
        case _:
            pass


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _left_out(node: ast.AST) -> Iterator[tuple[ast.stmt, Callable[[], None], Callable[[], None]]]:
    for name in ("body", "orelse"):
        body = getattr(node, name, None)
        if not isinstance(body, list):
            continue
        for place, one in enumerate(body):
            call = isinstance(one, ast.Expr) and not isinstance(one.value, ast.Constant)
            kept = isinstance(one, ast.Assign) and not isinstance(one.targets[0], ast.Name | ast.Tuple)
            if call or kept or isinstance(one, _LEFT_OUT):
                yield one, *_swap(body, place, one, ast.Pass())


def _on_texts(node: ast.BinOp | ast.AugAssign) -> bool:
    parts = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.value,)
    texts = (ast.JoinedStr, ast.List, ast.Tuple)
    return any(
        isinstance(part, texts) or (isinstance(part, ast.Constant) and isinstance(part.value, str))
        for part in parts
    )


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _set(node: ast.AST, name: str, value: object) -> _Change:
    before = getattr(node, name)
    text = ast.unparse(node)
    setattr(node, name, value)
    after = ast.unparse(node)
    setattr(node, name, before)
    return text, after, lambda: setattr(node, name, value), lambda: setattr(node, name, before)


def _set_test(node: ast.If | ast.IfExp, value: bool) -> _Change:
    before = node.test
    words = f"if {ast.unparse(before)}"

    def put(test: ast.expr) -> None:
        node.test = test

    return words, f"if {value}", lambda: put(ast.Constant(value)), lambda: put(before)


def _set_item(node: ast.AST, items: list[Any], place: int, value: ast.AST) -> _Change:
    before = items[place]
    text = ast.unparse(node)
    items[place] = value
    after = ast.unparse(node)
    items[place] = before
    return text, after, *_swap(items, place, before, value)


def _swap(
    items: list[Any], place: int, before: ast.AST, after: ast.AST
) -> tuple[Callable[[], None], Callable[[], None]]:
    return lambda: items.__setitem__(place, after), lambda: items.__setitem__(place, before)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LENGTH else f"{line[: _LENGTH - 3]}..."
