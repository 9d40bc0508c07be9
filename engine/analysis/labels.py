"""Label arrays of every value, written by rules: slots, ties and constraints between them, and frozen slots."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from engine.analysis.amounts import Place, amounts_of
from engine.analysis.constraints import Constraint, NonEmpty
from engine.analysis.slots import FROZEN, Slots
from engine.errors import RuleError
from engine.program.arrays import support
from engine.program.contraction import Contraction
from engine.program.graph import Graph, Node, Value

__all__ = ["Labels", "is_made_of"]


class Labels:
    """Label arrays ("layers") per value: a list of compact int64 arrays of slots.

    An entry of a tensor is removed when its slot in any of the layers is removed. The layers of an activation span
    different dimensions; a stored weight may have one layer over (outputs, inputs) and another over outputs.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.node: Node | None = None  # whose rule writes at present
        self.slots = Slots()
        self.constraints: list[Constraint] = []
        self.born: list[Tensor] = []
        self.unsafe: list[Tensor] = []  # slots along dimensions of which a number in the code takes an amount
        self.ragged: list[Tensor] = []  # rows that keep equally many slots; tensors made of them need not be products
        self._layers: dict[int, list[Tensor]] = {}
        self._same: dict[int, Value] = {}
        self._meetings: list[tuple[Tensor, Tensor]] = []
        self._outputs: dict[tuple[int, bool], Tensor] = {}
        self._groups: dict[int, int] = {}
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}
        self._fixed: dict[tuple[int, ...], Tensor] = {}
        self._marked = 0

    # ------------------------------------------------------------------ reading

    def layers(self, value: Value) -> list[Tensor]:
        """Return the layers of a value."""
        return self._layers.setdefault(self._same.get(value.index, value).index, [])

    def alias(self, value: Value, source: Value) -> None:
        """Give a value the slots of another one, including those that either receives later."""
        self._same[value.index] = self._same.get(source.index, source)

    def _stored(self, value: Value) -> bool:
        return self._same.get(value.index, value).stored

    def claim(self, value: Value) -> None:
        """Give a stored value fresh slots along each dimension without any (on first use in a point-wise op)."""
        if self._stored(value):
            covered = {d for layer in self.layers(value) for d in support(layer)}
            for layer in self.fresh(value, sorted(set(range(value.ndim)) - covered)):
                self.layers(value).append(layer)
                self.constraints.append(NonEmpty(layer.reshape(-1)))

    def fresh(self, value: Value, dims: Sequence[int]) -> list[Tensor]:
        """Return a new layer for each of the dimensions that is larger than 1."""
        layers = []
        for dim in dims:
            if value.shape[dim] > 1:
                layers.append(self.slots.new(value.shape[dim]).view([-1 if d == dim else 1 for d in range(value.ndim)]))
        return layers

    def along(self, value: Value, dim: int) -> Tensor | None:
        """Return the slots along one dimension, shape ``(size,)``, tied over all others that they span, or None."""
        slots: Tensor | None = None
        for layer in self.layers(value):
            touched = support(layer)
            if dim in touched:
                row = self._row(self.tie(layer, [d for d in touched if d != dim]))
                if slots is not None:
                    self.slots.union(slots, row)
                slots = row
        return slots

    def alone(self, value: Value, dim: int) -> Tensor | None:
        """Return the slots that span one dimension alone, shape ``(size,)``; where there are none, those along it.

        The inputs of a grouped convolution have slots over groups and inputs, which span the outputs of its weight.
        """
        layer = next((layer for layer in self.layers(value) if support(layer) == (dim,)), None)
        return self.along(value, dim) if layer is None else self._row(layer)

    def amounts(self, node: Node) -> frozenset[Place]:
        """Return the positions of a node's numeric arguments that change with the size of the input."""
        return amounts_of(node, self._is_channel)

    def _is_channel(self, value: Value, dim: int) -> bool:
        return any(dim in support(layer) and self.can_go(layer) for layer in self.layers(value))

    def can_go(self, layer: Tensor) -> bool:
        """Whether some of the slots are outputs of a contraction so far; no other slots are ever removed."""
        while self._marked < len(self.born):
            self.slots.mark(self.born[self._marked])
            self._marked += 1
        return bool(self.slots.marked(layer).any())

    def _row(self, layer: Tensor) -> Tensor:
        """Flatten a layer, always to the same object, so that sharing can be detected by identity."""
        if layer.ndim == 1:
            return layer
        if id(layer) not in self._rows:
            self._rows[id(layer)] = (layer, layer.reshape(-1))  # the layer is kept for its identity
        return self._rows[id(layer)][1]

    def without(self, value: Value, dims: Sequence[int], reason: str) -> list[Tensor]:
        """Return the value's layers tied along ``dims``; slots that span only these dimensions are frozen."""
        self._fix_unclaimed(value, dims)
        kept = []
        for layer in self.layers(value):
            touched = support(layer)
            if set(touched) <= set(dims):
                self.slots.freeze(layer, reason)
            else:
                kept.append(self.tie(layer, [d for d in touched if d in dims]))
        return kept

    def tie(self, layer: Tensor, dims: Iterable[int]) -> Tensor:
        """Tie the slots of a layer along dimensions, and return it with size 1 along these."""
        for dim in dims:
            self.slots.union(layer, layer.narrow(dim, 0, 1))
            layer = layer.narrow(dim, 0, 1)
        return layer

    # ------------------------------------------------------------------ writing

    def add(self, value: Value, layer: Tensor) -> None:
        """Add a layer to a value and tie it to the value's other slots along the same dimensions.

        A computed value is as wide as its producer says: slots that a reader adds along another dimension are frozen.

        Raises:
            RuleError: if the layer does not fit the value.
        """
        if layer.ndim != value.ndim or any(layer.shape[d] not in (1, n) for d, n in enumerate(value.shape)):
            raise RuleError(f"Slots of shape {tuple(layer.shape)} do not fit {value!r}; its op's rule is wrong.")
        layer = self.settled(layer)
        touched = set(support(layer))
        have = self.layers(value)
        if self._imposed(value, touched):
            self.slots.freeze(layer, f"{value!r} is computed by an op that keeps its size there ({self.node!r})")
        if touched and not have:
            have.append(layer)
        if not touched or have[0] is layer:
            return
        same = [other for other in have if set(support(other)) == touched]
        met = [] if self._stored(value) else [other for other in have if set(support(other)) & touched]
        if same:
            self.slots.union(same[0], layer)
        elif all(set(support(other)) < touched for other in met):
            have[:] = [other for other in have if all(other is not m for m in met)] + [layer]
            self._meetings += [(layer, other) for other in met]
        elif len(met) == 1 and touched < set(support(met[0])):
            self._meetings.append((met[0], layer))
        elif shared := touched.intersection(*(support(other) for other in met)):
            # Tie what each has for itself: in attention between the channels of a head, whole heads are removed.
            tied = [self.tie(array, set(support(array)) - shared) for array in (*met, layer)]
            have[:] = [other for other in have if all(other is not m for m in met)] + tied[:1]
            for array in tied[1:]:
                self.slots.union(tied[0], array)
        else:
            for array in (*met, layer):
                self.slots.freeze(array, f"its axes overlap in {value!r}")

    def _imposed(self, value: Value, touched: Collection[int]) -> bool:
        """Whether a reader of a computed value gives it slots along a dimension for which its producer has none."""
        if self.node is None or self._stored(value) or value in self.node.outputs:
            return False
        return not {d for layer in self.layers(value) for d in support(layer)}.issuperset(touched)

    def hold(self, value: Value, dims: Collection[int], reason: str) -> None:
        """Fix the sizes along some dimensions; slots that also span others can still be removed along those."""
        for layer in self.layers(value):
            touched = support(layer)
            if set(touched) <= set(dims):
                self.slots.freeze(layer, reason)
            else:
                self.tie(layer, [d for d in touched if d in dims])

    def pass_on(self, source: Value, target: Value) -> None:
        """Give ``target`` the layers of ``source``, dimension by dimension."""
        for layer in self.layers(source):
            self.add(target, layer)

    def freeze(self, value: Value, reason: str) -> None:
        """Freeze all slots of a value, and each dimension of a stored value that has none yet."""
        self.claim(value)
        for layer in self.layers(value):
            self.slots.freeze(layer, reason)

    def per_channel(self, value: Value, channels: Tensor | None) -> None:
        """Give a stored vector one slot per channel; without slots its size is fixed."""
        if channels is None:
            self.fix(value, value.ndim - 1)
        else:
            self.add(value, channels)

    def fix(self, value: Value, dim: int) -> None:
        """Fix the size along a dimension."""
        if value.shape[dim] > 1:
            shape = [value.shape[d] if d == dim else 1 for d in range(value.ndim)]
            if (layer := self._fixed.get(tuple(shape))) is None:
                layer = self._fixed[tuple(shape)] = torch.full(shape, FROZEN)
            self.add(value, layer)

    def fix_unclaimed(self, node: Node) -> None:
        """Fix the dimensions of stored values for which the rule of a reader has no slots.

        What it computes along them has the recorded size, whatever a later reader of the same tensor could lose. What
        has the slots of a stored value gives them back: its readers decide.
        """
        same = {self._same[output.index] for output in node.outputs if output.index in self._same}
        for value in node.inputs:
            if self._same.get(value.index, value) not in same:
                self._fix_unclaimed(value, range(value.ndim))

    def _fix_unclaimed(self, value: Value, dims: Iterable[int]) -> None:
        if self._stored(value):
            covered = {d for layer in self.layers(value) for d in support(layer)}
            for dim in set(dims) - covered:
                self.fix(value, dim)

    def regrouped(self, c: Contraction) -> bool:
        """Whether an earlier contraction splits the same weight into another number of groups."""
        return self._groups.setdefault(c.weight.index, c.groups) != c.groups

    def outputs_of(self, c: Contraction) -> Tensor | None:
        """Return the output slots of a contraction's weight, (groups, outputs); None if it is computed without any."""
        outputs = self._outputs.get((c.weight.index, c.transposed))
        if outputs is not None:
            return outputs
        slots_along = self.alone if c.groups > 1 else self.along
        labels = slots_along(c.weight, c.output_place) if c.groups == 1 or not c.transposed else None
        if labels is None:
            if not self._stored(c.weight):
                return None
            labels = self.slots.new(c.groups * c.outputs)
        self._outputs[c.weight.index, c.transposed] = labels = labels.view(c.groups, c.outputs)
        if c.depthwise or not (c.transposed and c.groups > 1 and c.outputs == 1):  # else rows follow the inputs
            self.add(c.weight, c.layout(labels[:, :, None]))
        self.born.append(labels.reshape(-1))
        self.constraints.append(NonEmpty(labels.reshape(-1)))
        return labels

    def settled(self, layer: Tensor) -> Tensor:
        """Drop dimensions along which all slots are tied, except the last one."""
        touched = support(layer)
        if len(touched) > 1:
            root = self.slots.find(layer)
            for dim in touched:
                if len(support(layer)) > 1 and (root == root.narrow(dim, 0, 1)).all():
                    layer, root = layer.narrow(dim, 0, 1), root.narrow(dim, 0, 1)
        return layer

    def settle_meetings(self) -> None:
        """Decide between rows and columns where slots over (heads, entries) met slots over entries alone.

        Rows are removed as a whole if the entries within each row are tied or frozen; otherwise an entry is removed
        from all rows.
        """
        keys = [tuple((layer.shape, self._roots(layer)) for layer in pair) for pair in self._meetings]
        distinct = dict(zip(keys, self._meetings, strict=True))  # a block may be called twice
        settled = [self._by_rows(joint, single) for joint, single in distinct.values()]
        waiting = [pair for pair, done in zip(distinct.values(), settled, strict=True) if not done]
        for meetings in self._separate(waiting) if waiting else ():
            self._settle(meetings)

    def _settle(self, waiting: list[tuple[Tensor, Tensor]]) -> None:
        while waiting:
            settled = [self._by_rows(joint, single) for joint, single in waiting]
            waiting = [pair for pair, done in zip(waiting, settled, strict=True) if not done]
            if waiting and not any(settled):
                self.slots.union(*waiting.pop(0))

    def _roots(self, layer: Tensor) -> tuple[int, ...]:
        return tuple(self.slots.find(layer).reshape(-1).tolist())

    def _separate(self, meetings: list[tuple[Tensor, Tensor]]) -> list[list[tuple[Tensor, Tensor]]]:
        """Partition meetings into sets without common slots, which can be decided independently."""
        parts = Slots()
        position = {
            root: i for i, root in enumerate(dict.fromkeys(r for pair in meetings for r in self._members(pair)))
        }
        ids = parts.new(len(position))
        members = [ids[[position[root] for root in self._members(pair)]] for pair in meetings]
        for own in members:
            parts.union(own, own[:1])
        sets: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for pair, own in zip(meetings, members, strict=True):
            sets.setdefault(int(parts.find(own[:1])), []).append(pair)
        return list(sets.values())

    def _members(self, pair: tuple[Tensor, Tensor]) -> set[int]:
        return {*self._roots(pair[0]), *self._roots(pair[1])}

    def _by_rows(self, joint: Tensor, single: Tensor) -> bool:
        along = support(single)
        if self.slots.frozen(single).all():
            self.tie(joint, along)
            return True
        first = joint
        for dim in along:
            first = first.narrow(dim, 0, 1)
        tied = bool((self.slots.find(joint) == self.slots.find(first)).all())
        if tied:
            self.slots.freeze(single, "belongs to none of the rows alone")
        return tied

    def make_rectangular(self) -> None:
        """Tie slots until what remains of every activation is a product of index sets along its dimensions."""
        self.settle_meetings()
        for value in self.graph.values:
            if self._stored(value):
                continue
            for layer in self.layers(value):
                if not self.is_ragged(layer):
                    self._rectangle(layer)

    def is_ragged(self, layer: Tensor) -> bool:
        """Whether a layer consists of whole rows that keep equally many slots, but not necessarily the same ones."""
        if not self.ragged or len(support(layer)) < 2:
            return False
        return is_made_of(
            {tuple(row) for rows in self.ragged for row in self.slots.find(rows).tolist()}, self.slots.find(layer)
        )

    def _rectangle(self, layer: Tensor) -> None:
        while len(support(layer)) > 1:
            root = self.slots.find(layer)
            root = torch.where(self.slots.frozen(root), FROZEN, root)  # frozen slots are all alike
            free = [d for d in support(root) if not (root == root.narrow(d, 0, 1)).all()]
            if len(free) < 2:
                return
            dim = min(free, key=root.size)
            self.slots.union(root, root.narrow(dim, 0, 1))


def is_made_of(rows: Collection[tuple[int, ...]], layer: Tensor) -> bool:
    """Whether all rows of a layer along its last dimension are among the given rows."""
    return all(tuple(row) in rows for row in layer.reshape(-1, layer.size(support(layer)[-1])).tolist())
