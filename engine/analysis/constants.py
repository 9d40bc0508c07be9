"""Forward pass: the constants of every tensor, without running the model.

A dead channel is not nothing: it still produces its bias, a norm's β, ``sigmoid(0)``. Each value gets a compact float64
array in which NaN means "varies with the input". A constant that borders change in the same way in all channels (zero
padding in an average, a sum over positions) is a *profile*: the constant times a map that all channels share.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.analysis.amounts import Amounts, agreed, none_known, other_amounts
from engine.analysis.links import Links
from engine.analysis.uncertain import Rare, agreeing, amounts
from engine.program.arrays import along, compact, is_finite, support, zero_where
from engine.program.contraction import Contraction
from engine.program.graph import Graph, Node, Value, rule_errors

__all__ = ["Constants"]

ConstantsOf = Callable[[Node, "Constants"], Sequence[Tensor] | None]


class _Rule(Protocol):
    @property
    def constants(self) -> ConstantsOf: ...

    @property
    def rare(self) -> Rare: ...


class _Rules(Protocol):
    """What is read of an `engine.Registry`, which stands above this file."""

    def of(self, node: Node) -> _Rule: ...


class Constants:
    """The constants of a graph under given parameters and masks.

    Args:
        graph, rules: the recorded program.
        stored: parameters and buffers by canonical name.
        masks: 0/1 masks by canonical name, in full shape; then only masked entries of parameters count as zero. None:
            all zeros in parameters count.
        repaired: treat the masks as repaired, so that they cover all parameters that produce a masked channel and a
            dead channel produces exactly 0.
        training: norms use batch statistics, as in train mode.
        base: constants of the same graph, parameters and masks with another ``training``; whatever does not depend on
            it is reused.
        amounts: numeric arguments that change with the size of the input; none by default.
    """

    def __init__(
        self,
        graph: Graph,
        rules: _Rules,
        stored: Mapping[str, Tensor],
        masks: Mapping[str, Tensor] | None = None,
        repaired: bool = False,
        training: bool = False,
        base: Constants | None = None,
        amounts: Amounts | None = None,
    ) -> None:
        self.graph = graph
        self.amounts = amounts or Amounts({}, lambda value, dim: True)
        self.repaired = repaired
        self._training = training
        self._asked = False
        self._asking: set[int] = set()  # nodes whose constants depend on train mode
        self._stored = stored
        self._masks = masks
        self._arrays: dict[int, Tensor] = {}
        self._sources: dict[int, Tensor] = {} if base is None else base._sources
        self._links: dict[tuple[int, int, bool], Links] = {} if base is None else base._links
        self._profiles: set[int] = set()
        self._parameters = {n for n, t in stored.items() if isinstance(t, torch.nn.Parameter)}
        self._zeros: dict[int, bool] = {}
        self._tidy: set[int] = set()  # identities of arrays that are kept below
        self._infinite: set[int] = set()  # values with entries that are known not to be finite
        bits = (torch.finfo(v.dtype).bits for v in graph.stored.values() if v.dtype.is_floating_point)
        self._bits = min(bits, default=0)  # width of the narrowest floating dtype that anything is stored in
        self._waiting: dict[int, tuple[Node, _Rules]] = {}  # views of weights are large and rarely needed
        if base is None:
            for node in graph.nodes:
                self._compute(node, rules)
        else:
            self._compute_from(base, rules)

    @property
    def training(self) -> bool:
        """Whether norms use batch statistics; reading it marks the current node as dependent on the mode."""
        self._asked = True
        return self._training

    def _compute(self, node: Node, rules: _Rules) -> None:
        if node.outputs and all(v.origin is not None for v in node.outputs):
            self._waiting.update((v.index, (node, rules)) for v in node.outputs)
        else:
            self._asked = False
            self._evaluate(node, rules)

    def _on_demand(self, value: Value) -> None:
        """Compute a value derived from a stored value alone, on first access."""
        if value.index in self._waiting:
            node, rules = self._waiting[value.index]
            for other in node.outputs:
                self._waiting.pop(other.index, None)
            asked, self._asked = self._asked, False  # a value and its reader depend on the mode separately
            self._evaluate(node, rules)
            self._asked |= asked

    def _evaluate(self, node: Node, rules: _Rules) -> None:
        rule, numbers = rules.of(node), self.graph.uncertain.get(node.index)
        with rule_errors(node):
            if numbers is None:
                arrays = self._steady(node, rule.constants)
            else:
                preserved = rule.rare.preserved(node, self.graph)
                again = functools.partial(self._steady, constants=rule.constants)
                arrays = agreeing(node, numbers, again, self.__getitem__, preserved, rule.rare.for_gradients)
        for position, value in enumerate(node.outputs):
            array = _varies(value) if arrays is None else self._held(arrays[position], value)
            self._arrays[value.index] = array = self._settled(array, value)
            self._tidy.add(id(array))
        if self._asked:
            self._asking.add(node.index)

    def _settled(self, array: Tensor, value: Value) -> Tensor:
        """What is known of a value where code that did not run may change its entries."""
        zeros_stay = self.graph.unsettled.get(value.index)
        if zeros_stay is None:
            return array
        return compact(zero_where(array == 0)) if zeros_stay else _varies(value)

    def _steady(self, node: Node, constants: ConstantsOf) -> Sequence[Tensor] | None:
        """Return a rule's constants of a node that hold for all sizes of the input."""
        arrays = constants(node, self)
        places = self.amounts.at(node)
        if arrays is None or not places or none_known(arrays):
            return arrays
        for other in other_amounts(node, places):
            try:
                arrays = agreed(arrays, constants(other, self))
            except (
                ArithmeticError,
                LookupError,
                RuntimeError,
                TypeError,
                ValueError,
            ):  # not a valid call: nothing is constant
                return None
        return arrays

    def _compute_from(self, base: Constants, rules: _Rules) -> None:
        """Recompute nodes that depend on the mode, and nodes whose inputs changed as a result."""
        changed: set[int] = set()
        for node in self.graph.nodes:
            if all(v.index in base._waiting for v in node.outputs) and node.outputs:
                self._compute(node, rules)
                continue
            there = all(v.index in base._arrays for v in node.outputs)
            if not there or node.index in base._asking or any(v.index in changed for v in node.inputs):
                self._compute(node, rules)
                changed.update(v.index for v in node.outputs if not there or self._differs(v.index, base))
                continue
            for value in node.outputs:
                self._arrays[value.index] = array = base._arrays[value.index]
                self._tidy.add(id(array))
                if value.index in base._profiles:
                    self._profiles.add(value.index)
                if value.index in base._infinite:
                    self._infinite.add(value.index)

    def _differs(self, index: int, other: Constants) -> bool:
        if index in self._waiting:  # not computed yet, so it may differ
            return True
        same = (index in self._profiles) == (index in other._profiles)
        mine, theirs = self._arrays[index].numpy(), other._arrays[index].numpy()
        return not (same and np.array_equal(mine, theirs, equal_nan=True))

    def _held(self, array: Tensor, value: Value) -> Tensor:
        """Return the constants of a value, NaN where its dtype cannot represent the number.

        Stored values may be rounded like everything computed from them. Where the code converts to a narrower dtype, to
        integers or to booleans, a constant computed in float64 would be a different number.
        """
        if self.graph.decided and not array.numel() and not value.stored:  # for other data there may be entries
            return _varies(value)
        array = self._cleaned(array, value)
        if value.dtype.is_complex or (value.dtype.is_floating_point and torch.finfo(value.dtype).bits >= self._bits):
            return array
        same = array.nan_to_num().to(value.dtype).double() == array
        return array if same.logical_or(array.isnan()).all() else compact(torch.where(same, array, math.nan))

    def finite(self, value: Value) -> bool:
        """Whether no entry of a value is known to be infinite, from stored values or constants.

        Zero times a varying value counts as zero; zero times an infinity that is present for all inputs does not.
        """
        if value.index in self._infinite:
            return False
        if value.origin is not None:
            return self.finite(value.origin.inputs[0])
        data = value.data if value.name is None else self._stored[value.name].detach()
        return data is None or is_finite(data)

    def at_present(self, value: Value) -> Tensor:
        """Return the constants of a value; of a stored one that may change, its numbers now, for what they rule out."""
        if value.name not in self.graph.changing:
            return self.plain(value)
        data = self._stored[value.name].detach()
        plain = _is_plain(data) and not data.is_complex()
        return compact(self._masked(value, data.to("cpu", torch.float64))) if plain else self[value]

    def _masked(self, value: Value, data: Tensor) -> Tensor:
        mask = None if self._masks is None else self._masks.get(value.name or "")
        return data if mask is None else data * mask.to("cpu", torch.float64)

    def _cleaned(self, array: Tensor, value: Value) -> Tensor:
        """Compact an array once, with NaN in place of infinities; what a rule passes on unchanged is clean already."""
        if id(array) in self._tidy:
            return array
        array = array.to(torch.float64)
        infinite = np.isinf(array.numpy())
        if infinite.any():
            self._infinite.add(value.index)
            array = torch.where(torch.from_numpy(infinite), math.nan, array)
        return compact(array)

    def __getitem__(self, value: Value) -> Tensor:
        """Return the compact array of a value."""
        self._on_demand(value)
        array = self._arrays.get(value.index, self._sources.get(value.index))
        if array is None:
            array = self._sources[value.index] = self._source(value)
        return array

    def assume(self, value: Value, array: Tensor) -> None:
        """Set the constants of a value that no node produces: a compact float64 array, NaN where it varies."""
        self._sources[value.index] = array

    def _source(self, value: Value) -> Tensor:
        if value.name in self.graph.changing:
            if value.name not in self.graph.maskable:
                return _varies(value)
            masked = self.zero(value) if self._masks is not None else _zero_lines(self._stored[value.name].detach())
            return zero_where(masked)
        if value.name is not None:
            data = self._stored[value.name].detach()
            if not _is_plain(data):
                return zero_where(self.zero(value))
            if data.is_complex():  # only the zeros of complex numbers are tracked
                data = torch.where(data == 0, 0.0, math.nan)
            data = data.to("cpu", torch.float64)
            return self._settled(self._masked(value, data), value)
        held = value.data
        if (
            held is not None
            and held.numel()
            and _is_plain(held)
            and not (held.is_complex() or value.index in self.graph.resized or value.index in self.graph.unsettled)
        ):
            return compact(held.to("cpu", torch.float64))
        return _varies(value)

    def along(self, value: Value, dim: int) -> Tensor:
        """Return the constants along a dimension, shape ``(size,)``, NaN where they are not uniform over the others."""
        return along(self[value], dim, value.shape[dim])

    def zero(self, value: Value) -> Tensor:
        """Return a compact bool array: where the value is certainly zero and stays zero during training."""
        if value.name is None:
            return self[value] == 0
        data = self._stored[value.name].detach()
        if not self.graph.unsettled.get(value.index, True):  # code that did not run may fill zeros in
            return torch.zeros([1] * value.ndim, dtype=torch.bool)
        mask = None if self._masks is None else self._masks.get(value.name)
        is_table = value.name in self.graph.maskable
        if self._masks is not None and (value.name in self._parameters or is_table and mask is not None):
            return torch.zeros([1] * value.ndim, dtype=torch.bool) if mask is None else (mask == 0).cpu()
        if not _is_plain(data) or value.name in self.graph.changing:
            return torch.zeros([1] * value.ndim, dtype=torch.bool)
        return (data == 0).cpu()

    def only_zeros(self, value: Value) -> bool:
        """Whether a value is not stored, and zero wherever it does not vary; many results are then zero, too."""
        array = self[value]
        all_zero = self._zeros.get(value.index)
        if all_zero is None:
            data = array.numpy()
            all_zero = self._zeros[value.index] = value.name is None and not ((data != 0) & (data == data)).any()
        return all_zero

    def links(self, c: Contraction) -> Links:
        """Return which inputs have a nonzero weight to which outputs."""
        key = (c.weight.index, c.groups, c.transposed)
        links = self._links.get(key)
        if links is None:
            links = self._links[key] = Links.of(c, ~self.zero(c.weight))
        return links

    def settled_inputs(self, c: Contraction) -> Tensor:
        """Return at which inputs all weights have numbers, so that the share of a constant can be computed.

        Args:
            c: a contraction with its weight, which may be computed, or a buffer that changes.
        """
        name = c.weight.name
        if name is None:
            numbers = ~self[c.weight].isnan().expand(c.weight.shape)
            return c.canonical(numbers).all(-1).all(1).reshape(-1)
        data = self._stored[name]
        changes = name in self.graph.changing or c.weight.index in self.graph.unsettled
        stays = data.is_meta or _is_plain(data) and not data.is_complex() and not changes
        return torch.full((c.groups * c.inputs,), stays)

    def magnitude(self, c: Contraction) -> Tensor:
        """Return the L1 norm of the weights of each output, ignoring masks: float64, (groups * outputs,)."""
        name = c.weight.name
        weight = self[c.weight].expand(c.weight.shape) if name is None else self._stored[name].detach()
        if weight.is_meta:
            return torch.ones(c.groups * c.outputs, dtype=torch.float64)
        return c.canonical(weight.abs().double().cpu()).sum((2, 3)).reshape(-1)

    def magnitude_along(self, value: Value, dim: int) -> Tensor:
        """Return the L1 norm of a stored value at each index of a dimension, ignoring masks: float64."""
        data = self._stored[value.name or ""].detach()
        if data.is_meta:
            return torch.ones(value.shape[dim], dtype=torch.float64)
        return data.abs().double().cpu().movedim(dim, 0).reshape(value.shape[dim], -1).sum(1)

    def is_parameter(self, value: Value) -> bool:
        """Whether a value is a parameter rather than a buffer."""
        return value.name in self._parameters

    def has_profile(self, value: Value) -> bool:
        """Whether the value's constants hold only up to a shared map over positions."""
        self._on_demand(value)
        return value.index in self._profiles

    def mark_profile(self, value: Value) -> None:
        """Declare that the value's constants hold only up to a shared map over positions."""
        self._profiles.add(value.index)

    def bordered(self, node: Node, c: Contraction) -> bool:
        """Whether constants differ between positions where a contraction reads them, at any size of the input."""
        follows = any(name == "padding" for name, _ in self.amounts.at(node))
        other = amounts(node, self.graph.uncertain.get(node.index, ()))
        opens = not _BORDERS.isdisjoint(other) or (c.transposed and "stride" in other)
        return c.bordered or follows or opens or self.has_profile(c.input)

    def plain(self, value: Value) -> Tensor:
        """Return the array of a value for ops that do not preserve a profile, for which all but zeros varies."""
        array = self[value]
        return torch.where(array == 0, array, math.nan) if self.has_profile(value) else array


_BORDERS = frozenset(["padding", "output_padding"])
"""Arguments of a convolution that put other entries beside its input."""


def _is_plain(tensor: Tensor) -> bool:
    """Whether the entries of a tensor are there, one beside the other."""
    return not tensor.is_meta and tensor.layout is torch.strided


def _zero_lines(table: Tensor) -> Tensor:
    """Return where a table holds nothing but zeros along all other dimensions than one: masks have been applied."""
    zero = (table == 0).cpu()
    lines = torch.zeros([1] * table.ndim, dtype=torch.bool)
    for dim in support(table):
        others = [d for d in range(table.ndim) if d != dim]
        lines = lines | zero.all(others, keepdim=True)
    return lines


def _varies(value: Value) -> Tensor:
    return torch.full([1] * value.ndim, math.nan, dtype=torch.float64)


def varies_where(unknown: Sequence[Tensor], result: Tensor) -> Tensor:
    """Return ``result`` with NaN where any operand is NaN, which comparisons and clamps would hide."""
    for operand in unknown:
        result = torch.where(operand.isnan(), math.nan, result)
    return result
