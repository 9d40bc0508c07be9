"""Traps: decisions by sizes that no recording takes, and what code chooses by them.

The sizes that matter here are few (a height of 12 and a width of 6), so that neither a recording nor the certificate
tries them. Whatever would run there, or run otherwise, keeps its channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.alternatives import other_sizes
from engine.flow import forward_arguments
from engine.unrecorded import replaced_calls, unreached, untaken
from tests.engine.traps.trap import Ablation, Trap, once

__all__ = ["ABLATIONS", "TRAPS", "one_size"]

USES = [once(3, 3, *size) for size in ((8, 8), (9, 10), (12, 6), (9, 9), (16, 16), (13, 12), (6, 12), (17, 9))]
UPSAMPLES = "diffusers, UNet2DConditionModel: `forward_upsample_size` is set in a loop over the image's sides"
RETURNS = "transformers, ViTEmbeddings.interpolate_pos_encoding: returns early for the sizes of the configuration"
SWITCHES = "Wang et al. 2020, Resolution Switchable Networks: norms by the resolution of the image"
SHIFTS = "torchvision, shifted_window_attention: the shift is 0 where one window covers the image"
LEVELS = "pyramids with as many levels as the image has room for"


def _is_special(y: Tensor) -> bool:
    height, width = y.shape[2:]
    return height * width == 72 and height == 12


def _activated(y: Tensor, other: bool) -> Tensor:
    return y.sigmoid() if other else y.tanh()


class _Activation(nn.Module):
    def forward(self, y: Tensor, other: bool) -> Tensor:
        if other:
            return y.sigmoid()
        return y.tanh()


class _Net(nn.Module):
    """Layers between which a function decides."""

    middle: Callable[[Tensor], Tensor]
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
        self.one, self.other = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.layers = nn.ModuleList([nn.Conv2d(8, 8, 1) for _ in range(2)])
        self.norms, self.act = {17: self.layers[0], 19: self.layers[1]}, _Activation()
        self.register_buffer("average", torch.randn(1, 8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        return self.head(self.middle(self.body(x)))  # type: ignore[no-any-return]

    def repeat(self, y: Tensor, times: int) -> Tensor:
        """Return features of a layer that runs several times."""
        for _ in range(times):
            y = self.one(y)
        return y

    def by_size(self, y: Tensor, height: int, width: int) -> Tensor:
        """Return activations of a kind that two numbers decide."""
        return y.sigmoid() if height * width == 72 and height == 12 else y.tanh()

    def activate(self, y: Tensor, kind: str = "tanh") -> Tensor:
        """Return activations of a kind."""
        if kind == "sigmoid":
            return y.sigmoid()
        return y.tanh()

    def shifted(self, y: Tensor) -> Tensor:
        """Return features, shifted by a number."""
        return y + 1.0


def one_size(net: nn.Module, y: Tensor) -> Tensor:
    """Return activations of a kind that the area decides together with the height: no run at other sizes has both."""
    return y.sigmoid() if y.shape[2] * y.shape[3] == 72 and y.shape[2] == 12 else y.tanh()


def _early(net: _Net, y: Tensor) -> Tensor:
    if y.shape[2] != 12:
        return y.tanh()
    if y.shape[3] != 6:
        return y.tanh()
    return y.sigmoid()


def _flag(net: _Net, y: Tensor) -> Tensor:
    flag = False
    if y.shape[2] * y.shape[3] == 72 and y.shape[2] == 12:
        flag = True
    z = y.tanh()
    if flag:
        z = y.sigmoid()
    return z


def _flag_in_a_list(net: _Net, y: Tensor) -> Tensor:
    reasons = []
    if y.shape[2] * y.shape[3] == 72 and y.shape[2] == 12:
        reasons.append("size")
    return y.sigmoid() if reasons else y.tanh()


def _flags_of_two_branches(net: _Net, y: Tensor) -> Tensor:
    high = low = 0
    if y.shape[2] % 13 == 12:
        high = 1
    if y.shape[3] % 7 == 6:
        low = 1
    return y.sigmoid() if high + low == 2 else y.tanh()


def _to_a_function(net: _Net, y: Tensor) -> Tensor:
    return _activated(y, _is_special(y))


def _to_a_module(net: _Net, y: Tensor) -> Tensor:
    return net.act(y, _is_special(y))  # type: ignore[no-any-return]


def _as_a_text(net: _Net, y: Tensor) -> Tensor:
    return net.activate(y, "sigmoid" if _is_special(y) else "tanh")


def _by_keyword(net: _Net, y: Tensor) -> Tensor:
    options = {"kind": "sigmoid" if _is_special(y) else "tanh"}
    return net.activate(y, **options)


def _to_a_nested_function(net: _Net, y: Tensor) -> Tensor:
    other = _is_special(y)

    def activated(z: Tensor) -> Tensor:
        return z.sigmoid() if other else z.tanh()

    return activated(y)


def _counted(net: _Net, y: Tensor) -> Tensor:
    rows = sum(1 for _ in zip(range(y.shape[2]), range(100), strict=False))
    return y.sigmoid() if rows == 12 and y.shape[3] == 6 else y.tanh()


def _as_a_plain_number(net: _Net, y: Tensor) -> Tensor:
    return net.by_size(y, len(y[0, 0]), int(y.shape[3] * 1.0))


def _replaced(net: _Net, y: Tensor) -> Tensor:
    z = net.one(y)
    return y.sigmoid() if _is_special(y) else z  # type: ignore[no-any-return]


def _replaced_by_a_part(net: _Net, y: Tensor) -> Tensor:
    z: Tensor = net.one(y)
    if _is_special(y):
        z = y[:, :8]
    return z


def _replaced_by_a_buffer(net: _Net, y: Tensor) -> Tensor:
    z: Tensor = net.one(y).mean((2, 3), keepdim=True)
    if _is_special(y):
        z = net.average
    return z.tanh()


def _replaced_by_a_loop(net: _Net, y: Tensor) -> Tensor:
    z: Tensor = net.one(y)
    if _is_special(y):
        for z in (y.sigmoid(),):  # noqa: B007
            pass
    return z


def _replaced_in_a_condition(net: _Net, y: Tensor) -> Tensor:
    z: Tensor = net.one(y)
    if _is_special(y) and (z := y.sigmoid()) is not None:
        pass
    return z


def _by_a_method(net: _Net, y: Tensor) -> Tensor:
    z: Tensor = net.one(y)
    if _is_special(y):
        z = net.shifted(z)
    return z


def _number(net: _Net, y: Tensor) -> Tensor:
    return net.one(y) + (1.0 if _is_special(y) else 0.0)  # type: ignore[no-any-return]


def _number_in_a_tensor(net: _Net, y: Tensor) -> Tensor:
    scale = torch.tensor(1.0 if _is_special(y) else 0.0, dtype=y.dtype)
    return net.one(y) + scale * net.other(y)  # type: ignore[no-any-return]


def _amount(net: _Net, y: Tensor) -> Tensor:
    amount = 1 if _is_special(y) else 0
    return F.pad(net.one(y), (amount,) * 4, value=1.0)


def _dimension(net: _Net, y: Tensor) -> Tensor:
    return net.one(y) + y.mean(1 if _is_special(y) else 3, keepdim=True)  # type: ignore[no-any-return]


def _part(net: _Net, y: Tensor) -> Tensor:
    count = 4 if _is_special(y) else 8
    return net.one(y) + y[:, :count].sum(1, keepdim=True)  # type: ignore[no-any-return]


def _dtype(net: _Net, y: Tensor) -> Tensor:
    kind = torch.int64 if _is_special(y) else y.dtype
    return (net.one(y) * 10).to(kind).to(y.dtype)  # type: ignore[no-any-return]


def _item(net: _Net, y: Tensor) -> Tensor:
    return [net.one(y), net.other(y)][1 if _is_special(y) else 0].tanh()  # type: ignore[no-any-return]


def _rounds(net: _Net, y: Tensor) -> Tensor:
    return net.repeat(y, 2 if _is_special(y) else 1)


def _rounds_counted(net: _Net, y: Tensor) -> Tensor:
    last, count = 1, 0
    if _is_special(y):
        last = 2
    while count < last:
        y, count = net.one(y), count + 1
    return y


def _function(net: _Net, y: Tensor) -> Tensor:
    activation = torch.tanh
    if _is_special(y):
        activation = torch.sigmoid
    return activation(net.one(y))


def _lambda(net: _Net, y: Tensor) -> Tensor:
    activation = (lambda z: z.sigmoid()) if _is_special(y) else (lambda z: z.tanh())
    return activation(y)  # type: ignore[no-any-return]


def _table(net: _Net, y: Tensor) -> Tensor:
    return net.norms.get(y.shape[2], net.other)(y)


def _table_of_text(net: _Net, y: Tensor) -> Tensor:
    return {str(size): layer for size, layer in net.norms.items()}.get(f"{y.shape[2]}", net.other)(y)


def _table_tested(net: _Net, y: Tensor) -> Tensor:
    return net.norms[y.shape[2]](y) if y.shape[2] in net.norms else net.other(y)  # type: ignore[no-any-return]


def _table_searched(net: _Net, y: Tensor) -> Tensor:
    own = (layer for size, layer in net.norms.items() if size == y.shape[2])
    return next(own, net.other)(y)


def _levels(net: _Net, y: Tensor) -> Tensor:
    layers = iter([net.one, net.other])
    try:
        for _ in range(y.shape[2] // 4):
            y = next(layers)(y)
    except StopIteration:
        y = net.layers[0](y)
    return y


def _trap(name: str, source: str, middle: Callable[[Any, Tensor], Tensor], size: tuple[int, int] = (8, 8)) -> Trap:
    kind = type("Net", (_Net,), {"__module__": __name__, "middle": middle})
    example = torch.randn(2, 3, *size, dtype=torch.float64)
    return Trap(name, source, kind, lambda model: example, USES, seeds=(0,))


TRAPS = [
    _trap("a branch for one size", RETURNS, one_size),
    _trap("early returns for other sizes", RETURNS, _early),
    _trap("a flag that is set for one size", UPSAMPLES, _flag),
    _trap("a list that is filled for one size", UPSAMPLES, _flag_in_a_list),
    _trap("flags of two sizes together", UPSAMPLES, _flags_of_two_branches),
    _trap("a size decides for a function", UPSAMPLES, _to_a_function),
    _trap("a size decides for a module", UPSAMPLES, _to_a_module),
    _trap("a size decides for a method, as a text", UPSAMPLES, _as_a_text),
    _trap("a size decides for a method, by keyword", UPSAMPLES, _by_keyword),
    _trap("a size decides for a nested function", UPSAMPLES, _to_a_nested_function),
    _trap("rows that are counted", UPSAMPLES, _counted),
    _trap("sizes as plain numbers for a method", UPSAMPLES, _as_a_plain_number),
    _trap("features in the place of others for one size", RETURNS, _replaced),
    _trap("a part of features in the place of others", RETURNS, _replaced_by_a_part),
    _trap("a buffer in the place of features", RETURNS, _replaced_by_a_buffer),
    _trap("features in the place of others, by a loop", RETURNS, _replaced_by_a_loop),
    _trap("features in the place of others, in a condition", RETURNS, _replaced_in_a_condition),
    _trap("a method that runs for one size", RETURNS, _by_a_method),
    _trap("a number for one size", SHIFTS, _number),
    _trap("a number in a tensor for one size", SHIFTS, _number_in_a_tensor),
    _trap("an amount of padding for one size", SHIFTS, _amount),
    _trap("a dimension for one size", SHIFTS, _dimension),
    _trap("a part of the channels for one size", SHIFTS, _part),
    _trap("a dtype for one size", SHIFTS, _dtype),
    _trap("an item of a list for one size", SHIFTS, _item),
    _trap("rounds by size", LEVELS, _rounds),
    _trap("rounds by size, counted", LEVELS, _rounds_counted),
    _trap("a function for one size", LEVELS, _function),
    _trap("a lambda function for one size", LEVELS, _lambda),
    _trap("a module from a table by size", SWITCHES, _table, (6, 9)),
    _trap("a module from a table by the text of a size", SWITCHES, _table_of_text, (6, 9)),
    _trap("a module from a table by size, tested before", SWITCHES, _table_tested, (6, 9)),
    _trap("a module that is searched by size", SWITCHES, _table_searched, (6, 9)),
    _trap("levels by size", LEVELS, _levels, (6, 9)),
]  # fmt: skip


_NOTHING: Any = lambda *args, **kwargs: None  # noqa: E731

ABLATIONS = [
    Ablation(
        "places at which sizes decide",
        lambda patch: patch.setattr(other_sizes.OtherSizes, "places", lambda self: frozenset()),
        "a branch for one size",
    ),
    Ablation(
        "flags that code sets which did not run",
        lambda patch: patch.setattr(unreached._UntakenBranches, "_may_run", lambda self, branch, node: False),
        "a flag that is set for one size",
    ),
    Ablation(
        "decisions by sizes that reach other functions",
        lambda patch: patch.setattr(forward_arguments, "functions_that_choose", lambda model, chooses: []),
        "a size decides for a function",
    ),
    Ablation(
        "values that code which did not run would replace",
        lambda patch: patch.setattr(untaken.UntakenBranch, "replaced", lambda self, selecting: set()),
        "features in the place of others for one size",
    ),
    Ablation(
        "numbers that code chooses",
        lambda patch: patch.setattr(replaced_calls, "assume_other_numbers", _NOTHING),
        "rounds by size",
    ),
    Ablation(
        "modules that code which ran got hold of",
        lambda patch: patch.setattr(unreached, "use_values_near_idle_modules", _NOTHING),
        "a module from a table by the text of a size",
    ),
]
