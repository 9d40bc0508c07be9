"""Which tensors of a run outlive it, wherever they are kept: counted by the references that Python holds.

What a forward returns may be any object, and what it stores may lie in an attribute, a closure, a global, a weak
table or a callback that was passed in. None of that has to be looked into: whoever keeps a tensor holds a reference to
it, and the recorder knows how many of these are its own.
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
    """Return the tensors that somebody else holds than the tables they are given in.

    Cycles among what the run left behind are collected first, but only where something is held that the caller does not
    expect: what is new lies in the youngest generation as long as Python does not look for cycles by itself.

    Args:
        tensors: by identity; the table holds a reference to each.
        expected: identities of tensors that may be held.
        further: tables that hold some of them once more.

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
    """Return the identities of the tensors with more references than those of the tables and of this loop."""
    [baseline] = _references({0: torch.empty(0)}).values()
    counts = _references(tensors)
    return [key for key, count in counts.items() if count - sum(key in table for table in further) > baseline]


def _references(tensors: Mapping[int, Tensor]) -> dict[int, int]:
    return {key: sys.getrefcount(tensor) - _of_autograd(tensor) for key, tensor in tensors.items()}


def _of_autograd(tensor: Tensor) -> int:
    """Return how many of a tensor's references are a graph's that waits for a backward pass."""
    if tensor.is_inference() or not _COUNTS_GRAPHS:
        return 0
    return int(tensor._use_count() > 1)  # type: ignore[attr-defined]


def _counts_graphs() -> bool:
    """Whether torch counts what its own code holds as one reference of Python's, as of 2.10."""
    with torch.inference_mode(False), torch.enable_grad():
        tensor = torch.zeros(1, requires_grad=True) * 1
        before = sys.getrefcount(tensor)
        square = tensor * tensor
        return sys.getrefcount(tensor) > before and square.requires_grad


_COUNTS_GRAPHS = _counts_graphs()
