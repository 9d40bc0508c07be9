"""What code does with the parameters and parts that it looks up."""

from __future__ import annotations

import ast

import pytest

from engine.source.lookups import LOOKS_UP_PARTS, LOOKS_UP_TENSORS, literal_name, reads_metadata_alone, result_of_lookup


def _lookup(text: str) -> tuple[ast.AST, ast.AST]:
    tree = ast.parse(text)
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    node = next(node for node in nodes if node.attr in LOOKS_UP_TENSORS | LOOKS_UP_PARTS)
    return result_of_lookup(node, tree), tree


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = x.to(next(self.parameters()).device)", True),
        ("p = next(iter(self.parameters()))\nx = x.to(p.dtype)", True),
        ("p = next(self.parameters())\nx = x + p", False),
        ("for p in self.parameters(): p.requires_grad = False", True),
        ("for p in self.parameters(): p.requires_grad_(False)", True),
        ("for name, p in self.named_parameters():\n    if 'norm' in name: p.grad = None", True),
        ("for name, p in self.state_dict().items(): y = y + p.sum()", False),
        ("for p, q in zip(self.parameters(), other): y = y + p", False),
        ("for part in self.modules():\n    if isinstance(part, BatchNorm): part.eval()", True),
        ("for part in self.children(): x = part(x)", False),
        ("any(p.requires_grad for p in self.parameters())", True),
        ("return list(self.parameters())", False),
        ("if self._parameters: y = 1", True),
        ("y = self.get_parameter('a') is None", True),
        ("f(self.parameters())", False),
    ],
)
def test_metadata(text: str, expected: bool) -> None:
    """A dtype, a device, a flag or a mode is no use of numbers."""
    assert reads_metadata_alone(*_lookup(text)) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("for part in self.children(): x = part(x)", True),
        ("x = checkpoint(list(self.children())[0], x)", True),
        ("y = [part.weight for part in self.children()]", False),
    ],
)
def test_calls_of_parts(text: str, expected: bool) -> None:
    """Calls may be followed by others."""
    assert reads_metadata_alone(*_lookup(text), calls=True) is expected


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("self.get_parameter(target='a.weight')", "a.weight"),
        ("self._modules['a'](x)", "a"),
        ("self.state_dict()[key]", None),
        ("self.children()[0]", None),
    ],
)
def test_literal_names(text: str, name: str | None) -> None:
    """A literal names what is looked up."""
    assert literal_name(*_lookup(text)) == name
