"""The op that marks a layer whose channels are separate from those of its consumers; `engine.surgery.kinds.spread`."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from engine.analysis.constants import Constants
from engine.analysis.constraints import NonEmpty
from engine.analysis.labels import Labels
from engine.analysis.use import Use
from engine.program.arrays import support
from engine.program.graph import Node
from engine.rule import Rare, Rule, Statistic
from engine.surgery.classes import derived

__all__ = ["RULES", "separate_layers"]


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
        output: Tensor = _mark(cls.forward(self, *args, **kwargs), self._engine_spread_dim)
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
        vars(module)["_engine_spread_dim"] = dim
    try:
        yield
    finally:
        for module, cls in classes.items():
            module.__class__ = cls
            del vars(module)["_engine_spread_dim"]


def _labels(node: Node, labels: Labels) -> None:
    """Give the channels of the result new slots, which can be removed as well; propagate all other dimensions."""
    source, target, dim = node.inputs[0], node.output, node.args["dim"] % node.output.ndim
    for layer in labels.layers(source):
        touched = support(layer)
        if dim not in touched:
            labels.add(target, layer)
        elif len(touched) > 1:
            labels.slots.freeze(layer, f"{node!r} spreads a part of coupled channels")
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


RULES = [Rule(("engine::spread",), _labels, _constants, _use, rare=Rare(refills=_refilled))]
