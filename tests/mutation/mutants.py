"""Mutants of a module: its syntax tree with one place changed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
UNTOUCHED = (ast.Raise, ast.Assert, ast.JoinedStr)  # messages, and what no right program reaches
LOGGERS = {"logger", "log", "request_logger"}


@dataclass(frozen=True)
class Mutant:
    """One changed place of a module's source."""

    line: int
    what: str
    source: str
    place: int

    def __str__(self) -> str:
        return f"line {self.line}: {self.what}"

    @property
    def tree(self) -> ast.Module:
        tree = ast.parse(self.source)
        _apply(list(_places(tree))[self.place])
        return ast.fix_missing_locations(tree)


def mutants_of(source: str) -> list[Mutant]:
    """All mutants of a module, in the order of its lines."""
    found = [
        Mutant(getattr(node, "lineno", 0), what, source, place)
        for place, node in enumerate(_places(ast.parse(source)))
        if (what := _change(node)) is not None
    ]
    return sorted(found, key=lambda mutant: mutant.line)


def _places(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that may be changed: not annotations, docstrings, messages or logging."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, UNTOUCHED) or _is_logging(child) or _is_type_checking(child):
            continue
        if isinstance(child, ast.AnnAssign):
            parts: list[ast.AST] = [child.value] if child.value is not None else []
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            parts = [*child.body, *child.args.defaults, *(one for one in child.args.kw_defaults if one is not None)]
        elif isinstance(child, ast.ClassDef):
            parts = list(child.body)
        else:
            yield child
            yield from _places(child)
            continue
        for part in parts:
            if isinstance(part, UNTOUCHED) or _is_logging(part):
                continue
            yield part
            yield from _places(part)


def _is_logging(node: ast.AST) -> bool:
    call = node.value if isinstance(node, ast.Expr) else None
    function = call.func if isinstance(call, ast.Call) else None
    owner = function.value if isinstance(function, ast.Attribute) else None
    return isinstance(owner, ast.Name) and owner.id in LOGGERS


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _change(node: ast.AST) -> str | None:
    """What can be changed in a node."""
    change = None
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            change = f"{type(op).__name__} becomes {COMPARISONS[type(op)].__name__} in {ast.unparse(node)}"
        case ast.BinOp(op=op) if type(op) in ARITHMETIC and not _is_union(node):
            change = f"{type(op).__name__} becomes {ARITHMETIC[type(op)].__name__} in {ast.unparse(node)}"
        case ast.AugAssign(op=op) if type(op) in ARITHMETIC:
            change = f"{type(op).__name__} becomes {ARITHMETIC[type(op)].__name__} in {ast.unparse(node)}"
        case ast.BoolOp():
            change = f"and and or are swapped in {ast.unparse(node)}"
        case ast.UnaryOp(op=ast.Not()):
            change = f"{ast.unparse(node)} loses its not"
        case ast.Constant(value=bool(flag)):
            change = f"{flag} becomes {not flag}"
        case ast.Constant(value=int(number)):
            change = f"{number} becomes {number + 1}"
        case ast.Return(value=value) if value is not None and not _is_none(value):
            change = f"{ast.unparse(node)} returns None"
        case ast.Expr(value=ast.Call() | ast.Await()):
            change = f"{ast.unparse(node)} is left out"
        case ast.If() | ast.While() | ast.IfExp():
            change = f"the condition {ast.unparse(node.test)} is always false"
        case ast.Break() | ast.Continue():
            change = f"{ast.unparse(node)} is left out"
    return change[:150] if change is not None else None


def _apply(node: ast.AST) -> None:
    match node:
        case ast.Compare():
            node.ops = [COMPARISONS[type(node.ops[0])]()]
        case ast.BinOp() | ast.AugAssign():
            node.op = ARITHMETIC[type(node.op)]()
        case ast.BoolOp():
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        case ast.UnaryOp():
            _become(node, node.operand)
        case ast.Constant(value=bool(flag)):
            node.value = not flag
        case ast.Constant(value=int(count)):
            node.value = count + 1
        case ast.Return():
            node.value = ast.Constant(None)
        case ast.Expr() | ast.Break() | ast.Continue():
            _become(node, ast.Pass())
        case ast.If() | ast.While() | ast.IfExp():
            node.test = ast.Constant(False)


def _become(node: ast.AST, other: ast.AST) -> None:
    place = {name: getattr(node, name) for name in ("lineno", "col_offset", "end_lineno", "end_col_offset")}
    node.__class__ = other.__class__
    node.__dict__.clear()
    node.__dict__.update({**other.__dict__, **place})


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_union(node: ast.BinOp) -> bool:
    """A type, such as int | None."""
    return isinstance(node.op, ast.BitOr) and (_is_none(node.left) or _is_none(node.right))
