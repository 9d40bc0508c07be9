"""Norms that lost channels become ordinary norms of their original class, over the remaining channels.

With d of D channels left, ``w x / sqrt(S / D + eps)`` equals ``w' x / sqrt(S / d + eps')`` with ``eps' = eps D / d``
and ``w' = w sqrt(D / d)``: that is an RMS norm, and exact. A layer norm or a group norm computes a different function.
Nothing is padded, and no class of this project remains in the module. It does not train as the masked norm would, whose
weight has another scale.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import PlanError
from engine.surgery.classes import original
from engine.surgery.exchange import Change, Decision, Exchange, Undo

__all__ = ["OrdinaryNorm"]


@dataclass(frozen=True, eq=False)
class OrdinaryNorm(Exchange):
    """A norm that becomes an ordinary one over the remaining channels.

    Attributes:
        size: number of channels that the statistics spanned.
        kept: number of channels that remain.
        number: name of the attribute that holds eps.
        squares: sum of the squares of the constants of the removed channels.
        offset: what the class adds to its weight: 1 where it multiplies by ``1 + w``.
        approximate: whether eps and weight stay as they are, so that the norm computes a different function.
    """

    kind = "ordinary"
    title = "Ordinary norms"

    size: int
    kept: int
    number: str
    squares: float = 0.0
    offset: float = 0.0
    approximate: bool = False

    @classmethod
    def planned(cls, decision: Decision) -> Iterator[OrdinaryNorm]:
        """Yield nothing: these are planned once the compacted network has been verified."""
        return iter(())

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> OrdinaryNorm:
        """Load and validate a state written by `state_dict`."""
        size, kept = int(state["size"]), int(state["kept"])
        squares, offset = float(state["squares"]), float(state["offset"])
        if not 0 < kept < size or not 0 <= squares < math.inf or offset not in (0.0, 1.0):
            raise ValueError(f"an ordinary norm over {kept} of {size} channels")
        number, approximate = str(state["number"]), bool(state["approximate"])
        return cls(str(state["module"]), size, kept, number, squares, offset, approximate)

    @property
    def exact(self) -> bool:
        """Whether it computes what the masked norm does."""
        return not self.approximate

    @property
    def exact_in_train(self) -> bool:
        """Whether it trains as the masked norm would: its weight has another scale."""
        return False

    def __str__(self) -> str:
        return f"{self.module} is an ordinary norm over {self.kept} of {self.size} channels"

    def then(self, later: OrdinaryNorm) -> OrdinaryNorm:
        """Return the norm that lost the channels of both."""
        return replace(later, size=self.size, squares=self.squares + later.squares)

    def prepare(self, change: Change) -> None:
        """Give the module its own class, the new eps and the new weight.

        Raises:
            PlanError: if the module has no such number.
        """
        module = change.module(self.module)
        values: dict[str, Any] = {} if self.approximate else {self.number: self._eps(module)}
        if "normalized_shape" in vars(module):
            values["normalized_shape"] = (self.kept,)
        if "num_groups" in vars(module):
            values["num_groups"] = int(vars(module)["num_groups"])
        change.become(module, original(change.class_of(module)), values)
        if not self.approximate:
            change.add(functools.partial(_scale, module, math.sqrt(self.size / self.kept), self.offset))

    def restore(self, change: Change) -> None:
        """Give the weight its old scale."""
        if not self.approximate:
            module = change.module(self.module)
            change.add(functools.partial(_scale, module, math.sqrt(self.kept / self.size), self.offset))

    def _eps(self, module: nn.Module) -> float:
        eps = vars(module).get(self.number, "")
        if eps is None:
            eps = torch.finfo(next((p.dtype for p in module.parameters()), torch.get_default_dtype())).eps
        if type(eps) is not float or not eps > 0:
            raise PlanError(f"{self.module!r} ({type(module).__name__}) has no eps {self.number!r}.")
        return (eps + self.squares / self.size) * self.size / self.kept


def _scale(module: nn.Module, factor: float, offset: float) -> Undo:
    """Multiply the weight, with what the class adds to it."""
    old = {parameter: parameter.data for parameter in module.parameters()}
    for parameter, data in old.items():
        parameter.data = ((data.double() + offset) * factor - offset).to(data.dtype)
    return functools.partial(_put_back, old)


def _put_back(old: Mapping[nn.Parameter, Tensor]) -> None:
    for parameter, data in old.items():
        parameter.data = data
