"""What a model's code passes on under another name."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine.flow.argument_flow import passed_arguments


def helper(h: Tensor, *rest: Any, kind: Any = None, **others: Any) -> Tensor:
    """Return the features."""
    return h


class Block(nn.Module):
    """A block with options."""

    def forward(self, h: Tensor, shuffle: Any = False, scale: Any = None, **others: Any) -> Tensor:
        """Return the features."""
        return h

    @staticmethod
    def plain(h: Tensor, way: Any = None) -> Tensor:
        """Return the features."""
        return h


class Net(nn.Module):
    """A network of one block, twice in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.blocks = nn.ModuleList([self.block, nn.ReLU()])
        self.broken = 3

    @property
    def raising(self) -> Any:
        """Not to be read."""
        raise RuntimeError

    def run(self, h: Tensor, on: Any) -> Tensor:
        """Return the block's output."""
        return self.block(h, shuffle=on)  # type: ignore[no-any-return]


def one(self: Net, x: Tensor, flag: Any = False, **kw: Any) -> Any:
    """Pass by position."""
    return self.block(x, flag)


def two(self: Net, x: Tensor, flag: Any = False, **kw: Any) -> Any:
    """Pass to items of a list, by name."""
    for n, block in enumerate(self.blocks):
        x = block(x, scale=flag and n > 0)
    return x


def three(self: Net, x: Tensor, flag: Any = False, **kw: Any) -> Any:
    """Pass through a method and a variable."""
    on = flag or 3
    return self.run(x, bool(on))


def written(self: Net, x: Tensor, flag: Any = False, **kw: Any) -> Any:
    """Pass through a variable with a type, a dictionary and an assignment in an expression."""
    on: bool = flag
    options = {"scale": on, **dict(shuffle=(late := on))}  # noqa: C408  the call is read as well
    return self.block(x, **options) + self.run(x, late)


def four(self: Net, x: Tensor, flag: Any = False, **kw: Any) -> Any:
    """Pass all that is there."""
    return self.block(x, **kw)


def five(self: Net, x: Tensor, flag: Any = False, **kw: Any) -> Any:
    """Pass through torch."""
    return checkpoint(self.blocks[0], x, kw.get("a"), use_reentrant=False)


def six(self: Net, x: Tensor, flag: Any = False, **kw: Any) -> Any:
    """Pass to functions, and to what is none."""
    self.broken(flag)  # type: ignore[operator]
    self.raising(flag)
    self.block.plain(x, flag)
    return helper(x, flag, other=flag) + helper(x, *flag, kind=self.broken)


def seven(self: Net, x: Tensor, flag: Any = False, **kw: Any) -> Any:
    """Pass features, which an argument has part in."""
    x = self.block(x * flag, shuffle=x.sum() > 0)
    return self.block(x, self.run(x, 3))


class Options:
    """What a caller asks for."""

    def __init__(self, way: Any = None) -> None:
        self.way = way


def resolved(option: Any) -> Any:
    """Return an option, or another one."""
    return 3 if option is None else option


def again(h: Tensor, option: Any) -> Any:
    """Return features, by calling itself."""
    return again(h, not option) if h is None else h


def by_object(self: Net, x: Tensor, flag: Any = False, **kw: Any) -> Any:
    """Pass an object that holds it; the methods of the object see what it holds."""
    return self.block(x, Options(flag))


def by_result(self: Net, x: Tensor, flag: Any = False, **kw: Any) -> Any:
    """Pass what a function makes of it; what another returns are features."""
    return self.block(again(x, flag), scale=resolved(flag))


def by_constant(self: Net, x: Tensor, flag: Any = False, **kw: Any) -> Any:
    """Pass a constant that it chooses."""
    way = "plain"
    if flag:
        way = "other"
    return self.block(x, way)


def by_class(self: Net, x: Tensor, flag: Any = False, **kw: Any) -> Any:
    """Pass by the class."""
    return Net.run(self, x, flag)


@pytest.mark.parametrize(
    ("forward", "passed"),
    [
        (one, {"shuffle"}),
        (two, {"scale"}),
        (three, {"on", "shuffle"}),
        (four, {"shuffle", "scale", "others"}),
        (written, {"shuffle", "scale", "others", "on"}),
        (five, {"shuffle"}),
        (six, {"way", "rest", "others"}),
        (seven, set()),
        (by_object, {"shuffle", "self", "way"}),
        (by_result, {"scale", "option"}),
        (by_constant, {"shuffle"}),
        (by_class, {"on", "shuffle"}),
    ],
)
def test_passed(forward: Any, passed: set[str]) -> None:
    """Names of arguments of the block, of methods and of functions."""
    net = type("Own", (Net,), {"forward": forward})()
    result = passed_arguments(net, {"flag", "kw"}).by_code
    assert set().union(*result.values()) == passed


def test_behind_a_decorator() -> None:
    """A wrapped forward is read, and called modules that call each other end."""

    def forward(self: Any, x: Tensor, flag: Any = False) -> Any:
        return self.run(x, flag)

    def run(self: Any, x: Tensor, on: Any) -> Any:
        return self.run(x, not on) if on else torch.relu(x)

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    net = type("Own", (Net,), {"forward": wrapped, "run": run})()
    assert passed_arguments(net, {"flag"}).by_code == {run.__code__: frozenset({"on"})}


def test_base_classes() -> None:
    """The method that ``super()`` gives is the one behind the class that names it."""

    class Above(Net):
        def forward(self, x: Tensor, flag: Any = False) -> Any:
            return super().run(x, flag)

        def run(self, h: Tensor, on: Any) -> Tensor:
            return h

    result = passed_arguments(Above(), {"flag"}).by_code
    assert result[Net.run.__code__] == {"on"} and Above.run.__code__ not in result


def test_modules_of_one_class() -> None:
    """An argument that one of two modules gets does not vary in the other; one whose call nothing shows gets all."""

    class Attention(nn.Module):
        def forward(self, x: Tensor, other: Any = None, causal: bool = False) -> Tensor:
            return x if other is None else x + other

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.cross, self.third = Attention(), Attention(), Attention()

        def forward(self, x: Tensor, other: Any = None, causal: bool = False) -> Any:
            third = getattr(self, "thi" + "rd")
            return third(self.cross(self.own(x, causal=causal), other=other))

    net = Decoder()
    passed, code = passed_arguments(net, {"other", "causal"}), Attention.forward.__code__
    assert passed.of_module(code, net.own) == {"causal"}
    assert passed.of_module(code, net.cross) == {"other"}
    assert passed.of_module(code, net.third) == passed.by_code[code] == {"other", "causal"}
