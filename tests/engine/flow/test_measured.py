"""Sizes that become factors."""

from __future__ import annotations

import ast

import pytest

from engine.flow.measured import names_measured


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("y = y / math.sqrt(h.size(-1))", {"h"}),
        ("y = y * h.shape[1] ** -0.5", {"h"}),
        ("n = h.numel()\ny = y / n", {"h"}),
        ("y = torch.log(torch.tensor(float(h.size(1))))", {"h"}),
        ("y = y / h.shape[0] / len(h) / h.size(0)", set()),
        ("y = h.view(h.shape[0], h.shape[1] // 2, -1)", set()),
        ("b, c = h.shape\ny = x.view(b * c, -1)", set()),
        ("y = y / h", set()),
    ],
)
def test_which_sizes_are_factors(text: str, names: set[str]) -> None:
    """The first is that of the batch, and those that arrange entries follow the channels."""
    assert set(names_measured(ast.parse(text))) == names
