"""Who decides which branch runs."""

from __future__ import annotations

import ast
import enum
import functools
import os

import pytest
import torch

from engine.flow.conditions import Conditions, has_fixed_result
from engine.source.static_attributes import attribute_code, method_code

_FUNCTION = """
def forward(self, x, flag=False, inner=None):
    mode = flag
    other = self.width * 2
"""


def exists(value: object) -> bool:
    """Whether a value is there, in a function of its own."""
    return value is not None


def counted(value: object) -> bool:
    """Whether a value is there, and a count that changes."""
    CALLS.append(value)
    return len(CALLS) > 3


def forever(value: object) -> bool:
    """A function that calls itself."""
    return forever(value)


@functools.cache
def is_version(operator: str, version: str) -> bool:
    """Compare a version with that of torch, as diffusers does."""
    return (operator == ">=") == (tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 0))


class _Kind(enum.Enum):
    WIDE = 1


CALLS: list[object] = []


@pytest.mark.parametrize(
    ("test", "is_fixed"),
    [
        ("self.width > 3", True),
        ("self.counter > 3", False),
        ("flag", False),
        ("mode", False),
        ("other > 2", True),
        ("inner is None", True),
        ("torch.jit.is_scripting()", True),
        ("torchvision._is_tracing()", True),
        ("os.environ.get('A')", False),
        ("LIMIT > 2", False),
        ("inner is Kind.WIDE", True),
        ("inner == Kind.WIDE.value", True),
        ("inner == KIND", False),
        ("x.requires_grad", False),
        ("x.device.type != 'meta'", True),
        ("x.device.type != 'cuda'", False),
        ("flag == 'meta'", False),
        ("hasattr(self, 'adapter')", True),
        ("isinstance(inner, torch.Tensor)", True),
        ("exists(inner)", True),
        ("not exists(value=inner)", True),
        ("exists(flag)", False),
        ("exists(*inner)", False),
        ("counted(inner)", False),
        ("forever(inner)", False),
        ("self.gate.mode > 3", False),
        ("self.gate.width > 3", True),
        ("self.gates[0].mode > 3", False),
        ("getattr(self.gates[-1], 'mode', 1)", False),
        ("any(gate.mode for gate in self.gates)", False),
        ("other.mode", False),
        ("sum(self.sizes.copy()) > 0", True),
        ("inner.lower() == 'a'", True),
        ("flag.lower() == 'a'", False),
        ("self.counter.startswith('a')", False),
        ("other.counter", True),
        ("self.counter", False),
        ("callable(self.counter)", False),
        ("isinstance(self.gate.mode, int)", False),
        ("isinstance(self.gate.width, int)", True),
        ("self.has_gate()", True),
        ("not self.gate.has_gate()", True),
        ("self.has_gate(3)", False),
        ("self.has_gate(key=3)", False),
        ("other.has_gate()", False),
        ("self.gates[0].has_gate()", False),
        ("self.counts()", False),
        ("self.gate.counts()", False),
        ("flag in self.empty", True),
        ("flag not in self.gate.empty", True),
        ("flag in self.empty in self.full", False),
        ("flag in self.full", False),
        ("flag in other", False),
        ("is_version('<', '2.0.0')", True),
        ("x.device.type == 'mps' and is_version('<', '2.0.0')", True),
        ("x.device.type == 'mps' or is_version('>=', '2.0.0')", True),
        ("x.device.type == 'mps' and is_version('>=', '2.0.0')", False),
        ("is_version(flag, '2.0.0')", False),
        ("is_version('<', 'a name')", False),
    ],
)
def test_fixed(test: str, is_fixed: bool) -> None:
    """Attributes that nobody sets, and what the code itself passes."""
    tree = ast.parse(_FUNCTION).body[0]
    assert isinstance(tree, ast.FunctionDef)
    space = {
        "torch": torch,
        "os": os,
        "LIMIT": 1,
        "Kind": _Kind,
        "KIND": _Kind.WIDE,
        "exists": exists,
        "counted": counted,
        "forever": forever,
        "is_version": is_version,
    }
    unsettled = {"counter", "gate.mode", "*.mode", "counts()", "gate.counts()", "full{}"}
    conditions = Conditions(tree, space, {"x", "flag"}, lambda path: path not in unsettled, lambda node: True, "self")
    assert conditions.is_fixed(ast.parse(test, mode="eval").body) is is_fixed


_IN_A_ROW = """
def forward(self, x, flag=False, size=None):
    skip = x
    size = size or flag
    copy = skip
    skip = None
    for block in self.blocks:
        if block.wide:
            x = block(x)
        if block.mode:
            x = block(x)
    if skip is not None:
        x = x + skip
    skip = copy
    if skip is not None:
        x = x + skip
    if size:
        x = x + 1
    flag = self.width
    if flag:
        x = x + 2
        flag = x.sum()
    flag = self.width
    while x.sum() > 0:
        if flag:
            x = x - 2
        flag = x
"""


def test_what_a_variable_holds_by_then() -> None:
    """Only what the last assignment on every way gave it, and what follows that; an item of a list is one of self's."""
    tree = ast.parse(_IN_A_ROW).body[0]
    assert isinstance(tree, ast.FunctionDef)
    tests = [node.test for node in ast.walk(tree) if isinstance(node, ast.If)]
    conditions = Conditions(tree, {}, {"x", "flag"}, lambda path: path != "*.mode", lambda node: True, "self")
    is_fixed = {ast.get_source_segment(_IN_A_ROW, t) + f" {t.lineno}": conditions.is_fixed(t) for t in tests}  # type: ignore[operator]
    assert is_fixed == {
        "block.wide 8": True,
        "block.mode 10": False,
        "skip is not None 12": True,
        "skip is not None 15": False,
        "size 17": False,
        "flag 20": True,
        "flag 25": False,
    }


def large(value: object, other: object) -> bool:
    """Whether values are there, and more than that."""
    return value is not None and other is not None and bool(other)


@pytest.mark.parametrize(
    ("test", "is_fixed"),
    [
        ("self.table is None", True),
        ("exists(self.table)", True),
        ("self.table", False),
        ("large(self.table, self.width)", True),
        ("large(self.width, self.table)", False),
        ("exists(self.reassigned)", False),
    ],
)
def test_contents_do_not_matter_to_an_identity(test: str, is_fixed: bool) -> None:
    """What only is compared with None may change inside, as a parameter does, but must not be exchanged."""
    tree = ast.parse(_FUNCTION).body[0]
    assert isinstance(tree, ast.FunctionDef)
    conditions = Conditions(
        tree,
        {"exists": exists, "large": large},
        {"x", "flag"},
        lambda path: path not in ("table", "reassigned"),
        lambda node: True,
        "self",
        lambda path: path != "reassigned",
    )
    assert conditions.is_fixed(ast.parse(test, mode="eval").body) is is_fixed


_IN_ITS_OWN_VALUE = """
def forward(self, x, flag=False, inner=None):
    inner = x.norm if inner is None else x.sum
    inner, other = (x.mean, 1) if flag else (x.max, 2)
    again = x.norm
    for block in self.blocks:
        again = x.norm if again is None else x.sum
    late = lambda: x.norm if late is None else x.sum
    later = list(x.norm if later is None else x.sum for block in self.blocks)
    def nested():
        nonlocal lasting
        lasting = x.norm if lasting is None else x.sum
"""


def test_what_an_assignment_reads_before_it_assigns() -> None:
    """Its own value is none of those that the variable may have, unless something repeats or postpones it."""
    tree = ast.parse(_IN_ITS_OWN_VALUE).body[0]
    assert isinstance(tree, ast.FunctionDef)
    tests = [node.test for node in ast.walk(tree) if isinstance(node, ast.IfExp)]
    conditions = Conditions(tree, {}, {"x", "flag"}, lambda path: True, lambda node: True, "self")
    assert {ast.unparse(test): conditions.is_fixed(test) for test in tests} == {
        "inner is None": True,
        "flag": False,
        "again is None": False,
        "late is None": False,
        "later is None": False,
        "lasting is None": False,
    }


class _Switched:
    """Properties of each kind."""

    width, counter = 4, 0

    @property
    def wide(self) -> bool:
        """What nobody sets."""
        return self.width > 3

    @functools.cached_property
    def late(self) -> bool:
        """What somebody sets."""
        return self.counter > 3

    @property
    def counted(self) -> bool:
        """More than what it returns."""
        CALLS.append(self)
        return self.width > 3


@pytest.mark.parametrize(("name", "is_fixed"), [("wide", True), ("late", False), ("counted", False)])
def test_properties(name: str, is_fixed: bool) -> None:
    """What a property returns, and nothing else that it does, is as fixed as what it reads."""
    function = attribute_code(_Switched, name)
    assert function is not None and has_fixed_result(function, lambda path: path != "counter") is is_fixed


class _Branching:
    """Methods that decide."""

    width, counter = 4, 0

    def by_width(self) -> bool:
        """Decide by what nobody sets."""
        if self.width > 8:
            return False
        limit = self.width * 2
        if limit is None:
            pass
        elif limit > 4:
            return True
        return False

    def by_counter(self) -> bool:
        """Decide by what somebody sets."""
        if self.counter > 8:
            return False
        return True

    def by_a_variable(self) -> bool:
        """Return what somebody sets."""
        late = self.counter
        return late > 3

    def by_a_default(self, limit: int = 3) -> bool:
        """Compare with a default."""
        return self.width > limit

    def that_counts(self) -> bool:
        """Do more than decide."""
        CALLS.append(self)
        return True

    def that_sets(self) -> bool:
        """Set an attribute."""
        self.width = 5
        return True

    def in_a_loop(self) -> bool:
        """Decide in a loop."""
        for item in [self.width]:
            return item > 3
        return False

    @staticmethod
    def without_an_owner() -> bool:
        """Decide without the object."""
        return True


@pytest.mark.parametrize(
    ("name", "is_fixed"),
    [
        ("by_width", True),
        ("by_counter", False),
        ("by_a_variable", False),
        ("by_a_default", True),
        ("that_counts", False),
        ("that_sets", False),
        ("in_a_loop", False),
    ],
)
def test_methods(name: str, is_fixed: bool) -> None:
    """A method that only branches is as fixed as what it branches on."""
    function = method_code(_Branching(), name)
    assert function is not None and has_fixed_result(function, lambda path: path != "counter") is is_fixed


def test_what_is_no_method_of_the_class() -> None:
    """Static methods, what an object holds itself, and what torch defines."""
    shadowed = _Branching()
    shadowed.by_width = lambda: True  # type: ignore[method-assign]
    assert method_code(shadowed, "by_width") is None and method_code(_Branching(), "without_an_owner") is None
    assert method_code(torch.nn.Linear(2, 2), "extra_repr") is None and method_code(_Branching(), "width") is None


def test_what_is_stored_has_no_code() -> None:
    """Attributes of the class, methods, and what torch looks up."""
    assert attribute_code(_Switched, "width") is None
    assert attribute_code(torch.nn.Linear, "weight") is None and attribute_code(torch.nn.Linear, "forward") is None


@pytest.mark.parametrize(
    ("body", "is_fixed"),
    [
        ("parts = []\n    if self.width > 3: parts.append(x)", True),
        ("parts = []\n    if flag: parts.append(x)", False),
        ("parts = []\n    parts.append(x)\n    parts.pop()", False),
        ("parts = []\n    parts.append(x)\n    del parts[0]", False),
        ("parts = [*x]", False),
        ("parts = x.unbind()", False),
        ("parts = []\n    parts += x.unbind()", False),
        ("parts = []\n    parts[:] = x", False),
        ("parts = []\n    other = parts\n    other.append(x)", False),
        ("parts = []\n    other = (parts, x)", False),
        ("parts = [1]\n    other = parts\n    other.pop()", False),
        ("parts = [1]\n    parts.pop()", False),
        ("parts = {1: 2}\n    parts.update(a=3)", True),
        ("parts = {1: 2}\n    exists(parts)", False),
        ("parts = {1: 2}\n    parts[2] = parts[1]", True),
        ("parts = {1: 2}\n    del parts[1]", False),
        ("parts = []\n    exists(parts)", False),
        ("parts = []\n    x = torch.cat(parts)", True),
        ("parts = []\n    x = torch.cat(parts + [x])", True),
        ("parts = []\n    x = torch.stack(x, out=parts)", False),
        ("parts = []\n    if not parts: parts.append(x)", True),
        ("parts = []\n    if parts[0]: parts.append(x)", False),
        ("parts = []\n    if flag or not parts: parts.append(x)", False),
        ("parts = []\n    for part in x: parts.append(part)", False),
        ("parts = []\n    for block in self.width: parts.append(x)", True),
        ("parts = []\n    [parts.append(part) for part in x]", False),
        ("parts = []\n    add = lambda: parts.append(x)", False),
        ("parts = []\n    for parts in x: pass", False),
    ],
)
@pytest.mark.parametrize("test", ["parts", "not parts"])
def test_lists_that_code_fills(body: str, test: str, is_fixed: bool) -> None:
    """Whether there is anything in one depends on what decides that something is added."""
    tree = ast.parse(f"def forward(self, x, flag=False):\n    {body}\n    return {test}").body[0]
    assert isinstance(tree, ast.FunctionDef)
    own = {"self.width", "width"}
    space = {"torch": torch, "exists": exists}
    conditions = Conditions(tree, space, {"x", "flag"}, lambda path: path in own, lambda node: True, "self")
    returned = tree.body[-1]
    assert isinstance(returned, ast.Return) and returned.value is not None
    assert conditions.is_fixed(returned.value) == is_fixed
