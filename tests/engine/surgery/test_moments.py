"""Rewritten statistics of the channels that remain, against the original ones of all channels."""

from __future__ import annotations

import ast
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.surgery.moments import average_squares, divide_total, spread_out

SIZE, KEPT = 8, torch.tensor([0, 2, 3, 7])
Edit = Callable[[ast.FunctionDef, ast.Call, float, int], ast.expr | None]


def function_of(body: str) -> ast.FunctionDef:
    """A function of a tensor, whose last statement returns what is computed by the outermost call."""
    function = ast.parse("def f(x, u):\n  " + body).body[0]
    assert isinstance(function, ast.FunctionDef)
    return function


def edited(body: str, edit: Edit, place: int) -> ast.FunctionDef | None:
    """The function with its last call rewritten; None where that is not possible."""
    function = function_of(body)
    last = function.body[-1]
    assert isinstance(last, ast.Return) and isinstance(last.value, ast.Call)
    last.value = edit(function, last.value, SIZE, place)
    return None if last.value is None else ast.fix_missing_locations(function)


def run(function: ast.FunctionDef, x: Tensor, u: Tensor) -> list[Tensor]:
    """Run a function."""
    space = {"torch": torch}
    exec(compile(ast.Module([function], []), "f", "exec"), space)
    result = space["f"](x, u)  # type: ignore[operator]
    return list(result) if isinstance(result, tuple) else [result]


@pytest.mark.parametrize(
    ("body", "edit", "place"),
    [
        ("return x.mean(1)", divide_total, 0),
        ("return torch.mean(x * x, dim=1, keepdim=True)", divide_total, 0),
        ("return x.mean((1, 2), keepdim=True)", divide_total, 2),
        ("return x.mean([-2, 0])", divide_total, -2),
        ("return x.mean()", divide_total, 2),
        ("return (x - u).pow(2).mean(1)", average_squares, 0),
        ("return torch.mean((x - u) ** 2, 1, keepdim=True)", average_squares, 0),
        ("return torch.square(x - x.mean(2, keepdim=True) * 0 - u).mean((0, 1))", average_squares, 2),
        ("d = x - u\n  x = u = d\n  return (d * d).mean(1, True)", average_squares, 0),
        ("x = x - u\n  return x.square().mean((-1, -2))", average_squares, -2),
        ("return x.sub(u).square().mean(1)", average_squares, 0),
        ("d = torch.sub(x * 1, u)\n  return torch.mean(torch.mul(d, d), 1)", average_squares, 0),
        ("d = (2 * x).sub(u)\n  return d.mul(d).mean((1, 2))", average_squares, 2),
        ("return x.var(1)", spread_out, 0),
        ("return x.var(1, False, True)", spread_out, 0),
        ("return torch.std(x, dim=1, keepdim=True)", spread_out, 0),
        ("return (2 * x).std(1, correction=3)", spread_out, 0),
        ("return torch.var_mean(x, 1, unbiased=False)", spread_out, 0),
        ("return torch.std_mean(x, (1, 2), correction=0, keepdim=True)", spread_out, 2),
    ],
)
def test_all_channels_count(body: str, edit: Edit, place: int) -> None:
    """The channels that are gone were zero, where nothing is subtracted yet."""
    generator = torch.Generator().manual_seed(0)
    x, u = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, SIZE, 5), (3, 1, 5)))
    gone = torch.ones(SIZE, dtype=torch.bool).index_fill(0, KEPT, False)
    x[:, gone] = 0
    function = edited(body, edit, place)
    assert function is not None
    for own, expected in zip(run(function, x[:, KEPT], u), run(function_of(body), x, u), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("body", "edit", "place"),
    [
        ("return mean(x, 1)", divide_total, 0),
        ("return x.mean(*u)", divide_total, 0),
        ("return x.mean(len(x.shape) - 2)", divide_total, 0),
        ("return x.sum(1)", divide_total, 0),
        ("return (x - u).pow(3).mean(1)", average_squares, 0),
        ("return ((x - u) * (u - x)).mean(1)", average_squares, 0),
        ("d = x + u\n  return (d * d).mean(1)", average_squares, 0),
        ("d = x - u\n  if u: d = x\n  return (d * d).mean(1)", average_squares, 0),
        ("return (x * x).mean(1)", average_squares, 0),
        ("return x.var(1, u)", spread_out, 0),
        ("return x.var(1, correction=x.size(1) - 2)", spread_out, 0),
        ("return x.var((1, 2))", spread_out, 2),
        ("return x.var()", spread_out, 2),
        ("return x.var(1, False, True, None)", spread_out, 0),
        ("return x.var(**u)", spread_out, 0),
    ],
)
def test_other_code_is_left(body: str, edit: Edit, place: int) -> None:
    """It is not of a form that is understood."""
    assert edited(body, edit, place) is None
