"""Modules, parameters and buffers of a model by name, in one traversal.

The engine needs them several times per call; `nn.Module`'s own generators, nested as deeply as the model, take ten
times as long.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn

__all__ = [
    "HISTORY",
    "PART",
    "copied",
    "distinct_modules",
    "modules_of",
    "parameters_of",
    "settled",
    "stored_tensor",
    "stored_tensors",
    "unsettled",
]

HISTORY = "_compactions"
"""Attribute in which a compacted module keeps its history."""

PART = "_compacted_part"
"""Attribute in which a part of a compacted module keeps its share of that."""

_SETTLED: dict[int, tuple[list[tuple[str, nn.Module]], dict[str, nn.Module]]] = {}
"""Modules of the models that are currently `settled`, by identity of the model: under every name, and once."""

_Module = TypeVar("_Module", bound=nn.Module)
_NAMERS = ("named_buffers", "named_modules", "named_parameters")


def _names_alone(model: nn.Module) -> bool:
    """Whether the model uses `nn.Module`'s naming; a wrapper may override it."""
    return all(getattr(type(model), name) is getattr(nn.Module, name) for name in _NAMERS)


@contextmanager
def settled(model: nn.Module) -> Iterator[None]:
    """Declare that the body only changes a model's modules where it is `unsettled`, so that they are listed once."""
    before = _SETTLED.get(id(model))
    _SETTLED[id(model)] = modules_of(model), distinct_modules(model)
    try:
        yield
    finally:
        _SETTLED.pop(id(model))
        _SETTLED.update({} if before is None else {id(model): before})


@contextmanager
def unsettled(model: nn.Module) -> Iterator[None]:
    """Declare that the body may change a model's modules, and restores them before they are listed again.

    Example:
        >>> model = nn.Sequential()
        >>> with settled(model):
        ...     with unsettled(model):
        ...         _ = model.append(nn.ReLU())
        ...         print(list(distinct_modules(model)))
        ...     print(list(distinct_modules(model)))
        ['', '0']
        ['']
    """
    before = _SETTLED.pop(id(model), None)
    try:
        yield
    finally:
        _SETTLED.update({} if before is None else {id(model): before})


def modules_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return every module under every name, like ``named_modules(remove_duplicate=False)``.

    Example:
        >>> [name for name, _ in modules_of(nn.Sequential(nn.ReLU(), nn.Sequential(nn.ReLU())))]
        ['', '0', '1', '1.0']
    """
    if id(model) in _SETTLED:
        return list(_SETTLED[id(model)][0])
    if not _names_alone(model):
        return list(model.named_modules(remove_duplicate=False))
    named_modules = [("", model)]
    _walk(model, "", named_modules)
    return named_modules


def distinct_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return every module once, by its first name, like ``named_modules()``."""
    if id(model) in _SETTLED:
        return dict(_SETTLED[id(model)][1])
    named_modules: dict[int, tuple[str, nn.Module]] = {}
    for name, module in modules_of(model):
        named_modules.setdefault(id(module), (name, module))
    return dict(named_modules.values())


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return parameters under all their names, like ``named_parameters(remove_duplicate=False)``.

    Example:
        >>> list(parameters_of(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False))))
        ['0.weight', '0.bias']
    """
    if not _names_alone(model):
        return dict(model.named_parameters(remove_duplicate=False))
    return {
        f"{name}.{key}" if name else key: parameter
        for name, module in modules_of(model)
        for key, parameter in module._parameters.items()
        if parameter is not None
    }


def _walk(module: nn.Module, prefix: str, named_modules: list[tuple[str, nn.Module]]) -> None:
    for name, child in module._modules.items():
        if child is not None:
            path = prefix + name
            named_modules.append((path, child))
            if child._modules:
                _walk(child, f"{path}.", named_modules)


def copied(model: _Module, shared: Iterable[Any] = ()) -> _Module:
    """Copy a model, also one that holds tensors which it computes before each call, such as a pruned weight.

    Args:
        model: the model.
        shared: objects that the copy shares.

    Example:
        >>> net = torch.nn.utils.prune.identity(nn.Linear(1, 1), "weight")
        >>> copied(net).weight_orig is net.weight_orig
        False
    """
    memo: dict[int, Any] = {id(part): part for part in shared}
    for module in model.modules():
        computed = [value for value in vars(module).values() if isinstance(value, Tensor) and value.grad_fn is not None]
        memo.update((id(value), value.detach().clone()) for value in computed)
    return copy.deepcopy(model, memo)


def stored_tensor(model: nn.Module, name: str) -> Tensor:
    """Return a parameter or buffer by its full name.

    Example:
        >>> stored_tensor(nn.Sequential(nn.BatchNorm1d(2)), "0.running_mean")
        tensor([0., 0.])
    """
    owner, _, key = name.rpartition(".")
    tensor: Tensor = getattr(model.get_submodule(owner), key)
    return tensor


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters, then buffers, under all their names.

    Example:
        >>> list(stored_tensors(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False))))
        ['0.weight', '0.bias', '1.running_mean', '1.running_var', '1.num_batches_tracked']
    """
    if not _names_alone(model):
        parameters = dict(model.named_parameters(remove_duplicate=False))
        return {**parameters, **dict(model.named_buffers(remove_duplicate=False))}
    modules = modules_of(model)
    tables: list[tuple[str, dict[str, Any]]] = [(name, m._parameters) for name, m in modules]
    tables += [(name, m._buffers) for name, m in modules]
    return {
        f"{name}.{key}" if name else key: tensor
        for name, entries in tables
        for key, tensor in entries.items()
        if tensor is not None
    }
