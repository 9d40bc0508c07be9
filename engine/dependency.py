"""NNI's dependency tables: layers that must keep the same channels, and layers that must not be pruned."""

from __future__ import annotations

import csv
import itertools
import math
import operator
import os
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from engine import html
from engine.analysis.constraints import Constraint, Equal, Grouped
from engine.analysis.slots import FROZEN
from engine.bounds import check_kinds
from engine.errors import InputError
from engine.groups import Group, Member, groups_of, output_channels, producers_of
from engine.plots import dependency_figure, show
from engine.program.arrays import support
from engine.program.defaults import own_defaults
from engine.program.graph import Graph
from engine.removal.propagate import Structure
from engine.removal.structure import structure_for
from engine.rule import Registry

__all__ = ["ChannelDependency", "GroupDependency", "InputChannelDependency", "UnsafeLayers", "not_safe_to_prune"]


class ChannelDependency:
    """Sets of layers that share output channels.

    Layers (convolutions, transposed convolutions, linear) that share a slot, transitively, form a set: an addition or a
    gate couples its operands; a concatenation does not. A layer that produces the model's output and is not coupled to
    any other belongs to no set.

    Args:
        model: it is only read.
        dummy_input: a tensor, a tuple of positional arguments, or a mapping of keyword arguments.
        graph: a graph of this model, to avoid recording it again.
        rules: op rules; None uses the model's defaults, see `engine.set_attention`.

    Attributes:
        dependency_sets: the sets, by first use.
        dependency: layer -> its set.
        channels: layer -> number of its output channels, for all layers with a weight (embeddings too), by first use.

    Raises:
        TraceError: if the model rejects the input.

    Example:
        >>> import torchvision
        >>> dependency = ChannelDependency(torchvision.models.resnet18(weights=None), torch.ones(1, 3, 224, 224))
        >>> len(dependency.dependency_sets), sorted(dependency.dependency["conv1"])
        (12, ['conv1', 'layer1.0.conv2', 'layer1.1.conv2'])

    NNI: ``nni.compression.pytorch.utils.shape_dependency.ChannelDependency``.
    """

    @own_defaults()
    def __init__(
        self, model: nn.Module, dummy_input: Any, *, graph: Graph | None = None, rules: Registry | None = None
    ) -> None:
        self._structure = structure_for(model, dummy_input, graph, rules)
        self._ordered = self._sets()
        self.dependency_sets: list[set[str]] = [set(layers) for layers in self._ordered]
        self.dependency: dict[str, set[str]] = {name: s for s in self.dependency_sets for name in s}
        self.channels: dict[str, int] = {}
        for node in self._structure.graph.nodes:
            for value, dim in output_channels(self._structure, node):
                self.channels.setdefault(node.module, value.shape[dim])

    def _sets(self) -> list[list[str]]:
        return _coupled(self._structure)

    def __repr__(self) -> str:
        sets = "\n".join(f"  {', '.join(names)}" for names in self._ordered)
        return f"{type(self).__name__}: layers that share channels\n{sets}"

    def _repr_html_(self) -> str:
        rows = [(number, ", ".join(names)) for number, names in enumerate(self._ordered, 1)]
        return html.table(repr(self).partition("\n")[0], ("set", "layers"), rows)

    def export(self, filepath: str | os.PathLike[str]) -> None:
        """Write the sets as CSV: the header ``Dependency Set,Convolutional Layers``, then ``Set k,layer,layer…``.

        Args:
            filepath: file to write.
        """
        check_kinds(ChannelDependency.export, locals())
        rows = ([f"Set {number}", *layers] for number, layers in enumerate(self._ordered, 1))
        with open(filepath, "w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([["Dependency Set", "Convolutional Layers"], *rows])

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Plot the sets: a row per layer, and a line with dots through the layers of each set.

        Args:
            path: image file to write; its extension determines the format. None: no file.

        Returns:
            The matplotlib figure.

        Raises:
            ImportError: if matplotlib is not installed, the extra ``plots``.
        """
        return show(dependency_figure(self._ordered, self.channels), path)

    @own_defaults()
    def tree(self, layer: str) -> str:
        """Return a layer's dependency groups as a tree of modules, parameters and dimensions.

        Args:
            layer: name of a layer that produces channels.

        Raises:
            InputError: if there is no such layer.

        Example:
            >>> net = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))
            >>> print(ChannelDependency(net, torch.zeros(1, 3, 8, 8)).tree("0"))
            0: 4 channels that are removed together
            ├── 0 (Conv2d)
            │   └── weight [4, 3, 1, 1], dim 0: out
            ├── 1 (BatchNorm2d)
            │   ├── weight [4], dim 0: norm
            │   ├── bias [4], dim 0: norm
            │   ├── running_mean [4], dim 0: norm
            │   └── running_var [4], dim 0: norm
            └── 3 (Conv2d)
                └── weight [2, 4, 1, 1], dim 1: in
        """
        groups = [g for g in groups_of(self._structure, self._structure.graph.stored) if layer in g.layers]
        if not groups:
            layer_names = ", ".join(list(dict.fromkeys(name for name, _ in producers_of(self._structure)))[:8])
            raise InputError(f"There is no layer {layer!r} that produces channels; the first are {layer_names}.")
        return "\n".join(_tree(group, self._structure.graph) for group in groups)


def _tree(group: Group, graph: Graph) -> str:
    modules: dict[str, list[Member]] = {}
    for member in group.members:
        modules.setdefault(member.parameter.rpartition(".")[0], []).append(member)
    frozen = f", frozen ({group.reason})" if group.reason else ""
    lines = [f"{group.name}: {group.size} channels that are removed together{frozen}"]
    for number, (module, members) in enumerate(modules.items(), 1):
        branch, indent = ("└── ", "    ") if number == len(modules) else ("├── ", "│   ")
        lines.append(f"{branch}{module or 'the model itself'} ({graph.types[module].__name__})")
        leaves = ["├── "] * (len(members) - 1) + ["└── "]
        lines += [indent + leaf + _leaf(member) for leaf, member in zip(leaves, members, strict=True)]
    return "\n".join(lines)


def _leaf(member: Member) -> str:
    axes = support(member.units) or (0,)
    where = f"dim {axes[0]}" if len(axes) == 1 else f"dims {', '.join(map(str, axes))}"
    return f"{member.parameter.rpartition('.')[2]} {list(member.shape)}, {where}: {member.role}"


def _coupled(structure: Structure) -> list[list[str]]:
    """Layers that share outputs; a layer that produces the model's output and is not coupled has no set."""
    producers = producers_of(structure)
    sets = _components((name, output_slots.unique().tolist()) for name, output_slots in producers)
    last = _output_layers(structure)
    return [names for names in sets if len(names) > 1 or not set(names) & last]


def _components(layers: Iterable[tuple[str, Iterable[Hashable]]]) -> list[list[str]]:
    """Connected components of layers by shared keys, in order of first use."""
    leader: dict[str, str] = {}

    def find(name: str) -> str:
        while leader.setdefault(name, name) != name:
            name = leader[name]
        return name

    owner: dict[Hashable, str] = {}
    order: dict[str, None] = {}
    for name, shared in layers:
        order[name] = None
        for key in shared:
            first = find(owner.setdefault(key, name))
            leader[find(name)] = first
    sets: dict[str, list[str]] = {}
    for name in order:
        sets.setdefault(find(name), []).append(name)
    return list(sets.values())


def _output_layers(structure: Structure) -> set[str]:
    """Layers whose channels are channels of an output of the model."""
    slots = [layer.reshape(-1) for v in structure.graph.outputs for layer in structure.of(v)]
    visible = torch.cat(slots) if slots else torch.zeros(0, dtype=torch.long)
    return {name for name, output_slots in producers_of(structure) if torch.isin(output_slots, visible).any()}


class InputChannelDependency(ChannelDependency):
    """Sets of layers that share input channels: a channel pruned in one of them has to be pruned in all.

    Layers that read the same tensor share its channels, even with norms, activations, pooling, additions or depthwise
    convolutions in between.

    Args:
        model: it is only read.
        dummy_input: a tensor, a tuple of positional arguments, or a mapping of keyword arguments.
        graph: a graph of this model, to avoid recording it again.
        rules: op rules; None uses the model's defaults, see `engine.set_attention`.

    Attributes:
        dependency_sets: the sets, by first use.
        dependency: layer -> its set.

    Raises:
        TraceError: if the model rejects the input.

    Example:
        >>> import torchvision
        >>> dependency = InputChannelDependency(torchvision.models.resnet18(weights=None), torch.ones(1, 3, 224, 224))
        >>> sorted(dependency.dependency["layer2.0.conv1"])
        ['layer1.0.conv1', 'layer1.1.conv1', 'layer2.0.conv1', 'layer2.0.downsample.0']

    NNI: ``nni.compression.pytorch.utils.shape_dependency.InputChannelDependency``.
    """

    def _sets(self) -> list[list[str]]:
        layer_inputs = []
        for node, c in self._structure.contractions():
            slots = self._structure.along(c.input, c.input_dim)
            # without slots it is an input of the model: then the tensor itself is shared
            layer_inputs.append(
                (node.module, [f"%{c.input.index}"] if slots is None else slots[slots != FROZEN].unique().tolist())
            )
        return _components(layer_inputs)


class GroupDependency:
    """Divisor of each layer's number of output channels.

    A grouped convolution needs equally many inputs and outputs per group, and therefore every layer that feeds it needs
    a multiple of the number of groups that its channels are in, which is not all of them if a concatenation comes in
    between. Pieces of a ``chunk`` count the same way. Depthwise convolutions impose nothing, since their groups are
    removed with the channels.

    Args:
        model: it is only read.
        dummy_input: a tensor, a tuple of positional arguments, or a mapping of keyword arguments.
        graph: a graph of this model, to avoid recording it again.
        rules: op rules; None uses the model's defaults, see `engine.set_attention`.

    Attributes:
        dependency: layer -> divisor, 1 if any number of channels is valid.
        dependency_sets: the same.

    Raises:
        TraceError: if the model rejects the input.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1, groups=2), nn.Conv2d(8, 8, 1, groups=4))
        >>> GroupDependency(net, torch.zeros(1, 3, 8, 8)).dependency
        {'0': 2, '1': 4, '2': 4}

    NNI: ``nni.compression.pytorch.utils.shape_dependency.GroupDependency``.
    """

    @own_defaults()
    def __init__(
        self, model: nn.Module, dummy_input: Any, *, graph: Graph | None = None, rules: Registry | None = None
    ) -> None:
        structure = structure_for(model, dummy_input, graph, rules)
        self.dependency: dict[str, int] = {}
        for name, output_slots in producers_of(structure):
            parts = [_parts_hit(rows, output_slots) for c in structure.constraints for rows in _balanced_rows(c)]
            self.dependency[name] = math.lcm(self.dependency.get(name, 1), *parts)
        self.dependency_sets = self.dependency

    def __repr__(self) -> str:
        rows = "\n".join(f"  {layer}: {divisor}" for layer, divisor in self.dependency.items())
        return f"GroupDependency: divisors of the numbers of output channels\n{rows}"

    def export(self, filepath: str | os.PathLike[str]) -> None:
        """Write the divisors as CSV: the header ``Conv Layer Name,Group``, then ``layer,number``.

        Args:
            filepath: file to write.
        """
        check_kinds(GroupDependency.export, locals())
        with open(filepath, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["Conv Layer Name", "Group"])
            writer.writerows(self.dependency.items())


def _balanced_rows(constraint: Constraint) -> list[Tensor]:
    """Return labels (parts, size) whose parts keep equally many slots."""
    if isinstance(constraint, Grouped):
        return [labels for labels in (constraint.inputs, constraint.outputs) if labels is not None]
    return [constraint.rows] if isinstance(constraint, Equal) else []


def _parts_hit(rows: Tensor, output_slots: Tensor) -> int:
    return max(int(torch.isin(rows, output_slots).any(1).sum()), 1)


class UnsafeLayers(list[str]):
    """Names of layers, with the reason for each.

    Attributes:
        reasons: layer -> why its channels cannot be removed, with the location in the source.
    """

    def __init__(self, reasons: dict[str, str]) -> None:
        super().__init__(reasons)
        self.reasons = reasons


@own_defaults()
def not_safe_to_prune(
    model: nn.Module, dummy_input: Any, *, graph: Graph | None = None, rules: Registry | None = None
) -> UnsafeLayers:
    """Return the layers whose pruning would break the model's code.

    A layer is listed if a size written in the code (``view(-1, 1024)``, ``x[:, :32]``) does not follow when its
    channels are removed, or mixes channels with positions; ``flatten`` and ``view(b, -1)`` follow.

    Args:
        model: it is only read.
        dummy_input: a tensor, a tuple of positional arguments, or a mapping of keyword arguments.
        graph: a graph of this model, to avoid recording it again.
        rules: op rules; None uses the model's defaults, see `engine.set_attention`.

    Returns:
        A list of layer names, with ``.reasons``.

    Raises:
        TraceError: if the model rejects the input.

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
    check_kinds(not_safe_to_prune, locals())
    structure = structure_for(model, dummy_input, graph, rules)
    reasons: dict[str, str] = {}
    for name, output_slots in producers_of(structure):
        slots = output_slots[structure.unsafe[output_slots]]
        if len(slots):
            reasons.setdefault(name, structure.slots.why(slots) or "")
            continue
        is_whole = (output_slots == output_slots[0]).all() or structure.frozen[output_slots].all()
        if len(output_slots) > 1 and is_whole:
            mixer = _mixer(structure, output_slots)
            if mixer is not None:
                reasons.setdefault(name, f"{mixer} mixes its channels with other axes: no part of them can be removed")
    return UnsafeLayers(reasons)


def _mixer(structure: Structure, slots: Tensor) -> str | None:
    """Return the first view that regroups a dimension of the slots with others, so that none can be removed."""
    for node in structure.graph.nodes:
        if "size" in node.args or "shape" in node.args:
            for value in node.inputs:
                mixed = _regrouped(value.shape, node.output.shape)
                for layer in structure.of(value):
                    if mixed & set(support(layer)) and torch.isin(slots, layer).any():
                        return repr(node)
    return None


def _regrouped(before: tuple[int, ...], after: tuple[int, ...]) -> set[int]:
    """Return the dimensions that a view neither keeps, splits nor merges, but regroups.

    Wherever the products of leading sizes agree, a new run of dimensions starts; a run of several dimensions before and
    several after is regrouped.
    """
    leading = ({*itertools.accumulate(sizes, operator.mul, initial=1)} for sizes in (before, after))
    cuts = set.intersection(*leading)

    def runs(shape: tuple[int, ...]) -> dict[int, list[int]]:
        dims_by_start: dict[int, list[int]] = {}
        product = 1
        for dim, size in enumerate(shape):
            if size > 1:
                start = max(cut for cut in cuts if cut <= product)
                dims_by_start.setdefault(start, []).append(dim)
            product *= size
        return dims_by_start

    old, new = runs(before), runs(after)
    return {d for start, dims in old.items() if len(dims) > 1 and len(new.get(start, ())) > 1 for d in dims}
