"""Layouts of results, against the ops themselves."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.ops.results import layout_of_result
from engine.running.fakes import Layout

ATEN = torch.ops.aten
CONVOLUTIONS = {1: ATEN.conv1d.default, 2: ATEN.conv2d.default, 3: ATEN.conv3d.default}
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def ways(x: Tensor) -> Iterator[Tensor]:
    """The same tensor in memory as usual, channels last, transposed, and with holes."""
    yield x
    if x.ndim in LAST:
        yield x.contiguous(memory_format=LAST[x.ndim])
    yield x.transpose(0, 1).contiguous().transpose(0, 1)
    yield torch.stack([x, x], -1)[..., 0]


def check(func: Any, *args: Any) -> bool:
    """Compare with the op; return whether it need not be asked."""
    layout = layout_of_result(func, args, {})
    assert layout is None or layout == Layout.of(func(*args))
    return layout is not None


@pytest.mark.parametrize("x", [torch.randn(3, 4, *[5] * n) for n in range(4)], ids=lambda x: f"{x.ndim}d")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [False, True])
def test_a_batch_norm(x: Tensor, dtype: torch.dtype, training: bool) -> None:
    """Of every rank, and in halves."""
    rest = (torch.ones(4), None, torch.zeros(4), torch.ones(4), training, 0.1, 1e-5, True)
    assert check(ATEN.batch_norm.default, x.to(dtype), *rest)
    for other in ways(x.to(dtype)):
        check(ATEN.batch_norm.default, other, *rest)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(
    "channels, outputs, groups", [(4, 6, 1), (4, 4, 4), (1, 2, 1), (2, 1, 1), (4, 6, 2), (1, 1, 1)]
)
def test_a_convolution(dims: int, channels: int, outputs: int, groups: int) -> None:
    """Of all sizes and in all layouts; the usual ones are known without the op."""
    func = CONVOLUTIONS[dims]
    for batch, side, kernel, bias in product([1, 2], [1, 5], [1, 3], [None, torch.zeros(outputs)]):
        x = torch.randn(batch, channels, *[side] * dims)
        weight = torch.randn(outputs, channels // groups, *[kernel] * dims)
        for stride, dilation in [(1, 1), (2, 2)]:
            numbers = ([stride] * dims, [dilation * (kernel // 2)] * dims, [dilation], groups)
            assert check(func, x, weight, bias, *numbers)
        for one, two in product(ways(x), ways(weight)):
            check(func, one, two, bias, *numbers)


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (7, 7)])
@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (1, 1, 1, 1), (3, 5, 4), (2, 1, 4, 4)])
def test_a_pool(size: tuple[int, int], shape: tuple[int, ...]) -> None:
    """To fewer positions, and to more."""
    x = torch.randn(shape)
    assert check(ATEN.adaptive_avg_pool2d.default, x, size)
    for other in ways(x):
        check(ATEN.adaptive_avg_pool2d.default, other, size)


@pytest.mark.parametrize("shape", [(3, 4), (1, 1), (2, 3, 4), (2, 1, 3, 4), (2, 3, 2, 1, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_a_linear_layer(shape: tuple[int, ...], dtype: torch.dtype, biased: bool) -> None:
    """Of inputs of every rank, and of weights in all orders."""
    x, weight = torch.randn(shape).to(dtype), torch.randn(6, shape[-1]).to(dtype)
    bias = torch.zeros(6, dtype=dtype) if biased else None
    assert check(ATEN.linear.default, x, weight, bias)
    for one, two in product(ways(x), ways(weight)):
        check(ATEN.linear.default, one, two, bias)
    with torch.device("meta"):
        fakes = [None if t is None else t.to("meta") for t in (x, weight, bias)]
        assert check(ATEN.linear.default, *fakes)


@pytest.mark.parametrize("shape", [(4,), (3, 4), (1, 1), (2, 3, 4), (2, 3, 5, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Over the last dimension and over several, with a scale and a shift, one of them, or none."""
    x = torch.randn(shape).to(dtype)
    for last in {shape[-1:], shape[-2:], shape}:
        ones = torch.ones(last, dtype=dtype)
        for scale, shift in product([None, ones], repeat=2):
            assert check(ATEN.layer_norm.default, x, last, scale, shift, 1e-5, True)
            for other in ways(x) if x.ndim > 1 else ():
                check(ATEN.layer_norm.default, other, last, scale, shift, 1e-5, True)


def test_what_does_not_fit_is_for_the_op_to_say() -> None:
    """So is every other op."""
    x, ones, kernels = torch.randn(3, 4, 5, 5), torch.ones(4), torch.ones(6, 4, 3, 3)
    rest = (False, 0.1, 1e-5, True)
    norm, convolution, pool = ATEN.batch_norm.default, ATEN.conv2d.default, ATEN.adaptive_avg_pool2d.default
    linear, layer_norm = ATEN.linear.default, ATEN.layer_norm.default
    refused: list[tuple[Any, ...]] = [
        (norm, x, ones, ones[:3], ones, ones, *rest),
        (norm, x[0, 0, 0], ones, ones, ones, ones, *rest),
        (convolution, x[:, :3], kernels),
        (convolution, x[..., :2], kernels),
        (convolution, x[:0], kernels),
        (convolution, x[0], kernels),
        (convolution, x.double(), kernels),
        (convolution, x, kernels, ones),
        (convolution, x, kernels, None, [1], [0], [1], 4),
        (convolution, x, kernels, None, [0]),
        (convolution, x, kernels, None, [1, 0]),
        (convolution, x, kernels, None, [1, 1, 1]),
        (convolution, x, kernels, None, [], [0]),
        (convolution, x, kernels, None, [1], [-1]),
        (convolution, x, kernels, None, [1], [0, 0, 0]),
        (convolution, x, kernels, None, [1], [0], [0]),
        (convolution, x, kernels, None, [1], [0], [1, 1, 1]),
        (linear, x, ones[None, :3]),
        (linear, x[..., :4], ones),
        (linear, x[0, 0, 0], torch.ones(2, 5)),
        (linear, x[:0], torch.ones(2, 5)),
        (linear, x.double(), torch.ones(2, 5)),
        (linear, x, torch.ones(2, 5), ones[:1]),
        (linear, x, torch.ones(2, 5), ones[:2].double()),
        (layer_norm, x, (4,)),
        (layer_norm, x, ()),
        (layer_norm, x.int(), (5,)),
        (layer_norm, x[:0], (5,)),
        (layer_norm, x, (5,), ones),
        (layer_norm, x, (5, 5), torch.ones(5, 5), torch.ones(5)),
        (layer_norm, x.double(), (5,), torch.ones(5)),
        (pool, x.int(), (1, 1)),
        (pool, x, (1,)),
        (ATEN.relu.default, x),
    ]
    assert [layout_of_result(func, args, {}) for func, *args in refused] == [None] * len(refused)
    wrong = nn.Sequential(nn.Conv2d(3, 5, 1), nn.BatchNorm2d(4)).double()
    with pytest.raises(engine.errors.TraceError, match="5"):
        engine.trace(wrong, torch.zeros(1, 3, 4, 4, dtype=torch.float64))
