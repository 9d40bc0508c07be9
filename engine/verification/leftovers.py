"""Values that hooks keep from a training step in any objects: gradients, and numbers that they read.

A hook on a tensor, a module or a parameter, a custom autograd function or a pair of saved-tensor hooks may store what
it sees anywhere. None of these places has to be searched: a tensor that an op of the step created, and that is still
alive once the step's graph is freed, was kept.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from engine.program.trees import tensors_in

__all__ = ["Leftovers"]

_READS = frozenset(["__array__", "__bool__", "__float__", "__int__", "__index__", "item", "numpy", "tolist"])


class _Outputs(TorchDispatchMode):
    """Notes the tensors that ops create, without keeping them alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.references: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.references += [weakref.ref(tensor) for tensor in tensors_in(out)]
        return out


class _Read(TorchFunctionMode):
    """Notes the tensors whose numbers Python reads."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _READS and isinstance(args[0], Tensor):
            self.values.append(args[0].detach().clone())
        return func(*args, **(kwargs or {}))


class Leftovers:
    """Watches a training step; `reading` watches its backward, which `torch.autograd.backward` would hide.

    Example:
        >>> kept = []
        >>> with Leftovers() as leftovers:
        ...     x = torch.ones(2) * 3
        ...     kept.append(x - 1)
        >>> del x
        >>> leftovers.tensors([])
        [tensor([2., 2.])]
    """

    def __init__(self) -> None:
        self._outputs, self._read, self._scope = _Outputs(), _Read(), ExitStack()

    def __enter__(self) -> Leftovers:
        self._scope.enter_context(self._outputs)
        return self

    def __exit__(self, *error: object) -> None:
        self._scope.close()

    def reading(self) -> TorchFunctionMode:
        """Return a mode that notes the numbers that hooks read while it is active."""
        return self._read

    def tensors(self, expected: Iterable[Tensor | None]) -> list[Tensor]:
        """Return copies of the tensors that were read or are still alive, in order of creation.

        Args:
            expected: tensors that are alive for other reasons.
        """
        own = {id(tensor) for tensor in (*expected, *self._read.values)}
        if any(id(t) not in own for t in self._alive()):
            gc.collect(0)
        alive = {id(t): t for t in self._alive() if id(t) not in own}
        return [*self._read.values, *(t.detach().clone() for t in alive.values())]

    def _alive(self) -> list[Tensor]:
        return [tensor for reference in self._outputs.references if (tensor := reference()) is not None]
