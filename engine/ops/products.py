"""Layers written as products with a stored matrix, or with one matrix of a stack for each token.

``x @ self.weight``, ``x @ self.weight.T``, ``torch.bmm(self.weight[expert], x)``, and the product of sorted tokens with
the matrices of their experts. In a stack, a row or column is one unit: it is removed from all matrices or from none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from engine.analysis.constants import Constants
from engine.analysis.constraints import Multiple
from engine.analysis.labels import Labels
from engine.analysis.use import Use
from engine.ops.contraction import contract, once, output_constants, used
from engine.ops.equations import spelled
from engine.ops.samples import Apply
from engine.ops.stacks import Matrix, matrix_of
from engine.program.contraction import Contraction
from engine.program.graph import Node, Value
from engine.program.signature import signature
from engine.rule import Rule, Sample, Shapes, Statistic

__all__ = ["RULES", "einsum_layer", "in_float64", "or_layer"]


@dataclass(frozen=True, eq=False)
class Layer:
    """A product that acts as a layer.

    Attributes:
        contraction: how it contracts channels.
        moved: the output dimension of each input dimension; None for that of the channels.
        running: stack dimensions of the weight that the input has too, with those of the input (a matrix per head).
    """

    contraction: Contraction
    moved: tuple[int | None, ...]
    running: Mapping[int, int] = field(default_factory=dict)

    @property
    def order(self) -> list[int]:
        """The output dimension of each input dimension, including that of the channels."""
        return [self.contraction.output_dim if d is None else d for d in self.moved]


Describe = Callable[[Node], Layer | None]


def _product(node: Node) -> Layer | None:
    """A product with exactly one stored factor; None for products of activations, and for scaled sums."""
    *bias, a, b = node.inputs
    left, right = matrix_of(a), matrix_of(b)
    if (left and right) or node.args.get("alpha", 1) != 1 or node.args.get("beta", 1) != 1:
        return None
    if right is not None:
        return _described(node, right, b, a, a.ndim - 1, bias[0] if bias else None)
    # A matrix in front of its input is one selected per token; otherwise it may mix tokens, and is not a layer.
    return _described(node, left, a, b, b.ndim - 2, None) if left and None in left.dims and not bias else None


def _described(node: Node, matrix: Matrix, weight: Value, x: Value, input_dim: int, bias: Value | None) -> Layer | None:
    """Describe a product, where the weight's stack dimensions are matched with those of the input."""
    stack, output = matrix.dims[:-2], node.output
    last = input_dim == x.ndim - 1
    alike = x.ndim == weight.ndim and x.shape[:-2] == weight.shape[:-2] if stack else weight.ndim == 2
    if matrix.first is None or not alike or any(d is not None and d >= matrix.stacked for d in stack):
        return None
    if bias is not None and (bias.name is None or bias.shape != output.shape[-1:]):
        return None
    output_dim = output.ndim - 1 if last else output.ndim - 2
    stacked = matrix.stacked
    transposed = matrix.first if last else not matrix.first
    c = Contraction(x, matrix.weight, bias, output, input_dim, output_dim, 1, transposed, stacked > 0, stacked)
    moved = tuple(None if d == input_dim else d for d in range(x.ndim))
    return Layer(c, moved, {place: d for d, place in enumerate(stack) if place is not None})


def einsum_layer(node: Node) -> Layer | None:
    """An einsum with a stored matrix: one letter is summed over, one is new, all others propagate."""
    inputs, arrow, output = node.args["equation"].replace(" ", "").partition("->")
    terms, values = inputs.split(","), node.args["tensors"]
    matrices = [matrix_of(value) for value in values]
    if not arrow or len(terms) != 2 or len([m for m in matrices if m]) != 1:
        return None
    place = 0 if matrices[0] else 1
    matrix, x, own = matrices[place], values[1 - place], terms[place]
    term, result = spelled(terms[1 - place], x), spelled(output, node.output)
    inner, outer = set(term) & set(own) - set(result), set(own) - set(term)
    plain = all(len(set(letters)) == len(letters) for letters in (term, own, result)) and "." not in own
    if matrix is None or not plain or len(inner) != 1 or len(outer) != 1 or set(term) - inner != set(result) - outer:
        return None
    (summed,), (new,) = inner, outer
    of = dict(zip(own, matrix.dims, strict=True))
    if {of[summed], of[new]} != {matrix.stacked, matrix.stacked + 1}:
        return None
    first, stack = of[new] == matrix.stacked, matrix.stacked
    places = term.index(summed), result.index(new)
    c = Contraction(x, matrix.weight, None, node.output, *places, 1, not first, stack > 0, stack)
    running = {d: term.index(letter) for letter, d in of.items() if d is not None and letter not in (summed, new)}
    return Layer(c, tuple(None if letter == summed else result.index(letter) for letter in term), running)


def _sorted_product(node: Node) -> Layer | None:
    """The product of tokens, sorted by expert, and the matrices of their experts."""
    x, weight = node.inputs[:2]
    matrix = matrix_of(weight)
    if matrix is None or matrix.first is None or x.ndim != 2 or matrix.dims[:-2] != (0,) or len(node.inputs) > 3:
        return None
    return Layer(Contraction(x, matrix.weight, None, node.output, 1, 1, 1, matrix.first, True, 1), (0, None))


# ---------------------------------------------------------------- common to all


def _layer_labels(node: Node, labels: Labels, layer: Layer) -> None:
    """Propagate dimensions other than the channels; a matrix per index of one is removed together with the index."""
    c = layer.contraction
    labels.along(c.input, c.input_dim)
    for array in labels.layers(c.input):
        if array.size(c.input_dim) == 1:
            labels.add(c.output, _passed(array, layer))
    contract(node, labels, c, layer.running)
    for place, dim in layer.running.items():
        slots = labels.along(c.input, dim)
        if slots is None:
            labels.fix(c.weight, place)
        else:
            labels.add(c.weight, slots.view([-1 if d == place else 1 for d in range(c.weight.ndim)]))


def _passed(array: Tensor, layer: Layer) -> Tensor:
    """Permute an array of the input that does not depend on channels to the output's dimensions."""
    return array.permute(*(layer.order.index(d) for d in range(array.ndim)))


def _constants(node: Node, constants: Constants, layer: Layer, other: Rule) -> Sequence[Tensor]:
    """The constants per channel, and zero at an index whose matrix is zero."""
    arrays = output_constants(node, constants, layer.contraction)
    product = other.constants(node, constants) if layer.running else None
    return arrays if product is None else [torch.where(product[0] == 0, 0.0, arrays[0])]


def _macs(shapes: Shapes, c: Contraction) -> int:
    return math.prod(shapes(c.output)) * shapes(c.input)[c.input_dim]


def or_layer(other: Rule, describe: Describe = _product) -> Rule:
    """Return the rule of a product that is a layer if one of its factors is stored (``x @ self.weight``).

    Args:
        other: rule for all other products.
        describe: returns the layer that a product is, or None.
    """
    layer_of = once(describe)

    def labels(node: Node, labels: Labels) -> None:
        layer = layer_of(node)
        other.labels(node, labels) if layer is None else _layer_labels(node, labels, layer)

    def constants(node: Node, constants: Constants) -> Sequence[Tensor] | None:
        layer = layer_of(node)
        return other.constants(node, constants) if layer is None else _constants(node, constants, layer, other)

    def use(node: Node, use: Use) -> None:
        layer = layer_of(node)
        other.use(node, use) if layer is None else used(node, use, layer.contraction, layer.order)

    def macs(node: Node, shapes: Shapes) -> int:
        layer = layer_of(node)
        return other.macs(node, shapes) if layer is None else _macs(shapes, layer.contraction)

    def inner(node: Node) -> Sequence[Contraction]:
        layer = layer_of(node)
        return other.inner(node) if layer is None else (layer.contraction,)

    def only_zeros(node: Node) -> Iterable[Statistic]:
        return other.only_zeros(node) if layer_of(node) is None else ()

    def samples() -> Iterable[Sample]:
        yield from other.samples()
        yield from _samples(other.ops)

    return replace(
        other,
        labels=labels,
        constants=constants,
        use=use,
        macs=macs,
        inner=inner,
        only_zeros=only_zeros,
        samples=samples,
    )


# ---------------------------------------------------------------- samples


class Product(nn.Module):
    """A layer written as a product by the function ``op``; ``turned``: with its matrix transposed."""

    def __init__(self, inputs: int, outputs: int, op: str, turned: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) if turned else torch.randn(inputs, outputs))
        self.bias, self.op, self.turned = nn.Parameter(torch.randn(outputs)), op, turned

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x @ weight + bias``."""
        weight = self.weight.T if self.turned else self.weight
        if self.op == "addmm":
            rows = torch.addmm(self.bias, x.flatten(0, -2), weight)
            return rows.view(*x.shape[:-1], rows.shape[-1])
        return (torch.mm if self.op == "mm" else torch.matmul)(x, weight) + self.bias


class Summed(nn.Module):
    """A layer written as an einsum with its matrix."""

    def __init__(self, equation: str, *shape: int) -> None:
        super().__init__()
        self.equation, self.weight = equation, nn.Parameter(torch.randn(*shape))

    def forward(self, x: Tensor) -> Tensor:
        """Return the einsum of the tokens and the matrix."""
        return torch.einsum(self.equation, x, self.weight)


def _summed(equation: str) -> nn.Module:
    shape = (8, 6) if "io" in equation else (6, 8)
    back = [Apply(lambda x: x.transpose(0, 2))] if equation.endswith("otb") else []
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), Summed(equation, *shape), *back, nn.ReLU(), nn.Linear(6, 3))


class Heads(nn.Module):
    """A matrix for each head, applied to the output of one layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.first, self.last = heads, nn.Linear(width, 2 * width), nn.Linear(heads * 3, 3)
        self.weight = nn.Parameter(torch.randn(heads, 2 * width // heads, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Return scores, (batch, 3)."""
        heads = self.first(x).view(len(x), self.heads, -1).transpose(0, 1)
        output: Tensor = self.last(torch.bmm(heads, self.weight).transpose(0, 1).flatten(1))
        return output


class Experts(nn.Module):
    """Route each token to the two of four gated experts with the largest router weights.

    Args:
        width: number of features of the tokens.
        units: number of hidden units of each expert.
        turned: whether matrices store the input dimension first.
        front: whether matrices are the left factor.
    """

    def __init__(self, width: int, units: int, turned: bool = False, front: bool = False) -> None:
        super().__init__()
        self.first, self.router, self.last = nn.Linear(5, width), nn.Linear(width, 4), nn.Linear(width, 3)
        self.turned, self.front = turned, front
        shapes = ((width, 2 * units), (units, width))
        both = [torch.randn(4, *(shape if turned else shape[::-1])) for shape in shapes]
        self.gate_up_proj, self.down_proj = map(nn.Parameter, both)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores for each token, (tokens, 3)."""
        x = self.first(x)
        scores, experts = self.router(x).softmax(-1).topk(2)
        tokens, expert = x.repeat_interleave(2, 0), experts.reshape(-1)
        gate, up = self._picked(tokens, self.gate_up_proj[expert]).chunk(2, -1)
        y = self._picked(torch.sigmoid(gate) * up, self.down_proj[expert]) * scores.reshape(-1, 1)
        output: Tensor = self.last(torch.tanh(x + y.view(len(x), 2, -1).sum(1)))
        return output

    def _picked(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.front:
            return torch.bmm(weight.mT if self.turned else weight, x[:, :, None])[:, :, 0]
        return torch.bmm(x[:, None], weight if self.turned else weight.mT)[:, 0]


def _samples(ops: Iterable[str]) -> Iterable[Sample]:
    for op, turned in itertools.product(sorted({"addmm", "matmul", "mm"} & set(ops)), (False, True)):
        yield Sample(
            lambda op=op, turned=turned: nn.Sequential(  # type: ignore[misc]
                nn.Linear(5, 8), Product(8, 6, op, turned), nn.ReLU(), nn.Linear(6, 3)
            ),
            (2, 5) if op == "mm" else (2, 4, 5),
            f"layer by {op}{' with a transpose' * turned}",
        )
    for equation in ("bti,oi->bto", "...i,io->...o", "bti,oi->otb") if "einsum" in ops else ():
        yield Sample(lambda e=equation: _summed(e), (2, 4, 5), f"layer by einsum {equation}")  # type: ignore[misc]
    if "bmm" in ops:
        yield Sample(lambda: Heads(4, 4), (3, 4), "a matrix per head")
        for turned, front in ((False, False), (True, False), (False, True)):
            where = f"{'inputs first' if turned else 'outputs first'}, {'in front' if front else 'behind'}"
            yield Sample(lambda t=turned, f=front: Experts(6, 4, t, f), (3, 5), f"experts, {where}")  # type: ignore[misc]


# ---------------------------------------------------------------- sorted tokens


def _sorted_labels(node: Node, labels: Labels) -> None:
    for value in (*node.inputs, *node.outputs):
        labels.freeze(value, f"the matrices of {node!r} are computed")


def _aligned(rule: Rule) -> Rule:
    """Keep rows of matrices at multiples of 16 bytes, as the kernel requires."""

    def labels(node: Node, labels: Labels) -> None:
        rule.labels(node, labels)
        x, step = node.inputs[0], 16 // max(node.inputs[0].dtype.itemsize, 1)
        layer = _sorted_product(node)
        if layer is None or step < 2 or x.dtype == torch.float64:  # not supported by the kernel
            return
        c = layer.contraction
        for value, dim in ((c.input, c.input_dim), *([(c.output, c.output_dim)] if c.transposed else [])):
            slots = labels.along(value, dim)
            if slots is not None and len(slots) % step == 0:
                labels.constraints.append(Multiple(slots, step))

    return replace(rule, labels=labels)


def _by_expert(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """Multiply the rows up to each offset by the next matrix; rows behind the last offset are zero."""
    products, start = x.new_zeros(len(x), weight.size(2)), 0
    for expert, end in enumerate(offs.tolist()):
        products[start:end] = x[start:end] @ weight[expert]
        start = end
    return products


def in_float64(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Compute in float64 an op that has no float64 kernel; None for all other ops.

    Args:
        func: overload of an op.
        args, kwargs: its arguments.
    """
    if signature(func).op != "_grouped_mm" or args[0].dtype != torch.float64:
        return None
    arguments = dict(zip(("x", "weight", "offs"), args, strict=False)) | {
        k: v for k, v in kwargs.items() if v is not None
    }
    if arguments.keys() != {"x", "weight", "offs"} or arguments["x"].ndim != 2:
        return None
    return _by_expert(**arguments) if arguments["weight"].ndim == 3 else _of_each_expert(**arguments)


def _of_each_expert(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """Multiply columns by rows up to each offset, which gives a matrix each: gradients of the matrices."""
    ends = offs.tolist()
    return torch.stack([x[:, start:end] @ weight[start:end] for start, end in zip([0, *ends], ends, strict=False)])


_SORTED = or_layer(Rule((), _sorted_labels), _sorted_product)

RULES = [
    replace(_aligned(_SORTED), ops=("_grouped_mm",)),
    replace(_SORTED, ops=("transformers::grouped_mm_fallback",)),
]
