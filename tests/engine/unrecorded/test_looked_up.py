"""Which parameters code that did not run looks up, by the groups that may lose channels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from tests.engine.exactness import randomised


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.between, self.leave = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.table = {"head": self.leave}

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Any:
        """Add something on demand."""
        y = self.leave(torch.relu(self.between(torch.relu(self.enter(x)))))
        if extra is not None:
            y = y + self.added() * extra
        return y

    def added(self) -> Any:
        """Return what is added."""
        return 1.0


class _Literal(_Net):
    def added(self) -> Any:
        return self.get_parameter("leave.weight").exp().sum()


class _Getattr(_Net):
    def added(self) -> Any:
        return getattr(getattr(self, "leave"), "weight").exp().sum()  # noqa: B009


class _Held(_Net):
    def added(self) -> Any:
        return self.table["head"].weight.exp().sum()


class _Super(_Literal):
    def added(self) -> Any:
        return super().added()


class _All(_Net):
    def added(self) -> Any:
        return sum(value.exp().sum() for value in vars(self)["_modules"]["leave"].parameters())


class _Dtype(_Net):
    def added(self) -> Any:
        return torch.ones((), dtype=next(self.leave.parameters()).dtype)


class _Frozen(_Net):
    def added(self) -> Any:
        for part in self.modules():
            part.eval()
        for _, parameter in self.named_parameters():
            parameter.requires_grad_(False)
        return 1.0


@pytest.mark.parametrize(
    ("kind", "free"),
    [
        (_Net, {"enter", "between"}),
        (_Literal, {"enter"}),
        (_Getattr, {"enter"}),
        (_Held, {"enter"}),
        (_Super, {"enter"}),
        (_All, set()),
        (_Dtype, {"enter", "between"}),
        (_Frozen, {"enter", "between"}),
    ],
)
def test_what_stays_whole(kind: type[nn.Module], free: set[str]) -> None:
    """The parameter that a literal names keeps its inputs, and the others are free."""
    groups = engine.dependency_groups(randomised(kind(), 0), torch.randn(2, 4, dtype=torch.float64))
    assert {group.name for group in groups if group.reason is None} == free
