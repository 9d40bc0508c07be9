"""Text that is no longer what runs."""

from __future__ import annotations
import __future__

import ast
import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
from _pytest.assertion.rewrite import rewrite_asserts

from engine.source.function_text import lambdas_of_file, same_code, source_of, syntax_of, text_of

ROOT = Path(__file__).parents[3]
TEXT = '''
from __future__ import annotations


class Model:
    def plain(self, x: Unknown, scale=1.0) -> None:
        """A docstring
            over two lines."""
        y = [n * scale for n in (1, 2.0, -0.0)]
        return lambda z: (x, y, z, """text
    of lines""", {1, 2})

    @staticmethod
    def decorated(x):
        try:
            return x in {"a", "b", "c"}
        finally:
            print(x)


def free(x):
    return x + 1
'''


def imported(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    """A module from a file of its own."""
    (folder / f"{name}.py").write_text(TEXT)
    monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module(name)


FUNCTIONS: dict[str, Callable[[ModuleType], FunctionType]] = {
    "method": lambda module: module.Model.plain,
    "decorated": lambda module: module.Model.decorated,
    "function": lambda module: module.free,
}


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Methods with docstrings, nested functions, decorators and annotations of the future."""
    function = FUNCTIONS[kind](imported(tmp_path, monkeypatch, f"texts_{kind}"))
    text = source_of(function)
    assert text is not None and f"def {function.__name__}" in text


@pytest.mark.parametrize(
    ("old", "new"),
    [("x + 1", "x - 1"), ("x + 1", "x + 1.0"), ("x + 1", "y + 1"), ("x + 1", "x + True"), ("def free", "\n\ndef free")],
)
def test_a_file_that_was_edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    """An operator, a constant, its type, a name; where the lines have moved, another text stands there."""
    name = f"texts_{abs(hash((old, new)))}"
    module = imported(tmp_path, monkeypatch, name)
    (tmp_path / f"{name}.py").write_text(TEXT.replace(old, new))
    assert source_of(module.free) is None


def test_a_module_that_is_loaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code that is gone has no text any more, and the code that runs has the new one."""
    module = imported(tmp_path, monkeypatch, "texts_again")
    old = module.free.__code__
    assert syntax_of(module.Model.plain.__code__) is not None
    file = tmp_path / "texts_again.py"
    file.write_text(TEXT.replace("x + 1", "x - 11"))
    importlib.reload(module)
    assert "x - 11" in text_of(module.free.__code__) and text_of(old) == ""
    assert syntax_of(old) is None


ASSERTING = """
import torch.nn.functional as F

def forward(x):
    assert x.ndim == 2, (
        "a batch of vectors"
    )
    return F.relu(x + 1)
"""


@pytest.mark.parametrize(("changed", "has_text"), [(ASSERTING, True), (ASSERTING.replace("+", "-"), False)])
def test_assertions_that_pytest_rewrites(tmp_path: Path, changed: str, has_text: bool) -> None:
    """The rest of the code says whether it is that of the text."""
    file = tmp_path / "asserting.py"
    file.write_text(ASSERTING)
    tree = ast.parse(ASSERTING)
    rewrite_asserts(tree, ASSERTING.encode())
    space: dict[str, Any] = {}
    exec(compile(tree, str(file), "exec", dont_inherit=True), space)
    file.write_text(changed)
    assert bool(text_of(space["forward"].__code__)) is has_text


def test_statements_of_a_cell(tmp_path: Path) -> None:
    """A notebook compiles each by itself, with the ``from __future__`` of other cells."""
    text = "import torch.nn.functional as F\n\ndef forward(x: Any):\n    return F.relu(x)\n"
    file = tmp_path / "cell.py"
    file.write_text(text)
    space: dict[str, Any] = {}
    for statement in ast.parse(text).body:
        module = ast.Module([statement], [])
        exec(compile(module, str(file), "exec", flags=__future__.annotations.compiler_flag, dont_inherit=True), space)
    assert text_of(space["forward"].__code__) == text


def test_a_comment_is_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code is the same."""
    module = imported(tmp_path, monkeypatch, "texts_comment")
    (tmp_path / "texts_comment.py").write_text(TEXT.replace("return x + 1", "return x + 1  # one more"))
    assert "one more" in (source_of(module.free) or "")


def test_code_is_compared_by_what_it_does() -> None:
    """Nested functions count, places do not."""
    assert same_code((lambda x: lambda: x).__code__, (lambda x: lambda: x).__code__)
    assert not same_code((lambda x: lambda: x).__code__, (lambda x: lambda: -x).__code__)
    assert not same_code((lambda x: x in {1, 2}).__code__, (lambda x: x in {1, 3}).__code__)


EDITED = """
import sys, pathlib, torch
from torch import nn
import engine, edited
from tests.engine.attentions import without_heads, tokens
from tests.engine.exactness import randomised, masked, run
model = randomised(nn.Sequential(nn.Linear(5, 8), edited.Attention(), nn.Linear(8, 3)))
masks = {"1.qkv": without_heads(model[1].qkv, [1, 2])}
file = pathlib.Path(edited.__file__)
expected = run(masked(model, masks).train(), tokens())[0]
file.write_text(file.read_text().replace("# TRAIN", "y = y * (1.5 if self.training else 1)"))
speedup = engine.ModelSpeedup(model, tokens(), masks)
small = speedup.speedup_model()
print(len(speedup.plan.exchanges), float((run(small.train(), tokens())[0] - expected).abs().max()))
print(speedup.plan)
"""


def test_a_train_branch_that_was_edited_meanwhile(tmp_path: Path) -> None:
    """The model keeps running the code that it was verified with: nothing is pinned in text that it is not."""
    lines = (ROOT / "tests/engine/attentions.py").read_text().split("\n")
    begin = next(n for n, line in enumerate(lines) if line.startswith("class Attention"))
    end = next(n for n, line in enumerate(lines) if line.startswith("class Rewritten"))
    text = "\n".join(lines[begin:end]).replace("        return self.out", "        # TRAIN\n        return self.out")
    (tmp_path / "edited.py").write_text(f"from torch import Tensor, nn\n\n\n{text}")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    out = subprocess.run([sys.executable, "-c", EDITED], capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    assert out.returncode == 0, out.stderr
    pins, difference = out.stdout.split("\n")[0].split()
    assert pins == "0" and float(difference) < 1e-12


def test_lambda_functions_are_looked_for_once() -> None:
    """By their lines, also where one lies in another; another text has others."""
    text = "f = lambda: (lambda x: x)\n\ng = lambda: 1\n"
    lambdas = lambdas_of_file(text)
    assert {line: len(on_line) for line, on_line in lambdas.items()} == {1: 2, 3: 1}
    assert lambdas_of_file(text) is lambdas and list(lambdas_of_file(f"\n{text}")) == [2, 4]
