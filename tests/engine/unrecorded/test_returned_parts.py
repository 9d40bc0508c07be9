"""Results that code which did not run returns in another container."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from tests.engine.traps.returned import Output


class Encoder(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 8)

    def forward(self, x: Tensor) -> Output:
        """Return features by name."""
        return Output(last=self.layer(x).relu())


class Net(nn.Module):
    """An encoder, a second result, and a head."""

    def __init__(self, returned: Any) -> None:
        super().__init__()
        self.encoder, self.pooler, self.head = Encoder(), nn.Linear(8, 8), nn.Linear(8, 2)
        self.body = type("Body", (Body,), {"forward": returned, "__module__": __name__})(self.encoder, self.pooler)

    def forward(self, x: Tensor) -> Any:
        """Return scores."""
        return self.head(self.body(x)[0])


class Body(nn.Module):
    """Calls the encoder."""

    def __init__(self, encoder: nn.Module, pooler: nn.Module) -> None:
        super().__init__()
        self.encoder, self.pooler, self.decoder = encoder, pooler, Encoder()


def appended(self: Any, x: Tensor) -> Any:
    """Append further items, of which there are none."""
    outputs = self.encoder(x)
    h = outputs[0]
    pooled = self.pooler(h)
    if len(x) == 77:
        return (h, pooled) + outputs[1:]
    return Output(last=h, pooled=pooled)


def chosen(self: Any, x: Tensor) -> Any:
    """Leave out an item that may be missing."""
    outputs = self.encoder(x)
    h = outputs[0]
    pooled = self.pooler(h) if self.pooler is not None else None
    if len(x) == 77:
        head = (h, pooled) if pooled is not None else (h,)
        return head + outputs[1:]
    return Output(last=h, pooled=pooled)


def alone(self: Any, x: Tensor) -> Any:
    """Return the only item in a tuple."""
    outputs = self.encoder(x)
    h = outputs[0]
    if len(x) == 77:
        return (h,) + outputs[1:]
    return Output(last=h)


def itself(self: Any, x: Tensor) -> Any:
    """Return features alone, of which others pick the first row."""
    outputs = self.encoder(x)
    h = outputs[0]
    if len(x) == 77:
        return (h,) + outputs[1:]
    return h


def filtered(self: Any, x: Tensor) -> Any:
    """Leave out what is None."""
    outputs = self.encoder(x)
    h, inner = outputs[0], None
    pooled = self.pooler(h)
    if len(x) == 77:
        return tuple(v for v in [h, pooled, inner] if v is not None)
    return Output(last=h, pooled=pooled)


def filtered_in_another_order(self: Any, x: Tensor) -> Any:
    """Leave out what is None, of a list in another order."""
    outputs = self.encoder(x)
    h, inner = outputs[0], None
    pooled = self.pooler(h)
    if len(x) == 77:
        return tuple(v for v in [inner, pooled, h] if v is not None)
    return Output(last=h, pooled=pooled)


def filtered_by_entries(self: Any, x: Tensor) -> Any:
    """Leave out what has no positive entries."""
    outputs = self.encoder(x)
    h = outputs[0]
    pooled = self.pooler(h)
    if len(x) == 77:
        return tuple(v for v in [h, pooled] if v.sum() > 0)
    return Output(last=h, pooled=pooled)


def changed(self: Any, x: Tensor) -> Any:
    """Return other features than the usual ones in the second place."""
    outputs = self.encoder(x)
    h = outputs[0]
    pooled = self.pooler(h)
    if len(x) == 77:
        return (h, h.flip(1)) + outputs[1:]
    return Output(last=h, pooled=pooled)


def computed(self: Any, x: Tensor) -> Any:
    """Compute other features under the same name."""
    outputs = self.encoder(x)
    h = outputs[0]
    pooled = self.pooler(h)
    if len(x) == 77:
        h = self.decoder(x).last
        return (h, pooled) + outputs[1:]
    return Output(last=h, pooled=pooled)


def both(self: Any, x: Tensor) -> Any:
    """Append the items of two containers."""
    one, two = self.encoder(x), self.decoder(x)
    if len(x) == 77:
        return one + two
    return Output(last=one.last, other=two.last)


def unseen(self: Any, x: Tensor) -> Any:
    """Append items of something of which nothing shows that it is a container."""
    outputs = self.encoder(x)
    h, pooled = outputs.last, self.pooler(outputs.last)
    if len(x) == 77:
        return (h, pooled) + outputs[1:]
    return Output(last=h, pooled=pooled)


def swapped(self: Any, x: Tensor) -> Any:
    """Return them in another order."""
    outputs = self.encoder(x)
    h = outputs[0]
    pooled = self.pooler(h)
    if len(x) == 77:
        return (pooled, h) + outputs[1:]
    return Output(last=h, pooled=pooled)


def summed(self: Any, x: Tensor) -> Any:
    """Add features."""
    h = self.encoder(x).last
    pooled = self.pooler(h)
    if len(x) == 77:
        return h + pooled
    return Output(last=h, pooled=pooled)


FREE = [appended, chosen, alone, filtered, both]
KEPT = [filtered_in_another_order, filtered_by_entries, changed, computed, itself, unseen, swapped, summed]


@pytest.mark.parametrize("returned, free", [*((f, True) for f in FREE), *((f, False) for f in KEPT)])
def test_the_usual_items_in_their_order(returned: Any, free: bool) -> None:
    """Whatever calls the module picks the same features from either container."""
    groups = engine.dependency_groups(Net(returned), torch.zeros(2, 3))
    reasons = {group.name: group.reason for group in groups}
    assert (reasons["encoder.layer"] is None) is free, reasons
