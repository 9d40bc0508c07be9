"""Traps: hooks of a backward pass that keep what they see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.verification import training
from engine.verification.leftovers import Leftovers
from tests.engine.traps.trap import Ablation, Trap, once

__all__ = ["ABLATIONS", "TRAPS"]

_SEEN: list[Any] = []


def _step(model: nn.Module) -> Any:
    """Train one step, and return what hooks kept of it."""
    _SEEN.clear()
    model.train()
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    out = model(x)
    out.square().sum().backward()
    model.zero_grad()
    seen = [t.clone() if isinstance(t, Tensor) else t for t in _SEEN]
    _SEEN.clear()
    return [out.detach(), seen]


class _Net(nn.Module):
    """Keeps something of the backward pass in a list that lies outside of it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.stem, self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        if how == "module":
            self.body.register_full_backward_hook(_of_module)
        if how == "parameter":
            self.body.weight.register_hook(_append)
        if how == "accumulated":
            self.body.weight.register_post_accumulate_grad_hook(_accumulated)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x).relu())
        if x.requires_grad and self.how in _TENSOR_HOOKS:
            x.register_hook(_TENSOR_HOOKS[self.how])
        if self.how == "saved":
            with torch.autograd.graph.saved_tensors_hooks(_pack, lambda saved: saved):
                x = x.tanh()
        out = self.head(x.relu())
        if self.how == "output" and out.requires_grad:
            out.register_hook(_append)
        return out  # type: ignore[no-any-return]


def _append(gradient: Tensor) -> None:
    _SEEN.append(gradient.clone())


def _of_module(module: nn.Module, inputs: Any, outputs: Any) -> None:
    _SEEN.append(outputs[0].detach() * 1)


def _accumulated(parameter: Tensor) -> None:
    assert parameter.grad is not None
    _SEEN.append(parameter.grad.norm())
    parameter.grad = None


def _pack(saved: Tensor) -> Tensor:
    _SEEN.append(saved.detach() + 0)
    return saved


_TENSOR_HOOKS: dict[str, Callable[[Tensor], None]] = {
    "tensor": _append,
    "list": lambda gradient: _SEEN.append(gradient.tolist()),
    "array": lambda gradient: _SEEN.append(gradient.numpy().astype("float64").mean().item()),
    "number": lambda gradient: _SEEN.append(gradient.mean().item()),
}

_SOURCES = {
    "module": "Grad-CAM: register_full_backward_hook keeps the gradient of a layer's output",
    "parameter": "captum and pruning by Taylor expansion: weight.register_hook(grads.append)",
    "accumulated": "pytorch tutorials, optimizer step in backward: register_post_accumulate_grad_hook",
    "saved": "pytorch docs, saved_tensors_hooks: a pack hook that keeps what is saved",
    "tensor": "pytorch forum: h.register_hook(lambda g: self.grads.append(g))",
    "list": "wandb.watch: histograms of gradients by tolist",
    "array": "tensorboard: add_histogram of gradients by numpy",
    "number": "logging of a gradient's mean by item",
    "output": "adversarial training: the gradient at the output, whose size stays",
}

TRAPS = [
    Trap(
        name=f"a hook that keeps what it sees, {how}",
        source=source,
        make=lambda how=how: _Net(how),
        example=lambda model: torch.zeros(2, 6, dtype=torch.float64),
        uses=[once(3, 6)],
        trains=[_step],
        shrinks=True,
    )
    for how, source in _SOURCES.items()
]


def _forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing(Leftovers):
        def tensors(self, expected: Any) -> list[Tensor]:
            return []

    monkeypatch.setattr(training, "Leftovers", Nothing)


ABLATIONS = [
    Ablation("what hooks of a backward keep is compared", _forgotten, "a hook that keeps what it sees, tensor", True),
    Ablation("what hooks of a backward read is compared", _forgotten, "a hook that keeps what it sees, list", True),
]
