"""Tests of how masked entries are kept at zero."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_compress.callbacks.zeroing import Zeroing, zero_gradients, zero_weights

ROWS = torch.tensor([True, False, True, True])
MASKS = {
    "rows": ROWS.view(4, 1, 1).expand(4, 6, 3),
    "columns": torch.arange(6).ge(2).view(1, 6, 1).expand(4, 6, 3),
    "last": torch.tensor([False, True, True]).expand(4, 6, 3),
    "scattered": torch.rand(4, 6, 3, generator=torch.Generator().manual_seed(0)) > 0.5,
    "corner": torch.ones(4, 6, 3, dtype=torch.bool).index_fill(0, torch.tensor([1]), False) | torch.eye(6, 3).bool(),
    "all": torch.zeros(4, 6, 3, dtype=torch.bool),
    "none": torch.ones(4, 6, 3, dtype=torch.bool),
}


@pytest.mark.parametrize("kind", MASKS)
def test_masked_entries_only(kind: str) -> None:
    """Masked entries are 0 afterwards, even infinite ones, all others keep their bits, and the Parameter stays."""
    parameter, mask = nn.Parameter(torch.randn(4, 6, 3)), MASKS[kind]
    before, data = parameter.detach().clone(), parameter.data_ptr()
    parameter.grad = torch.where(mask, before, torch.inf)
    zeroing = Zeroing.of(parameter, mask)
    zero_weights([zeroing])
    zero_gradients([zeroing])
    assert parameter.data_ptr() == data
    for found in (parameter, parameter.grad):
        assert torch.equal(found, torch.where(mask, before, 0.0))
    assert (zeroing.bits is not None) == (kind not in ("scattered", "corner"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("kind", ["rows", "scattered"])
def test_every_dtype(kind: str, dtype: torch.dtype) -> None:
    """Entries of any size are zeroed, NaN and negative zeros too, in any layout, in a gradient of another dtype."""
    parameter, mask = nn.Parameter(torch.randn(4, 6, 3).to(dtype)), MASKS[kind]
    plain, turned = parameter.detach(), parameter.detach().mT.contiguous().mT
    for gradient in (plain, turned, plain.to(torch.complex128)):
        for value in (torch.nan, torch.inf, -0.0):
            found = torch.where(mask, gradient, value)
            Zeroing.of(parameter, mask).fill(found)
            assert torch.equal(found, torch.where(mask, gradient, 0.0))
            assert not torch.signbit(torch.view_as_real(found) if found.is_complex() else found)[~mask].any()


@pytest.mark.parametrize("kept", [True, False])
def test_a_parameter_without_dimensions(kept: bool) -> None:
    """A single number is masked or not."""
    parameter = nn.Parameter(torch.tensor(3.0))
    zero_weights([Zeroing.of(parameter, torch.tensor(kept))])
    assert parameter.item() == (3.0 if kept else 0.0)


def test_an_empty_mask() -> None:
    """A parameter without entries has nothing to zero."""
    Zeroing.of(nn.Parameter(torch.ones(0, 3)), torch.ones(0, 3, dtype=torch.bool)).fill(torch.ones(0, 3))


def test_what_is_masked_elsewhere_keeps_its_weights() -> None:
    """Of a parameter that a buffer masks only the gradient is written; one without a gradient is left alone."""
    parameter = nn.Parameter(torch.ones(4))
    zeroing = Zeroing.of(parameter, ROWS, weights=False)
    zero_gradients([zeroing])
    parameter.grad = torch.ones(4)
    zero_weights([zeroing])
    zero_gradients([zeroing])
    assert parameter.detach().all() and torch.equal(parameter.grad, ROWS.float())


@pytest.mark.parametrize(("kind", "size"), [("rows", 4), ("columns", 6), ("all", 1)])
def test_masks_of_channels_take_little_memory(kind: str, size: int) -> None:
    """Of what is masked in whole rows or columns, little is held."""
    zeroing = Zeroing.of(nn.Parameter(torch.ones(4, 6, 3)), MASKS[kind])
    assert zeroing.masked.numel() == size
    assert zeroing.bits is not None and zeroing.bits.numel() <= 18
