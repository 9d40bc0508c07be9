"""Compare the rule of a call with its op, by brute force over the indices that could be removed.

Four questions are answered by running the op itself on random numbers:

- *labels*: if slots are cut from the inputs, is the output the full output with the same slots cut?
- *constants*: do outputs that the rule declares constant have these values, whatever varies?
- *use*: can entries that the rule declares unused take any value without changing a used output?
- *frozen*: which cuts of inputs lead to a cut output although the rule freezes them?

A rule that fails one of the first three is wrong. The last is a missed opportunity, and reported as such. The approach
follows ``torch.distributed.tensor._ops.strategy_validation``, which checks sharding rules in the same way.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.analysis.constants import Constants
from engine.analysis.constraints import closed
from engine.analysis.labels import Labels
from engine.analysis.use import Use
from engine.checking.isolated import Call, Tensors, run
from engine.errors import RuleError
from engine.program.expressions import AttributeOf, evaluate
from engine.program.graph import Node, Value
from engine.removal.propagate import Structure, resolve
from engine.removal.shrink import Shrunk
from engine.rule import Demand, Registry

__all__ = ["Pattern", "check_call", "close", "combinations", "structure_of_call", "subsets"]

_SUBSETS, _RANDOM, _PATTERNS, _DRAWS = 14, 6, 8, 2
Pattern = Mapping[Value, tuple[int, ...]]
"""Input -> dimensions with slots."""


# ---------------------------------------------------------------- candidates for slots and cuts


def _dims(call: Call, value: Value) -> list[int]:
    """Dimensions larger than 1, except the batch."""
    start = 1 if value.shape[:1] == (call.batch,) and not value.stored else 0
    return [d for d in range(start, value.ndim) if value.shape[d] > 1]


def combinations(call: Call, values: Sequence[Value]) -> Iterator[Pattern]:
    """Yield choices of at most one dimension per input, all of the same size; those with few inputs first."""
    places = [[None, *_dims(call, v)] for v in values]
    chosen: list[Pattern] = [
        {v: (d,) for v, d in zip(values, pick, strict=True) if d is not None} for pick in itertools.product(*places)
    ]
    alike = [c for c in chosen if c and len({v.shape[d] for v, (d,) in c.items()}) == 1]
    yield from sorted(alike, key=len)


def _patterns(call: Call) -> list[Pattern]:
    patterns: list[Pattern] = list(combinations(call, call.activations))[:_PATTERNS]
    return [*patterns, {v: tuple(_dims(call, v)) for v in call.activations}]


def subsets(size: int, generator: torch.Generator, blocks: bool = False) -> Iterator[list[int]]:
    """Yield proper, non-empty subsets of ``range(size)``: all if there are few, otherwise singletons and random ones.

    With ``blocks``, also yield runs and strides of every length that divides the size.
    """
    if 2**size - 2 <= _SUBSETS:
        yield from sorted(([i for i in range(size) if bits >> i & 1] for bits in range(1, 2**size - 1)), key=len)
        return
    for length in (n for n in range(1, size if blocks else 2) if size % n == 0):
        yield from (list(range(start, start + length)) for start in range(0, size, length))
        yield from (list(range(start, size, size // length)) for start in range(size // length) if length > 1)
    for _ in range(_RANDOM):
        chosen = (torch.rand(size, generator=generator) < 0.5).nonzero()[:, 0].tolist()
        if 0 < len(chosen) < size:
            yield chosen


def structure_of_call(call: Call, pattern: Pattern, rules: Registry) -> Structure:
    """Run the label rule of a call with slots along the dimensions in the pattern, all of them removable."""
    labels = Labels(call.graph)
    for value, dims in pattern.items():
        for layer in labels.fresh(value, dims):
            labels.add(value, layer)
    try:
        rules.of(call.node).labels(call.node, labels)
    except Exception as error:
        axes_text = ", ".join(f"{call.name(v)} {list(dims)}" for v, dims in pattern.items() if dims) or "no input"
        raise _wrong(
            call, "labels", f"with slots along {axes_text} they raise {type(error).__name__}: {error}"
        ) from error
    labels.born.append(torch.arange(1, len(labels.slots)))
    labels.make_rectangular()
    return resolve(labels, rules)


# ---------------------------------------------------------------- labels


def _check_labels(call: Call, pattern: Pattern, rules: Registry, generator: torch.Generator) -> None:
    if call.node.target is None:
        return  # it repeats the numbers of other calls
    structure = structure_of_call(call, pattern, rules)
    spans = [*_zeroed(call, rules)]
    values = (*call.inputs, *call.node.outputs)
    layers = [layer.reshape(-1) for v in values for layer in structure.of(v)]
    present = torch.cat(layers).unique() if layers else torch.zeros(0, dtype=torch.long)
    slots = present[structure.free()[present]]
    statistic = rules.of(call.node).statistic
    spanned = None if statistic is None else statistic(call.node)
    if spanned is not None and structure.along(spanned.input, spanned.dim) is not None:
        return  # another class takes over when channels are removed: `engine.check_rule` compares whole networks
    for subset in subsets(len(slots) + 1, generator):  # the last index stands for no slot, so that all can be removed
        keep = torch.ones(len(structure.roots), dtype=torch.bool)
        keep[slots[[i for i in subset if i < len(slots)]]] = False
        keep = closed(structure.constraints, keep, lambda: torch.zeros(len(structure.roots)))
        shrunk = Shrunk(structure, keep)
        if not keep[slots].all() and all(0 not in shrunk.shape(v) for v in values):  # in a network, something remains
            _compare_cut(call, shrunk, spans, rules, generator)


def _zeroed(call: Call, rules: Registry) -> Iterator[tuple[Value, int]]:
    """Yield (value, dimension) that can be cut only where it is zero or folded."""
    for c in rules.contractions(call.node):
        if not c.hidden:
            yield c.input, c.input_dim
    for span in rules.of(call.node).only_zeros(call.node):
        yield span.input, span.dim


def _compare_cut(
    call: Call, shrunk: Shrunk, spans: Sequence[tuple[Value, int]], rules: Registry, generator: torch.Generator
) -> None:
    node, full = call.node, call.random(generator)
    if rules.of(node).contraction is None and rules.contractions(node):  # an inner unit without rows is zero
        full.update((v.index, full[v.index] * m) for v in call.inputs if (m := shrunk.mask(v)) is not None)
    for value, dim in spans:
        is_kept = shrunk.indices(value, dim)
        if is_kept is not None:
            shape = [-1 if d == dim else 1 for d in range(value.ndim)]
            full[value.index] = full[value.index] * is_kept.view(shape)
    numbers = _numbers(node, shrunk, rules)
    if any(d.expr is not None and evaluate(d.expr, shrunk.shape, _no_attribute) != d.wanted for d in numbers):
        return  # the surrounding code is edited in this case; whole networks show whether that is right
    try:
        inputs = _corrected(call, full, shrunk, rules)
        parts = {v.index: _part(shrunk, v, inputs[v.index]) for v in call.inputs}
        wanted = [_part(shrunk, v, t) for v, t in zip(node.outputs, run(node, full), strict=True)]
        outputs = run(node, parts, [d for d in numbers if d.expr is None])
    except (RuntimeError, IndexError, ValueError) as error:
        raise _wrong(call, "labels", f"{_cut_text(shrunk, call)} it cannot run: {error}") from error
    if len(outputs) != len(wanted):
        raise _wrong(call, "labels", f"{_cut_text(shrunk, call)} it has {len(outputs)} outputs, not {len(wanted)}")
    for value, a, b in zip(node.outputs, wanted, outputs, strict=True):
        if a.shape != b.shape or not close(a, b):
            what = f"output {value.index - len(call.inputs)} is {_difference(a, b)}"
            raise _wrong(call, "labels", f"{_cut_text(shrunk, call)} {what}")


def _corrected(call: Call, full: Tensors, shrunk: Shrunk, rules: Registry) -> dict[int, Tensor]:
    """Return the inputs with the corrections for removed parts."""
    inputs = dict(full)
    for value, delta in rules.of(call.node).rare.corrections(call.node, lambda v: full[v.index], shrunk.mask):
        inputs[value.index] = full[value.index] + delta.to(full[value.index].dtype)
    return inputs


def _no_attribute(expr: AttributeOf) -> int:
    raise RuleError(f"An op takes a number from the attribute {expr.name!r} by itself.")


def _part(shrunk: Shrunk, value: Value, tensor: Tensor) -> Tensor:
    mask = shrunk.mask(value)
    return tensor if mask is None else tensor[mask.expand(value.shape)].reshape(shrunk.shape(value))


def _numbers(node: Node, shrunk: Shrunk, rules: Registry) -> list[Demand]:
    """Return new values of numeric arguments: the rule's demands, and numbers that follow an attribute."""
    rule = rules.of(node)
    wanted = list(rule.demands(node, shrunk.indices, shrunk.shape))
    before, after = rule.attributes(node, lambda value: value.shape), rule.attributes(node, shrunk.shape)
    names = [name for name, old in before.items() if node.args.get(name) == old]
    return wanted + [Demand((name, 0), before[name], after[name]) for name in names]


def close(a: Tensor, b: Tensor) -> bool:
    """Whether two results are equal up to rounding."""
    dtype = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    return torch.allclose(a.to(dtype), b.to(dtype), rtol=1e-9, atol=1e-9, equal_nan=True)


def _difference(a: Tensor, b: Tensor) -> str:
    if a.shape != b.shape:
        return f"of shape {tuple(b.shape)} instead of {tuple(a.shape)}"
    return f"off by {float((a.double() - b.double()).abs().nan_to_num(math.inf).max()):.1e}"


def _cut_text(shrunk: Shrunk, call: Call) -> str:
    cuts = [
        f"{call.name(v)} {[d for d in range(v.ndim) if shrunk.shape(v)[d] < v.shape[d]]}"
        for v in call.inputs
        if shrunk.shape(v) != v.shape
    ]
    return f"cut along {', '.join(cuts) or 'no input'},"


def _wrong(call: Call, kind: str, what: str) -> RuleError:
    shapes = ", ".join(f"{call.name(v)} {list(v.shape)}" for v in call.inputs)
    return RuleError(f"The {kind} of {call.node.op} ({shapes}) are wrong: {what}.")


# ---------------------------------------------------------------- constants and use


def _assumed(
    call: Call, pattern: Pattern, rules: Registry, generator: torch.Generator
) -> tuple[Constants, dict[int, Tensor]]:
    """Make some entries of each input constant, and some rows of stored inputs zero.

    Returns:
        The rule's constants, and the data of each input, NaN where an activation varies.
    """
    assumed = dict(call.tensors)
    for value in call.inputs:
        if value.stored and value.dtype.is_floating_point:
            zeroed = assumed[value.index] * (_row(value, range(value.ndim), generator) > 0.3)
            assumed[value.index] = (
                assumed[value.index] if (assumed[value.index] > 0).all() else zeroed
            )  # not a variance
    stored = {v.name: assumed[v.index] for v in call.inputs if v.name is not None}
    outside = Constants(replace(call.graph, nodes=()), rules, stored)
    for value in call.activations:
        array = torch.full([1] * value.ndim, math.nan, dtype=torch.float64)
        if pattern.get(value):
            array = _some_constant(_row(value, pattern[value], generator), value.dtype.is_floating_point)
            array = array.to(value.dtype).double()
        outside.assume(value, array)
        assumed[value.index] = array.expand(value.shape)
    return Constants(call.graph, rules, stored, base=outside), assumed


def _row(value: Value, dims: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return random numbers in [0, 1) along one of the dimensions."""
    dim = dims[int(torch.randint(len(dims), (), generator=generator))] if len(dims) else -1
    return torch.rand([n if d == dim else 1 for d, n in enumerate(value.shape)], generator=generator).double()


def _some_constant(draw: Tensor, number: bool) -> Tensor:
    """A third varies, a third is zero, a third has other values."""
    other = (draw - 0.8) * 5 if number else torch.ones_like(draw)
    return torch.where(draw < 1 / 3, math.nan, torch.where(draw < 2 / 3, 0.0, other))


def _drawn(call: Call, assumed: Mapping[int, Tensor], generator: torch.Generator) -> dict[int, Tensor]:
    """Fill in random numbers where inputs vary."""
    inputs = dict(assumed)
    for value in call.activations:
        array = assumed[value.index]
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        noise = noise if value.dtype.is_floating_point else (noise > 0).double()
        inputs[value.index] = torch.where(array.isnan(), noise, array).to(value.dtype)
    return inputs


def _check_constants(call: Call, pattern: Pattern, rules: Registry, generator: torch.Generator) -> None:
    constants, assumed = _assumed(call, pattern, rules, generator)
    for _ in range(_DRAWS):
        for value, output in zip(call.node.outputs, run(call.node, _drawn(call, assumed, generator)), strict=True):
            array = constants[value]
            if any(n not in (1, have) for n, have in zip(array.shape, output.shape, strict=True)):
                raise _wrong(call, "constants", f"of shape {tuple(array.shape)} for {tuple(output.shape)}")
            array = array.expand(output.shape)
            fixed = array == 0 if constants.has_profile(value) else ~array.isnan()
            if not close(array[fixed], output[fixed]):
                raise _wrong(call, "constants", f"a constant entry is {_difference(array[fixed], output[fixed])}")


def _check_use(call: Call, pattern: Pattern, rules: Registry, generator: torch.Generator) -> None:
    node, structure = call.node, structure_of_call(call, pattern, rules)
    constants, assumed = _assumed(call, pattern, rules, generator)
    use = Use(structure, constants)
    for value in node.outputs:
        use.add(value, torch.rand(use.shape(value), generator=generator) < 0.5)
    rules.of(node).use(node, use)
    before = _drawn(call, assumed, generator)
    other = _drawn(call, assumed, generator)
    after = dict(before)
    for value in call.activations:
        after[value.index] = torch.where(use[value].expand(value.shape), before[value.index], other[value.index])
    for value, a, b in zip(node.outputs, run(node, before), run(node, after), strict=True):
        used = use[value].expand(a.shape)
        if not close(a[used], b[used]):
            raise _wrong(call, "use", f"an unused entry changes a used output ({_difference(a[used], b[used])})")


def check_call(call: Call, rules: Registry, generator: torch.Generator) -> None:
    """Check labels, constants and use of a rule on one call.

    Raises:
        RuleError: if any of them is wrong, naming the arguments and the difference.
    """
    for pattern in _patterns(call):
        _check_labels(call, pattern, rules, generator)
        _check_constants(call, pattern, rules, generator)
        _check_use(call, pattern, rules, generator)
