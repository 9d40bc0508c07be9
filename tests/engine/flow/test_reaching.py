"""Which assignment of a variable was the last one."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from engine.flow.reaching import definitions_before, is_never_none

_FUNCTION = """
def forward(self, x, flag=False, keys=()):
    v, w = self.pair(x)
    u: int = 1
    if flag:
        v = x * 2
        v = v.reshape(3, -1)
    elif keys:
        v = None
    else:
        w = x + 1
    for key in keys:
        u = 2
    z = 3
    z = z + u
    with flag:
        t = 4
    x[0] = None
    AT(v, w, u, z, t, x, key)
"""


def before(name: str, code: str = _FUNCTION) -> list[str] | None:
    """Return the values, or `*` for parts of one, that a variable may have at the last statement."""
    tree = ast.parse(code).body[0]
    assert isinstance(tree, ast.FunctionDef)
    last = next(n for n in ast.walk(tree.body[-1]) if isinstance(n, ast.Name) and n.id == name)
    definitions = definitions_before(tree, name, last)
    values = ("*" if d.value is None else ast.unparse(d.value) for d in definitions or ())
    return None if definitions is None else sorted(values)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("v", ["*", "None", "v.reshape(3, -1)"]),
        ("w", ["*", "x + 1"]),
        ("u", ["1", "2"]),
        ("z", ["z + u"]),
        ("t", None),
        ("x", None),
        ("key", None),
    ],
)
def test_the_last_assignments(name: str, values: list[str] | None) -> None:
    """Of each branch, of loops, and none where it may be an argument, or unbound."""
    assert before(name) == values


def test_in_the_condition_of_a_branch_that_assigns() -> None:
    """Where the expression is in a branch, or in a condition, what stands behind it does not count."""
    tree = ast.parse("def f(x):\n  v = x + 1\n  if v is not None:\n    v = None\n    w = v\n  return v").body[0]
    assert isinstance(tree, ast.FunctionDef) and isinstance(tree.body[1], ast.If)
    test, inside = tree.body[1].test, tree.body[1].body[1]
    assert isinstance(test, ast.Compare) and isinstance(inside, ast.Assign)
    for node, value in ((test.left, "x + 1"), (inside.value, "None")):
        definitions = definitions_before(tree, "v", node)
        assert definitions is not None
        assert [ast.unparse(d.value) for d in definitions if d.value is not None] == [value]


@pytest.mark.parametrize(
    ("code", "never"),
    [
        ("-x", True),
        ("x < 2", True),
        ("[x, y]", True),
        ("'a'", True),
        ("x.mean(dim=1)", True),
        ("self.mean(x)", False),
        ("x.features.mean()", False),
        ("x.add(y)", False),
        ("x.unknown()", False),
        ("x if y else None", False),
    ],
)
def test_what_is_never_none(code: str, never: bool) -> None:
    """Operators, displays and methods of tensors; a container's `add` returns nothing."""
    assert is_never_none(ast.parse(code, mode="eval").body, {"x", "y"}) is never


def test_a_round_assigns_before_it_reads() -> None:
    """What other rounds left there does not reach the expression."""
    code = "def f(x, layers):\n  for layer in layers:\n    x = layer(x)\n    if x: x, y = x\n  return x"
    tree: Any = ast.parse(code).body[0]
    condition = tree.body[0].body[1]
    reaching = definitions_before(tree, "x", condition.test)
    assert reaching is not None and [ast.unparse(d.value) for d in reaching if d.value is not None] == ["layer(x)"]
    assert definitions_before(tree, "x", tree.body[0].body[0].value.args[0]) is None
