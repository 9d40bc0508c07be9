"""Entries that code which did not run takes by an index."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import engine


def _kept(h: Tensor, keep: Tensor | None) -> Tensor:
    if keep is not None and keep.ndim == 2:
        if keep.dtype == torch.bool:
            return h[keep]
        return torch.take_along_dim(h, keep[..., None], dim=1)
    return h


def _ordered(h: Tensor, keep: Tensor | None) -> Tensor:
    if keep is not None:
        return torch.index_select(h, dim=-1, index=keep)
    return h


class Tokens(nn.Module):
    """Takes some of its features in a function beside the class."""

    def __init__(self, ordered: bool) -> None:
        super().__init__()
        self.enter, self.leave, self.ordered = nn.Linear(3, 8), nn.Linear(8, 2), ordered

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        """Return scores."""
        h = self.enter(x)
        h = _ordered(h, keep) if self.ordered else _kept(h, keep)
        return self.leave(h)  # type: ignore[no-any-return]


@pytest.mark.parametrize("ordered", [False, True])
def test_entries_by_an_index_beside_the_channels(ordered: bool) -> None:
    """They leave the channels alone; those along the channels use all of them."""
    groups = engine.dependency_groups(Tokens(ordered), torch.zeros(2, 5, 3))
    [reason] = [group.reason for group in groups if group.name == "enter"]
    assert "could be read" in (reason or "") if ordered else reason is None
