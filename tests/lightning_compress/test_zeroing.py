"""Tests of how masked entries are kept at zero."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_compress.zeroing import Zeroing, zero_gradients, zero_weights

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
    assert (zeroing.dim >= 0) == (kind not in ("scattered", "corner"))


def test_what_is_masked_elsewhere_keeps_its_weights() -> None:
    """Of a parameter that a buffer masks only the gradient is written; one without a gradient is left alone."""
    parameter = nn.Parameter(torch.ones(4))
    zeroing = Zeroing.of(parameter, ROWS, weights=False)
    zero_gradients([zeroing])
    parameter.grad = torch.ones(4)
    zero_weights([zeroing])
    zero_gradients([zeroing])
    assert parameter.detach().all() and torch.equal(parameter.grad, ROWS.float())


def test_a_mask_of_one_dimension_is_an_index() -> None:
    """Biases and norms: indices of what is masked."""
    zeroing = Zeroing.of(nn.Parameter(torch.ones(4)), ROWS)
    assert zeroing.dim == 0 and isinstance(zeroing.masked, Tensor) and zeroing.masked.tolist() == [1]
