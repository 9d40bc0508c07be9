"""Names say what a thing is: past participles and verbs that fit anything are not names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("engine", "lightning_compress", "examples", "benchmarks", "site_build")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
VAGUE = frozenset({"found", "known", "made", "given", "told", "puts", "apart"})


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Names of variables, parameters, attributes, functions, classes and imports that are defined, with lines."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from ((node.lineno, alias.asname) for alias in node.names if alias.asname)
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            yield node.lineno, node.name


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_names_say_what_a_thing_is(path: Path) -> None:
    """None of the vague words is a name by itself, underscores aside."""
    vague = [(line, name) for line, name in names(ast.parse(path.read_text())) if name.strip("_") in VAGUE]
    assert not vague


@pytest.mark.parametrize(
    "code",
    [
        "{} = 0",
        "x, *{} = y",
        "self.{} = 0",
        "self._{} += 1",
        "{}: int",
        "def {}(): pass",
        "async def {}(): pass",
        "def f(*, {}=1): pass",
        "def f(**{}): pass",
        "lambda {}: 0",
        "class {}: pass",
        "for {} in y: pass",
        "[0 for {} in y]",
        "with x as {}: pass",
        "if ({} := 0): pass",
        "import x as {}",
        "try: pass\nexcept E as {}: pass",
        "match x:\n    case [{}, *_]: pass",
        "match x:\n    case [*{}]: pass",
    ],
)
def test_the_test_above_can_see_names(code: str) -> None:
    """However they are defined."""
    defined = {name.strip("_") for _, name in names(ast.parse(code.format("found")))}
    assert "found" in defined
