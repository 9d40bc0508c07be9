"""Functions that reach the numbers of a tensor past torch's ops are refused, and only while a model is recorded."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack, to_dlpack

import engine
from engine.errors import TraceError
from engine.numbers.replaced_functions import replaced_functions

OUTSIDE: Any = SimpleNamespace(holds=lambda tensor: False)
"""Stands for a program that none of the tensors belong to."""


class Net(nn.Module):
    """Changes features in some way between two layers."""

    change: Callable[[Tensor], Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        return self.leave(self.change(torch.relu(self.enter(x))))  # type: ignore[no-any-return]


CHANGES: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "apply_": lambda net, h: h.apply_(lambda n: 2 * n),  # type: ignore[dict-item]
    "map_": lambda net, h: h.map_(h.clone(), lambda n, m: n + m),  # type: ignore[dict-item]
    "capsule": lambda net, h: from_dlpack(to_dlpack(h)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_or_shares_a_tensor_without_an_op(name: str) -> None:
    """The error names the function and the line."""
    net = type("Net", (Net,), {"change": CHANGES[name], "__module__": __name__})()
    with pytest.raises(TraceError, match="which cannot be followed") as error:
        engine.trace(net, torch.zeros(2, 4))
    assert "test_replaced_functions.py:" in str(error.value) and name.replace("capsule", "from_dlpack") in str(
        error.value
    )
    with torch.no_grad():
        assert net(torch.zeros(2, 4)).shape == (2, 3)  # the functions are as they were


def test_tensors_that_are_handed_on_themselves() -> None:
    """`from_dlpack` reads a tensor, and takes arrays."""
    net = type("Net", (Net,), {"change": lambda net, h: from_dlpack(h), "__module__": __name__})()
    graph = engine.trace(net, torch.zeros(2, 4))
    assert "is read by the code" in str(graph.exits)
    with replaced_functions(OUTSIDE):
        assert torch.equal(torch.from_dlpack(torch.ones(2).numpy()), torch.ones(2))


def test_functions_are_put_back() -> None:
    """After an error too."""
    before = range, math.sqrt, torch._C._from_dlpack, Tensor.as_subclass, Tensor.__deepcopy__
    with pytest.raises(ZeroDivisionError), replaced_functions(OUTSIDE):
        assert range is not before[0] and math.sqrt(4.0) == 2.0 and Tensor.as_subclass is not before[3]
        raise ZeroDivisionError
    assert (range, math.sqrt, torch._C._from_dlpack, Tensor.as_subclass, Tensor.__deepcopy__) == before
    assert not {"as_subclass", "_make_subclass"} & vars(Tensor).keys()


def test_a_recording_in_a_recording() -> None:
    """The inner one puts back what the outer one has replaced, not what there was before both."""
    before = range, math.sqrt, torch._C._from_dlpack, Tensor.as_subclass, Tensor._make_subclass
    with replaced_functions(OUTSIDE):
        outer = range, math.sqrt, torch._C._from_dlpack, Tensor.as_subclass, Tensor._make_subclass
        with replaced_functions(OUTSIDE):
            assert Tensor.as_subclass is not outer[3]
        assert (range, math.sqrt, torch._C._from_dlpack, Tensor.as_subclass, Tensor._make_subclass) == outer
    assert (range, math.sqrt, torch._C._from_dlpack, Tensor.as_subclass, Tensor._make_subclass) == before


class Counted(Net):
    """Repeats a layer as often as a tensor says, and scales by its root."""

    def forward(self, x: Tensor, rounds: Tensor) -> Tensor:
        """Return scores."""
        h = self.enter(x)
        for _ in range(rounds):  # type: ignore[call-overload]
            h = torch.relu(h)
        return self.leave(h * math.sqrt(rounds))  # type: ignore[no-any-return]


def test_a_tensor_in_the_place_of_a_number_is_read() -> None:
    """It is so for ``range`` and functions of `math`, too: the tensor is an output of the program."""
    graph = engine.trace(Counted(), (torch.zeros(2, 4), torch.tensor(2)))
    assert graph.inputs[1] in graph.outputs
