"""Python source of exported programs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.errors import InputError
from lightning_compress.stock.emit import source_of


class Calls(nn.Module):
    """A network whose forward is a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(2, 2), function

    def forward(self, x: Tensor) -> Any:
        """Return what the function makes of a product."""
        return self.function(self.layer(x))


def text_of(function: Any) -> str:
    """The source of a network with a free batch size."""
    dims = {0: torch.export.Dim.DYNAMIC}  # type: ignore[attr-defined]
    return source_of(torch.export.export(Calls(function), (torch.randn(3, 2),), dynamic_shapes=(dims,)), "Calls")[0]


def test_sizes_are_literal_and_the_batch_is_free() -> None:
    """Parameters have the small sizes; a view reads the batch from its input."""
    text = text_of(lambda y: y.view(y.shape[0] * 2, 1))
    assert '"layer.weight": ((2, 2), torch.float32)' in text and "sym_size" in text and " * 2" in text


def test_numbers_and_dtypes_are_written_as_they_are() -> None:
    """Infinities, dtypes, tuples; devices follow the input."""
    text = text_of(lambda y: (y.masked_fill(y > 0, float("-inf")).double(), torch.zeros(2, device=y.device)))
    assert 'float("-inf")' in text and "torch.float64" in text and "device=x.device" in text
    compile(text, "network.py", "exec")


def test_what_nothing_reads_is_left_out() -> None:
    """Products that are thrown away are not computed; what writes to a tensor is."""

    def function(y: Tensor) -> Tensor:
        y.sigmoid()
        y.add_(1)
        return y

    text = text_of(function)
    assert "sigmoid" not in text and "add_" in text


def test_what_cannot_be_written_is_refused() -> None:
    """A part that runs in another mode is a program of its own."""

    def function(y: Tensor) -> Tensor:
        with torch.autocast("cpu"):
            return y @ y.T

    with pytest.raises(InputError, match="cannot be written"):
        text_of(function)
