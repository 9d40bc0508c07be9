"""Layers that lose channels which coupled layers keep: their narrow output is spread to the full width again.

In a sum of branches, a channel is kept as long as one branch feeds it. A branch in which it is constant, usually zero,
need not compute it: its last layer loses the channel, and the constant is inserted behind that layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.analysis.constants import Constants
from engine.analysis.constraints import NonEmpty
from engine.analysis.propagate import Labels
from engine.analysis.use import Use
from engine.errors import PlanError
from engine.program.arrays import support
from engine.program.graph import Node
from engine.rule import Rule, Statistic
from engine.source.exchange import derived

__all__ = ["RULES", "Spread", "separate_layers", "spread_out"]


@dataclass(frozen=True, eq=False)
class Spread:
    """A layer whose narrow output is spread to more channels.

    Attributes:
        module: name of the layer.
        dim: channel dimension of its output.
        kept: number of channels of the narrow output.
        table: int64, for each channel of the result, its index in the narrow output followed by the constants.
        fill: the constants, float64.
    """

    module: str
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
        table, gone = before.cumsum(0)[wanted] - 1, ~before[wanted]
        fill, place = constants[wanted][gone].nan_to_num(0.0).unique(return_inverse=True)
        table[gone] = int(before.sum()) + place
        return cls(module, dim, int(before.sum()), table, fill if len(fill) else torch.zeros(1, dtype=torch.float64))

    def state_dict(self) -> dict[str, Any]:
        """Return the spread as primitives and tensors."""
        return {"module": self.module, "dim": self.dim, "kept": self.kept, "table": self.table, "fill": self.fill}

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


# ---------------------------------------------------------------- the layer


def _spread_out(x: Tensor, dim: int, table: Tensor, fill: Tensor) -> Tensor:
    constants = fill.to(x).view([-1 if d == dim % x.ndim else 1 for d in range(x.ndim)])
    sizes = [len(fill) if d == dim % x.ndim else n for d, n in enumerate(x.shape)]
    return torch.cat([x, constants.expand(sizes)], dim).index_select(dim, table)


@functools.cache
def _spreading(cls: Hashable) -> type[nn.Module]:
    """Return a subclass whose output is spread."""
    assert isinstance(cls, type) and issubclass(cls, nn.Module)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        return _spread_out(cls.forward(self, *args, **kwargs), self._spread_dim, self._spread_table, self._spread_fill)

    return derived(cls, {"forward": forward}, _spreading)  # type: ignore[arg-type]


def spread_out(module: nn.Module, spread: Spread) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return functions that make a layer spread its output, and that undo it.

    Args:
        module: the layer.
        spread: the mapping to apply.

    Raises:
        PlanError: if the output is spread already.
    """
    if "_spread_table" in module._buffers:
        raise PlanError(f"The output of {spread.module!r} is spread already, and cannot be once more.")
    cls, device = type(module), next((p.device for p in module.parameters()), None)

    def redo() -> None:
        module.__class__ = _spreading(cls)  # type: ignore[arg-type, assignment]
        vars(module)["_spread_dim"] = spread.dim
        module.register_buffer("_spread_table", spread.table.to(device), persistent=False)
        module.register_buffer("_spread_fill", spread.fill.to(device), persistent=False)

    def undo() -> None:
        module.__class__ = cls
        del vars(module)["_spread_dim"], module._spread_table, module._spread_fill

    return redo, undo


# ---------------------------------------------------------------- the op that marks such a layer in a recording


@torch.library.custom_op("engine::spread", mutates_args=())
def _mark(x: Tensor, dim: int) -> Tensor:
    return x.clone()


@_mark.register_fake
def _(x: Tensor, dim: int) -> Tensor:
    return torch.empty_like(x)


@functools.cache
def _marked(cls: Hashable) -> type[nn.Module]:
    assert isinstance(cls, type) and issubclass(cls, nn.Module)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = _mark(cls.forward(self, *args, **kwargs), self._spread_dim)
        return output

    return derived(cls, {"forward": forward}, _marked)  # type: ignore[arg-type]


@contextmanager
def separate_layers(model: nn.Module, layers: Mapping[str, int]) -> Iterator[None]:
    """Separate the channels of some layers from those of their consumers inside the context.

    Args:
        model: the model.
        layers: names of the layers, with the channel dimension of their output.
    """
    dims_by_module = {model.get_submodule(name): dim for name, dim in layers.items()}
    classes = {module: type(module) for module in dims_by_module}
    for module, dim in dims_by_module.items():
        module.__class__ = _marked(classes[module])  # type: ignore[arg-type, assignment]
        vars(module)["_spread_dim"] = dim
    try:
        yield
    finally:
        for module, cls in classes.items():
            module.__class__ = cls
            del vars(module)["_spread_dim"]


def _labels(node: Node, labels: Labels) -> None:
    """Give the channels of the result new slots, which can be removed as well; propagate all other dimensions."""
    source, target, dim = node.inputs[0], node.output, node.args["dim"] % node.output.ndim
    for layer in labels.layers(source):
        touched = support(layer)
        if dim not in touched:
            labels.add(target, layer)
        elif len(touched) > 1:
            labels.slots.freeze(layer, f"{node!r} spreads a part of what hangs together")
    for layer in labels.fresh(target, [dim]):
        labels.add(target, layer)
        labels.born.append(layer.reshape(-1))
        labels.constraints.append(NonEmpty(layer.reshape(-1)))


def _constants(node: Node, constants: Constants) -> Sequence[Tensor] | None:
    """A constant times a map cannot be stored in the table."""
    return None if constants.has_profile(node.inputs[0]) else [constants[node.inputs[0]]]


def _use(node: Node, use: Use) -> None:
    use.add(node.inputs[0], use[node.output])


def _refilled(node: Node) -> Iterable[Statistic]:
    yield Statistic(node.inputs[0], node.args["dim"] % node.output.ndim)


RULES = [Rule(("engine::spread",), _labels, _constants, _use, refills=_refilled)]
