"""Traps: options that go through base classes, objects and functions, that matter together, or take a tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from engine.alternatives import attributes
from engine.alternatives.arguments import Arguments
from engine.flow import argument_flow
from engine.unrecorded import argument_fallbacks
from tests.engine.traps.trap import Ablation, Trap, Use

__all__ = ["ABLATIONS", "TRAPS"]


@dataclass
class Options:
    """What a caller asks for."""

    centred: Any = None
    depth: int = 1

    def finish(self, h: Tensor) -> Tensor:
        """Return features, or their sums."""
        if self.centred:
            h = h.cumsum(-1)
        return h


class Pair(NamedTuple):
    """Two options."""

    first: Any
    second: Any


def resolved(option: Any, other: Any = None) -> Any:
    """Return an option, or another one."""
    return other if option is None else option


def named(option: Any) -> str:
    """Return the name of an option."""
    if option is None:
        return "plain"
    return "sums"


class Block(nn.Module):
    """A layer whose caller may ask for sums."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)

    def forward(self, h: Tensor, sums: Any = None) -> Tensor:
        """Return features."""
        h = self.body(h)
        if sums:
            h = h.cumsum(-1)
        return h.tanh()


class Asked(Block):
    """The same with an object of options."""

    def forward(self, h: Tensor, options: Any = None) -> Tensor:
        """Return features."""
        h = self.body(h)
        if options.centred:
            h = h.cumsum(-1)
        return h.tanh()


class Paired(Block):
    """The same with a pair of options."""

    def forward(self, h: Tensor, pair: Any = None) -> Tensor:
        """Return features."""
        h = self.body(h)
        if pair[0]:
            h = h.cumsum(-1)
        return h.tanh()


class Called(Block):
    """The same by the name of a way."""

    def forward(self, h: Tensor, way: str = "plain") -> Tensor:
        """Return features."""
        h = self.body(h)
        if way != "plain":
            h = h.cumsum(-1)
        return h.tanh()


class Net(nn.Module):
    """A stem, blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.block, self.asked, self.paired, self.named = Block(), Asked(), Paired(), Called()
        self.first = self.second = False

    def switch(self) -> None:
        """Switch both on."""
        self.first = self.second = True

    def resolve(self, option: Any) -> Any:
        """Return an option, or the default."""
        return option if option is not None else False


class Base(Net):
    """A network whose subclasses pass options on."""

    def forward(self, x: Tensor, sums: Any = None) -> Tensor:
        """Return logits."""
        return self.head(self.block(self.stem(x), sums))  # type: ignore[no-any-return]

    def run(self, x: Tensor, sums: Any = None) -> Tensor:
        """Return logits."""
        h = self.stem(x)
        if sums:
            h = h.cumsum(-1)
        return self.head(self.block(h))  # type: ignore[no-any-return]


class BySuper(Base):
    """Passes the option on by position."""

    def forward(self, x: Tensor, flag: Any = None) -> Tensor:
        """Return logits."""
        return super().forward(x, flag)


class BySuperMethod(Base):
    """Passes the option on to a method of the base."""

    def forward(self, x: Tensor, flag: Any = None) -> Tensor:
        """Return logits."""
        return super().run(x, sums=flag)

    def run(self, x: Tensor, sums: Any = None) -> Tensor:
        """Not what is called."""
        raise NotImplementedError


class ByClass(Base):
    """Passes the option on to the class."""

    def forward(self, x: Tensor, flag: Any = None) -> Tensor:
        """Return logits."""
        return Base.forward(self, x, flag)


def _dataclass(self: Any, x: Tensor, flag: Any = None) -> Any:
    options = Options(centred=flag)
    return self.head(self.asked(self.stem(x), options))


def _namespace(self: Any, x: Tensor, flag: Any = None) -> Any:
    return self.head(self.asked(self.stem(x), SimpleNamespace(centred=flag)))


def _set_later(self: Any, x: Tensor, flag: Any = None) -> Any:
    options = Options()
    options.centred = flag
    return self.head(self.asked(self.stem(x), options))


def _set_by_name(self: Any, x: Tensor, flag: Any = None) -> Any:
    options = Options()
    setattr(options, "centred", flag)  # noqa: B010
    return self.head(self.asked(self.stem(x), options))


def _method_of_object(self: Any, x: Tensor, flag: Any = None) -> Any:
    options = Options(flag)
    return self.head(self.block(options.finish(self.stem(x))))


def _tuple(self: Any, x: Tensor, flag: Any = None) -> Any:
    pair = Pair(flag, 3)
    return self.head(self.paired(self.stem(x), pair))


def _mapping(self: Any, x: Tensor, flag: Any = None) -> Any:
    options: dict[str, Any] = {}
    options["sums"] = flag
    return self.head(self.block(self.stem(x), **options))


def _updated(self: Any, x: Tensor, flag: Any = None) -> Any:
    options: dict[str, Any] = {}
    options.update(sums=flag)
    return self.head(self.block(self.stem(x), **options))


def _by_method(self: Any, x: Tensor, flag: Any = None) -> Any:
    flag = self.resolve(flag)
    return self.head(self.block(self.stem(x), flag))


def _by_function(self: Any, x: Tensor, flag: Any = None) -> Any:
    return self.head(self.block(self.stem(x), resolved(flag, False)))


def _by_constants(self: Any, x: Tensor, flag: Any = None) -> Any:
    return self.head(self.named(self.stem(x), named(flag)))


def _by_branches(self: Any, x: Tensor, flag: Any = None) -> Any:
    way = "plain"
    if flag is not None:
        way = "sums"
    return self.head(self.named(self.stem(x), way))


def _both(self: Any, x: Tensor, first: bool = False, second: bool = False) -> Any:
    h = self.stem(x).relu()
    return self.head(self.block(h + 1.0 * all([first, second])))


def _neither(self: Any, x: Tensor, first: bool = True, second: bool = True) -> Any:
    h = self.stem(x).relu()
    return self.head(self.block(h + 1.0 * (not (first or second))))


def _attributes(self: Any, x: Tensor) -> Any:
    h = self.stem(x).relu()
    return self.head(self.block(h + 1.0 * all([self.first, self.second])))


def _function_of_both(self: Any, x: Tensor, first: bool = False, second: bool = False) -> Any:
    function = (torch.relu, torch.sigmoid)[all([first, second])]
    return self.head(self.block(function(self.stem(x))))


def _function_of_attributes(self: Any, x: Tensor) -> Any:
    function = (torch.relu, torch.sigmoid)[all([self.first, self.second])]
    return self.head(self.block(function(self.stem(x))))


def _added(self: Any, x: Tensor, bias: Any = None) -> Any:
    return self.head(self.block(self.stem(x).relu() + (0 if bias is None else bias)))


def _number(self: Any, x: Tensor, bias: Any = None) -> Any:
    shift = 0.0 if bias is None else bias
    h = self.stem(x).relu()
    return self.head(self.block(h + shift))


def _number_in_place(self: Any, x: Tensor, scale: Any = None) -> Any:
    if scale is None:
        scale = 1.0
    return self.head(self.block((self.stem(x).relu() - 1.0) * scale + 1.0))


def _or_number(self: Any, x: Tensor, bias: Any = None) -> Any:
    bias = bias or 0
    return self.head(self.block(torch.add(self.stem(x).relu(), bias)))


def _masked(self: Any, x: Tensor, mask: Any = None) -> Any:
    h = self.stem(x).relu()
    h = h if mask is None else h.masked_fill(mask, 2.0)
    return self.head(self.block(h))


def _prior(self: Any, x: Tensor, prior: Any = None) -> Any:
    h = self.stem(x).relu()
    h = h + prior if prior is not None else h
    return self.head(self.block(h))


def _x() -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def _noise() -> Tensor:
    return torch.randn(8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def _call(**kwargs: Any) -> Use:
    def use(model: nn.Module) -> Any:
        with torch.no_grad():
            return model.eval()(_x(), **kwargs)

    return use


def _switched(model: Any) -> Any:
    model.switch()
    return _call()(model)


def _of(name: str, source: str, make: Callable[[], nn.Module], **kwargs: Any) -> Trap:
    example = torch.zeros(2, 6, dtype=torch.float64)
    return Trap(
        name=name, source=source, make=make, example=lambda _: example, uses=[_call(), _call(**kwargs)], shrinks=True,
    )  # fmt: skip


def _trap(name: str, source: str, forward: Callable[..., Any], **kwargs: Any) -> Trap:
    return _of(name, source, lambda: type("Net", (Net,), {"forward": forward, "__module__": __name__})(), **kwargs)


TRAPS = [
    _of("an option to the base class", "super().forward(x, flag)", BySuper, flag=True),
    _of("an option to a method of the base class", "super().run(x, sums=flag)", BySuperMethod, flag=True),
    _of("an option to a class by its name", "Base.forward(self, x, flag)", ByClass, flag=True),
    _trap("an option in a dataclass", "options = Options(centred=flag)", _dataclass, flag=True),
    _trap("an option in a namespace", "SimpleNamespace(centred=flag)", _namespace, flag=True),
    _trap("an option set on an object", "options.centred = flag", _set_later, flag=True),
    _trap("an option set by its name", "setattr(options, 'centred', flag)", _set_by_name, flag=True),
    _trap("a method of an object of options", "options.finish(h)", _method_of_object, flag=True),
    _trap("an option in a named tuple", "Pair(flag, 3)", _tuple, flag=True),
    _trap("an option put into a mapping", "options['sums'] = flag; block(h, **options)", _mapping, flag=True),
    _trap("an option updated in a mapping", "options.update(sums=flag)", _updated, flag=True),
    _trap("an option that a method resolves", "flag = self.resolve(flag)", _by_method, flag=True),
    _trap("an option that a function resolves", "block(h, default(flag, False))", _by_function, flag=True),
    _trap("a name that a function chooses", "block(h, named(flag))", _by_constants, flag=True),
    _trap("a name that a branch chooses", "if flag is not None: way = 'sums'", _by_branches, flag=True),
    _trap("two flags together", "all([a, b])", _both, first=True, second=True),
    _trap("neither of two flags", "if a or b:", _neither, first=False, second=False),
    _trap("a function by two flags", "functions[a and b](x)", _function_of_both, first=True, second=True),
    *(
        Trap(
            name=name,
            source=source,
            make=type("Net", (Net,), {"forward": forward, "__module__": __name__}),
            example=lambda _: torch.zeros(2, 6, dtype=torch.float64),
            uses=[_call(), _switched],
            shrinks=True,
        )
        for name, source, forward in [
            ("two flags in attributes together", "all([self.a, self.b])", _attributes),
            ("a function by two flags in attributes", "functions[self.a and self.b](x)", _function_of_attributes),
        ]
    ),
    _trap("a tensor in place of nothing", "h + (0 if bias is None else bias)", _added, bias=_noise()),
    _trap("a tensor in place of a number", "shift = 0.0 if bias is None else bias", _number, bias=_noise()),
    _trap("a tensor in place of one", "if scale is None: scale = 1.0", _number_in_place, scale=_noise()),
    _trap("a number or nothing", "bias = bias or 0", _or_number, bias=3.0),
    _trap("a mask or none", "h if mask is None else h.masked_fill(mask, 2.0)", _masked, mask=_noise() > 0),
    _trap("a prior or none", "h + prior if prior is not None else h", _prior, prior=_noise()),
]


def _one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arguments, "_with_all_flags", lambda self: iter(()))


def _attributes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attributes, "_all_flags", lambda flags: [])


def _no_base_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(argument_flow, "inherited", lambda owner, code, name: iter(()))


def _nothing_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(argument_flow.Reader, "returns_argument", lambda self, call: False)


def _no_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(argument_flow, "_constants_chosen", lambda tree, owner: [])


def _no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(argument_fallbacks, "ends_of_numeric_fallbacks", lambda *args: {})


ABLATIONS = [
    Ablation("flags are recorded together", _one_at_a_time, "a function by two flags"),
    Ablation("flags in attributes are recorded together", _attributes_alone, "a function by two flags in attributes"),
    Ablation("options of base classes", _no_base_classes, "an option to the base class"),
    Ablation("what functions return, and objects hold, of options", _nothing_returned, "an option in a named tuple"),
    Ablation("constants that options choose", _no_constants, "a name that a branch chooses"),
    Ablation("numbers in place of arguments", _no_numbers, "a tensor in place of a number"),
]
