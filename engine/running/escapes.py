"""Tensors of a run that outlive it, wherever they are kept, detected by counting Python's references.

A forward may return any object, and may store tensors in an attribute, a closure, a global, a weak table or a callback
that was passed in. None of these has to be searched: whoever keeps a tensor holds a reference to it, and the recorder
knows how many references are its own.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Collection, Container, Mapping

import torch
from torch import Tensor

__all__ = ["outliving_tensors"]


def outliving_tensors(
    tensors: Mapping[int, Tensor], expected: Container[int], *further: Container[int]
) -> list[Tensor]:
    """Return the tensors that are referenced from outside the given tables.

    Reference cycles that the run left behind are collected first, but only if a tensor is held that the caller does not
    expect. New objects are in the youngest generation as long as automatic collection is off.

    Args:
        tensors: by identity; the table holds a reference to each.
        expected: identities of tensors that may be held.
        further: tables that hold another reference to some of them.

    Example:
        >>> table = {id(t): t for t in (torch.zeros(1), torch.ones(1))}
        >>> kept = [list(table.values())[1]]
        >>> outliving_tensors(table, set())
        [tensor([1.])]
    """
    held = _held(tensors, further)
    if any(key not in expected for key in held):
        gc.collect(0)
        held = _held(tensors, further)
    return [tensors[key] for key in held]


def _held(tensors: Mapping[int, Tensor], further: Collection[Container[int]]) -> list[int]:
    """Return the identities of the tensors with more references than those from the tables and this loop."""
    [baseline] = _references({0: torch.empty(0)}).values()
    counts = _references(tensors)
    return [key for key, count in counts.items() if count - sum(key in table for table in further) > baseline]


def _references(tensors: Mapping[int, Tensor]) -> dict[int, int]:
    return {key: sys.getrefcount(tensor) - _of_autograd(tensor) for key, tensor in tensors.items()}


def _of_autograd(tensor: Tensor) -> int:
    """Return how many of a tensor's references belong to an autograd graph that waits for its backward pass."""
    if tensor.is_inference() or not _COUNTS_GRAPHS:
        return 0
    return int(tensor._use_count() > 1)  # type: ignore[attr-defined]


def _counts_graphs() -> bool:
    """Whether references from torch's own code count as one Python reference, as they do from 2.10 on."""
    with torch.inference_mode(False), torch.enable_grad():
        tensor = torch.zeros(1, requires_grad=True) * 1
        before = sys.getrefcount(tensor)
        square = tensor * tensor
        return sys.getrefcount(tensor) > before and square.requires_grad


_COUNTS_GRAPHS = _counts_graphs()
