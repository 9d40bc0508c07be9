"""Functions that TorchScript compiled from Python: a recording runs the Python function, whose branches are visible."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from engine.program.stored import distinct_modules
from engine.source.model_code import module_namespaces, user_classes

__all__ = ["unscripted"]

_DECISIONS = ("prim::If", "prim::Loop")


@contextmanager
def unscripted(model: nn.Module) -> Iterator[None]:
    """Replace scripted functions in a model's code, and in attributes of its modules, by the original Python functions.

    Functions without branches and loops are not replaced.

    Args:
        model: the model.
    """
    spaces = [*module_namespaces(model), *(vars(module) for module in distinct_modules(model).values())]
    names = [(space, name, value) for space in spaces for name, value in space.items() if _decides(value)]
    classes = [(cls, name, value) for cls in user_classes(model) for name, value in vars(cls).items()]
    static = [(cls, name, value) for cls, name, value in classes if _decides(getattr(value, "__func__", value))]
    for space, name, value in names:
        space[name] = value._torchdynamo_inline
    for cls, name, value in static:
        setattr(cls, name, staticmethod(getattr(value, "__func__", value)._torchdynamo_inline))
    try:
        yield
    finally:
        for space, name, value in names:
            space[name] = value
        for cls, name, value in static:
            setattr(cls, name, value)


def _decides(value: Any) -> bool:
    """Whether a function was compiled from Python and has branches or loops."""
    if not isinstance(value, torch.jit.ScriptFunction) or not hasattr(value, "_torchdynamo_inline"):
        return False
    return any(decision in str(value.graph) for decision in _DECISIONS)
