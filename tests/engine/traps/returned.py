"""Traps: code that did not run returns the usual items in another container, or other ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from engine.unrecorded import returned_parts, unreached
from tests.engine.traps.trap import Ablation, Trap, at_other_length

__all__ = ["ABLATIONS", "TRAPS", "Output"]


class Output(OrderedDict[str, Any]):
    """Items by name or by position, as transformers returns them."""

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]

    @property
    def last(self) -> Any:
        """The last features."""
        return self["last"]


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, inner: bool) -> Output:
        h = self.first(x).relu()
        last = self.second(h).relu()
        return Output(last=last, inner=h) if inner else Output(last=last)


class _Body(nn.Module):
    """Returns features and pooled ones, of the same width."""

    inner = False

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.pooler = _Encoder(), nn.Linear(8, 8)


class _Plain(_Body):
    def forward(self, x: Tensor) -> Any:
        outputs = self.encoder(x, self.inner)
        h = outputs[0]
        pooled = self.pooler(h).tanh()
        if len(x) == 77:
            return (h, pooled) + outputs[1:]
        return Output(last=h, pooled=pooled)


class _Chosen(_Body):
    def forward(self, x: Tensor) -> Any:
        outputs = self.encoder(x, self.inner)
        h = outputs[0]
        pooled = self.pooler(h).tanh() if self.pooler is not None else None
        if len(x) == 77:
            head = (h, pooled) if pooled is not None else (h,)
            return head + outputs[1:]
        return Output(last=h, pooled=pooled)


class _Swapped(_Body):
    def forward(self, x: Tensor) -> Any:
        outputs = self.encoder(x, self.inner)
        h = outputs[0]
        pooled = self.pooler(h).tanh()
        if len(x) == 77:
            return (pooled, h) + outputs[1:]
        return Output(last=h, pooled=pooled)


class _Fewer(_Body):
    def forward(self, x: Tensor) -> Any:
        outputs = self.encoder(x, self.inner)
        h = outputs[0]
        pooled = self.pooler(h).tanh()
        if len(x) == 77:
            return (h,) + outputs[:1]
        return Output(last=h, pooled=pooled)


class _More(_Plain):
    """The items that are appended have features, and the last of them is picked."""

    inner = True


class _Sum(_Body):
    def forward(self, x: Tensor) -> Any:
        outputs = self.encoder(x, self.inner)
        h = outputs[0]
        pooled = self.pooler(h).tanh()
        if len(x) == 77:
            return h + pooled
        return Output(last=h, pooled=pooled)


class _Two(_Body):
    """Appends the items of one container to another one."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = _Encoder()

    def forward(self, x: Tensor) -> Any:
        one, two = self.encoder(x, self.inner), self.decoder(x, self.inner)
        if len(x) == 77:
            return (*one.values(), *two.values()) if self.inner else tuple(one.values()) + tuple(two.values())
        return Output(last=one.last, pooled=two.last)


class _Net(nn.Module):
    def __init__(self, body: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.body, self.head, self.other = body(), nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(x)[0])


class _Last(_Net):
    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(x)[-1])


class _Asks(_Net):
    """Has a layer for tuples."""

    def forward(self, x: Tensor) -> Any:
        outputs = self.body(x)
        return self.other(outputs[0]) if isinstance(outputs, tuple) else self.head(outputs[0])


def _trap(name: str, body: type[_Body], net: type[_Net] = _Net, *, shrinks: bool = False) -> Trap:
    return at_other_length(name, _SOURCE, lambda: net(body), shrinks=shrinks)


_SOURCE = "transformers: `if not return_dict: return (sequence_output, pooled_output) + encoder_outputs[1:]`"
TRAPS = [
    _trap("a tuple in place of an output", _Plain, shrinks=True),
    _trap("the last item of a tuple in place of an output", _Plain, _Last, shrinks=True),
    _trap("a tuple with an optional item in place of an output", _Chosen, shrinks=True),
    _trap("a tuple in another order in place of an output", _Swapped),
    _trap("a tuple with fewer items in place of an output", _Fewer, _Last),
    _trap("a tuple with more features in place of an output", _More, _Last),
    _trap("a sum of features in place of an output", _Sum),
    _trap("two tuples in place of an output", _Two),
    _trap("a layer for tuples in place of an output", _Plain, _Asks),
]


def _order_does_not_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(returned_parts, "_are_alike", lambda parts, usual: True)


def _nobody_asks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(unreached, "asks_about_result", lambda branch, other: False)


ABLATIONS = [
    Ablation(
        "items that are returned in another container are the usual ones, in their order",
        _order_does_not_count,
        "a tuple in another order in place of an output",
    ),
    Ablation(
        "a condition may ask for the type of a result that is returned in another container",
        _nobody_asks,
        "a layer for tuples in place of an output",
    ),
]
