"""Traps: decisions by several sizes, in code of any form, of which no run at other sizes takes one by chance."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.alternatives import other_sizes, steps
from engine.flow import branches, coverage
from engine.numbers import table_keys
from engine.source import attribute_writes
from engine.unrecorded import unreached
from tests.engine.traps import chosen
from tests.engine.traps.trap import Ablation, Trap, Use, once

__all__ = ["ABLATIONS", "TRAPS"]

USES: list[Use] = [once(3, 3, *size) for size in ((8, 8), (9, 10), (12, 6), (9, 9), (16, 16), (6, 12), (12, 8), (8, 6))]
SIZES = "diffusers, UNet2DConditionModel: `any(s % factor != 0 for s in sample.shape[-2:])`"
RETURNS = "transformers, ViTEmbeddings.interpolate_pos_encoding: returns early for the sizes of the configuration"
SWITCHES = {"fast": False}
MARKS = "methods such as `apply_masks` and `make_cache`, which set attributes whenever they run"
TABLES = "triton, Autotuner.run: `self.cache[key]`, where a tuple of sizes is the key of the tuned kernel"
KEYS = "heads and levels that a comprehension picks, as in torchvision's feature pyramids"


class _Net(nn.Module):
    """Layers between which code decides by sizes."""

    middle: Callable[[Tensor], Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 1)
        self.is_marked, self.calls = False, 0

    def apply_mark(self, marked: bool) -> None:
        """Set what the next call reads."""
        self.is_marked = marked

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        return self.head(self.middle(self.body(x)))  # type: ignore[no-any-return]


def _is_special(y: Tensor) -> bool:
    height, width = y.shape[2:]
    return height == 12 and width == 6


def _lambda(net: _Net, y: Tensor) -> Tensor:
    activation: Callable[[Tensor], Tensor] = lambda z: z.flip(1) if _is_special(z) else z.tanh()  # noqa: E731
    return activation(y)


def _comprehension(net: _Net, y: Tensor) -> Tensor:
    return torch.stack([z.flip(1) if _is_special(z) else z.tanh() for z in (y, net.one(y))]).sum(0)


def _condition_of_a_comprehension(net: _Net, y: Tensor) -> Tensor:
    return sum((z.flip(1) for z in (y, net.one(y)) if z.shape[2] == 12 if z.shape[3] == 6), y)


def _filter(net: _Net, y: Tensor) -> Tensor:
    return sum(filter(_is_special, [y.flip(1)]), y)


def _any(net: _Net, y: Tensor) -> Tensor:
    return y.tanh() if any(a != b for a, b in zip(y.shape[2:], (12, 6), strict=True)) else y.flip(1)


def _default_of_a_lambda(net: _Net, y: Tensor) -> Tensor:
    activation = lambda z, special=_is_special(y): z.flip(1) if special else z  # noqa: B008, E731
    return activation(y)  # type: ignore[no-any-return]


def _picked(net: _Net, y: Tensor) -> Tensor:
    return [z for z in (y, y.flip(1))][int(_is_special(y))]  # noqa: C416


def _zipped(net: _Net, y: Tensor) -> Tensor:
    return sum((z for z, special in zip([y.flip(1)], [_is_special(y)], strict=True) if special), y)


def _three(net: _Net, y: Tensor) -> Tensor:
    return (lambda z: z.flip(1) if _is_special(z) and len(z) == 3 else z)(y)  # type: ignore[no-any-return]


def _strided(net: _Net, y: Tensor) -> Tensor:
    z = nn.functional.avg_pool2d(y, 2)
    return (lambda z: z.flip(1) if z.shape[2] == 6 and z.shape[3] == 3 else z)(z)  # type: ignore[no-any-return]


def _dimension(net: _Net, y: Tensor) -> Tensor:
    return net.one(y) + y.mean(1 if _is_special(y) else 3, keepdim=True)  # type: ignore[no-any-return]


def _flag(net: _Net, y: Tensor) -> Tensor:
    return y.cumsum(3) if y.shape[3] != 8 else y.argsort(1, descending=_is_special(y)).to(y)


def _in_another_file(net: _Net, y: Tensor) -> Tensor:
    return chosen.one_size(net, y)


def _flipped(y: Tensor) -> Tensor:
    return y.flip(1)


BY_SIZES = {(12, 6): _flipped}
BY_HEIGHT_AND_WIDTH = {12: {6: _flipped}}


def _from_a_display(net: _Net, y: Tensor) -> Tensor:
    return {(8, 12, 6): _flipped}.get((8, *y.shape[2:]), torch.tanh)(y)


def _from_a_table(net: _Net, y: Tensor) -> Tensor:
    return BY_SIZES.get(tuple(y.shape[2:]), torch.tanh)(y)  # type: ignore[arg-type]


def _from_a_table_in_a_table(net: _Net, y: Tensor) -> Tensor:
    return BY_HEIGHT_AND_WIDTH.get(y.shape[2], {}).get(y.shape[3], torch.tanh)(y)


def _by_an_area(net: _Net, y: Tensor) -> Tensor:
    return {72: _flipped}.get(y.shape[2] * y.shape[3], torch.tanh)(y)


def _marked(net: _Net, y: Tensor) -> Tensor:
    z = y.flip(1) if net.is_marked else y
    if y.shape[2] * y.shape[3] == 72 and y.shape[2] == 12:
        net.apply_mark(True)
    return z


def _after_a_mark(model: nn.Module) -> Tensor:
    once(3, 3, 12, 6)(model)
    return once(3, 3, 9, 9)(model)  # type: ignore[no-any-return]


def _and_a_count(net: _Net, y: Tensor) -> Tensor:
    net.calls += 1
    return [z.flip(1) if _is_special(z) and net.calls > 2 else z for z in (y,)][0]


def _and_gradients(net: _Net, y: Tensor) -> Tensor:
    return (lambda z: z.flip(1) if _is_special(z) and torch.is_grad_enabled() else z)(y)  # type: ignore[no-any-return]


def _and_a_switch(net: _Net, y: Tensor) -> Tensor:
    return sum((z.flip(1) for z in (y,) if _is_special(z) and SWITCHES["fast"]), y)


def _switched_on(model: nn.Module) -> Tensor:
    SWITCHES["fast"] = True
    try:
        return once(3, 3, 12, 6)(model)  # type: ignore[no-any-return]
    finally:
        SWITCHES["fast"] = False


def _with_gradients(model: nn.Module) -> Tensor:
    with torch.enable_grad():
        return model(torch.ones(3, 3, 12, 6, dtype=torch.float64)).detach()  # type: ignore[no-any-return]


def _trap(name: str, source: str, middle: Callable[[Any, Tensor], Tensor], size: tuple[int, int] = (8, 8)) -> Trap:
    kind = type("Net", (_Net,), {"__module__": __name__, "middle": middle})
    example = torch.randn(2, 3, *size, dtype=torch.float64)
    return Trap(
        name, source, kind, lambda model: example, [*USES, _after_a_mark, _switched_on, _with_gradients], seeds=(0,)
    )


TRAPS = [
    _trap("a lambda function that decides by two sizes", RETURNS, _lambda),
    _trap("a comprehension that decides by two sizes", KEYS, _comprehension),
    _trap("two conditions of a comprehension, on sizes", KEYS, _condition_of_a_comprehension),
    _trap("features that a function of sizes filters", KEYS, _filter),
    _trap("a generator that compares sizes", SIZES, _any),
    _trap("a default of a lambda function by two sizes", RETURNS, _default_of_a_lambda),
    _trap("an item that two sizes pick", KEYS, _picked),
    _trap("features beside a flag of two sizes", KEYS, _zipped),
    _trap("two sizes and a batch together", SIZES, _three),
    _trap("two sizes of pooled features", SIZES, _strided),
    _trap("a dimension for two sizes", SIZES, _dimension),
    _trap("a flag of an op for two sizes", SIZES, _flag, (12, 10)),
    _trap("a function of another file that decides by sizes", RETURNS, _in_another_file),
    _trap("a function from a display under two sizes", TABLES, _from_a_display),
    _trap("a function from a table under two sizes", TABLES, _from_a_table),
    _trap("a function from a table in a table", TABLES, _from_a_table_in_a_table),
    _trap("a function from a table under an area", TABLES, _by_an_area),
    _trap("a comprehension that decides by two sizes and a count", KEYS, _and_a_count),
    _trap("a lambda function that decides by two sizes and gradients", RETURNS, _and_gradients),
    _trap("a generator that decides by two sizes and a switch", KEYS, _and_a_switch),
    _trap("a flag that a function with the name of a builder sets", MARKS, _marked),
]

_IS_FIXED = unreached._UntakenBranches._is_fixed_by_code


def _settled_elsewhere(self: Any, branch: Any, *args: Any, **kwargs: Any) -> bool:
    return branch.code.co_filename not in self._files or _IS_FIXED(self, branch, *args, **kwargs)


def _of_named_functions(code: CodeType, always: bool = False) -> branches.FunctionBranches | None:
    return None if code.co_name.startswith("<") else branches.branches_of(code, always)


def _leave_elsewhere_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(unreached._UntakenBranches, "_is_fixed_by_code", _settled_elsewhere)


ABLATIONS = [
    Ablation(
        "sizes that decisions ask for, one after another",
        lambda patch: patch.setattr(other_sizes.OtherSizes, "_try_one_by_one", lambda self, axes, accepts: None),
        "an item that two sizes pick",
    ),
    Ablation(
        "keys that sizes are looked up under",
        lambda patch: patch.setattr(table_keys.Lookups, "keys", lambda self, frame, size: set()),
        "a function from a table in a table",
    ),
    Ablation(
        "dimensions and flags of steps",
        lambda patch: patch.setattr(steps, "_manner", lambda node: ()),
        "a dimension for two sizes",
    ),
    Ablation(
        "functions of other files that sizes decide in",
        _leave_elsewhere_alone,
        "a function of another file that decides by sizes",
    ),
    Ablation(
        "functions that forward runs build no model",
        lambda patch: patch.setattr(attribute_writes, "run_by_forward", lambda names: frozenset()),
        "a flag that a function with the name of a builder sets",
    ),
    Ablation(
        "branches of lambda functions and comprehensions",
        lambda patch: patch.setattr(coverage, "branches_of", _of_named_functions),
        "a comprehension that decides by two sizes and a count",
    ),
]
