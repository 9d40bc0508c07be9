"""Answers to an entry's calls of autograd while it is recorded, when nothing is differentiated."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from engine.program.trees import tensors_in
from engine.source.sites import is_handler

__all__ = ["GRADIENT", "GradientRequests"]

GRADIENT = "autograd::grad"
"""The op that stands for `torch.autograd.grad`, and for reading ``parameter.grad``; it has no rule."""

_CLIPPING = "clip_grad.py"  # of torch: norms of gradients do not notice entries that are zero


class GradientRequests(TorchFunctionMode):
    """Answers ``backward``, `torch.autograd.grad` and ``.grad`` in a run that records.

    Args:
        leave: receives tensors that are differentiated: a loss is an output.
        derive: receives the outputs to differentiate and the inputs; returns the gradients.
    """

    def __init__(
        self,
        leave: Callable[[Sequence[Tensor]], None],
        derive: Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor]],
    ) -> None:
        super().__init__()
        self._leave, self._derive = leave, derive
        self._losses: list[Tensor] = []

    def reset(self) -> GradientRequests:
        """Reset the state for another run, and return the object itself."""
        self._losses = []
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer calls that concern gradients, and run all others."""
        kwargs = kwargs or {}
        if func in (Tensor.backward, torch.autograd.backward):
            losses = list(tensors_in((args, kwargs)))
            self._losses += losses
            return self._leave(losses)
        if func is torch.autograd.grad:
            return self._gradients(*args, **kwargs)
        if getattr(func, "__name__", "") != "__get__":
            return func(*args, **kwargs)
        if func.__self__ is Tensor.grad:
            return self._gradient(args[0])
        return func(*args, **kwargs)

    def _gradients(self, outputs: Any, inputs: Any, grad_outputs: Any = None, **options: Any) -> tuple[Tensor, ...]:
        """Return tensors that depend in an unknown way on everything that is differentiated."""
        sources = list(tensors_in((outputs, grad_outputs)))
        return tuple(self._derive(sources, list(tensors_in(inputs))))

    def _gradient(self, tensor: Tensor) -> Tensor | None:
        """Return the gradient of a leaf: none before the first ``backward``, and none to torch's own clipping."""
        if not self._losses or _asked_by(_CLIPPING):
            return None
        return self._derive(self._losses, [tensor])[0]


def _asked_by(file: str) -> bool:
    """Whether the innermost call outside of the modes is in a file."""
    frame = sys._getframe(2)
    while frame.f_back is not None and is_handler(frame.f_code):
        frame = frame.f_back
    return frame.f_code.co_filename.endswith(file)
