"""Calls of constructors as trees of arguments."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import nn

from lightning_compress.stock.calls import Call, fields_of, recorded, source_of_call, with_values


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a block is made of."""

    width: int
    kernel: int = 3


class Plain:
    """The same without being a dataclass: it keeps another number than it gets."""

    def __init__(self, width: int, factor: float = 1.0) -> None:
        self.size = int(width * factor)


class Net(nn.Module):
    """A network whose constructor takes all kinds of arguments."""

    def __init__(
        self,
        blocks: Any,
        settings: Any = (),
        norm: Any = None,
        act: Any = nn.ReLU,
        width: int = 4,
        **others: Any,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in blocks)
        self.sizes = [getattr(setting, "size", getattr(setting, "width", 0)) for setting in settings]
        self.norm, self.act = (norm or nn.LayerNorm)(width), act()
        self.others = others


def built() -> Net:
    """A network as a package's function builds it."""
    settings = [Setting(8), Plain(6, factor=2.0)]
    return Net([[4, 8], (8, 2)], settings, functools.partial(nn.LayerNorm, eps=1e-6), bias=True)


def test_a_call_is_recorded_with_the_objects_in_it() -> None:
    """As they were constructed, whatever they make of their arguments; the classes stay as they are."""
    before = Net.__init__, Plain.__init__
    call = recorded(built, Net)
    assert call is not None and (Net.__init__, Plain.__init__) == before and "__init__" in vars(Plain)
    assert fields_of(call) == {
        ("blocks", 0, 0): 4,
        ("blocks", 0, 1): 8,
        ("blocks", 1, 0): 8,
        ("blocks", 1, 1): 2,
        ("settings", 0, "width"): 8,
        ("settings", 0, "kernel"): 3,
        ("settings", 1, "width"): 6,
        ("settings", 1, "factor"): 2.0,
        ("norm", "eps"): 1e-6,
        ("width",): 4,
    }


def test_a_changed_call_is_made_and_written() -> None:
    """In lists of lists, in objects and in partial functions; what has its default is not written."""
    call = recorded(built, Net)
    assert call is not None
    values = {("blocks", 0, 1): 5, ("settings", 1, "width"): 3, ("norm", "eps"): 0.1, ("width",): 2}
    changed = with_values(call, values)
    net = changed.result()
    assert net.layers[0].out_features == 5 and net.sizes == [8, 6] and net.norm.eps == 0.1
    written = source_of_call(changed)
    assert written is not None
    imports, text = written
    assert "act=" not in text and "kernel" not in text and "bias=True" in text
    names: dict[str, Any] = {}
    exec("\n".join(imports), names)
    again = eval(text, names)
    assert again.sizes == net.sizes and again.norm.eps == 0.1 and again.layers[0].out_features == 5
    assert call.result().layers[0].out_features == 8


def test_what_has_no_name_is_not_written() -> None:
    """A function inside of another, and a tensor."""
    assert source_of_call(Call(nn.Linear, in_features=lambda: 1)) is None
    assert source_of_call(Call(nn.Linear, in_features=torch.zeros(1))) is None


def test_arguments_without_names_are_not_recorded() -> None:
    """As those of ``nn.Sequential``."""
    assert recorded(lambda: nn.Sequential(nn.ReLU()), nn.Sequential) is None
