"""Stand-ins for weights: tensors that are computed when an op reads them, and freed afterwards.

A float64 copy of all weights takes twice the memory of the weights themselves; a copy of the one that is being read is
small, and making it costs a few percent of the op that reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine.program.signature import signature
from engine.program.trees import map_tensors

__all__ = ["RecomputedTensor"]

Part = Callable[[Tensor, Tensor], Tensor]


class RecomputedTensor(Tensor):
    """A tensor that is computed anew whenever an op reads it.

    It is computed once, and kept until `forget` is called, if many calls read it, or if a call writes to it or returns
    a view of it, through which a later call may write.

    Args:
        like: a tensor of the same shape, strides and device.
        dtype: dtype of the computed tensor.
        make: computes the tensor.
        kept: whether to keep the tensor once it is computed.
        part: computes only the entries at some indices of the first two dimensions; None if nothing should be left out.

    Example:
        >>> weight = RecomputedTensor(torch.ones(2, 2), torch.float64, lambda: torch.eye(2, dtype=torch.float64))
        >>> weight.dtype, (weight @ torch.ones(2, dtype=torch.float64)).tolist()
        (torch.float64, [1.0, 1.0])
    """

    _make: Callable[[], Tensor]
    _part: Part | None
    _summary: Tensor | None
    _kept: bool
    _materialized: Tensor | None

    @staticmethod
    def __new__(
        cls,
        like: Tensor,
        dtype: torch.dtype,
        make: Callable[[], Tensor],
        kept: bool = False,
        part: Part | None = None,
    ) -> RecomputedTensor:
        """Return a tensor without memory of its own."""
        with torch.inference_mode():  # views of it are made there
            self: RecomputedTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls, like.shape, strides=like.stride(), dtype=dtype, device=like.device
            )
        self._make, self._kept, self._materialized = make, kept, None
        self._part, self._summary = part, None
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an op on the tensors that its arguments stand for."""
        keep = signature(func).shares

        def read(tensor: Tensor) -> Tensor:
            return tensor._read(keep) if isinstance(tensor, RecomputedTensor) else tensor

        return func(*map_tensors(args, read), **map_tensors(kwargs or {}, read))

    def _read(self, keep: bool) -> Tensor:
        tensor = self._make() if self._materialized is None else self._materialized
        if keep or self._kept:
            self._materialized = tensor
        return tensor

    def materialized(self) -> Tensor:
        """Return the tensor that this one stands for."""
        return self._read(False)

    def summary(self, summarize: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the result of a function of the tensor, which is cached as long as nothing may write to the tensor."""
        if self._materialized is not None:
            return summarize(self._materialized)
        if self._summary is None:
            self._summary = summarize(self._read(False))
        return self._summary

    @property
    def has_parts(self) -> bool:
        """Whether parts of it may be computed alone, so that it is worth looking for zeros."""
        return self._part is not None

    def part(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the entries at some indices of the first two dimensions."""
        if self._materialized is None and self._part is not None and not self._kept:
            return self._part(first, second)
        return self._read(False).index_select(0, first).index_select(1, second)

    def data_ptr(self) -> int:
        """Refuse: there is no memory that foreign code could read.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("This weight is computed when an op reads it; it has no memory of its own.")

    def forget(self) -> None:
        """Free the tensor if it was kept."""
        self._materialized = None
