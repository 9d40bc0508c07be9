"""Functions whose source is not available: if other calls may take another path, they may do anything."""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection
from types import CodeType

from torch import nn

from engine.flow.conditions import Conditions
from engine.flow.mutability import Mutability
from engine.observations.assumptions import Assumptions
from engine.observations.dataflow import Dataflow
from engine.observations.recorded_runs import RecordedRuns
from engine.observations.surroundings import values_around
from engine.program.places import shown_place
from engine.source.instructions import arguments_of
from engine.source.model_code import codes_of
from engine.source.unread_code import UnreadFunction, chooses_by_value, condition_at, has_sizes
from engine.unrecorded.idle_modules import IdleModules

__all__ = ["assume_nothing_of_unread_functions"]

_UNREAD = "whose text Python does not keep, or whose code equals that of another file"


def assume_nothing_of_unread_functions(
    runs: RecordedRuns, idle: IdleModules, mutability: Mutability, dataflow: Dataflow, assumptions: Assumptions
) -> None:
    """Assume that the values around functions without source that may behave differently are used and vary.

    Args:
        runs: the recordings.
        idle: modules that did not run.
        mutability: of the model's attributes.
        dataflow: of the recorded ops.
        assumptions: is extended.
    """
    with_ops = {code for node in runs.nodes if node.site is not None for code in (node.site.code, node.site.caller)}
    places: dict[str, None] = {}
    for function in runs.coverage.unread.values():
        code, module = function.code, runs.modules[function.owner]
        is_method = code in codes_of(type(module))  # type: ignore[arg-type]
        computes = is_method or code in with_ops or not code.co_name.startswith("__")
        if computes and _may_differ(function, module if is_method else None, runs, idle, mutability):
            places[f"{code.co_name} ({shown_place(f'{code.co_filename}:{code.co_firstlineno}')})"] = None
            values = list(values_around(function.owner, runs.modules, dataflow))
            assumptions.use(values, f"could be used by {code.co_name}, {_UNREAD}")
            assumptions.vary(values)
    if places:
        assumptions.notes.append(
            f"Functions {_UNREAD}, and which may do something else in other calls; around them all channels stay: "
            f"{', '.join(places)}. Save the code in a file of its own and import it."
        )


def _may_differ(
    function: UnreadFunction, module: nn.Module | None, runs: RecordedRuns, idle: IdleModules, mutability: Mutability
) -> bool:
    """Whether a function may behave differently in other calls; ``module``: the module whose method it is."""
    if function.is_passed_functions or chooses_by_value(function.code, function.space):
        return True
    jumps = list(function.one_way())
    has_idle = bool(idle.owners) if function.owner == "" else idle.includes_any([function.owner])
    if jumps and (module is None or has_idle or has_sizes(function.code)):  # what the other side does to them is unread
        return True
    return not all(_is_settled(function, jump, module, runs.sized, mutability) for jump in jumps)


def _is_settled(
    function: UnreadFunction, jump: int, module: nn.Module | None, sized: Collection[str], mutability: Mutability
) -> bool:
    """Whether a jump goes the same way in every call of the model."""
    code, test = function.code, condition_at(function.code, jump)
    if test is None or module is None:
        return False
    owner = code.co_varnames[0]
    conditions = Conditions(
        _without_body(code), function.space, set(arguments_of(code)) - {owner},
        functools.partial(mutability.never_changed, module), lambda node: True, owner,
        functools.partial(mutability.never_reassigned, module), code.co_filename, sized,
    )  # fmt: skip
    return conditions.is_fixed(test)


def _without_body(code: CodeType) -> ast.FunctionDef:
    """Return the syntax of a function with the arguments of another one and no body."""
    arguments = ast.arguments([], [ast.arg(name) for name in arguments_of(code)], None, [], [], None, [])
    return ast.fix_missing_locations(ast.FunctionDef(code.co_name, arguments, [ast.Pass()], []))
