"""What is accepted as a model and as its example inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy

import engine
from engine.errors import InputError, TraceError
from engine.running.inputs import larger_inputs, resolve_inputs
from tests.engine.nets import image


@pytest.mark.parametrize("call", [engine.trace, engine.count_flops_params, engine.ModelSpeedup])
@pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated")
def test_what_is_no_model_is_refused(call: Any) -> None:
    """A class, TorchScript, and other objects, each with what to pass instead."""
    scripted = torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 3)))
    for bad, message in (
        (nn.Conv2d, "pass an instance, `Conv2d"),
        (scripted, "TorchScript"),
        (3, "be a `Module`, got 3"),
    ):
        with pytest.raises(InputError, match=message):
            call(bad, image())


def test_how_example_inputs_are_passed() -> None:
    """A tensor is one argument; a tuple or list, positional; a mapping, keywords."""
    x, y = torch.ones(1), torch.zeros(1)
    assert resolve_inputs(x) == ((x,), {})
    assert resolve_inputs([x, y]) == ((x, y), {}) == resolve_inputs((x, y))
    assert resolve_inputs({"a": x, "b": 3}) == ((), {"a": x, "b": 3})
    assert resolve_inputs(([x],)) == (([x],), {})


def test_an_empty_example_is_refused() -> None:
    """It would cost nothing, so that any target would be reached; one empty argument among others is fine."""
    with pytest.raises(InputError, match=r"is empty: its shape is \(0, 3, 4, 4\). Pass at least one sample"):
        engine.trace(nn.Conv2d(3, 4, 1), torch.zeros(0, 3, 4, 4))
    assert len(resolve_inputs((torch.ones(1), torch.zeros(0)))[0]) == 2


def test_a_layer_without_a_shape_is_named_and_left_alone() -> None:
    """A lazy layer gets its sizes from the first call, which recording must not be."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.LazyConv2d(2, 1))
    with pytest.raises(InputError, match="'1.weight' has no shape yet"):
        engine.trace(model, torch.zeros(1, 3, 4, 4))
    assert is_lazy(model[1].weight) and model(torch.zeros(1, 3, 4, 4)).shape == (1, 2, 4, 4)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("sizes", [(0, 8), (8, 0)])
def test_layers_without_entries_are_refused(sizes: tuple[int, int]) -> None:
    """By name, before anything is recorded: a head for no classes has no channels to analyse."""
    model = nn.Sequential(nn.Linear(4, sizes[0]), nn.Linear(*sizes))
    with pytest.raises(InputError, match=r"'[01]' is a layer without entries"):
        engine.trace(model, torch.zeros(1, 4))


def test_larger_inputs_keep_batch_and_channels() -> None:
    """Large sizes grow by 32, small ones double; integers and vectors stay."""
    grown, _ = larger_inputs((torch.ones(2, 3, 64, 5), torch.ones(2, 3), torch.ones(1, 1, 4).long()), {})
    assert [tuple(t.shape) for t in grown] == [(2, 3, 96, 10), (2, 3), (1, 1, 4)]


class _Asking(nn.Module):
    """Asks whether it is recorded."""

    def __init__(self, rejects: bool) -> None:
        super().__init__()
        self.layer, self.rejects = nn.Linear(3, 2), rejects

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        if self.rejects or torch.overrides._get_current_function_mode() is not None:
            raise ValueError("no")
        return self.layer(x)


def test_who_rejects_an_input_is_told_apart() -> None:
    """The model, or the recording; then the line is named, and what to do about it."""
    with pytest.raises(
        TraceError, match=r"accepts the example input, but cannot be recorded: ValueError: no at .*:\d+"
    ):
        engine.trace(_Asking(rejects=False), torch.zeros(1, 3))
    with pytest.raises(TraceError, match="Asking rejected the example input"):
        engine.trace(_Asking(rejects=True), torch.zeros(1, 3))
