"""Numbers that code that did not run would choose differently: ``scale = 1.0 if h > 512 else 0.5``."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Mapping
from types import CodeType

from engine.flow.branches import RESULT
from engine.flow.choices import Choices
from engine.flow.chosen_calls import Span, chosen_calls
from engine.flow.forward_arguments import functions_that_choose
from engine.numbers.sizes import booleans_in, numbers_in
from engine.observations.assumptions import Assumptions
from engine.observations.dataflow import Dataflow
from engine.observations.recorded_runs import RecordedRuns
from engine.observations.surroundings import is_own_op, may_pick_arguments, use_values_around_code
from engine.program.places import shown_place
from engine.source.function_text import syntax_of
from engine.source.syntax import nodes_of, span_of
from engine.unrecorded.untaken import UntakenBranch

__all__ = ["assume_other_numbers"]


def assume_other_numbers(
    branches: Iterable[UntakenBranch], runs: RecordedRuns, dataflow: Dataflow, assumptions: Assumptions
) -> None:
    """Doubt the numbers of ops that code that did not run would choose differently.

    Args:
        branches: code that did not run, and may run for other inputs.
        runs: the recordings.
        dataflow: of the recorded ops.
        assumptions: is extended.
    """
    expressions: set[ast.AST] = set()
    variables: dict[CodeType, set[str]] = {}
    places: set[str] = set()
    for branch in branches:
        choice = branch.branch.nodes[0]
        if isinstance(choice, ast.expr):
            if _is_plain(choice, branch.code):
                expressions.add(choice)
                variables.setdefault(branch.code, set())
                places.add(branch.place)
            continue
        for name in {*branch.branch.assigned, RESULT} - {branch.self_name}:
            values = branch.branch.values_of(name)
            if values and not branch.values_of(name, {}) and all(_is_plain(v, branch.code, name) for v in values):
                variables.setdefault(branch.code, set()).add(name)
                places.add(branch.place)
    if not variables:
        return
    model, modules = runs.modules[""], runs.modules
    functions = functions_that_choose(model, variables.__contains__)
    calls = chosen_calls(model, Choices(functions, expressions=frozenset(expressions), variables=variables))
    for node in dataflow.nodes:
        if node.site is not None and node.site.span in calls.get(node.site.code, ()) and is_own_op(modules, node):
            neutral = dataflow.functions.neutral_flags
            arguments = [value for name, value in node.args.items() if name not in neutral]
            numbers = numbers_in(arguments)
            assumptions.doubt(node, numbers)
            dims = any("dim" in name for name in node.args)
            if dims or booleans_in(arguments) or not numbers and neutral.isdisjoint(node.args):
                reason = (
                    f"is computed along a dimension, or by a flag, that code chooses at {shown_place(node.site.place)}"
                )
                assumptions.use((v for v in (*node.inputs, *node.outputs) if not v.stored), reason)
                assumptions.keeping.update(places)
    _assume_beside_ops(runs, dataflow, calls, assumptions, places)


def _is_plain(value: ast.expr, code: CodeType, own: str = "") -> bool:
    """Whether an expression is a number, a string or a function, and not a variable or the result of a call.

    Args:
        value: the expression.
        code: of the function.
        own: the variable that it is assigned to, which it may update: ``n = max(n - 1, 0)``, ``key = key.upper()``.
    """
    if isinstance(value, ast.Constant):
        return value.value is not None
    if isinstance(value, (ast.Tuple, ast.List)):
        return all(_is_plain(item, code) for item in value.elts)
    if isinstance(value, ast.UnaryOp):
        return _is_plain(value.operand, code, own)
    if isinstance(value, (ast.BinOp, ast.Call)) and own not in {n.id for n in nodes_of(value, ast.Name)}:
        return False
    if isinstance(value, ast.BinOp):
        return all(_is_plain(operand, code, own) for operand in (value.left, value.right))
    if isinstance(value, ast.Call) and _changes_plain_values(value.func, own):
        return all(_is_plain(argument, code, own) for argument in value.args) and not value.keywords
    if isinstance(value, ast.Name):
        return value.id == own or value.id not in (*code.co_varnames, *code.co_cellvars, *code.co_freevars)
    return isinstance(value, (ast.Attribute, ast.Lambda))


def _changes_plain_values(function: ast.expr, own: str) -> bool:
    """Whether a function is a Python builtin, or a method of the variable that its result is assigned to."""
    if isinstance(function, ast.Attribute):
        return isinstance(function.value, ast.Name) and function.value.id == own != ""
    return isinstance(function, ast.Name) and function.id in vars(builtins)


def _assume_beside_ops(
    runs: RecordedRuns,
    dataflow: Dataflow,
    calls: Mapping[CodeType, Mapping[Span, bool]],
    assumptions: Assumptions,
    places: Iterable[str],
) -> None:
    """Extend the assumptions for chosen numbers that no op receives: those for a list, a loop, or a new tensor."""
    spans = {(node.site.code, node.site.span) for node in dataflow.nodes if node.site is not None}
    for code, own in calls.items():
        tree = syntax_of(code)
        nodes = {span_of(node): node for node in nodes_of(tree, ast.expr, ast.AugAssign)} if tree is not None else {}
        ran = {
            span
            for span in own
            if runs.coverage.package_lines.ran(code, span[0][0], span[1][0])
            and (span not in nodes or runs.coverage.ran(code, nodes[span]))  # other analyses follow what did not run
        }
        beside = [own[span] for span in ran if (code, span) not in spans]
        for node in dataflow.nodes if beside else ():
            if node.site is not None and node.site.code is code:
                assumptions.vary(v for v in node.inputs if v.producer is None and v.data is not None and not v.stored)
        if any(beside):
            reason = f"could be picked, or be computed again, by a number that code chooses in {code.co_name}"
            picks = (nodes.get(span) for span in ran if own[span])
            received = any(pick is None or may_pick_arguments(pick, code, runs.modules) for pick in picks)
            use_values_around_code(code, runs.modules, dataflow, assumptions, reason, received=received)
            assumptions.keeping.update(places)
