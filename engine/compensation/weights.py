"""What a program reads, masked or not, and what the processes of a run do together where each holds a part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from engine.program.dtensors import is_spread, spread, stand_in, whole
from engine.program.graph import Node
from engine.recording.evaluation import evaluating

__all__ = ["Alone", "Processes", "Weights"]

T = TypeVar("T")


class Processes(Protocol):
    """The processes of a run; each has to ask for the same."""

    def running(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Let a model run in eval mode, leaving no trace on it."""

    def summed(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes."""

    def together(self, function: Callable[[], T]) -> T:
        """Return what a function returns; where it fails in one process, it fails in all."""


class Alone:
    """The one process that holds everything.

    Example:
        >>> Alone().together(lambda: 3)
        3
    """

    def running(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Let a model run in eval mode, leaving no trace on it."""
        return evaluating(model)

    def summed(self, tensor: Tensor) -> Tensor:
        """Return the tensor."""
        return tensor

    def together(self, function: Callable[[], T]) -> T:
        """Return what a function returns."""
        return function()


class Weights(Mapping[str, Tensor]):
    """Parameters and buffers by canonical name, each whole while it is read.

    Args:
        stored: the tensors of the model, which may be spread over processes.
        masks: 0/1 masks by name; what is masked reads as zero.
        changed: values in the place of stored ones, as `put` keeps them; may be shared.

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
        """Return a whole tensor; of one that is spread, every process has to ask for it."""
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
        """Hold what a node reads for a while, so that it is gathered once, however many batches go through the node."""
        before = self._held
        self._held = before | {v.name: self[v.name] for v in node.inputs if v.name is not None}
        try:
            yield
        finally:
            self._held = before

    def put(self, name: str, value: Tensor) -> None:
        """Let a whole tensor take the place of a stored one, spread as that is."""
        self._changed[name] = spread(value, self._stored[name])

    def outline(self) -> dict[str, Tensor]:
        """Return the tensors, but matrices that are spread without their data: what masks say of them is known."""
        return {n: stand_in(t) if is_spread(t) and t.ndim > 1 else self[n] for n, t in self._stored.items()}
