"""Networks of installed packages by the arguments of their class's constructor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_compress.stock.constructors import constructor_of
from lightning_compress.stock.describe import Search, look_at

torchvision = pytest.importorskip("torchvision")


def solved(wide: nn.Module, narrow: nn.Module) -> Any:
    """The arguments that are found for a network from what a wider one is built of."""
    form = constructor_of(wide)
    assert form is not None
    search = Search(form.build, form.fields(), look_at(narrow))
    values = search.solve()[0]
    return values if not search.score(values)[0] else None


def test_the_nearest_function_is_the_start() -> None:
    """A network with other arguments than the function's comes out with its own."""
    with torch.device("meta"):
        model = torchvision.models.resnet18(num_classes=7)
    form = constructor_of(model)
    assert form is not None and form.call["layers"] == [2, 2, 2, 2]
    assert solved(model, model) == {("num_classes",): 7}


def test_inner_widths_are_an_argument() -> None:
    """One number for all blocks."""
    with torch.device("meta"):
        wide, narrow = (torchvision.models.resnet50(width_per_group=width) for width in (64, 32))
    assert solved(wide, narrow) == {("width_per_group",): 32}


def test_other_classes_have_none() -> None:
    """Of no package, without a function that builds them, or built of modules."""

    class Own(nn.Module):
        """Nobody else has it."""

    assert constructor_of(Own()) is None
    assert constructor_of(nn.Sequential(nn.Linear(1, 1))) is None
    with torch.device("meta"):
        model = torchvision.models.vgg11()
    assert constructor_of(model) is None
