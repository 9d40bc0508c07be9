"""Collections of numbers and texts in attributes that code sets later: indices and names of levels, dimensions.

Some other lists of numbers are recorded. A collection may express more orders and choices than can be recorded, so
everything that is computed by functions that choose by it is kept.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any

from engine.flow.names_used import names_in
from engine.limits import DEEPEST_CHOICE, MOST_CHOICES, MOST_LIST_ITEMS, MOST_NUMBERS_FURTHER
from engine.observations.assumptions import Assumptions
from engine.observations.dataflow import Dataflow
from engine.observations.recorded_runs import RecordedRuns
from engine.observations.surroundings import use_values_around_code
from engine.source.function_text import syntax_of
from engine.source.syntax import nodes_of, parents_of

__all__ = ["is_choice", "is_list_of_numbers", "other_lists", "record_in_steps", "use_values_chosen_by_lists"]

_COLLECTIONS = (list, tuple, set, frozenset, dict)
_PASSED = (ast.Subscript, ast.Starred, ast.keyword)
_ITERATING = frozenset("enumerate iter len list map range reversed set sorted sum tuple zip".split())


def is_list_of_numbers(value: Any) -> bool:
    """Whether a value is a short list or tuple of numbers and flags.

    Example:
        >>> is_list_of_numbers([0, 2]), is_list_of_numbers([]), is_list_of_numbers(["s", 1])
        (True, False, False)
    """
    numbers = type(value) in (list, tuple) and 0 < len(value) <= MOST_LIST_ITEMS
    return numbers and all(type(item) in (bool, int, float) for item in value)


def record_in_steps(
    setting: Sequence[tuple[Any, Any]],
    accepts: Callable[[Sequence[tuple[Any, Any]]], bool],
    leads_on: Callable[[], bool],
) -> bool:
    """Record a setting, and go on in its direction as long as each step leads to something new.

    Args:
        setting: attributes, each with another value.
        accepts: records a run with a setting, and returns whether it succeeded.
        leads_on: returns whether the run that was recorded last took a step that none before it took.

    Returns:
        Whether the setting itself could be recorded.
    """
    is_accepted = accepts(setting)
    further = iter(_further_numbers(setting) if is_accepted else ())
    while leads_on() and (following := next(further, None)) is not None and accepts(following):
        pass
    return is_accepted


def _further_numbers(setting: Sequence[tuple[Any, Any]]) -> list[list[tuple[Any, Any]]]:
    """Return the settings that go on where one changes whole numbers by one step, without negative ones.

    Args:
        setting: attributes, each with another value.
    """
    steps = {value - a.value if type(a.value) is type(value) is int else 0 for a, value in setting}
    if steps not in ({1}, {-1}):
        return []
    ways = [
        [(a, a.value + count * (value - a.value)) for a, value in setting]
        for count in range(2, MOST_NUMBERS_FURTHER + 1)
    ]
    return [way for way in ways if all(value >= 0 for _, value in way)]


def is_choice(value: Any) -> bool:
    """Whether a value is a short collection of numbers and strings, by which code may choose (``return_layers``).

    Their items may be such collections, too, or empty ones: ``{3: [1, 2]}``.

    Example:
        >>> [is_choice(value) for value in (["s", 1], {2}, {"layer4": "out"}, {3: [{"on": True}]}, [object()])]
        [True, True, True, True, False]
    """
    return type(value) in _COLLECTIONS and len(value) > 0 and _is_of_numbers_and_texts(value, DEEPEST_CHOICE)


def _is_of_numbers_and_texts(value: Any, levels: int) -> bool:
    if type(value) not in _COLLECTIONS:
        return type(value) in (bool, int, float, str, type(None))
    items = [*value, *(value.values() if isinstance(value, dict) else ())]
    return levels > 0 and len(value) <= MOST_CHOICES and all(_is_of_numbers_and_texts(i, levels - 1) for i in items)


def other_lists(numbers: list[Any] | tuple[Any, ...]) -> Iterator[list[Any] | tuple[Any, ...]]:
    """Yield other lists: with other numbers, in another order, with one more item, and with one less.

    Example:
        >>> list(other_lists([0, 2]))
        [[1, 3], [-1, 1], [2, 0], [0, 2, 3], [0]]
    """
    kind = type(numbers)
    for step in (1, -1):
        yield kind([not n if isinstance(n, bool) else n + step for n in numbers])
    if len(numbers) > 1:
        yield kind(reversed(numbers))
    last = numbers[-1]
    yield kind([*numbers, last if isinstance(last, bool) else max(numbers) + 1])
    yield kind(numbers[:-1])


def use_values_chosen_by_lists(runs: RecordedRuns, dataflow: Dataflow, assumptions: Assumptions) -> None:
    """Count as used what is computed by functions that choose by a collection of numbers or strings set later.

    Args:
        runs: the recordings.
        dataflow: of the recorded ops.
        assumptions: is extended.
    """
    owners = ((runs.modules[name], key) for name, key in runs.set_later if name in runs.modules)  # or in a container
    choices = {key: f"{type(m).__name__}.{key}" for m, key in owners if is_choice(vars(m).get(key))}
    for code in runs.coverage.called if choices else ():
        for key in [key for key in choices.keys() & names_in(code) if _chooses(code, key)]:
            reason = f"is computed by {code.co_name}, which reads {choices[key]}: numbers or texts that code sets later"
            use_values_around_code(code, runs.modules, dataflow, assumptions, reason)


def _chooses(code: CodeType, attribute: str) -> bool:
    """Whether a function does more with a collection in an attribute than pass it, or an item of it, to a call.

    A number that an op receives is like any other. Iterating over the list, searching it, or indexing with one of its
    numbers is a choice.
    """
    tree = syntax_of(code)
    if tree is None:
        return True
    parents = parents_of(tree)
    for node in (node for node in nodes_of(tree, ast.Attribute) if node.attr == attribute):
        part: ast.AST = node
        while isinstance(parents[part], _PASSED) and getattr(parents[part], "value", 0) is part:
            part = parents[part]
        call = parents[part]
        if isinstance(call, ast.Call) and call.func is node:  # another attribute of this name: a list is not called
            continue
        if not isinstance(call, ast.Call) or part is call.func or getattr(call.func, "id", "") in _ITERATING:
            return True
    return False
