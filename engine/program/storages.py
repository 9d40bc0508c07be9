"""Which tensors share memory."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["storage_of"]

_layout = Tensor.layout.__get__  # type: ignore[attr-defined]  # a fake tensor's own property is written in Python


def storage_of(tensor: Tensor) -> int:
    """Return a key that identifies the memory of a tensor while it exists; a sparse tensor stands for itself.

    Example:
        >>> tensor = torch.zeros(2, 3)
        >>> storage_of(tensor) == storage_of(tensor[0]), storage_of(tensor) == storage_of(tensor.clone())
        (True, False)
    """
    return tensor.untyped_storage()._cdata if _layout(tensor) is torch.strided else -id(tensor)
