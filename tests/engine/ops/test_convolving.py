"""Convolutions in float64: the same numbers, whatever the sizes, in pieces that are small enough."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.ops import convolving
from engine.ops.convolving import in_float64
from engine.running.recomputed import RecomputedTensor

OPS = {1: torch.ops.aten.conv1d.default, 2: torch.ops.aten.conv2d.default, 3: torch.ops.aten.conv3d.default}


class Calls(TorchDispatchMode):
    """Notes the inputs of convolutions."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "conv" in str(func):
            self.shapes.append(tuple((kwargs or {}).get("input", *args[:1]).shape))
        return func(*args, **(kwargs or {}))


def random(*shape: int) -> Tensor:
    """Random numbers in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


@settings(max_examples=150, deadline=None)
@given(
    dims=st.integers(1, 3),
    batch=st.integers(0, 3),
    groups=st.integers(1, 3),
    inputs=st.integers(1, 2),
    outputs=st.integers(1, 2),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    size=st.integers(5, 8),
    columns=st.sampled_from([1, 100, 1000, 5000]),
    bias=st.booleans(),
)
def test_pieces_give_what_the_whole_does(
    dims: int,
    batch: int,
    groups: int,
    inputs: int,
    outputs: int,
    kernel: int,
    stride: int,
    padding: int,
    dilation: int,
    size: int,
    columns: int,
    bias: bool,
) -> None:
    """At any sizes, dense, grouped and depthwise, however small the pieces; a batch without samples too."""
    x = random(batch, inputs * groups, *range(size, size + dims))
    weight = random(outputs * groups, inputs, *[kernel] * dims)
    args = (
        x,
        weight,
        random(outputs * groups) if bias else None,
        [stride],
        [padding] * dims,
        [dilation] * dims,
        groups,
    )
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(convolving, "COLUMNS", columns)
        found = in_float64(OPS[dims], args, {})
    assert found is not None or columns > 1 or kernel == 1 or not batch
    if found is not None:
        torch.testing.assert_close(found, OPS[dims](*args), rtol=1e-13, atol=1e-13)


def test_pieces_are_as_large_as_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples together as long as their columns are small enough, and else rows of each, evenly."""
    x, weight = random(4, 2, 8, 8), random(3, 2, 3, 3)
    row = 2 * 9 * 6 * 8
    seen: dict[int, list[tuple[int, ...]]] = {}
    for rows in (24, 13, 6, 4, 1):
        monkeypatch.setattr(convolving, "COLUMNS", rows * row)
        with torch.inference_mode(), Calls() as calls:
            in_float64(OPS[2], (x, weight), {})
        seen[rows] = calls.shapes
    assert not seen[24] and seen[13] == [(2, 2, 8, 8)] * 2 and seen[6] == [(1, 2, 8, 8)] * 4
    assert seen[4] == [(1, 2, 5, 8)] * 8 and seen[1] == [(1, 2, 3, 8)] * 24


def test_a_depthwise_convolution_is_a_sum() -> None:
    """Of as many pictures as a kernel has entries, and no convolution of one channel after the other."""
    x, weight = random(2, 6, 5, 5), random(6, 1, 3, 3)
    with torch.inference_mode(), Calls() as calls:
        found = in_float64(OPS[2], (x, weight, None, [1], [1], [1], 6), {})
    assert not calls.shapes
    torch.testing.assert_close(found, torch.conv2d(x, weight, padding=1, groups=6), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("change", ["float32", "channels_last", "one by one", "another op", "no batch"])
def test_what_has_no_columns_is_for_torch(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other dtypes and layouts have kernels of their own, and so has a kernel of one entry."""
    monkeypatch.setattr(convolving, "COLUMNS", 1)
    x, weight = random(2, 2, 8, 8), random(3, 2, 3, 3)
    func = torch.ops.aten.conv_transpose2d.input if change == "another op" else OPS[2]
    args = {
        "float32": (x.float(), weight.float()),
        "channels_last": (x.contiguous(memory_format=torch.channels_last), weight),
        "one by one": (x, weight[..., :1, :1].contiguous()),
        "another op": (x, weight.transpose(0, 1).contiguous()),
        "no batch": (x[0], weight),
    }[change]
    with torch.inference_mode(), Calls() as calls:
        assert in_float64(func, args, {}) is None
    assert not calls.shapes


def test_a_weight_that_is_made_when_it_is_read_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not for each piece."""
    monkeypatch.setattr(convolving, "COLUMNS", 1)
    made = []
    weight = RecomputedTensor(random(3, 2, 3, 3), torch.float64, lambda: made.append(1) or random(3, 2, 3, 3))
    with torch.inference_mode():
        found = in_float64(OPS[2], (random(2, 2, 8, 8), weight), {})
    torch.testing.assert_close(found, torch.conv2d(random(2, 2, 8, 8), random(3, 2, 3, 3)), rtol=1e-13, atol=1e-13)
    assert len(made) == 1
