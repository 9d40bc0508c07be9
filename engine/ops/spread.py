"""Layers that lose channels which others keep: their short output is spread over the full width again.

In a sum of branches a channel stays as long as one of them feeds it. Where it is a constant in one branch, mostly zero,
that branch need not compute it: its last layer loses the channel, and the constant takes its place behind it.
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

__all__ = ["RULES", "Spread", "apart", "spread_out"]


@dataclass(frozen=True, eq=False)
class Spread:
    """A layer whose output is spread out.

    Attributes:
        module: its name.
        dim: the dimension of the channels in its output.
        kept: channels of the short output.
        table: int64, for each channel of the result where it is in the short output, with the constants behind it.
        fill: the constants, float64.
    """

    module: str
    dim: int
    kept: int
    table: Tensor
    fill: Tensor

    @classmethod
    def of(cls, module: str, dim: int, before: Tensor, after: Tensor, constants: Tensor) -> Spread | None:
        """Return what brings the channels that a layer keeps to those that its readers keep; None where they agree.

        Args:
            module: name of the layer.
            dim: the dimension of the channels.
            before: bool, which channels the layer keeps.
            after: bool, which channels its readers keep.
            constants: the constant of each channel; read where only the readers keep it.
        """
        if torch.equal(before, after):
            return None
        wanted = after.nonzero()[:, 0]
        table, gone = before.cumsum(0)[wanted] - 1, ~before[wanted]
        fill, place = constants[wanted][gone].nan_to_num(0.0).unique(return_inverse=True)
        table[gone] = int(before.sum()) + place
        return cls(module, dim, int(before.sum()), table, fill if len(fill) else torch.zeros(1, dtype=torch.float64))

    def state_dict(self) -> dict[str, Any]:
        """Return it as primitives and tensors."""
        return {"module": self.module, "dim": self.dim, "kept": self.kept, "table": self.table, "fill": self.fill}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Spread:
        """Read what `state_dict` wrote, and check it.

        Raises:
            PlanError: where it cannot be.
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
    """Return a subclass whose output is spread out."""
    assert isinstance(cls, type) and issubclass(cls, nn.Module)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        return _spread_out(cls.forward(self, *args, **kwargs), self._spread_dim, self._spread_table, self._spread_fill)

    return derived(cls, {"forward": forward}, _spreading)  # type: ignore[arg-type]


def spread_out(module: nn.Module, spread: Spread) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return what makes a layer spread its output, and what takes it back.

    Args:
        module: the layer.
        spread: what it is to do.

    Raises:
        PlanError: where its output is spread already.
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


# ---------------------------------------------------------------- the op that stands for it while a model is recorded


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
        found: Tensor = _mark(cls.forward(self, *args, **kwargs), self._spread_dim)
        return found

    return derived(cls, {"forward": forward}, _marked)  # type: ignore[arg-type]


@contextmanager
def apart(model: nn.Module, layers: Mapping[str, int]) -> Iterator[None]:
    """Set the channels of some layers apart from those of their readers, for the length of the body.

    Args:
        model: the model.
        layers: names of the layers, with the dimension of the channels in their output.
    """
    found = {model.get_submodule(name): dim for name, dim in layers.items()}
    classes = {module: type(module) for module in found}
    for module, dim in found.items():
        module.__class__ = _marked(classes[module])  # type: ignore[arg-type, assignment]
        vars(module)["_spread_dim"] = dim
    try:
        yield
    finally:
        for module, cls in classes.items():
            module.__class__ = cls
            del vars(module)["_spread_dim"]


def _labels(node: Node, labels: Labels) -> None:
    """The channels of the result are others than those of the source, and may go as well; all else is the same."""
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
    """What a common map makes of a constant has no place in the table."""
    return None if constants.has_profile(node.inputs[0]) else [constants[node.inputs[0]]]


def _use(node: Node, use: Use) -> None:
    use.add(node.inputs[0], use[node.output])


def _refilled(node: Node) -> Iterable[Statistic]:
    yield Statistic(node.inputs[0], node.args["dim"] % node.output.ndim)


RULES = [Rule(("engine::spread",), _labels, _constants, _use, refills=_refilled)]
