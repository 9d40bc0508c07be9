"""Which parts of a function did not run: branches, loops, and what follows an early return."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from engine.source.alternatives import alternatives, leaves, runs_with
from engine.source.entrywise import names_read

__all__ = ["Branching", "Part", "branching", "syntax_of"]

_SILENT = (ast.Raise, ast.Assert, ast.Pass, ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal, ast.Constant)
_REPORTS = frozenset("debug info warning warning_once warn error exception critical print log".split())


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a function that may be passed over: statements in a row, or an expression.

    Attributes:
        nodes: its syntax.
        test: what decides: an expression, or the statement before it, which may leave.
        offsets: its own instructions.
        is_condition: whether it is a further condition, which only decides.
        user: the assignment or the call that uses it as it is, or the other choice.
    """

    nodes: Sequence[ast.AST]
    test: ast.AST | None
    offsets: frozenset[int]
    is_condition: bool = False
    user: ast.AST | None = None

    @property
    def line(self) -> int:
        """Where it begins."""
        return int(getattr(self.nodes[0], "lineno", 0))

    @functools.cached_property
    def syntax(self) -> tuple[ast.AST, ...]:
        """All of its syntax."""
        return tuple(inner for node in self.nodes for inner in ast.walk(node))

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """The variables that it reads."""
        changed = {n.target.id for n in self.syntax if isinstance(n, ast.AugAssign) and isinstance(n.target, ast.Name)}
        return frozenset(name for node in self.nodes for name in names_read(node)) | changed

    @functools.cached_property
    def targets(self) -> frozenset[str]:
        """The variables that it sets to what another one holds."""
        own = (n for n in (*self.syntax, self.user) if isinstance(n, ast.Assign))
        same = (n for n in own if isinstance(n.value, ast.Name) or n is self.user)
        return frozenset(t.id for n in same for t in n.targets if isinstance(t, ast.Name))

    @functools.cached_property
    def is_silent(self) -> bool:
        """Whether it computes nothing: it is a condition, or it raises, warns or imports."""
        if self.is_condition or any(isinstance(node, ast.Raise) for node in self.nodes):
            return True
        return all(isinstance(node, _SILENT) or _reports(node) for node in self.nodes)


@dataclass(eq=False)
class _Node:
    """A part with what may be passed over inside of it."""

    part: Part
    inner: list[_Node] = field(default_factory=list)


class Branching:
    """A function that may pass over parts of itself.

    Args:
        code: of the function.
        tree: its syntax.

    Attributes:
        parts: what it may pass over, but for what is silent.
        points: lines where parts are decided, with these.
        late: parts that no single condition decides.
        shared: lines on which a part begins that shares them with what is not part of it.
    """

    def __init__(self, code: CodeType, tree: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.code, self.tree = code, tree
        spans = [(2 * n, p) for n, p in enumerate(_positions(code)) if None not in p]
        self._spans = [(at, (line, column), (end, last)) for at, (line, end, column, last) in spans]
        self._instructions: dict[ast.AST, frozenset[int]] = {}
        self._users = {
            id(choice): user
            for user in ast.walk(tree)
            for used in (user.args if isinstance(user, ast.Call) else [getattr(user, "value", None)])
            for choice in ((used.body, used.orelse) if isinstance(used, ast.IfExp) else ())
        }
        self._nodes = list(self._block(tree.body, None))
        self.parts: list[Part] = []
        self.points: dict[int, list[Part]] = {}
        self.late: list[Part] = []
        self.shared: set[int] = set()
        self._settle(self._nodes)

    def _settle(self, nodes: Sequence[_Node]) -> None:
        lines = dict(self._lines())
        for node in nodes:
            self._settle(node.inner)
            if not node.part.is_silent:
                self.parts.append(node.part)
                test = self._offsets(*([] if node.part.test is None else [node.part.test]))
                if test:
                    self.points.setdefault(lines[min(test)], []).append(node.part)
                if not test or node.part.targets or isinstance(node.part.test, ast.stmt):
                    self.late.append(node.part)
                first = lines[min(node.part.offsets)]
                if any(line == first and at not in node.part.offsets for at, line in lines.items()):
                    self.shared.add(first)

    def _lines(self) -> Iterator[tuple[int, int]]:
        return ((at, start[0]) for at, start, _ in self._spans)

    def missed(self, ran: set[int]) -> Iterator[Part]:
        """Yield the largest parts of which no instruction ran."""
        yield from self._missed(self._nodes, ran)

    def _missed(self, nodes: Sequence[_Node], ran: set[int]) -> Iterator[Part]:
        for node in nodes:
            if ran.isdisjoint(node.part.offsets):
                yield node.part
            else:
                yield from self._missed(node.inner, ran)

    def ran(self, node: ast.AST, ran: set[int]) -> bool:
        """Whether some syntax is in no part that did not run."""
        if node not in self._instructions:
            self._instructions[node] = self._offsets(node)
        offsets = self._instructions[node]
        return not offsets or not any(offsets <= p.offsets and ran.isdisjoint(p.offsets) for p in self.parts)

    def _offsets(self, *nodes: ast.AST) -> frozenset[int]:
        ranges = [((n.lineno, n.col_offset), (n.end_lineno, n.end_col_offset)) for n in nodes if hasattr(n, "lineno")]  # type: ignore[attr-defined]
        return frozenset(
            at for at, start, end in self._spans if any(first <= start and end <= last for first, last in ranges)
        )

    def _part(self, nodes: Sequence[ast.AST], test: ast.AST | None, is_condition: bool = False) -> _Node | None:
        offsets = self._offsets(*nodes)
        user = self._users.get(id(nodes[0]))
        return _Node(Part(nodes, test, offsets, is_condition, user)) if offsets else None

    def _block(self, block: Sequence[ast.stmt], test: ast.AST | None) -> Iterator[_Node]:
        """Yield what may be passed over in statements: what is in them, and all that follows one which may leave."""
        for place, statement in enumerate(block):
            rest = [s for s in block[place + 1 :] if self._offsets(s)]
            yield from self._inside(statement)
            if rest and leaves(statement):
                node = self._part(rest, statement)
                if node is not None:
                    node.inner = list(self._block(rest, None))
                    yield node
                    return

    def _inside(self, statement: ast.AST, is_condition: bool = False) -> Iterator[_Node]:
        for test, block in alternatives(statement):
            nodes = block if isinstance(block, list) else [block]
            node = self._part(nodes, test, is_condition)
            if node is not None:
                node.inner = list(
                    self._block(block, None) if isinstance(block, list) else self._inside(block, is_condition)
                )
                yield node
        for child in runs_with(statement):
            if isinstance(child, ast.stmt):
                yield from self._block([child], None)
            else:
                yield from self._inside(child, is_condition or child is getattr(statement, "test", None))


def _reports(node: ast.AST) -> bool:
    call = getattr(node, "value", None)
    function = getattr(call, "func", None)
    return isinstance(node, ast.Expr) and getattr(function, "attr", getattr(function, "id", "")) in _REPORTS


def _positions(code: CodeType) -> list[Any]:
    """Return where each instruction stands in the source; nothing before Python 3.11, which does not keep it."""
    return list(code.co_positions()) if hasattr(code, "co_positions") else []


@functools.cache
def branching(code: CodeType, always: bool = False) -> Branching | None:
    """Return what a function may pass over; None where there is no source, or where that is nothing, if not always."""
    if not hasattr(code, "co_positions") or code.co_name.startswith("<"):
        return None
    tree = syntax_of(code)
    function = None if tree is None else Branching(code, tree)
    return function if function is not None and (function.parts or always) else None


@functools.cache
def syntax_of(code: CodeType) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """Return the syntax of a function; None where there is no source."""
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    if not lines:
        return None
    try:
        text = "".join(inspect.getblock(lines))
        indented = text[:1].isspace()
        tree = ast.parse(f"if 1:\n{text}" if indented else text)
    except (SyntaxError, ValueError, IndexError):
        return None
    ast.increment_lineno(tree, code.co_firstlineno - (2 if indented else 1))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [n for n in ast.walk(tree) if isinstance(n, kinds) and n.name == code.co_name]
    return functions[0] if functions else None
