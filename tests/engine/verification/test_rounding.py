"""No difference is rounded off on the way."""

from __future__ import annotations

import pytest
import torch

from engine.verification.rounding import unrounded

SUM = torch.ops.aten.sum.default


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_converts_to_less_stays(dtype: torch.dtype) -> None:
    """Whether the dtype is given by place or by name."""
    x = torch.ones(3, dtype=torch.float64)
    args, kwargs = unrounded(torch.ops.aten.softmax.int, (x, 0, dtype), {})
    assert args[1:] == (0, torch.float64) and kwargs == {}
    assert unrounded(SUM, (x,), {"dtype": dtype}) == ((x,), {"dtype": torch.float64})


def test_everything_else_is_left_alone() -> None:
    """Whole numbers, tensors of less to begin with, and calls that do not say."""
    x = torch.ones(3, dtype=torch.float64)
    for given in ({"dtype": torch.int64}, {"dtype": None}, {}):
        assert unrounded(SUM, (x,), given)[1] == given
    assert unrounded(SUM, (x.float(),), {"dtype": torch.float16})[1] == {"dtype": torch.float16}
    assert unrounded(torch.ops.aten.relu.default, (x,), {})[0] == (x,)
