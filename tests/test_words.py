"""Names say what a thing is: past participles and verbs that fit anything are not names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(path for package in ("engine", "lightning_compress") for path in (ROOT / package).rglob("*.py"))
VAGUE = frozenset({"found", "known", "made", "given", "told", "puts", "apart"})


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Names of variables, parameters, attributes, functions and classes that are defined, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_names_say_what_a_thing_is(path: Path) -> None:
    """None of the vague words is a name by itself, underscores aside."""
    vague = [(line, name) for line, name in names(ast.parse(path.read_text())) if name.strip("_") in VAGUE]
    assert not vague


def test_the_test_above_can_see_names() -> None:
    """Of each kind."""
    code = "def made(given, *, known=1):\n    found = self.told = 0\n    for apart in (): pass\nclass puts: pass"
    assert {name for _, name in names(ast.parse(code))} >= VAGUE
