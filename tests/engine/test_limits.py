"""Limits of the analysis."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import engine
from engine import limits

ROOT = Path(engine.__file__).parent
ROOMS = "source numbers flow running observations alternatives unrecorded recording".split()
FILES = [path for room in ROOMS for path in sorted((ROOT / room).glob("*.py"))]
LIMIT = re.compile(r"_*(MOST|LEAST|LARGEST|LONGEST|DEEPEST|FRUITLESS)\w*")
OTHERS = {"sites._MOST", "branch_notes._MOST_NAMES"}
"""The size of a cache, and of a list in a message."""


def test_each_limit_is_used_and_says_what_it_limits() -> None:
    """No module has another number for the same thing."""
    tree = ast.parse(Path(limits.__file__).read_text())
    constants = {s.targets[0].id for s in tree.body if isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Name)}
    texts = [s for s in tree.body if isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)]
    assert constants - {"__all__"} == set(limits.__all__) and len(texts) == len(limits.__all__) + 1
    code = "\n".join(path.read_text() for path in FILES)
    assert [name for name in limits.__all__ if len(re.findall(rf"\b{name}\b", code)) < 2] == []


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_module_has_limits_of_its_own(path: Path) -> None:
    """A reader finds all of them in one place."""
    targets = [t for s in ast.parse(path.read_text()).body if isinstance(s, ast.Assign) for t in s.targets]
    names = {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name) and LIMIT.fullmatch(n.id)}
    assert {f"{path.stem}.{name}" for name in names} <= OTHERS
