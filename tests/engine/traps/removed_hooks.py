"""Traps: hooks of a constructor that a method removes later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.unrecorded import unreached
from tests.engine.traps.entering import called, noise
from tests.engine.traps.trap import Ablation, Trap

__all__ = ["ABLATIONS", "TRAPS"]


class _Hooked(nn.Module):
    """Turns features around in a hook until it is removed."""

    def __init__(self, before: bool) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 8), nn.Linear(8, 3)
        if before:
            self.handles = [self.leave.register_forward_pre_hook(lambda module, args: (args[0].flip(1),))]
        else:
            self.handles = [self.enter.register_forward_hook(lambda module, args, out: out.flip(1))]

    def remove_hooks(self) -> None:
        """Remove the hook."""
        for handle in self.handles:
            handle.remove()

    def forward(self, x: Tensor) -> Any:
        """Two layers."""
        return self.leave(torch.relu(self.enter(x)))


def _without_hooks(model: Any) -> Any:
    model.remove_hooks()
    return called(noise(5))(model)


TRAPS = [
    Trap(name, "spectral_norm and its removal; adapters", lambda before=before: _Hooked(before), lambda model: noise(3),
         [called(noise(4)), _without_hooks], kept="hooks that code of the model may remove")
    for name, before in (("a hook that a method removes", False), ("a hook before a layer that is removed", True))
]  # fmt: skip


def _as_recorded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(unreached, "use_values_around_removable_hooks", lambda modules, dataflow, assumptions: None)


ABLATIONS = [Ablation("hooks may be removed", _as_recorded, "a hook that a method removes")]
