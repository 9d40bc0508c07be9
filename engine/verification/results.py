"""Results of a call: the tensors in its return value, and in attributes that it sets on modules."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from engine.program.stored import distinct_modules, stored_tensors
from engine.program.trees import items_of, results_in

__all__ = ["attributes", "results_of"]

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def attributes(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the current attributes of all modules, by the modules' names."""
    return {name: dict(vars(module)) for name, module in distinct_modules(model).items()}


def results_of(
    out: Any,
    model: nn.Module,
    before: Mapping[str, Mapping[str, Any]],
    weights: Container[tuple[str, str]] = (),
) -> list[Tensor]:
    """Return the tensors and numbers in a return value, and tensors and floats in attributes that were set since.

    Args:
        out: the return value of the call.
        model: the model after the call.
        before: the result of `attributes` before the call.
        weights: module and name of attributes with tensors computed from parameters alone, which are no results.

    Example:
        >>> net = nn.Identity()
        >>> before = attributes(net)
        >>> net.features = [2.0]
        >>> [float(t) for t in results_of({"score": 1.0}, net, before)]
        [1.0, 2.0]
    """
    seen: set[int] = set()
    tensors = [*results_in(out, seen), *_whole_numbers(out)]
    stored = set(map(id, stored_tensors(model).values()))
    for name, module in distinct_modules(model).items():
        for key, value in vars(module).items():
            if (
                key not in _OF_EVERY_MODULE
                and (name, key) not in weights
                and before.get(name, {}).get(key) is not value
            ):
                tensors += [t for t in results_in(value, seen) if id(t) not in stored]
    return tensors


def _whole_numbers(tree: Any) -> Iterator[Tensor]:
    """Yield the integers in nested containers, one of which may count channels."""
    if isinstance(tree, int) and not isinstance(tree, bool):
        yield torch.tensor(tree)
    elif not isinstance(tree, Tensor):
        for item in items_of(tree):
            yield from _whole_numbers(item)
