"""Values of variables in the rounds of a loop, or the calls of a function, in which a branch does not run."""

from __future__ import annotations

import ast
import builtins
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch import Tensor, nn

from engine.flow.branches import RESULT, Branch, FunctionBranches
from engine.flow.conditions import ALWAYS_FALSE
from engine.flow.control_flow import controls, tests_in
from engine.flow.paths_read import PartsRead, parts_read, picks_by_literals, state_read
from engine.flow.reaching import definitions_before, is_never_none
from engine.limits import MOST_VALUES
from engine.source.anonymous import is_anonymous
from engine.source.bindings import bindings, bound_value, path_of
from engine.source.instructions import arguments_of
from engine.source.syntax import compares_with_none, nodes_of

__all__ = ["Rounds", "add_new", "repeatable"]


Notes = dict[str, list[Any]]
"""Summaries of the values of variables, by name."""

_PLAIN = (Tensor, list, tuple, dict, nn.Module, str, int, float, type(None))


@dataclass
class _Round:
    """One evaluation of the condition of a branch, up to the next one.

    Attributes:
        notes: of this round.
        has_entered: whether the branch started to run; for a side without code, whether the other side did.
        is_left: whether code ran that is not on the lines of the condition.
        offset: of the last instruction.
    """

    notes: Notes = field(default_factory=dict)
    has_entered: bool = False
    is_left: bool = False
    offset: int = -1


@functools.cache
def repeatable(function: FunctionBranches, by_calls: bool, is_method: bool) -> frozenset[Branch]:
    """Return the branches that may run in some rounds and not in others.

    The body of a loop as a whole is not one of them, nor are branches whose condition is the same in all rounds, such
    as an attribute of the module.

    Args:
        function: the function.
        by_calls: whether calls count as rounds, as well as those of loops inside of it.
        is_method: whether its first argument is the same module in all calls.
    """
    tree = function.tree
    loops: list[Any] = list(nodes_of(tree, ast.For, ast.AsyncFor, ast.While))
    of_loops = {id(loop.test if isinstance(loop, ast.While) else loop.iter) for loop in loops}
    inside = {node for loop in loops for part in (*loop.body, *_targets(loop)) for node in ast.walk(part)}
    is_comprehension = is_anonymous(function.code.co_name) and function.code.co_name != "<lambda>"
    by_calls = by_calls or is_comprehension
    bound = {
        name
        for name, own in bindings(tree).items()
        if by_calls or any(b.node in inside or b.node in loops for b in own)
    }
    varying = bound | {*arguments_of(function.code)[is_method:]} if by_calls else bound
    alike = functools.partial(_is_alike, tree=tree, varying=varying, of_loops=of_loops)
    return frozenset(
        branch
        for branch in function.branches
        if id(branch.test) not in of_loops
        and not branch.is_interrupted
        and (by_calls or (branch.skipped or branch.nodes)[0] in inside)
        and not (tests_in(branch.test) and all(map(alike, tests_in(branch.test))))
    )


def _targets(loop: ast.For | ast.AsyncFor | ast.While) -> Sequence[ast.AST]:
    return () if isinstance(loop, ast.While) else (loop.target,)


def _is_alike(
    test: ast.expr, tree: ast.FunctionDef | ast.AsyncFunctionDef, varying: Collection[str], of_loops: Set[int]
) -> bool:
    """Whether a condition has its recorded outcome in each round: the same in all, or one that their code sets."""
    if isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and compares_with_none(test):
        own = bindings(tree).get(test.left.id, ())
        values = [bound_value(test.left.id, binding) for binding in own]
        conditions = {c for binding in own for c in controls(tree).get(binding.node, ()) if id(c) not in of_loops}
        if own and all(_is_none(value) or _is_never_none(value, tree) for value in values):
            return all(_is_the_same(condition, varying) for condition in conditions - {test})
    if _asks_for_dtype(test):  # each item has one
        return True
    match test:
        case ast.Call(func=ast.Name(id="isinstance"), args=[ast.Name(id=name) as variable, kind]) if (
            last := definitions_before(tree, name, variable)
        ):
            of_layers = all(d.value is not None and _is_result_of_layer(d.value, tree) for d in last)
            return of_layers and _is_the_same(kind, varying)
    return _is_the_same(test, varying)


def _asks_for_dtype(test: ast.expr) -> bool:
    """Whether a condition is about a dtype and nothing else: ``v.dtype.is_floating_point``, ``v.dtype == torch.int64``.

    Example:
        >>> texts = ("v.is_floating_point()", "not v.dtype.is_complex", "v.dtype == x.dtype", "v.dtype == k", "v > 0")
        >>> [_asks_for_dtype(ast.parse(text, mode="eval").body) for text in texts]
        [True, True, True, False, False]
    """
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return _asks_for_dtype(operand)
        case ast.Attribute(value=ast.Attribute(attr="dtype"), attr="is_floating_point" | "is_complex"):
            return True
        case ast.Call(func=ast.Attribute(attr="is_floating_point" | "is_complex")):
            return True
        case ast.Compare(left=left, comparators=[right]):
            return all(isinstance(side, ast.Attribute) for side in (left, right)) and left.attr == "dtype"  # type: ignore[attr-defined]
    return False


def _is_result_of_layer(value: ast.expr, tree: ast.AST) -> bool:
    """Whether a value is the result of a loop's current layer, or of one in a container; its code fixes the type."""
    called = value.func if isinstance(value, ast.Call) else None
    loops: Sequence[Any] = nodes_of(tree, ast.For, ast.AsyncFor) if isinstance(called, ast.Name) else ()
    at = {node.id for loop in loops for node in nodes_of(loop.target, ast.Name)}
    return isinstance(called, ast.Subscript) or isinstance(called, ast.Name) and called.id in at


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _is_never_none(value: ast.expr, tree: ast.AST) -> bool:
    """Whether an expression is never None: an operator, a method of tensors, or a loop's current layer."""
    if isinstance(value, ast.IfExp):
        return all(_is_never_none(choice, tree) for choice in (value.body, value.orelse))
    return _is_result_of_layer(value, tree) or is_never_none(value, bindings(tree).keys())


def _is_the_same(test: ast.AST | None, varying: Collection[str]) -> bool:
    """Whether an expression has one value in all rounds: it reads no varying variable, and calls nothing unknown."""
    if not isinstance(test, ast.expr):
        return False
    for node in ast.walk(test):
        if isinstance(node, (ast.Name, ast.Attribute)) and path_of(node) in varying:
            return False
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            is_plain = isinstance(node.func, ast.Name) and name in vars(builtins)
            if not (is_plain or name in ALWAYS_FALSE):
                return False
    return True


class Rounds:
    """Notes the values of a function's variables where some of its branches do not run.

    Args:
        pending: branches that did not run yet; nothing is noted of them any more once they do.
        repeated: branches of which a note is made in each round.
        space: globals of the function.
        ran: offsets of the instructions that ran.
        seen: notes by branch; is extended when a round ends in which the branch did not run.
        summarize: returns what to keep of the value of a variable, or None.
    """

    def __init__(
        self,
        pending: Collection[Branch],
        repeated: Collection[Branch],
        space: Mapping[str, Any],
        ran: Set[int],
        seen: dict[Branch, Notes],
        summarize: Callable[[Any], Any],
    ) -> None:
        self._pending, self._repeated = frozenset(pending), frozenset(repeated)
        self._space, self._ran = space, ran
        self._seen, self._summarize = seen, summarize
        self._rounds: dict[Branch, _Round] = {}

    def step(self, offset: int, line: int) -> None:
        """Note an instruction that runs.

        Args:
            offset: of the instruction.
            line: its line.
        """
        for branch, current in self._rounds.items():
            if offset in (branch.entered or branch.offsets):
                current.has_entered = True
            first, last = _lines_of_test(branch)
            current.is_left |= not first <= line <= last or offset <= current.offset
            current.offset = offset

    def decide(self, frame: FrameType, branches: Sequence[Branch]) -> None:
        """Note the values that branches would read, where it is decided whether they run.

        Args:
            frame: of the function.
            branches: those that are decided on here.
        """
        variables = frame.f_locals if branches else {}
        for branch in branches:
            if self._is_noted(branch):
                current = self._rounds.get(branch)
                if current is None or current.has_entered or current.is_left:
                    self._end(branch)
                    current = self._rounds[branch] = _Round(offset=frame.f_lasti)
                for text, held in state_read(branch, variables, self._space):
                    self._note(current.notes, text, held)
                for name in branch.relevant_names:
                    held = variables.get(name)
                    is_picked = type(held) is tuple and picks_by_literals(branch, name)
                    is_whole = isinstance(held, _PLAIN) and not is_picked
                    held = held if is_whole else parts_read(held, name, branch, variables)
                    self._note_variable(current.notes, variables, name, held)

    def leave(self, frame: FrameType, branch: Branch) -> None:
        """Note the values that a statement assigned to variables that a branch in it would assign to.

        Args:
            frame: of the function.
            branch: the branch.
        """
        if branch in self._rounds and self._is_noted(branch):
            self._note_late(self._rounds[branch].notes, frame, branch, False)

    def end(self, frame: FrameType, decided_late: Collection[Branch], result: Any) -> None:
        """Note the result of the function, and the values of its variables at that time.

        Args:
            frame: of the function.
            decided_late: branches whose variables are known only when the function returns.
            result: what it returns; None also stands for an error.
        """
        for branch in list(self._rounds):
            self._end(branch)
        for branch in self._pending | self._repeated:
            if branch not in self._seen and not self._ran.isdisjoint(branch.offsets):
                continue  # it ran in all rounds
            if branch in decided_late:
                self._note_late(self._seen.setdefault(branch, {}), frame, branch, True)
            if result is not None and branch.returns:
                held = result if isinstance(result, _PLAIN) else PartsRead([])  # what a trainer holds is no result
                self._note(self._seen.setdefault(branch, {}), RESULT, held)

    def _is_noted(self, branch: Branch) -> bool:
        return branch in self._repeated or branch in self._pending and self._ran.isdisjoint(branch.offsets)

    def _end(self, branch: Branch) -> None:
        current = self._rounds.pop(branch, None)
        if current is not None and current.has_entered == bool(branch.entered):
            seen = self._seen.setdefault(branch, {})
            for name, values in current.notes.items():
                own = seen.setdefault(name, [])
                add_new(own, values, at_most=MOST_VALUES)

    def _note_late(self, notes: Notes, frame: FrameType, branch: Branch, at_end: bool) -> None:
        variables, is_single = frame.f_locals, isinstance(branch.test, ast.expr)
        for name in branch.assigned if is_single else branch.names | branch.assigned:
            held = variables.get(name)
            if not isinstance(held, _PLAIN):
                if is_single and at_end or name in notes and name not in branch.assigned:
                    continue  # an object that other code has filled by now
                held = parts_read(held, name, branch, variables)
            self._note_variable(notes, variables, name, held)

    def _note_variable(self, notes: Notes, variables: Mapping[str, Any], name: str, held: Any) -> None:
        if name in variables:
            self._note(notes, name, held)
        else:
            notes.setdefault(name, [])

    def _note(self, notes: Notes, name: str, held: Any) -> None:
        values, summary = notes.setdefault(name, []), self._summarize(held)
        if summary is not None and summary not in values and len(values) < MOST_VALUES:
            values.append(summary)


@functools.cache
def _lines_of_test(branch: Branch) -> tuple[int, int]:
    """Return the first and the last line of what decides whether a branch runs."""
    parts: list[Any] = [*branch.earlier, branch.nodes[0] if branch.is_interrupted else branch.test]
    lines = [(part.lineno, part.end_lineno) for part in parts if hasattr(part, "lineno")]
    return min((first for first, _ in lines), default=0), max((last for _, last in lines), default=0)


def add_new(noted: list[Any], values: Iterable[Any], at_most: int | None = None) -> None:
    """Add the values that are not noted yet, in place.

    Args:
        noted: what was noted so far.
        values: more of them.
        at_most: how many are noted in all.

    Example:
        >>> noted = [1, 2]
        >>> add_new(noted, [2, 3, 4], at_most=3)
        >>> noted
        [1, 2, 3]
    """
    new = [value for value in values if value not in noted]
    noted += new if at_most is None else new[: max(0, at_most - len(noted))]
