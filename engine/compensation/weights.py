"""Weights of a recorded program, masked or not, and collective operations for sharded weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from engine.program.dtensors import is_spread, spread, stand_in, whole
from engine.program.graph import Node
from engine.running.evaluation import evaluating

__all__ = ["Alone", "Processes", "Weights"]

T = TypeVar("T")


class Processes(Protocol):
    """Collective operations; every process has to call them."""

    def running(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Run a model in eval mode inside the context, and restore its state afterwards."""

    def summed(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes."""

    def together(self, function: Callable[[], T]) -> T:
        """Call a function on all processes; if it fails on one, raise on all."""


class Alone:
    """A single process.

    Example:
        >>> Alone().together(lambda: 3)
        3
    """

    def running(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Run a model in eval mode inside the context, and restore its state afterwards."""
        return evaluating(model)

    def summed(self, tensor: Tensor) -> Tensor:
        """Return the tensor."""
        return tensor

    def together(self, function: Callable[[], T]) -> T:
        """Call the function."""
        return function()


class Weights(Mapping[str, Tensor]):
    """Parameters and buffers by canonical name, gathered when read.

    Args:
        stored: the tensors of the model, which may be sharded.
        masks: 0/1 masks by name; masked entries read as zero.
        changed: values that replace stored ones, see `put`; may be shared.

    Example:
        >>> import torch
        >>> weights = Weights({"weight": torch.ones(2)}, {"weight": torch.tensor([1, 0])})
        >>> weights["weight"]
        tensor([1., 0.])
    """

    def __init__(
        self,
        stored: Mapping[str, Tensor],
        masks: Mapping[str, Tensor] | None = None,
        changed: dict[str, Tensor] | None = None,
    ) -> None:
        self._stored, self._masks = stored, masks or {}
        self._changed = {} if changed is None else changed
        self._held: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        """Return a whole tensor; for a sharded one, every process has to call this."""
        if name in self._held:
            return self._held[name]
        tensor = whole(self._changed[name] if name in self._changed else self._stored[name]).detach()
        return tensor * self._masks[name].to(tensor.device, tensor.dtype) if name in self._masks else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    @contextmanager
    def at(self, node: Node) -> Iterator[None]:
        """Cache the weights of a node inside the context, so that they are gathered once for all batches."""
        before = self._held
        self._held = before | {v.name: self[v.name] for v in node.inputs if v.name is not None}
        try:
            yield
        finally:
            self._held = before

    def put(self, name: str, value: Tensor) -> None:
        """Replace a stored tensor by a whole one, sharded like the stored one."""
        self._changed[name] = spread(value, self._stored[name])

    def outline(self) -> dict[str, Tensor]:
        """Return the tensors; sharded matrices have no data, because their masks suffice."""
        return {n: stand_in(t) if is_spread(t) and t.ndim > 1 else self[n] for n, t in self._stored.items()}
