"""What a comparison with the version of a package says."""

from __future__ import annotations

import ast
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.flow.version_checks import version_check


def newer(version: str, strict: bool = False) -> bool:
    """Whether torch is newer."""
    return version < "2.5"


cached = functools.cache(newer)


@pytest.mark.parametrize(
    ("text", "function", "expected"),
    [
        ("cached('2.0')", cached, True),
        ("cached('2.9.1')", cached, False),
        ("cached('2.0', True)", cached, True),
        ("newer('2.0')", newer, None),
        ("cached('two')", cached, None),
        ("cached(version)", cached, None),
        ("cached('2.0', strict=True)", cached, None),
        ("version", cached, None),
    ],
)
def test_cached_functions_of_a_version(text: str, function: Any, expected: bool | None) -> None:
    """Only a function that keeps its results, of literals with a version among them."""
    assert version_check(ast.parse(text, mode="eval").body, function) is expected


class Gated(nn.Module):
    """Takes another way on a device, where torch is too old for it."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        x = self.enter(x)
        if x.device.type == "mps" and cached("2.9"):
            return self.leave(x.float().flip(-1).to(x.dtype))  # type: ignore[no-any-return]
        return self.leave(x.relu())  # type: ignore[no-any-return]


def test_what_only_an_older_version_runs_keeps_nothing() -> None:
    """The other way cannot run beside this version."""
    assert engine.dependency_groups(Gated(), torch.zeros(2, 3))[0].reason is None
