"""Branches of a function that did not run: of conditions and loops, code after an early return, or after an error."""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from engine.flow.control_flow import conditional_parts, may_leave, only_reports, swallows_errors, unconditional_parts
from engine.flow.effects import names_read
from engine.flow.measured import names_measured
from engine.flow.skips import bodies_of_loops, other_operand, other_side_of
from engine.source.anonymous import anonymous_function, is_anonymous
from engine.source.bindings import Binding, bindings, bound_value
from engine.source.function_text import syntax_of
from engine.source.instructions import cached_by_identity, instructions, named_instructions, positions
from engine.source.syntax import nodes_of

__all__ = ["RESULT", "Branch", "FunctionBranches", "branches_of"]

RESULT = "return"
"""Name for the result of a function among its variables."""

_LAST_INSTRUCTIONS = {
    ast.Assign: "STORE", ast.AnnAssign: "STORE", ast.AugAssign: "STORE", ast.Expr: "POP_TOP", ast.Return: "RETURN",
}  # fmt: skip
"""Prefixes of the names of the instructions that end statements."""


@dataclass(frozen=True, eq=False)
class Branch:
    """A part of a function that need not run: consecutive statements, or an expression.

    Attributes:
        nodes: its statements, or its expression.
        test: the expression that decides whether it runs, or the preceding statement, which may leave the block.
        offsets: offsets of its instructions.
        is_condition: whether it is a part of a condition, such as ``b`` in ``if a and b``.
        user: the assignment or the call that takes its value, or that of the other branch, as it is.
        statement: the statement that an expression is part of.
        span: first and last line of the statement that it is part of, after which its variables are assigned.
        is_interrupted: whether an error in its first statement keeps it from running to its end.
        skipped: statements that do not run if it does: it is the other side of a condition without an ``else``, or
            skips the rest of a loop.
        entered: offsets of the instructions of a condition's only side; the other side has none and represents a jump.
        other_side: the other side of a conditional expression whose value no variable holds, such as an operand.
        earlier: the operands of ``and`` or ``or`` before the deciding one, which may decide as well.
    """

    nodes: Sequence[ast.AST]
    test: ast.AST | None
    offsets: frozenset[int]
    is_condition: bool = False
    user: ast.AST | None = None
    statement: ast.stmt | None = None
    span: tuple[int, int] = (0, 0)
    is_interrupted: bool = False
    skipped: Sequence[ast.stmt] = ()
    entered: frozenset[int] = frozenset()
    earlier: Sequence[ast.expr] = ()
    other_side: ast.expr | None = None

    @property
    def line(self) -> int:
        """Line of the file on which it begins."""
        return int(getattr(self.nodes[0], "lineno", 0))

    @functools.cached_property
    def syntax(self) -> tuple[ast.AST, ...]:
        """All syntax nodes inside."""
        return tuple(inner for node in self.nodes for inner in ast.walk(node))

    @functools.cached_property
    def _inner(self) -> frozenset[ast.AST]:
        return frozenset(self.syntax)

    def contains(self, node: ast.AST) -> bool:
        """Whether a syntax node is inside."""
        return node in self._inner

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """Variables that it reads."""
        return frozenset(name for node in self.nodes for name in names_read(node)) | self.measured_names

    @functools.cached_property
    def measured_names(self) -> frozenset[str]:
        """Variables whose sizes it uses as numbers."""
        return frozenset(names_measured(ast.Module([*self.nodes], [])))  # type: ignore[list-item]

    @functools.cached_property
    def tested_names(self) -> frozenset[str]:
        """Variables in the expression that decides whether it runs."""
        nodes = ast.walk(self.test) if isinstance(self.test, ast.expr) else ()
        return frozenset(n.id for n in nodes if isinstance(n, ast.Name))

    @functools.cached_property
    def relevant_names(self) -> frozenset[str]:
        """Variables that it reads, that decide whether it runs, or that keep their values if it runs."""
        other_side = () if self.other_side is None else names_read(self.other_side)
        return frozenset({*self.names, *self.tested_names, *self.skipped_bindings, *other_side})

    @functools.cached_property
    def targets(self) -> frozenset[str]:
        """Variables to which it assigns another variable."""
        own = (n for n in (*self.syntax, self.user) if isinstance(n, ast.Assign))
        same = (n for n in own if isinstance(n.value, ast.Name) or n is self.user)
        return frozenset(t.id for n in same for t in n.targets if isinstance(t, ast.Name))

    @functools.cached_property
    def _bindings(self) -> Mapping[str, tuple[Binding, ...]]:
        return bindings(ast.Module([*self.nodes], []))  # type: ignore[list-item]

    @functools.cached_property
    def skipped_bindings(self) -> Mapping[str, tuple[Binding, ...]]:
        """Assignments of the statements that it skips, by variable."""
        return bindings(ast.Module([*self.skipped], []))

    @functools.cached_property
    def skips_results(self) -> bool:
        """Whether the skipped code passes on a result other than in a variable: by ``yield``, or in an attribute."""
        yields = any(nodes_of(statement, ast.Yield, ast.YieldFrom) for statement in self.skipped)
        return yields or any("." in name for name in self.skipped_bindings)

    @functools.cached_property
    def _statement_targets(self) -> frozenset[str]:
        """Variables assigned by the statement that an expression is part of."""
        return frozenset() if self.statement is None else frozenset(bindings(self.statement))

    @functools.cached_property
    def assigned(self) -> frozenset[str]:
        """Variables that have another value if the branch runs."""
        bound = self._bindings.keys() | self._statement_targets | self.skipped_bindings.keys()
        return frozenset(name for name in bound if "." not in name) | self.targets

    def values_of(self, name: str) -> list[ast.expr]:
        """Return the expressions that it assigns to a variable; in a tuple if the variable receives a part of one.

        Args:
            name: the variable, or `RESULT` for what it returns.
        """
        values = [bound_value(name, binding) for binding in self._bindings.get(name, ())]
        if isinstance(self.nodes[0], ast.expr) and (name in self._statement_targets or name == RESULT):
            values.append(self.nodes[0])
        if name == RESULT:
            values += [n.value for n in self.syntax if isinstance(n, ast.Return) and n.value is not None]
        return values

    def replaces(self, name: str) -> bool:
        """Whether it assigns something to a variable that it does not compute from the variable."""
        return any(name not in names_read(value) for value in self.values_of(name))

    @functools.cached_property
    def returns(self) -> bool:
        """Whether the function returns another value if the branch runs."""
        return any(isinstance(n, ast.Return) and n.value is not None for n in (*self.syntax, self.statement))

    @functools.cached_property
    def computes_nothing(self) -> bool:
        """Whether it is a condition, or only raises, warns, logs or imports."""
        if any(isinstance(node, ast.Raise) for node in self.nodes):
            return True
        if self.skipped:
            return not (self.assigned or self.skips_results)
        return not self.assigned if self.is_condition else all(map(only_reports, self.nodes))


@dataclass(eq=False)
class _Node:
    """A branch with the branches inside of it."""

    branch: Branch
    inner: list[_Node] = field(default_factory=list)


class FunctionBranches:
    """The branches of one function.

    Args:
        code: of the function.
        tree: its syntax.

    Attributes:
        branches: all that compute something.
        decided_on: branches by the line of the condition that decides whether they run.
        decided_at: branches by the instruction that decides, where the line assigns variables before that.
        decided_late: branches whose variables are known only when the function returns.
        shared_lines: lines that hold the beginning of a branch as well as other code.
    """

    def __init__(self, code: CodeType, tree: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.code, self.tree = code, tree
        spans = [(2 * n, p) for n, p in enumerate(positions(code)) if None not in p]
        self._spans = [(at, (line, column), (end, last)) for at, (line, end, column, last) in spans]
        self._executable = {at for at, _ in instructions(code)}  # without the interpreter's caches
        self._offsets_of: dict[ast.AST, frozenset[int]] = {}
        self._users = {
            id(choice): user
            for user in ast.walk(tree)
            for used in (user.args if isinstance(user, ast.Call) else [getattr(user, "value", None)])
            for choice in ((used.body, used.orelse) if isinstance(used, ast.IfExp) else ())
        }
        self._statements = {
            id(part): statement
            for statement in ast.walk(tree)
            if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return))
            for part in ast.walk(statement)
            if isinstance(part, ast.expr)
        }
        self._loops = bodies_of_loops(tree)
        self._nodes = list(self._branches_of_block(tree.body))
        self.branches: list[Branch] = []
        self._of_conditions: list[Branch] = []
        self.decided_on: dict[int, list[Branch]] = {}
        self.decided_at: dict[int, list[Branch]] = {}
        self.decided_late: list[Branch] = []
        self.shared_lines: set[int] = set()
        self._stores = {(n.lineno, n.id) for n in nodes_of(tree, ast.Name) if isinstance(n.ctx, ast.Store)}
        self._index(self._nodes)

    def _index(self, nodes: Sequence[_Node]) -> None:
        lines = dict(self._lines())
        for node in nodes:
            self._index(node.inner)
            if node.branch.is_condition:
                self._of_conditions.append(node.branch)
                self._share_line(node.branch, lines)
            if not node.branch.computes_nothing:
                self.branches.append(node.branch)
                first = node.branch.nodes[0] if node.branch.is_interrupted else node.branch.test
                test = frozenset[int]() if first is None else self._offsets(first)
                for offsets in (*map(self._offsets, node.branch.earlier), test):
                    self._note_decision(node.branch, offsets, lines)
                if not test or node.branch.assigned or isinstance(node.branch.test, ast.stmt):
                    self.decided_late.append(node.branch)
                self._share_line(node.branch, lines)
                if node.branch.is_interrupted:
                    self.shared_lines.update(lines[at] for at in self._offsets(node.branch.nodes[0]))

    def _note_decision(self, branch: Branch, test: frozenset[int], lines: Mapping[int, int]) -> None:
        if test:
            line = lines[min(test)]
            self.decided_on.setdefault(line, []).append(branch)
            if any((line, name) in self._stores for name in branch.names):
                self.decided_at.setdefault(max(test & self._executable), []).append(branch)
                self.shared_lines.add(line)

    def _share_line(self, branch: Branch, lines: Mapping[int, int]) -> None:
        """Note the line on which a branch begins, if other code is on it, too."""
        first = lines[min(branch.entered or branch.offsets)]
        if any(line == first and at not in (branch.entered or branch.offsets) for at, line in lines.items()):
            self.shared_lines.add(first)

    def _lines(self) -> Iterator[tuple[int, int]]:
        return ((at, start[0]) for at, start, _ in self._spans)

    def names_at(self, offsets: Collection[int]) -> set[str]:
        """Return the names in some instructions, and on lines that begin with one of them and hold no branch.

        Args:
            offsets: of the instructions.
        """
        steps = named_instructions(self.code)
        lines = {line for offset, line, _ in steps if offset in offsets} - self.shared_lines
        return {name for offset, line, name in steps if name is not None and (offset in offsets or line in lines)}

    def untaken(self, ran: set[int]) -> Iterator[Branch]:
        """Yield the outermost branches of which no instruction ran.

        Args:
            ran: offsets of the instructions that ran.
        """
        yield from self._untaken(self._nodes, ran)

    def _untaken(self, nodes: Sequence[_Node], ran: set[int]) -> Iterator[Branch]:
        for node in nodes:
            if ran.isdisjoint(node.branch.offsets):
                yield node.branch
            else:
                yield from self._untaken(node.inner, ran)

    def ran(self, node: ast.AST, ran: set[int]) -> bool:
        """Whether a syntax node is outside of all branches that did not run.

        Args:
            node: of the function.
            ran: offsets of the instructions that ran.
        """
        return self._is_outside(self.branches, node, ran)

    def evaluated(self, node: ast.AST, ran: set[int]) -> bool:
        """Whether a syntax node ran, as far as branches and the parts of conditions (``b`` in ``a and b``) tell.

        Args:
            node: of the function.
            ran: offsets of the instructions that ran.
        """
        return self.ran(node, ran) and self._is_outside(self._of_conditions, node, ran)

    def _is_outside(self, branches: Sequence[Branch], node: ast.AST, ran: set[int]) -> bool:
        """Whether a node, with or without offsets of its own, is outside of branches that did not run."""
        if node not in self._offsets_of:
            self._offsets_of[node] = self._offsets(node)
        offsets, idle = self._offsets_of[node], (branch for branch in branches if ran.isdisjoint(branch.offsets))
        return not any(offsets <= branch.offsets if offsets else branch.contains(node) for branch in idle)

    def _offsets(self, *nodes: ast.AST) -> frozenset[int]:
        ranges = [((n.lineno, n.col_offset), (n.end_lineno, n.end_col_offset)) for n in nodes if hasattr(n, "lineno")]  # type: ignore[attr-defined]
        return frozenset(
            at for at, start, end in self._spans if any(first <= start and end <= last for first, last in ranges)
        )

    def _branch(
        self, nodes: Sequence[ast.AST], test: ast.AST | None, is_condition: bool = False, whole: ast.AST | None = None
    ) -> _Node | None:
        offsets = self._offsets(*nodes)
        user, statement = self._users.get(id(nodes[0])), self._statements.get(id(nodes[0]))
        node: Any = statement if statement is not None else whole
        span = (node.lineno, node.end_lineno or node.lineno) if hasattr(node, "lineno") else (0, 0)
        skipped = self._loops.get(nodes[-1], ())
        earlier = whole.values[: whole.values.index(test)] if isinstance(whole, ast.BoolOp) else []  # type: ignore[arg-type]
        place, more = (user, statement, span), (frozenset[int](), earlier)
        if not offsets:
            return None
        other = other_operand(whole, nodes[0], statement)
        return _Node(Branch(nodes, test, offsets, is_condition, *place, False, skipped, *more, other_side=other))

    def _branches_of_block(self, block: Sequence[ast.stmt]) -> Iterator[_Node]:
        """Yield the branches in a block; all statements after one that may leave the block are a branch, too."""
        for place, statement in enumerate(block):
            yield from self._branches_in(statement)
            rest = [s for s in block[place + 1 :] if self._offsets(s)] if may_leave(statement) else []
            if rest:
                node = self._branch(rest, statement)
                if node is not None:
                    node.inner = list(self._branches_of_block(rest))
                    yield node
                    return

    def _interrupted(self, block: Sequence[ast.stmt]) -> Iterator[_Node]:
        """Yield the rest of a block from each statement on: an error in this one may keep it from running."""
        if not block:
            return
        inner = list(self._interrupted(block[1:]))
        completed = self._completed(block[0])
        offsets = frozenset(completed | self._offsets(*block[1:]))
        nodes = block if completed else block[1:]
        if offsets and (completed or not may_leave(block[0])):
            yield _Node(Branch(nodes, None, offsets, is_interrupted=True), inner)
        else:
            yield from inner

    def _completed(self, statement: ast.stmt) -> frozenset[int]:
        """Return the instructions that a simple statement ends with; none of another one."""
        targets: Sequence[ast.AST] = [statement]
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, (ast.AnnAssign, ast.AugAssign)):
            targets = [statement.target]
        last = _LAST_INSTRUCTIONS.get(type(statement))
        names = dict(instructions(self.code)) if last else {}
        return frozenset(at for at in self._offsets(*targets) if last and names.get(at, "").startswith(last))

    def _branches_in(self, statement: ast.AST, is_condition: bool = False) -> Iterator[_Node]:
        other_side = other_side_of(statement, self._offsets)
        if other_side is not None:
            yield _Node(Branch(**other_side))
        for test, block in conditional_parts(statement):
            nodes = block if isinstance(block, list) else [block]
            node = self._branch(nodes, test, is_condition, statement)
            if node is not None:
                node.inner = list(
                    self._branches_of_block(block)
                    if isinstance(block, list)
                    else self._branches_in(block, is_condition)
                )
                yield node
        yield from self._interrupted(swallows_errors(statement))
        for child in unconditional_parts(statement):
            if isinstance(child, ast.stmt):
                yield from self._branches_of_block([child])
            else:
                goes_on = is_condition and isinstance(statement, (ast.BoolOp, ast.UnaryOp))  # others have values
                yield from self._branches_in(child, goes_on or child is getattr(statement, "test", None))


@cached_by_identity
def branches_of(code: CodeType, always: bool = False) -> FunctionBranches | None:
    """Return the branches of a function, a lambda function or a comprehension; None without source.

    Args:
        code: of the function.
        always: whether to return an object for a function without branches as well, instead of None.
    """
    tree = anonymous_function(code) if is_anonymous(code.co_name) else syntax_of(code)
    function = None if tree is None else FunctionBranches(code, tree)
    return function if function is not None and (function.branches or always) else None
