"""Layers that lose channels which coupled layers keep: their narrow output is spread to the full width again.

In a sum of branches, a channel is kept as long as one branch feeds it. A branch in which it is constant, usually zero,
need not compute it: its last layer loses the channel, and the constant is inserted behind that layer.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import PlanError
from engine.surgery.classes import derived
from engine.surgery.exchange import Change, Decision, Exchange, Undo

__all__ = ["Spread"]


@dataclass(frozen=True, eq=False)
class Spread(Exchange):
    """A layer whose narrow output is spread to more channels.

    Attributes:
        dim: channel dimension of its output.
        kept: number of channels of the narrow output.
        table: int64, for each channel of the result, its index in the narrow output followed by the constants.
        fill: the constants, float64.
    """

    kind = "spread"
    title = "Spread"
    stage = 2

    dim: int
    kept: int
    table: Tensor
    fill: Tensor

    @classmethod
    def of(cls, module: str, dim: int, before: Tensor, after: Tensor, constants: Tensor) -> Spread | None:
        """Return what maps the channels that a layer keeps to those that its consumers keep; None if they are the same.

        Args:
            module: name of the layer.
            dim: channel dimension.
            before: bool, which channels the layer keeps.
            after: bool, which channels its consumers keep.
            constants: constant of each channel; read where only the consumers keep it.
        """
        if torch.equal(before, after):
            return None
        wanted = after.nonzero()[:, 0]
        table, is_constant = before.cumsum(0)[wanted] - 1, ~before[wanted]
        fill, place = constants[wanted][is_constant].nan_to_num(0.0).unique(return_inverse=True)
        table[is_constant] = int(before.sum()) + place
        return cls(module, dim, int(before.sum()), table, fill if len(fill) else torch.zeros(1, dtype=torch.float64))

    @classmethod
    def planned(cls, decision: Decision) -> Iterator[Spread]:
        """Yield the layers that lose channels which their consumers keep."""
        for node, before, after, constants in decision.refills:
            spread = cls.of(node.module, node.args["dim"], before, after, constants)
            if spread is not None:
                yield spread

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Spread:
        """Load and validate a state written by `state_dict`.

        Raises:
            PlanError: if the table is invalid.
        """
        table, fill, kept = state["table"].long(), state["fill"].double(), int(state["kept"])
        vectors = table.ndim == 1 == fill.ndim and len(table) > 0 and len(fill) > 0
        if not vectors or not 0 <= int(table.min()) <= int(table.max()) < kept + len(fill):
            raise PlanError(f"The table that spreads the output of {state['module']!r} is damaged.")
        return cls(str(state["module"]), int(state["dim"]), kept, table, fill)

    def __str__(self) -> str:
        return f"the output of {self.module} to {len(self.table)} channels"

    def then(self, later: Spread) -> Spread:
        """Reject a second spread, as `prepare` does.

        Raises:
            PlanError: always.
        """
        raise PlanError(_TWICE.format(self.module))

    def prepare(self, change: Change) -> None:
        """Make the layer spread its output.

        Raises:
            PlanError: if the output is spread already.
        """
        module = change.module(self.module)
        kind = change.class_of(module)
        if getattr(kind, "_engine_spreads", False):
            raise PlanError(_TWICE.format(self.module))
        change.become(module, _spreading(kind), {"_engine_spread_dim": self.dim})  # type: ignore[arg-type]
        device = next((p.device for p in module.parameters()), None)
        for name, tensor in (("_engine_spread_table", self.table), ("_engine_spread_fill", self.fill)):
            change.add(functools.partial(_register, module, name, tensor.to(device)))


_TWICE = "The output of {!r} is spread already, and cannot be once more."


def _register(module: nn.Module, name: str, tensor: Tensor) -> Undo:
    module.register_buffer(name, tensor, persistent=False)
    return functools.partial(delattr, module, name)


def _spread_out(x: Tensor, dim: int, table: Tensor, fill: Tensor) -> Tensor:
    constants = fill.to(x).view([-1 if d == dim % x.ndim else 1 for d in range(x.ndim)])
    sizes = [len(fill) if d == dim % x.ndim else n for d, n in enumerate(x.shape)]
    return torch.cat([x, constants.expand(sizes)], dim).index_select(dim, table)


@functools.cache
def _spreading(cls: Hashable) -> type[nn.Module]:
    """Return a subclass whose output is spread."""
    assert isinstance(cls, type) and issubclass(cls, nn.Module)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        return _spread_out(
            cls.forward(self, *args, **kwargs),
            self._engine_spread_dim,
            self._engine_spread_table,
            self._engine_spread_fill,
        )

    return derived(cls, {"forward": forward, "_engine_spreads": True}, _spreading)  # type: ignore[arg-type]
