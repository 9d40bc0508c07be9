"""Names of modules, parameters and buffers are those of `nn.Module`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from engine.program.stored import copied, distinct_modules, modules_of, stored_tensors


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


@pytest.mark.parametrize("masking", [prune.identity, torch.nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
def test_a_copy_of_a_model_that_computes_a_weight(masking: Any) -> None:
    """Python's own copy refuses a tensor that was computed; the copy computes the same, of parameters of its own."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    masking(model[0], "weight")
    x = torch.rand(2, 3)
    expected = model(x)
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(model)
    other = copied(model, [model[1]])
    assert torch.equal(other(x), expected) and other[1] is model[1] and other[0] is not model[0]
    assert not {*map(id, other[0].parameters())} & {*map(id, model.parameters())}
