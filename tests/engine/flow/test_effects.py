"""What statements do to the tensors in their variables."""

from __future__ import annotations

import ast

import pytest
import torch

from engine.flow.effects import Effect, effects, operands
from engine.ops.calls import FUNCTIONS


@pytest.mark.parametrize(
    ("code", "effect"),
    [
        ("x = x.to(dtype)", Effect.KEEPS),
        ("x = x * scale", Effect.KEEPS_ZERO),
        ("x *= scale", Effect.KEEPS_ZERO),
        ("x = torch.clamp(x, min=-limit, max=limit)", Effect.KEEPS_ZERO),
        ("x = x + shift", Effect.CHANGES),
        ("x = F.dropout(x, p)", Effect.KEEPS_ZERO),
        ("x = F.interpolate(x, size=y.shape[2:])", Effect.MOVES),
        ("x = TF.resize(x * scale, size)", Effect.MOVES),
        ("x = F.pad(x, [a, b])", Effect.MOVES),
        ("x = F.pad(x, (0, 0, 0, 0, 1, 1))", Effect.USES),
        ("x = F.pad(x, [a, b], value=1.0)", Effect.USES),
        ("x = F.pad(x, [a, b]) + shift", Effect.USES),
        ("x = F.pad(x, [a, b])\nx = x + shift", Effect.USES),
        ("x = x.resize(size)", Effect.USES),
        ("x = x[:, :, :h, 1:-w]", Effect.MOVES),
        ("x = x[..., :w].relu()", Effect.MOVES),
        ("x = x[:, :c]", Effect.USES),
        ("x = x[..., :c, :h, :w]", Effect.USES),
        ("x = x[:, :, 0]", Effect.USES),
        ("x = x[:, :, : x.argmax()]", Effect.USES),
        ("limit = torch.finfo(x.dtype).max", None),
        ("is_infinite = torch.isinf(x).any()", None),
        ("y = x.type(y.type())", Effect.USES),
        ("y = self.id(x)", Effect.USES),
        ("y = y + x.isfinite()", Effect.USES),
        ("x = FF.relu(x)", Effect.USES),
        ("k, x = cache.update(k, x)", Effect.KEEPS),
        ("x = x @ w", Effect.USES),
        ("x = x + x.mean()", Effect.USES),
        ("y = x", Effect.USES),
        ("x = scale / x", Effect.USES),
        ("x = other.update(x)", Effect.USES),
    ],
)
def test_effects(code: str, effect: Effect | None) -> None:
    """What is not known to change single entries uses all of them."""
    assert effects(ast.parse(code).body, FUNCTIONS, ["cache"]).get("x") == effect


def test_operands() -> None:
    """Dtypes and sizes are none; what a return statement computes from the returned argument counts."""
    nodes = ast.parse("x = F.interpolate(x.to(z), size) * a\nx -= b\nreturn torch.maximum(x, c)").body
    combined = [(ast.unparse(operand), adds) for operand, adds in operands(nodes, "x", FUNCTIONS, "x")]
    assert combined == [("a", False), ("b", True), ("c", False)]


def test_names_of_python_modules() -> None:
    """A variable hides a global name."""

    def run(functional: object) -> object:
        return functional

    space = {"torch": torch, "functional": torch.nn.functional, "F": ast}
    assert FUNCTIONS.within(space, run.__code__).namespaces == {"torch"}
