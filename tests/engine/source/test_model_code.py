"""Classes, methods, Python modules and files of a model's code."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.source.model_code import code_of, methods_of, module_namespaces, source_files, user_classes


class Net(nn.Module):
    """A network with a method beside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def beside(self, x: Any) -> Any:
        """Call a layer."""
        return self.layer(x)

    @torch.no_grad()
    def forward(self, x: Any) -> Any:
        """Return the input."""
        return x


def test_methods_and_the_attributes_that_they_name() -> None:
    """Those of torch's own classes are left out."""
    assert methods_of(Net) == (("beside", frozenset({"layer"})),)
    assert methods_of(nn.Linear) == ()


def test_code_behind_decorators() -> None:
    """A built-in function has none."""
    code = code_of(Net.forward)
    assert code is not None and code.co_name == "forward" and code_of(len) is None


def test_where_the_code_of_a_model_is() -> None:
    """Its classes without torch's, their Python modules, and the files of all of them."""
    model = nn.Sequential(Net())
    assert user_classes(model) == [Net]
    assert any(space is globals() for space in module_namespaces(model))
    assert {__file__, nn.modules.linear.__file__} <= source_files(model)
