"""Survey of a model: its layers with their costs, and the axes along which it can be narrowed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

import engine
from lightning_compress.selection.amounts import kept_units

if TYPE_CHECKING:
    from lightning_compress.selection.amounts import Masks


@dataclass(frozen=True)
class Layer:
    """One layer.

    Attributes:
        name: path in the model; ``""`` is the model itself.
        kind: name of its class.
        channels: number of output channels; 0 without a weight.
        params: number of parameters of its weight and bias.
        macs: multiply-accumulates per sample, summed over calls.
    """

    name: str
    kind: str
    channels: int
    params: int
    macs: int


@dataclass(frozen=True)
class Axis:
    """A dependency group: channels (or heads) that several layers can only lose together.

    Attributes:
        name: name of the group.
        layers: layers that produce the channels.
        size: number of channels.
        kept: number of channels that masks keep.
        reason: why the channels cannot be removed, or None.
    """

    name: str
    layers: tuple[str, ...]
    size: int
    kept: int
    reason: str | None


@dataclass(frozen=True)
class Survey:
    """Survey of a model.

    Attributes:
        layers: the layers, by first use.
        axes: the dependency groups, by first use.
        macs: multiply-accumulates per sample.
        params: number of parameters.
        size: bytes of all parameters and buffers.
    """

    layers: tuple[Layer, ...]
    axes: tuple[Axis, ...]
    macs: int
    params: int
    size: int

    def state_dict(self) -> dict[str, Any]:
        """Convert the survey to primitives."""
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Survey:
        """Restore a survey from its `state_dict`.

        Example:
            >>> from torch import ones
            >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 2, 3))
            >>> result = survey(model, ones(1, 1, 8, 8))
            >>> Survey.from_state_dict(result.state_dict()) == result
            True
        """
        layers = tuple(Layer(**layer) for layer in state["layers"])
        axes = tuple(Axis(**{**axis, "layers": tuple(axis["layers"])}) for axis in state["axes"])
        return cls(layers, axes, state["macs"], state["params"], state["size"])


def survey(model: nn.Module, example: Any, masks: Masks | None = None) -> Survey:
    """Survey a model.

    Args:
        model: the model, which is not changed.
        example: its input, as for ``engine.trace``.
        masks: masks relative to the model, for the channels that each axis keeps.

    Returns:
        The survey, with the costs of the unmasked model.

    Raises:
        TraceError: if the model rejects the example.

    Example:
        >>> from torch import ones
        >>> result = survey(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 2, 3)), ones(1, 1, 8, 8))
        >>> [(layer.name, layer.channels, layer.macs) for layer in result.layers], result.params
        ([('0', 4, 1296), ('1', 2, 1152)], 114)
    """
    graph = engine.trace(model, example)
    macs, params, table = engine.count_flops_params(model, example, verbose=False, masks={}, graph=graph)
    channels = engine.ChannelDependency(model, example, graph=graph).channels
    groups = engine.dependency_groups(model, example, graph=graph)
    kept = kept_units(groups, masks or {})
    layers = _layers(model, graph, channels, table)
    axes = (Axis(g.name, g.layers, g.size, int(kept[g.name].sum()), g.reason) for g in groups)
    size = sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
    return Survey(tuple(layers), tuple(axes), int(macs), int(params), size)


def _layers(
    model: nn.Module, graph: engine.Graph, channels: Mapping[str, int], table: Mapping[str, Any]
) -> Iterator[Layer]:
    """Yield the layers by first use: those with a cost, and embeddings, which have channels but no cost."""
    first: dict[str, int] = {}
    for node in graph.nodes:
        first.setdefault(node.module, len(first))
    for name in sorted({**table, **channels}, key=lambda name: first.get(name, len(first))):
        if name in table:
            row = table[name]
            yield Layer(name, row["module_type"][0], channels.get(name, 0), max(row["params"]), sum(row["flops"]))
        else:
            module = model.get_submodule(name)
            params = sum(parameter.numel() for parameter in module.parameters(recurse=False))
            yield Layer(name, type(module).__name__, channels[name], params, 0)
