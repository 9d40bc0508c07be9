"""NNI's tables: which layers must keep the same channels, and which must not be pruned at all."""

from __future__ import annotations

import csv
import os
from typing import Any

import torch
from torch import nn

from engine.demands import structure_of
from engine.graph import Graph
from engine.groups import producers_of
from engine.ops import RULES
from engine.propagate import Structure
from engine.rule import Registry
from engine.tracer import trace

__all__ = ["ChannelDependency", "UnsafeLayers", "not_safe_to_prune"]


class ChannelDependency:
    """Which layers share output channels.

    Layers (convolutions, transposed convolutions, linear) that share a slot, transitively, form a set: what an
    addition or a gate combines is coupled; what stands side by side after a concatenation is not. The layer that
    makes the model's output and couples with nothing has no set.

    Args:
        model: it is only read.
        dummy_input: a tensor, a tuple of positional arguments, or a mapping of keyword arguments.
        graph: a graph of this model, to save recording it.
        rules: what is known of ops.

    Attributes:
        dependency_sets: the sets, by first use.
        dependency: layer -> its set.

    Raises:
        TraceError: where the model rejects the input.

    Example:
        >>> import torchvision
        >>> dependency = ChannelDependency(torchvision.models.resnet18(weights=None), torch.ones(1, 3, 224, 224))
        >>> len(dependency.dependency_sets), sorted(dependency.dependency["conv1"])
        (12, ['conv1', 'layer1.0.conv2', 'layer1.1.conv2'])

    NNI: ``nni.compression.pytorch.utils.shape_dependency.ChannelDependency``.
    """

    def __init__(
        self, model: nn.Module, dummy_input: Any, *, graph: Graph | None = None, rules: Registry = RULES
    ) -> None:
        graph = trace(model, dummy_input) if graph is None else graph
        graph.check_fresh(model)
        self._ordered = _coupled(structure_of(graph, rules))
        self.dependency_sets: list[set[str]] = [set(layers) for layers in self._ordered]
        self.dependency: dict[str, set[str]] = {name: s for s in self.dependency_sets for name in s}

    def export(self, filepath: str | os.PathLike[str]) -> None:
        """Write the sets as CSV: the header ``Dependency Set,Convolutional Layers``, then ``Set k,layer,layer…``.

        Args:
            filepath: file to write.
        """
        with open(filepath, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["Dependency Set", "Convolutional Layers"])
            for number, layers in enumerate(self._ordered, 1):
                writer.writerow([f"Set {number}", *layers])


def _coupled(structure: Structure) -> list[list[str]]:
    """Connected components of layers over the slots they share, in order of first use."""
    producers = producers_of(structure)
    leader: dict[str, str] = {}

    def find(name: str) -> str:
        while leader.setdefault(name, name) != name:
            name = leader[name]
        return name

    owner: dict[int, str] = {}
    for name, made in producers:
        for slot in made.unique().tolist():
            first = find(owner.setdefault(slot, name))
            leader[find(name)] = first
    sets: dict[str, dict[str, None]] = {}
    for name, _ in producers:
        sets.setdefault(find(name), {})[name] = None
    last = _output_layers(structure)
    return [list(names) for names in sets.values() if len(names) > 1 or not set(names) & last]


def _output_layers(structure: Structure) -> set[str]:
    """Layers whose channels are channels of an output of the model."""
    slots = [layer.reshape(-1) for v in structure.graph.outputs for layer in structure.of(v)]
    visible = torch.cat(slots) if slots else torch.zeros(0, dtype=torch.long)
    return {name for name, made in producers_of(structure) if torch.isin(made, visible).any()}


class UnsafeLayers(list[str]):
    """Names of layers, with the reason for each.

    Attributes:
        reasons: layer -> why its channels cannot go, with the place in the source.
    """

    def __init__(self, reasons: dict[str, str]) -> None:
        super().__init__(reasons)
        self.reasons = reasons


def not_safe_to_prune(
    model: nn.Module, dummy_input: Any, *, graph: Graph | None = None, rules: Registry = RULES
) -> UnsafeLayers:
    """Return the layers whose pruning would break the model's code.

    A layer is listed where a size written in the code (``view(-1, 1024)``, ``x[:, :32]``) does not follow when its
    channels go; ``flatten`` and ``view(b, -1)`` follow.

    Args:
        model: it is only read.
        dummy_input: a tensor, a tuple of positional arguments, or a mapping of keyword arguments.
        graph: a graph of this model, to save recording it.
        rules: what is known of ops.

    Returns:
        A list of layer names, with ``.reasons``.

    Raises:
        TraceError: where the model rejects the input.

    Example:
        >>> class Net(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.conv, self.fc = nn.Conv2d(1, 4, 1), nn.Linear(16, 2)
        ...     def forward(self, x):
        ...         return self.fc(self.conv(x).view(-1, 16))
        >>> not_safe_to_prune(Net(), torch.zeros(1, 1, 2, 2))
        ['conv']

    NNI: ``nni.compression.pytorch.utils.not_safe_to_prune``.
    """
    graph = trace(model, dummy_input) if graph is None else graph
    graph.check_fresh(model)
    structure = structure_of(graph, rules)
    reasons: dict[str, str] = {}
    for name, made in producers_of(structure):
        slots = made[structure.unsafe[made]]
        if len(slots):
            reasons.setdefault(name, structure.slots.why(slots) or "")
    return UnsafeLayers(reasons)
