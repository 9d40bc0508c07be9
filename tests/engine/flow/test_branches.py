"""Which parts of a function did not run."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import engine
from engine.flow.branches import branches_of


def choose(flag: bool, x: int) -> int:
    """A function with branches, in one line and in several."""
    y = x + 1 if flag else x - 1
    if flag:
        y = y * 2
    else:
        return y
    return y + 3


def test_what_did_not_run() -> None:
    """The largest parts that no instruction ran of, expressions included."""
    function = branches_of(choose.__code__)
    assert function is not None
    ran = set(range(0, len(choose.__code__.co_code), 2))
    assert not list(function.untaken(ran))
    branches = list(function.untaken(set()))
    assert [ast.unparse(branch.nodes[0]) for branch in branches] == [
        "x + 1",
        "x - 1",
        "y = y * 2",
        "return y",
        "return y + 3",
    ]
    assert [sorted(branch.names) for branch in branches] == [["x"], ["x"], ["y"], ["y"], ["y"]]


def gather(flag: bool, items: list[int]) -> list[int]:
    """A function whose branch has a comprehension, which is code of its own."""
    if flag:
        return [item + 1 for item in items if item != 3]
    return [item - 1 for item in items]


def test_comprehensions_run_with_their_branch() -> None:
    """What is inside of a comprehension did not run if the branch around it did not."""
    function = branches_of(gather.__code__)
    assert function is not None
    [branch, *_] = function.branches
    ran = set(range(0, len(gather.__code__.co_code), 2))
    inside = {ast.unparse(node): node for node in ast.walk(function.tree) if isinstance(node, (ast.BinOp, ast.Compare))}
    assert branch.offsets and all(function.ran(node, ran) for node in inside.values())
    idle = {text for text, node in inside.items() if not function.ran(node, ran - branch.offsets)}
    assert idle == {"item + 1", "item != 3"}


def test_functions_without_branches() -> None:
    """There is nothing to watch."""
    assert branches_of((lambda x: x + 1).__code__) is None


TEXT = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other, self.head = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        h, z = self.one(x).relu(), self.other(x).sigmoid()
        if len(x) == 77:
            h = z
        return self.head(h) + self.head(z)
"""


def imported(path: Path, name: str) -> Any:
    """Load a file as a Python module of some name."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_equal_code_of_two_files_and_of_a_file_that_is_loaded_twice(tmp_path: Path) -> None:
    """Each network is analysed by the code that it runs."""
    reasons = []
    for name in ("first", "second", "second"):
        path = tmp_path / f"{name}.py"
        path.write_text(TEXT)
        net = imported(path, f"{name}_{len(reasons)}").Net()
        reasons.append([group.reason is None for group in engine.dependency_groups(net, torch.zeros(2, 3))])
    assert reasons[0] == reasons[1] == reasons[2] and not any(reasons[0])


class Both(nn.Module):
    """Calls two functions with equal code."""

    def __init__(self, *choose: Any) -> None:
        super().__init__()
        self.layers, self.head, self.choose = nn.ModuleList(nn.Linear(3, 4) for _ in range(3)), nn.Linear(4, 2), choose

    def forward(self, x: torch.Tensor) -> Any:
        """Add scores."""
        a, b, c = (layer(x) for layer in self.layers)
        return self.head(self.choose[0](a, b)) + self.head(self.choose[1](b, c))


def test_equal_code_of_two_files_in_one_model(tmp_path: Path) -> None:
    """What the second function does in other calls is not known."""
    functions = []
    for name in ("one", "other"):
        path = tmp_path / f"{name}.py"
        path.write_text("def choose(a, b):\n    if len(a) == 77:\n        a = b.flip(1)\n    return a\n")
        functions.append(imported(path, f"equal_{name}").choose)
    groups = engine.dependency_groups(Both(*functions), torch.zeros(2, 3))
    assert not any(group.reason is None for group in groups)
