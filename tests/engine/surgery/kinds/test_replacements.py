"""What the plan says of modules to be replaced, and calling the functions; the whole is in ``test_speedup.py``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.errors import InputError, PlanError
from engine.surgery.kinds.replacements import Replacement, check_functions, opaque_names, places, replaced_by

CPU = torch.device("cpu")


def plan() -> Replacement:
    """Of a linear layer from 3 to 2, that loses an input, under a mask of its bias."""
    stays = torch.tensor([[True, False, True]])
    bias = {"bias": torch.tensor([True, False])}
    stored = {"weight": (2, 3), "bias": (2,)}
    return Replacement("0", "Linear", ((stays, (4, 3)),), ((torch.ones(1, 1).bool(), (4, 2)),), bias, stored)


def test_masks_in_full_shape() -> None:
    """Floats; the weights' by name, ones where nothing is masked."""
    given, made, weights = plan().masks(nn.Linear(3, 2), CPU)
    assert torch.equal(given, torch.tensor([[1.0, 0, 1]]).expand(4, 3)) and torch.equal(made, torch.ones(4, 2))
    assert weights["bias"].tolist() == [1, 0] and torch.equal(weights["weight"], torch.ones(2, 3))


def test_several_inputs_are_a_tuple() -> None:
    """In the order of the call."""
    one = plan()
    two = Replacement("0", "Linear", one.inputs * 2, one.outputs, {}, one.stored)
    given, made, _ = two.masks(nn.Linear(3, 2), CPU)
    assert isinstance(given, tuple) and len(given) == 2 and isinstance(made, Tensor)


def test_a_round_trip() -> None:
    """Through primitives and tensors."""
    state = plan().state_dict()
    again = Replacement.from_state_dict(state)
    assert again.state_dict().keys() == state.keys() and again.stored == plan().stored
    assert torch.equal(again.masks(nn.Linear(3, 2), CPU)[0], plan().masks(nn.Linear(3, 2), CPU)[0])


def test_the_function_gets_a_masked_copy() -> None:
    """What it does to it does not reach the model."""
    layer = nn.Linear(3, 2)
    before = layer.bias.detach().clone()

    def smaller(module: nn.Module, masks: Any) -> nn.Module:
        assert module is not layer and module.bias[1] == 0 and module.bias[0] == before[0]
        module.bias.zero_()
        return module

    made = replaced_by(plan(), layer, {"Linear": smaller}, CPU)
    assert made is not layer and torch.equal(layer.bias.detach(), before)


def test_the_nearest_class_wins() -> None:
    """The module's own before its bases."""
    functions = {"Module": lambda m, masks: nn.ReLU(), "Linear": lambda m, masks: nn.GELU()}
    assert isinstance(replaced_by(plan(), nn.Linear(3, 2), functions, CPU), nn.GELU)


def test_what_is_replaced_already_is_left() -> None:
    """Another class, or other shapes; else a function is needed."""
    assert replaced_by(plan(), nn.ReLU(), {}, CPU) is None and replaced_by(plan(), nn.Linear(2, 2), {}, CPU) is None
    with pytest.raises(PlanError, match="'0'.*Linear.*`customized_replace_func`"):
        replaced_by(plan(), nn.Linear(3, 2), {}, CPU)


def test_names_are_those_of_the_outermost_modules() -> None:
    """By class or base; none is an error."""
    net = nn.Sequential(nn.Sequential(nn.ReLU(), nn.ReLU()), nn.ReLU(), nn.Conv2d(1, 1, 1))
    assert opaque_names(net[0], {"ReLU": len}) == ("0", "1")
    assert opaque_names(net, {"_ConvNd": len, "ReLU": len}) == ("2", "0.0", "0.1", "1")
    assert opaque_names(net, {"Sequential": len, "ReLU": len}) == ("",)
    with pytest.raises(InputError, match="'LSTM'"):
        opaque_names(net, {"LSTM": len})


@pytest.mark.parametrize("bad", [[1], {"a": 1}, {nn.ReLU: len}, "ReLU"])
def test_functions_are_a_mapping(bad: Any) -> None:
    """From names of classes."""
    with pytest.raises(InputError, match="`customized_replace_func` maps"):
        check_functions(bad)


def test_every_place_of_a_module() -> None:
    """Also where it is registered twice."""
    act = nn.ReLU()
    net = nn.Sequential(act, nn.Sequential(nn.Tanh(), act))
    assert [name for _, name in places(net, act)] == ["0", "1"]
