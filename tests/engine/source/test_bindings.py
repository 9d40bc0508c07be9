"""What the variables of a function may hold."""

from __future__ import annotations

import ast
from types import CodeType

import pytest

from engine.source.bindings import bindings, path_of, set_from_globals


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("a = b = x", {"a": "x", "b": "x"}),
        ("a: int = x", {"a": "x"}),
        ("a: int", {}),
        ("a += x", {"a": "x"}),
        ("f(a := x)", {"a": "x"}),
        ("b = (a := x)", {"a": "x", "b": "x"}),
        ("for i, a in x: pass", {"i": "x", "a": "x"}),
        ("[a for a in x]", {"a": "x"}),
        ("with x as (a, b): pass", {"a": "x", "b": "x"}),
        ("a, (b, c) = x, (y, z)", {"a": "x", "b": "y", "c": "z"}),
        ("a, *b = x, y", {"a": "(x, y)", "b": "(x, y)"}),
        ("a, b = (x, y) if z else w", {"a": "(x, y) if z else w", "b": "(x, y) if z else w"}),
        ("a['k'] = x", {"a": "x"}),
        ("a[i].k = x", {"a": "x"}),
        ("a.k = x", {"a": "x", "a.k": "x"}),
        ("self.k = x", {"self.k": "x"}),
        ("a.append(x)", {"a": "x"}),
        ("a.update(k=x)", {"a": "x"}),
        ("a.view(x)", {}),
        ("match x:\n    case [a, *b]: pass\n    case {'k': 1, **c}: pass", {"a": "x", "b": "x", "c": "x"}),
    ],
)
def test_bindings(code: str, expected: dict[str, str]) -> None:
    """Each way in which Python binds a name, or puts something into what it holds."""
    result = {name: [ast.unparse(b.value) for b in own] for name, own in bindings(ast.parse(code), "self").items()}
    assert result == {name: [value] for name, value in expected.items()}


def test_what_replaces() -> None:
    """A name that is set holds nothing of before; one that gets an item does."""
    tree = ast.parse("a = x\na += x\na.k = x\na[0] = x\na.append(x)")
    assert [b.replaces for b in bindings(tree)["a"]] == [True, False, False, False, False]
    assert [(b.line, type(b.node)) for b in bindings(tree)["a"]][:2] == [(1, ast.Assign), (2, ast.AugAssign)]


def test_whether_something_has_gradients_is_no_part_of_it() -> None:
    """The path is bound, and not the variable."""
    names = bindings(ast.parse("a.requires_grad = True\nb.data = c"))
    assert set(names) == {"a.requires_grad", "b.data", "b"}


def test_paths() -> None:
    """Of attributes of a variable only."""
    assert path_of(ast.parse("a.b.c", mode="eval").body) == "a.b.c"
    assert path_of(ast.parse("f().b", mode="eval").body) is None


def test_what_is_set_from_globals() -> None:
    """Arguments and their items are not, whatever builtin functions go over them."""
    text = "def run(cache=None):\n    if cache is None: cache = Cache()\n    F = ops\n    for c in zip(cache): pass"
    code = next(c for c in compile(text, "", "exec").co_consts if isinstance(c, CodeType))
    assert set_from_globals(ast.parse(text).body[0], code) == {"F"}  # type: ignore[arg-type]
