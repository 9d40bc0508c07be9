"""What the short examples share, and what holds for all of them."""

from __future__ import annotations

import ast
from pathlib import Path

import fitting
import pytest

FOLDER = Path(fitting.__file__).parent
HELPERS = {"fitting", "image_data", "measuring"}
EXAMPLES = sorted(path for path in FOLDER.glob("*.py") if path.stem not in HELPERS)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_an_example_says_what_it_teaches_and_how_to_run_it(path: Path) -> None:
    """Its docstring has the one command; it is tested; the list of examples names it."""
    doc = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert "this example teaches" in doc
    assert f"make example NAME={path.stem}" in doc or (path.stem == "digits" and "make demo" in doc)
    assert (Path(__file__).parent / f"test_{path.stem}.py").exists()


def test_results_are_shown_in_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Counts with separators, fractions with three digits, pairs as before and after."""
    fitting.show({"MACs": (1_234_567, 1000), "error": 1.23456e-15, "same": True, "file": Path("a")})
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["MACs   1,234,567 -> 1,000", "error  1.23e-15", "same   True", "file   a"]
