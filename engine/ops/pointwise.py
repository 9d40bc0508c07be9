"""Point-wise ops with broadcasting: all operands keep the same channels.

Ops are listed by their effect on constants. Any function of constants is constant; a product is zero where either
factor is, and a choice where both entries are the same; of comparisons, those of zeros are followed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.analysis.constants import Constants, varies_where
from engine.analysis.labels import Labels
from engine.analysis.use import Use
from engine.ops.samples import Apply, chain, residual
from engine.ops.shape import expanded, shape_rule, through
from engine.program.arrays import align, support, zero_where
from engine.program.graph import Node, Value
from engine.rule import Rule, Sample

__all__ = ["RULES", "broadcast_labels"]

# One tensor in, the same function applied to every entry.
UNARY = """
    abs acos acosh asin asinh atan atanh ceil celu clamp clamp_max clamp_min cos cosh elu erf erfc exp exp2 expm1 floor
    frac gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu log log10 log1p log2 log_sigmoid logit mish
    nan_to_num neg negative reciprocal relu relu6 round rrelu rsqrt rsub selu sigmoid sign silu sin sinh softplus
    softshrink sqrt square tan tanh threshold trunc
""".split()

# Several tensors in, a function of corresponding entries.
COMBINING = """
    add addcdiv addcmul atan2 copysign fmax fmin floor_divide fmod hypot lerp maximum minimum pow prelu remainder sub
    subtract xlogy
""".split()

# Zero where either factor is zero, unless the other is known not to be finite.
PRODUCTS = "mul multiply".split()

# Zero where the dividend is zero, unless the divisor is known to be zero.
QUOTIENTS = "div divide true_divide".split()

# Known where all operands are zero: what rounding makes of another constant may be on the other side.
COMPARISONS = "eq ge gt le lt ne".split()

# The constants of the result are not followed.
OPAQUE = """
    __and__ __iand__ __ior__ __ixor__ __or__ __xor__ bitwise_and bitwise_not bitwise_or bitwise_xor isfinite isinf isnan
    logical_and logical_not logical_or logical_xor
""".split()

# One of two entries, as a condition says.
CHOICES = "masked_fill where".split()

# Their value at zero depends on the sign of the zero, which is unknown.
SIGNED = "atan2 copysign".split()

# The identity in eval mode. In train mode zero stays zero; other values are scaled or replaced at random.
DROPOUT = "dropout feature_dropout".split()


def _placed(node: Node, value: Value) -> Value | None:
    """A weight per channel (`prelu`) is aligned with dimension 1; other operands broadcast from the right."""
    return value if node.op == "prelu" and value is node.args["weight"] and value.shape not in ((), (1,)) else None


def _lift(node: Node, value: Value, array: Tensor) -> Tensor:
    ndim = node.output.ndim
    return array.view([-1 if d == 1 else 1 for d in range(ndim)]) if _placed(node, value) else align(array, ndim)


def _lifted_shape(node: Node, value: Value) -> list[int]:
    ndim = node.output.ndim
    if _placed(node, value):
        return [value.shape[0] if d == 1 else 1 for d in range(ndim)]
    return [1] * (ndim - value.ndim) + list(value.shape)


def broadcast_labels(node: Node, labels: Labels) -> None:
    """Tie operands. A stored operand without slots adopts those it meets; any other freezes the dimension."""
    target = node.output
    for value in node.inputs:
        labels.claim(value)
        for layer in labels.layers(value):
            labels.add(target, _lift(node, value, layer))
    for value in node.inputs:
        slotted_dims = {d for layer in labels.layers(value) for d in support(_lift(node, value, layer))}
        fixed = {d for d, size in enumerate(_lifted_shape(node, value)) if size > 1} - slotted_dims
        labels.hold(target, fixed, f"{node!r} combines it with a tensor of fixed size")


def _arrays(node: Node, constants: Constants) -> dict[int, Tensor]:
    return {value.index: _lift(node, value, constants.plain(value)) for value in node.inputs}


def _functional(node: Node, arrays: dict[int, Tensor]) -> Tensor:
    """Call the out-of-place op on arrays instead of its tensors; of complex results only the zeros are known."""

    def swap(item: Any) -> Any:
        return arrays[item.index] if isinstance(item, Value) else item

    required = node.target._schema.arguments
    positional = [swap(node.args[a.name]) for a in required if not a.kwarg_only and a.name in node.args]
    keywords = {a.name: swap(node.args[a.name]) for a in required if a.kwarg_only and a.name in node.args}
    keywords = {name: item for name, item in keywords.items() if name not in ("generator", "out")}
    result: Tensor = getattr(torch.ops.aten, node.op)(*positional, **keywords)
    return zero_where(result == 0) if result.is_complex() else result


def _at_zero(node: Node) -> float:
    """The value of a unary function at zero."""
    key = (node.op, *((name, item) for name, item in node.args.items() if not isinstance(item, Value)))
    if key not in _AT_ZERO:
        _AT_ZERO[key] = float(_functional(node, {node.inputs[0].index: torch.zeros(1, dtype=torch.float64)}))
    return _AT_ZERO[key]


_AT_ZERO: dict[Hashable, float] = {}


def _of_zeros(node: Node, constants: Constants) -> Tensor | None:
    """A unary function of a value that is zero wherever it does not vary; None for any other."""
    if len(node.inputs) != 1 or not constants.only_zeros(node.inputs[0]):
        return None
    array, zero_value = constants[node.inputs[0]], _at_zero(node)
    return array if zero_value == 0 else array + zero_value


def _combined(node: Node, constants: Constants) -> Sequence[Tensor]:
    if node.op == "add" and len(node.inputs) == 2 and all(map(constants.only_zeros, node.inputs)):
        first, second = (_lift(node, value, constants[value]) for value in node.inputs)
        return [first + second]  # ``0 + alpha * 0``; NaN stays NaN where it varies
    easy = None if node.op == "rrelu" else _of_zeros(node, constants)
    if easy is not None:
        return [easy]
    arrays = _arrays(node, constants)
    if node.op in ("add", "sub"):  # NaN propagates
        return [_functional(node, arrays)]
    if node.op == "prelu":
        x, weight = (arrays[node.args[k].index] for k in ("self", "weight"))
        return [varies_where((x, weight), torch.where(x > 0, x, x * weight))]
    if node.op == "rrelu" and node.args["training"]:
        return [torch.full([1] * node.output.ndim, math.nan)]
    array = varies_where(list(arrays.values()), _functional(node, arrays))
    for operand in arrays.values() if node.op in SIGNED else ():
        array = torch.where(operand == 0, math.nan, array)
    return [array]


def _zero_with(node: Node, constants: Constants, factors: Sequence[Value]) -> Sequence[Tensor]:
    absorbed = [value for value in factors if _beside_finite(node, value, constants)]
    if absorbed and len(absorbed) == len(node.inputs) and all(map(constants.only_zeros, factors)):
        zeros = [_lift(node, value, constants[value]) == 0 for value in node.inputs]
        return [torch.where(functools.reduce(torch.logical_or, zeros), 0.0, math.nan)]
    arrays = _arrays(node, constants)
    result = varies_where(list(arrays.values()), _functional(node, arrays))
    for value in absorbed:
        zero = _lift(node, value, constants.zero(value))
        result = torch.where(zero, 0.0, result)
    return [result]


def _beside_finite(node: Node, value: Value, constants: Constants) -> bool:
    """Whether no other operand is known to be infinite: zero times infinity is not zero."""
    numbers = [item for item in node.args.values() if isinstance(item, (int, float))]
    return all(map(math.isfinite, numbers)) and all(constants.finite(v) for v in node.inputs if v is not value)


def _product(node: Node, constants: Constants) -> Sequence[Tensor]:
    return _zero_with(node, constants, node.inputs)


def _quotient(node: Node, constants: Constants) -> Sequence[Tensor]:
    dividend, divisor = node.args["self"], node.args["other"]
    arrays = _zero_with(node, constants, [dividend] if isinstance(dividend, Value) else [])
    if not isinstance(divisor, Value):
        return arrays
    nowhere = _lift(node, divisor, constants.at_present(divisor)) == 0
    return [torch.where(nowhere, math.nan, arrays[0])]


def _dropped(node: Node, constants: Constants) -> Sequence[Tensor]:
    array = constants.plain(node.inputs[0])
    return [torch.where(array == 0, array, math.nan) if node.args["train"] else array]


def _used(node: Node, use: Use) -> None:
    for value in node.inputs:
        use.add(value, _lower_used(node, value, use[node.output]))


def _lower_used(node: Node, value: Value, used: Tensor) -> Tensor:
    return used.transpose(0, 1).flatten(1).any(1) if _placed(node, value) else used


def _finds_places(node: Node) -> bool:
    """Whether the node is ``where(condition)``, which returns as many indices as the condition holds at."""
    return node.op == "where" and "self" not in node.args


def _choice_labels(node: Node, labels: Labels) -> None:
    if _finds_places(node):
        labels.freeze(node.inputs[0], f"{node!r} counts its entries")
    else:
        broadcast_labels(node, labels)


def _compared(node: Node, constants: Constants) -> Sequence[Tensor] | None:
    numbers = [item for item in node.args.values() if isinstance(item, (int, float))]
    if any(0 < abs(number) < _ROUNDED_TO_ZERO for number in numbers):
        return None
    zero = torch.zeros(1, dtype=torch.float64)
    outcome = float(_functional(node, {value.index: zero for value in node.inputs}))
    zeros = [_lift(node, value, constants.plain(value)) == 0 for value in node.inputs]
    return [torch.where(functools.reduce(torch.logical_and, zeros), outcome, math.nan)]


_ROUNDED_TO_ZERO = 1e-6
"""A smaller number may be zero in half precision."""


def _chosen(node: Node, constants: Constants) -> Sequence[Tensor] | None:
    """Constant where both entries are the same, whichever is chosen."""
    if _finds_places(node):
        return None
    items = node.args["self"], node.args["value" if node.op == "masked_fill" else "other"]
    numbers = (
        torch.full([1] * node.output.ndim, item, dtype=torch.float64) for item in items if not isinstance(item, Value)
    )
    one, other = [*(_lift(node, item, constants.plain(item)) for item in items if isinstance(item, Value)), *numbers]
    return [torch.where(one == other, one, math.nan)]


def _choice_used(node: Node, use: Use) -> None:
    if _finds_places(node):
        use.add_all(node.inputs[0])
    else:
        _used(node, use)


def _product_used(node: Node, use: Use) -> None:
    """A factor is used where the result is and the other factor is not zero."""
    used = use[node.output]
    for value in node.inputs:
        if not use.constants.finite(value):
            use.add(value, used)
        for other in node.inputs:
            if other is not value:
                used_here = used & ~_lift(node, other, use.constants.zero(other))
                use.add(value, used_here)
        if len({id(v) for v in node.inputs}) == 1:
            use.add(value, used)


def _glu_labels(node: Node, labels: Labels) -> None:
    """Tie each gate to the entry that it gates."""
    source, dim = node.inputs[0], node.args["dim"] % node.inputs[0].ndim
    for layer in labels.layers(source):
        if dim in support(layer):
            first, second = layer.chunk(2, dim)
            labels.slots.union(first, second)
            layer = first
        labels.add(node.output, layer)


def _glu_constants(node: Node, constants: Constants) -> Sequence[Tensor]:
    """Zero where the gated half is zero, whatever the gate."""
    source, dim = node.inputs[0], node.args["dim"] % node.output.ndim
    array = constants.plain(source)
    half, gate = array.chunk(2, dim) if array.size(dim) > 1 else (array, array)
    return [torch.where(half == 0, 0.0, varies_where((half, gate), half * gate.sigmoid()))]


def _glu_used(node: Node, use: Use) -> None:
    used, dim = use[node.output], node.args["dim"] % node.output.ndim
    use.add(node.inputs[0], torch.cat([used, used], dim) if used.size(dim) > 1 else used)


def _copied(node: Node, constants: Constants) -> Sequence[Tensor]:
    return [align(constants.plain(node.args["src"]), node.output.ndim)]


def _copy_used(node: Node, use: Use) -> None:
    use.add(node.args["src"], use[node.output])


# Further arguments of the unary ops above, for the sample that covers them all.
_FURTHER = {"clamp": (0.2, 0.7), "clamp_max": (0.7,), "clamp_min": (0.3,), "rsub": (2,), "threshold": (0.3, 0.1)}


def _every_unary(x: Tensor) -> Tensor:
    x = torch.sigmoid(x) * 0.8 + 0.1  # where all of them are finite
    total = torch.zeros_like(x)
    for name in UNARY:
        operand = x + 1 if name == "acosh" else x
        total = total + getattr(torch.ops.aten, name)(operand, *_FURTHER.get(name, ()))
    return total


def _every_combining(x: Tensor, y: Tensor) -> Tensor:
    x, y = torch.sigmoid(x) * 0.8 + 0.1, torch.sigmoid(y) * 0.8 + 0.1
    total = torch.addcdiv(x, x, y) + torch.addcmul(x, x, y) + torch.lerp(x, y, 0.3)
    for name in COMBINING:
        if name not in ("addcdiv", "addcmul", "lerp", "prelu"):
            total = total + getattr(torch.ops.aten, name)(x, y)
    return total


def _choices(x: Tensor, y: Tensor) -> Tensor:
    larger = ((x > y) & (x >= 0) | (y < x - 1) & ~(y <= -1)).logical_xor(x == y).logical_or(x.isnan())
    larger &= larger.bitwise_or(x < 0).bitwise_and(x > -5).bitwise_xor(x > 4) ^ (y > 5)
    larger |= y > 6
    larger ^= y > 7
    larger = larger.logical_and(x != 3).logical_and(y.isfinite()).logical_and(y.isinf().logical_not())
    return torch.where(larger, x, y).masked_fill(x > 0.5, 0.25)


def _unary_samples() -> Iterable[Sample]:
    yield through("every function of one tensor", _every_unary)
    for f in (F.relu, torch.sigmoid, F.gelu, F.hardswish, torch.cos, F.softplus):
        yield through(f.__name__, f)
    yield Sample(lambda: chain(nn.Conv2d(3, 6, 3), nn.ReLU(True), nn.Conv2d(6, 4, 3)), (2, 3, 6, 6), "in place")
    yield through("one minus", lambda x: 1 - x)


def _combining_samples() -> Iterable[Sample]:
    yield _of_two("add", residual)
    yield _of_two("sub", torch.sub)
    yield _of_two("maximum", torch.maximum)
    yield Sample(lambda: chain(nn.Conv2d(3, 8, 3), nn.PReLU(8), nn.Conv2d(8, 4, 3)), (2, 3, 7, 7), "prelu per channel")
    yield Sample(lambda: chain(nn.Conv2d(3, 8, 3), nn.PReLU(), nn.Conv2d(8, 4, 3)), (2, 3, 7, 7), "prelu")
    yield through("prelu with a number", lambda x: F.prelu(x, torch.tensor(0.2).to(x)))
    yield _of_two("every function of two tensors", _every_combining)
    yield through("add in place", lambda x: (x * 1).add_(x).sub_(1.5).div_(2))


def _of_two(name: str, f: Callable[..., Tensor]) -> Sample:
    def make() -> nn.Module:
        return chain(Apply(f, nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 1)), nn.Conv2d(8, 4, 3, padding=1))

    return Sample(make, (2, 3, 6, 6), name)


def _quotient_samples() -> Iterable[Sample]:
    yield _of_two("division", lambda x, y: x / (1 + y * y))
    yield _of_two("its other names", lambda x, y: torch.divide(x, 1 + y * y) + torch.true_divide(x, y.exp()))


def _opaque_samples() -> Iterable[Sample]:
    yield _of_two("choices", _choices)


def _comparison_samples() -> Iterable[Sample]:
    yield through("a straight-through step", lambda x: (x > 0.3).to(x) - x.detach() + x)
    yield through("places of zeros", lambda x: x + (x == 0).to(x) + (x >= -1) * (x <= 2))
    yield _of_two("the larger one", lambda x, y: (x > y).to(x) * 2 + (x != y).to(x) + (x < y).to(x))


def _choice_samples() -> Iterable[Sample]:
    yield through("a leaky ReLU by hand", lambda x: torch.where(x > 0, x, x * 0.1))
    yield through("a choice beside a number", lambda x: torch.where(x > 0.2, torch.where(x < 2, x, 0.0), 0.0))
    yield through("entries filled with zeros", lambda x: x.masked_fill(x < 0.3, 0.0))
    yield through("entries filled with another number", lambda x: x.masked_fill(x < 0.3, 0.5))


def _dropout_samples() -> Iterable[Sample]:
    yield through("dropout", lambda x: F.dropout2d(F.dropout(x, training=False), training=False))


def _product_samples() -> Iterable[Sample]:
    yield Sample(lambda: chain(nn.Conv2d(3, 8, 3), _gate(), nn.Conv2d(8, 4, 3, padding=1)), (2, 3, 6, 6), "gate")
    yield through("square", lambda x: x * x)
    yield through("other names", lambda x: torch.multiply(x, x.sigmoid()))
    yield through("glu", lambda x: F.glu(x, 1), after=4)


def _gate() -> nn.Module:
    squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 4, 1), nn.ReLU(), nn.Conv2d(4, 8, 1), nn.Sigmoid())
    return Apply(lambda gate, x: gate * x, squeeze, nn.Identity())


RULES = [
    Rule(tuple(UNARY), broadcast_labels, _combined, _used, elementwise=1, samples=_unary_samples),
    Rule(tuple(COMBINING), broadcast_labels, _combined, _used, elementwise=1, samples=_combining_samples),
    Rule(tuple(PRODUCTS), broadcast_labels, _product, _product_used, elementwise=1, samples=_product_samples),
    Rule(tuple(QUOTIENTS), broadcast_labels, _quotient, _used, elementwise=1, samples=_quotient_samples),
    Rule(tuple(COMPARISONS), broadcast_labels, _compared, _used, elementwise=1, samples=_comparison_samples),
    Rule(tuple(OPAQUE), broadcast_labels, use=_used, elementwise=1, samples=_opaque_samples),
    Rule(tuple(CHOICES), _choice_labels, _chosen, _choice_used, elementwise=1, samples=_choice_samples),
    Rule(tuple(DROPOUT), broadcast_labels, _dropped, _used, samples=_dropout_samples),
    Rule(("glu",), _glu_labels, constants=_glu_constants, use=_glu_used, elementwise=1),
    Rule(("copy",), broadcast_labels, _copied, _copy_used),
    shape_rule(["expand_as"], expanded, broadcast_labels),  # as if adding the tensor that gives the size
]
