"""Names of modules, parameters and buffers are those of `nn.Module`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.program.stored import distinct_modules, modules_of, stored_tensors


def tied() -> nn.Module:
    """A module and a parameter under two names, a child and a bias that are None."""
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    model.again = model[3]
    model.register_module("nothing", None)
    model.register_buffer("table", torch.zeros(2))
    return model


class Renamed(nn.Sequential):
    """Names its parameters in its own way."""

    def named_parameters(self, *args: Any, **named: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Put a word before each name."""
        for name, parameter in super().named_parameters(*args, **named):
            yield f"own.{name}", parameter


@pytest.mark.parametrize("make", [tied, lambda: Renamed(nn.Linear(2, 2)), nn.ReLU])
def test_names_and_order_are_those_of_torch(make: Any) -> None:
    """Every name, parameters before buffers, also where the model names them itself."""
    model = make()
    assert modules_of(model) == list(model.named_modules(remove_duplicate=False))
    assert list(distinct_modules(model).items()) == list(model.named_modules())
    wanted: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    wanted.update(model.named_buffers(remove_duplicate=False))
    found = stored_tensors(model)
    assert list(found) == list(wanted) and all(found[name] is tensor for name, tensor in wanted.items())
