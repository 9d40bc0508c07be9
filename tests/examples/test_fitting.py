"""What the short examples share, and what holds for all of them."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from pathlib import Path

import fitting
import pytest

FOLDER = Path(fitting.__file__).parent
HELPERS = {"fitting", "image_data", "measuring"}
EXAMPLES = sorted(path for path in FOLDER.glob("*.py") if path.stem not in HELPERS)


def is_run(example: str, source: str) -> bool:
    """Whether a test runs an example: its ``run`` or ``main``, `small.run` with it, or its file in another process."""
    tree = ast.parse(source)
    imported = [alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names = {alias.asname or alias.name for alias in imported if alias.name == example}
    tests = [f for f in tree.body if isinstance(f, ast.FunctionDef)]
    calls = [node for f in tests for node in ast.walk(f) if isinstance(node, ast.Call)]

    def runs(call: ast.Call) -> bool:
        if not isinstance(call.func, ast.Attribute) or call.func.attr not in ("run", "main"):
            return False
        inside = [node.id for part in (call.func, *call.args) for node in ast.walk(part) if isinstance(node, ast.Name)]
        return bool(names & set(inside))

    return any(runs(call) for call in calls)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_an_example_says_what_it_teaches_and_how_to_run_it(path: Path) -> None:
    """Its docstring has the one command; it is tested; the list of examples names it."""
    doc = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert "this example teaches" in doc
    assert f"make example NAME={path.stem}" in doc or (path.stem == "digits" and "make demo" in doc)
    test = Path(__file__).parent / f"test_{path.stem}.py"
    assert test.exists() and is_run(path.stem, test.read_text()), f"No test runs {path.name}."


def test_an_example_that_no_test_runs_is_found() -> None:
    """A test that imports it, or runs another one, does not count."""
    assert is_run("vit", "import vit\ndef test_it(): small.run(vit, path)")
    assert is_run("vit", "import vit as example\ndef test_it(): example.main()")
    assert is_run("vit", "import vit\ndef test_it(): subprocess.run([python, vit.__file__])")
    assert not is_run("vit", "import vit\ndef test_it(): assert vit.Transformer()")
    assert not is_run("vit", "import vit, lstm\ndef test_it(): small.run(lstm, path)")
    assert not is_run("vit", "import vit\nvit.run")


def test_every_example_is_in_the_readme() -> None:
    """The table names each, and none that is not there."""
    readme = (FOLDER.parent / "README.md").read_text(encoding="utf-8")
    table = readme.partition("## Examples")[2].partition("## ")[0]
    named = [
        name
        for line in table.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.split(" | ")[0])
    ]
    assert sorted(named) == [path.stem for path in EXAMPLES]


def test_results_are_shown_in_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Counts with separators, fractions with three digits, pairs as before and after."""
    fitting.show({"MACs": (1_234_567, 1000), "error": 1.23456e-15, "same": True, "file": Path("a")})
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["MACs   1,234,567 -> 1,000", "error  1.23e-15", "same   True", "file   a"]


def test_make_lists_the_examples_alone() -> None:
    """Helpers beside them are not examples; a name that is none gets the list."""
    command = ["make", "--old-file=.venv/.stamp-demo", "example", "NAME=fitting"]
    # a make around this one (`make test`) hands its options on, and this one then reports the folders that it enters
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    listing = subprocess.run(command, cwd=FOLDER.parent, env=environment, capture_output=True, text=True)
    assert listing.returncode == 2 and "one of" in listing.stdout
    assert listing.stdout.split(":\n")[1].split() == [path.stem for path in EXAMPLES]
