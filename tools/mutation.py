"""Finds the mutants of a module: copies of its source with one small fault each.

A mutant changes one piece of the text, found in the syntax tree: a comparison, `and` and `or`, a `not`, a number, an
operator, a condition, a returned value, or a statement that disappears. Comments and lines stay where they are.

Left out is what no test should notice: docstrings, annotations, the words of messages, decorators, `__repr__`, names
like `__all__`, imports for type checkers, methods that a subclass must have, and `strict=` of `zip`.

A mutant is known by its file, its function, what stands there before and after, and which of several equal ones it is,
so its name holds when lines move or something else in the function changes.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
MESSAGES = {"warn", "warn_once", "debug", "info", "warning", "error", "exception", "cast", "TypeVar", "isinstance"}
"""Calls whose arguments are words or types."""
SILENT_KEYWORDS = {"strict", "stacklevel"}


@dataclass(frozen=True)
class Mutant:
    """One fault: the text from `start` to `end` of a file is replaced by `after`."""

    file: str
    function: str
    operator: str
    before: str
    after: str
    number: int
    """Which it is of those in the function that are alike."""
    line: int
    start: int
    end: int

    @property
    def name(self) -> str:
        """A name that does not change with what stands elsewhere."""
        parts = (self.file, self.function, self.operator, self.before, self.after, str(self.number))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]

    def apply(self, source: str) -> str:
        """Return the source with this fault."""
        text = source.encode()
        return (text[: self.start] + self.after.encode() + text[self.end :]).decode()


def find_mutants(source: str, file: str) -> list[Mutant]:
    """List all mutants of a module, in the order of its text."""
    starts = _line_starts(source)
    seen: Counter[tuple[str, ...]] = Counter()
    found = []
    for function, operator, node, after in _Walk().of(ast.parse(source)):
        start, end = starts[node.lineno] + node.col_offset, starts[node.end_lineno] + node.end_col_offset
        before = " ".join(source.encode()[start:end].decode().split())
        key = (function, operator, before, after)
        mutant = Mutant(file, function, operator, before, after, seen[key], node.lineno, start, end)
        seen[key] += 1
        found.append(mutant)
    return sorted(found, key=lambda mutant: (mutant.start, mutant.operator, mutant.after))


def _line_starts(source: str) -> list[int]:
    """Where each line begins, in bytes, as the syntax tree counts; lines count from one."""
    starts = [0, 0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


Fault = tuple[str, str, ast.expr | ast.stmt, str]
"""The function it is in, the kind, the node that is replaced, and the new text."""


class _Walk:
    """Goes through a module, with the name of the function that it is in."""

    def __init__(self) -> None:
        self._names: list[str] = []

    def of(self, node: ast.AST) -> Iterator[Fault]:
        """Yield the faults at `node`, and those inside it."""
        if _is_left_out(node):
            return
        is_scope = isinstance(node, ast.FunctionDef | ast.ClassDef)
        if is_scope:
            self._names.append(node.name)
        here = ".".join(self._names) or "the module"
        for operator, target, after in _faults_at(node):
            yield here, operator, target, after
        for inner in _parts(node):
            yield from self.of(inner)
        if is_scope:
            self._names.pop()


def _is_left_out(node: ast.AST) -> bool:
    match node:
        case ast.JoinedStr() | ast.Import() | ast.ImportFrom() | ast.Assert():
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Assign(targets=[ast.Name(id=name) | ast.Attribute(attr=name)]):
            return name.startswith("__")
        case ast.FunctionDef(name="__repr__" | "__str__"):
            return True
        case ast.FunctionDef(decorator_list=decorators):
            return any("overload" in ast.unparse(d) or "abstractmethod" in ast.unparse(d) for d in decorators)
    return False


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what is looked at inside a node: no annotations, decorators or messages."""
    match node:
        case ast.Raise():
            return
        case ast.FunctionDef():
            yield from [*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None), *node.body]
        case ast.ClassDef():
            yield from node.body
        case ast.AnnAssign():
            yield from [] if node.value is None else [node.value]
        case ast.Call() if _called(node) in MESSAGES:
            return
        case ast.Call():
            yield from [node.func, *node.args, *(k.value for k in node.keywords if k.arg not in SILENT_KEYWORDS)]
        case _:
            yield from ast.iter_child_nodes(node)


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _faults_at(node: ast.AST) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    match node:
        case ast.Compare():
            yield from (("comparison", node, other) for other in _other_comparisons(node))
        case ast.BoolOp():
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield "and/or", node, _text(ast.BoolOp(other, node.values))
            yield from (("operand left out", node, rest) for rest in _without_an_operand(node))
        case ast.BinOp() if type(node.op) in ARITHMETIC and not (_is_text(node.left) or _is_text(node.right)):
            yield "arithmetic", node, _text(ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right))
        case ast.UnaryOp(op=ast.Not()):
            yield "not", node, _text(node.operand)
        case ast.Constant(value=bool() | int() | float()):
            yield from (("constant", node, other) for other in _other_constants(node.value))
        case ast.IfExp():
            yield "branches swapped", node, _text(ast.IfExp(node.test, node.orelse, node.body))
        case ast.If() if not isinstance(node.test, ast.Compare | ast.UnaryOp):  # those have faults of their own
            yield "branches swapped", node.test, f"not {_text(node.test)}"
        case ast.stmt():
            yield from _faults_of_statement(node)


def _other_comparisons(node: ast.Compare) -> Iterator[str]:
    for index, operator in enumerate(node.ops):
        ops = [*node.ops[:index], COMPARISONS[type(operator)](), *node.ops[index + 1 :]]
        yield _text(ast.Compare(node.left, ops, node.comparators))


def _without_an_operand(node: ast.BoolOp) -> Iterator[str]:
    for index in range(len(node.values)):
        rest = [*node.values[:index], *node.values[index + 1 :]]
        yield _text(ast.BoolOp(node.op, rest) if len(rest) > 1 else rest[0])


def _other_constants(value: float) -> list[str]:
    if isinstance(value, bool):
        return [repr(not value)]
    return [repr(value + 1), repr(value - 1) if value >= 1 else f"({value - 1!r})"]


def _faults_of_statement(node: ast.stmt) -> Iterator[tuple[str, ast.stmt, str]]:
    match node:
        case ast.Return(value=value) if value is not None and not _is_false(value):
            yield "returns None", node, "return None"
        case ast.Expr(value=ast.Call(func=function)) if not ast.unparse(function).startswith("warnings."):
            yield "statement left out", node, "pass"
        case ast.Raise(exc=error) if error is not None and "NotImplementedError" not in ast.unparse(error):
            yield "statement left out", node, "pass"
        case ast.AugAssign() if type(node.op) in ARITHMETIC and not _is_text(node.value):
            other = copy.copy(node)
            other.op = ARITHMETIC[type(node.op)]()
            yield "arithmetic", node, ast.unparse(other)
            yield "statement left out", node, "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "statement left out", node, "pass"
        case ast.Continue() | ast.Delete():
            yield "statement left out", node, "pass"


def _text(node: ast.expr) -> str:
    """Write an expression so that it can stand anywhere."""
    return f"({ast.unparse(node)})"


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and not node.value
