"""Limits on stored plans, checked before any of it is expanded, because files are untrusted.

A few bytes of a plan can expand to much more: an index set is stored as bits and used as integers, a tensor may repeat
one entry, and one record may be referenced ten thousand times. All parts are therefore counted as often as they are
referenced, and limited to what a compaction of a real network needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.errors import PlanError

__all__ = ["check_plans"]

_PLANS = 1000
_PARTS = 500_000
_MOST = {"notes": 10_000, "pins": 10_000}
_LARGEST = 2**62
_FREE = 16 * 2**20  # bytes allowed for index sets in any file
_TIMES = 1.5  # additional bytes, as a multiple of the file size
_INDICES = {"index": (torch.int32, torch.int64), "table": (torch.int64,), "bits": (torch.uint8,)}
_VALUES = {"fill": torch.float64, "delta": torch.float64}
_TABLES = ("masks", "inputs", "outputs", "weights")  # tensors under names chosen by the user
_ONES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(1, dtype=np.uint8)


def check_plans(plans: Iterable[Any], size: int) -> None:
    """Reject plans that would take more memory or time than the size of their file justifies.

    Args:
        plans: state dicts from a file.
        size: size of the file in bytes.

    Raises:
        PlanError: naming what there is too much of.
    """
    plans = list(plans)
    if len(plans) > _PLANS:
        raise PlanError(f"There are {len(plans)} plans; the limit is {_PLANS}.")
    _Counter(_FREE + int(_TIMES * size)).add("", plans)


class _Counter:
    """Counter of the parts of plans, as often as they are referenced, and of index sets, once each."""

    def __init__(self, memory: int) -> None:
        self._parts, self._memory, self._counts = _PARTS, memory, dict.fromkeys(_MOST, 0)
        self._seen: set[int] = set()

    def add(self, key: str, value: Any, table: bool = False) -> None:
        """Count a part named ``key``; ``table`` is whether it belongs to a table of tensors."""
        self._parts -= 1
        if self._parts < 0:
            raise PlanError(f"The plans have more than {_PARTS} parts.")
        if isinstance(value, Mapping):
            for name, item in value.items():
                self.add(str(name), item, table or key in _TABLES)
        elif isinstance(value, (list, tuple)):
            self._count(key, len(value))
            for item in value:
                self.add(key, item, table)
        else:
            self._add_leaf(key, value, table)

    def _add_leaf(self, key: str, value: Any, table: bool) -> None:
        if isinstance(value, Tensor):
            if not table and key not in (*_INDICES, *_VALUES, *_TABLES):
                raise PlanError(f"The plan is damaged: {key!r} is a tensor.")
            self._add_tensor(key, value)
        elif isinstance(value, int) and abs(value) > _LARGEST:
            raise PlanError(f"The plan is damaged: it has a number of {value.bit_length()} bits.")

    def _count(self, key: str, number: int) -> None:
        if key in _MOST:
            self._counts[key] += number
            if self._counts[key] > _MOST[key]:
                raise PlanError(f"The plans have {self._counts[key]} {key}; the limit is {_MOST[key]}.")

    def _add_tensor(self, key: str, tensor: Tensor) -> None:
        if id(tensor) in self._seen:
            return
        self._seen.add(id(tensor))
        _check_plain(key, tensor)
        if key == "bits":
            # one byte per bit, and an int64 per set bit
            self._memory -= 8 * tensor.numel() + 8 * int(_ONES[tensor.cpu().numpy()].sum(dtype=np.int64))
        elif key in _INDICES:
            self._memory -= 8 * tensor.numel()
        if self._memory < 0:
            raise PlanError("The index sets of the plan take much more memory than the file has bytes.")


def _check_plain(key: str, tensor: Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise PlanError(f"The plan is damaged: {key!r} is not a plain tensor.")
    expanded = key in _INDICES or key in _VALUES  # a mask may stay a repeated entry
    if expanded and tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise PlanError(f"The plan is damaged: {key!r} claims {tensor.numel()} entries, but holds fewer.")
    if key in _INDICES and (tensor.dtype not in _INDICES[key] or tensor.ndim != 1):
        raise PlanError(f"The plan is damaged: {key!r} is a tensor of {tensor.dtype} and shape {tuple(tensor.shape)}.")
    if key in _VALUES and tensor.dtype != _VALUES[key]:
        raise PlanError(f"The plan is damaged: {key!r} is a tensor of {tensor.dtype}.")
