"""The notebooks run, cell by cell, and show tables."""

from __future__ import annotations

import ast
import json
import linecache
from pathlib import Path
from typing import Any

import pytest

from tests.examples.small import one_thread

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"


def cells(path: Path) -> list[str]:
    """The code."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run_cell(code: str, names: dict[str, Any]) -> Any:
    """Run a cell; the value of its last line, where that is an expression, as a notebook shows it."""
    tree, name = ast.parse(code), f"cell {len(linecache.cache)}"
    linecache.cache[name] = len(code), None, code.splitlines(keepends=True), name  # as notebooks do
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), names)
    return eval(compile(ast.Expression(last.value), name, "eval"), names) if last is not None else None


@pytest.mark.parametrize("name", ["vision", "language"])
@pytest.mark.filterwarnings("ignore")
def test_a_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its last cell claims holds, and what cells end with has a table."""
    if name == "vision":
        pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = []
    with one_thread():
        for code in cells(FOLDER / f"{name}.ipynb"):
            value = run_cell(code.replace("EPOCHS = 8", "EPOCHS = 3").replace("EPOCHS = 6", "EPOCHS = 3"), names)
            shown += [value] if hasattr(value, "_repr_html_") else []
    assert len(shown) >= 2 and all("<table" in value._repr_html_() for value in shown)


def test_the_notebooks_hold_no_outputs() -> None:
    """They are small, and differ by their code alone."""
    for path in FOLDER.glob("*.ipynb"):
        for cell in json.loads(path.read_text())["cells"]:
            assert cell["cell_type"] != "code" or (cell["outputs"] == [] and cell["execution_count"] is None)
