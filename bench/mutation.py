"""Small changes of a source file, one at a time, that a test suite should find.

The name of a mutant says where it is and what was changed, without line numbers, so that it stays valid after
edits elsewhere. Changed are comparisons, arithmetic, boolean operators, constants other than texts, returned
values, branches, and statements without a value (these are removed). Annotations, decorators and
texts are not changed.
"""

from __future__ import annotations

import ast
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

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
        source: the changed file.
        line: where it is now.
    """

    name: str
    source: str
    line: int


@dataclass(frozen=True)
class _Site:
    node: ast.AST
    owner: str
    before: str
    after: str
    apply: Callable[[], None]


def names(source: str) -> list[str]:
    """Return the names of all mutants of a module, in the order of the file."""
    return [name for name, _ in _named(ast.parse(source))]


def mutants(source: str) -> Iterator[Mutant]:
    """Yield every mutant of a module, in the order of the file."""
    for place in range(len(names(source))):
        tree = ast.parse(source)
        name, site = next(itertools.islice(_named(tree), place, None))
        site.apply()
        changed = ast.unparse(ast.fix_missing_locations(tree))
        yield Mutant(name, changed, getattr(site.node, "lineno", 0))


def _named(tree: ast.Module) -> Iterator[tuple[str, _Site]]:
    met: Counter[str] = Counter()
    for site in _sites(tree):
        name = f"{site.owner}: {site.before} => {site.after}"
        met[name] += 1
        yield name if met[name] == 1 else f"{name} #{met[name]}", site


def _sites(tree: ast.Module) -> Iterator[_Site]:
    yield from _visit(tree, "module")


def _visit(node: ast.AST, owner: str) -> Iterator[_Site]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        owner = node.name if owner == "module" else f"{owner}.{node.name}"
    for before, after, apply in _changes(node):
        yield _Site(node, owner, _short(before), _short(after), apply)
    for child in _children(node):
        yield from _visit(child, owner)


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


_Change = tuple[str, str, Callable[[], None]]


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
    yield from _left_out(node)


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


def _left_out(node: ast.AST) -> Iterator[_Change]:
    for name in ("body", "orelse"):
        body = getattr(node, name, None)
        for place, one in enumerate(body if isinstance(body, list) else ()):
            call = isinstance(one, ast.Expr) and not isinstance(one.value, ast.Constant)
            kept = isinstance(one, ast.Assign) and not isinstance(one.targets[0], ast.Name | ast.Tuple)
            if call or kept or isinstance(one, _LEFT_OUT):

                def leave_out(body: list[ast.stmt] = body, place: int = place) -> None:
                    body[place] = ast.Pass()

                yield ast.unparse(one), "pass", leave_out


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
    return text, after, lambda: setattr(node, name, value)


def _set_test(node: ast.If | ast.IfExp, value: bool) -> _Change:
    words = f"if {ast.unparse(node.test)}"
    return words, f"if {value}", lambda: setattr(node, "test", ast.Constant(value))


def _set_item(node: ast.AST, items: list, place: int, value: ast.AST) -> _Change:  # type: ignore[type-arg]
    before = items[place]
    text = ast.unparse(node)
    items[place] = value
    after = ast.unparse(node)
    items[place] = before
    return text, after, lambda: items.__setitem__(place, value)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LENGTH else f"{line[: _LENGTH - 3]}..."
