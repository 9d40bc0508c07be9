"""What takes the place of arguments that a call leaves out."""

from __future__ import annotations

import ast
from typing import Any

from engine.flow.branches import branches_of
from engine.flow.omitted_arguments import empty_arguments, ends_of_numeric_fallbacks, fallback_variables


def _cell(x: Any, h: Any = None, *, gate: Any = None) -> Any:
    state = x * 0 if h is None else h
    if gate is None:
        gate = 1
    other = x + 1
    x = x + h if h is not None else x
    return state, gate, other


def test_variables_and_arguments() -> None:
    """The argument itself, and variables that are made of it; other arguments and variables are not."""
    function = branches_of(_cell.__code__)
    assert function is not None
    assert fallback_variables(function, {"x": 1, "h": None, "gate": None}) == {"h": "h", "gate": "gate", "state": "h"}
    assert fallback_variables(function, {"x": 1, "h": 2, "gate": None}) == {"gate": "gate"}


def test_a_call_with_all_arguments() -> None:
    """Nothing is left out."""
    function = branches_of(_cell.__code__)
    assert function is not None and fallback_variables(function, {"x": 1, "h": 2, "gate": 3}) == {}


def _typed(x: Any, state: Any = None, mask: Any = None, extra: Any = None) -> Any:
    h: Any = x * 0 if state is None else state
    a, b = (x, x) if mask is None else mask
    kept = {}
    kept["h"] = x if extra is None else extra
    return (other := x if state is None else state), h, a, b, kept, other


def test_each_way_to_bind_a_variable() -> None:
    """With a type, in an expression, several at once, as an item."""
    function = branches_of(_typed.__code__)
    assert function is not None
    result = fallback_variables(function, {"x": 1, "state": None, "mask": None, "extra": None})
    assert {name: result.get(name) for name in ("h", "a", "b", "kept", "other")} == {
        "h": "state", "a": "mask", "b": "mask", "kept": "extra", "other": "state",
    }  # fmt: skip


def _many(x: Any, *items: Any, h: Any = None) -> Any:
    return x, items, h


def test_what_holds_nothing() -> None:
    """None, and no items; a number or a tensor is something."""
    function = branches_of(_many.__code__) or branches_of(_cell.__code__)
    assert function is not None
    assert empty_arguments(function, {"x": 1, "h": None, "gate": ()}) == {"h", "gate"} & {*function.code.co_varnames}


def _numbers(body: str, computed: tuple[int, ...] = ()) -> set[int]:
    tree = ast.parse(f"def f(x, a=None, *items):\n  {body}")
    spans = [n for n in ast.walk(tree) if isinstance(n, ast.BinOp) and n.lineno == 2 and n.end_col_offset in computed]
    marked = frozenset(((n.lineno, n.col_offset), (2, n.end_col_offset or 0)) for n in spans)
    return {column for _, column in ends_of_numeric_fallbacks(tree, frozenset({"a", "items"}), marked)}


def test_numbers_are_followed_up_to_an_op() -> None:
    """Through operators and variables; sizes of the argument are numbers in any call."""
    text = "return x * (1 + (0 if a is None else a)) + x"
    assert _numbers(text, (len("  " + text[:-4]), len("  " + text))) == {41, 42}
    assert _numbers("n = 0 if a is None else a.shape[1]; return x + (1 + n)")
    assert not _numbers("n = 0; n = len(items); return x + n")
