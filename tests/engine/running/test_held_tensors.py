"""Which tensors an object of any kind holds."""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.running.held_tensors import tensors_held_by, tensors_of_variable

H = torch.ones(2)


class _Slots:
    __slots__ = ("h",)

    def __init__(self, h: Tensor) -> None:
        self.h = h


class _Holder:
    def __init__(self, h: Tensor) -> None:
        self._h = h

    def read(self) -> Tensor:
        """Return it."""
        return self._h


def _inside(h: Tensor) -> Callable[[], Tensor]:
    return lambda: h


def _default(h: Tensor = H) -> Tensor:
    return h


def _generated(h: Tensor) -> Iterator[Tensor]:
    yield h
    yield h.square()


@pytest.mark.parametrize(
    "held",
    [
        _inside(H), _default, functools.partial(torch.sum, H), H.square, _Holder(H).read, _Holder(H), _Slots(H),
        types.SimpleNamespace(h=[H]), iter([H]), zip([H], [1], strict=True), map(torch.square, [H]), reversed([H]),
        collections.deque([H]), _generated(H), (h for h in [H]), {"a": [_inside(H)]},
        torch.distributions.Normal(H, 1.0),
    ],
    ids=lambda held: type(held).__name__,
)  # fmt: skip
def test_what_holds_a_tensor(held: Any) -> None:
    """Code that gets the object can read the tensor."""
    assert any(tensor is H for tensor in tensors_held_by(held))
    kind, tensors = tensors_of_variable(held)
    assert kind == "inside" and any(tensor is H for tensor in tensors)


def test_what_holds_none() -> None:
    """Neither the globals of a function nor the weights of a module are what an object holds."""
    for held in (_generated, nn.Linear(2, 2), torch, type(H), "text", _Holder(None), object()):  # type: ignore[arg-type]
        assert not list(tensors_held_by(held))


def test_an_object_that_holds_itself() -> None:
    """Each object is visited once, and not beyond a limit."""
    ring: list[Any] = [H]
    ring.append(ring)
    assert len(list(tensors_held_by(ring))) == 1
    far = functools.reduce(lambda inner, _: [inner], range(3000), [H])
    assert not list(tensors_held_by(far))


def test_a_container_of_tensors() -> None:
    """Containers are told from other objects: conditions on types can be decided for them alone."""
    assert tensors_of_variable([H, (H, 3)])[0] == "values" and tensors_of_variable(3) == ("values", [])
    assert tensors_of_variable([(H, H), _inside(H.clone())])[0] == "inside"
