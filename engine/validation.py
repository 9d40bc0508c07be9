"""What a rule says of one call, against what the op does: by brute force over the indices that could go.

Four questions, each answered by running the op itself on random numbers:

- *labels*: does the op, given inputs from which slots are cut, put out its output with the same slots cut?
- *constants*: where the rule knows an output without running the op, is it that, whatever varies?
- *use*: can what the rule calls unused be anything without a used output noticing?
- *frozen*: which cuts of inputs give a cut output, although the rule says that they stay?

The first three make a rule wrong. The last makes it weak, and is a finding. In the manner of
``torch.distributed.tensor._ops.strategy_validation``, which asks the same of sharding rules.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.constants import Constants
from engine.errors import PlanError, RuleError
from engine.graph import Node, Value
from engine.isolated import Call, Tensors, run
from engine.keep import closed
from engine.propagate import Labels, Structure, resolve
from engine.rule import Demand, Registry
from engine.shrink import Shrunk
from engine.sizes import AttributeOf, evaluate
from engine.slices import slice_from_mask
from engine.use import Use

__all__ = ["Freed", "check_call", "freed"]

_SUBSETS, _RANDOM, _PATTERNS, _DRAWS = 14, 6, 8, 2
Pattern = Mapping[Value, tuple[int, ...]]
"""Which dimensions of which inputs have slots."""


@dataclass(frozen=True)
class Freed:
    """Entries that could go, and that a rule holds on to.

    Attributes:
        op: the op.
        axes: the inputs' dimensions that are cut together, counted from the end (``"input -1 + weight -1"``).
        zero: whether they can go only where they are zero.
        reason: the rule's reason to keep them.
    """

    op: str
    axes: str
    zero: bool
    reason: str

    def __str__(self) -> str:
        return f"{self.op}: {self.axes}{' where it is zero' if self.zero else ''} ({self.reason})"


# ---------------------------------------------------------------- what can have slots, and what can be cut


def _dims(call: Call, value: Value) -> list[int]:
    """The dimensions that are larger than 1, and not the batch."""
    start = 1 if value.shape[:1] == (call.batch,) and not value.stored else 0
    return [d for d in range(start, value.ndim) if value.shape[d] > 1]


def _combinations(call: Call, values: Sequence[Value]) -> Iterator[Pattern]:
    """Yield choices of at most one dimension per input, all of one size; those of few inputs first."""
    places = [[None, *_dims(call, v)] for v in values]
    chosen: list[Pattern] = [
        {v: (d,) for v, d in zip(values, pick, strict=True) if d is not None} for pick in itertools.product(*places)
    ]
    alike = [c for c in chosen if c and len({v.shape[d] for v, (d,) in c.items()}) == 1]
    yield from sorted(alike, key=len)


def _patterns(call: Call) -> list[Pattern]:
    found: list[Pattern] = list(_combinations(call, call.activations))[:_PATTERNS]
    return [*found, {v: tuple(_dims(call, v)) for v in call.activations}]


def _subsets(size: int, generator: torch.Generator, blocks: bool = False) -> Iterator[list[int]]:
    """Yield proper, non-empty subsets of ``range(size)``: all where there are few, else single ones and random ones.

    With ``blocks`` also the runs and the strides of every length that divides the size.
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


def _structure(call: Call, pattern: Pattern, rules: Registry) -> Structure:
    """Run the label rule of a call whose inputs have slots as the pattern says, every slot removable."""
    labels = Labels(call.graph, rules)
    for value, dims in pattern.items():
        for layer in labels.fresh(value, dims):
            labels.add(value, layer)
    try:
        rules.rule(call.node.op).labels(call.node, labels)
    except Exception as error:
        told = ", ".join(f"{call.name(v)} {list(dims)}" for v, dims in pattern.items() if dims) or "no input"
        raise _wrong(call, "labels", f"with slots along {told} they raise {type(error).__name__}: {error}") from error
    labels.born.append(torch.arange(1, len(labels.slots)))
    labels.make_rectangular()
    return resolve(labels)


# ---------------------------------------------------------------- labels


def _check_labels(call: Call, pattern: Pattern, rules: Registry, generator: torch.Generator) -> None:
    if call.node.target is None:
        return  # its numbers are those of other calls
    structure = _structure(call, pattern, rules)
    spans = [*_zeroed(call, rules)]
    values = (*call.inputs, *call.node.outputs)
    layers = [layer.reshape(-1) for v in values for layer in structure.of(v)]
    present = torch.cat(layers).unique() if layers else torch.zeros(0, dtype=torch.long)
    slots = present[structure.free()[present]]
    statistic = rules.rule(call.node.op).statistic
    spanned = None if statistic is None else statistic(call.node)
    if spanned is not None and structure.along(spanned.input, spanned.dim) is not None:
        return  # another class takes over when channels go: `engine.check_rule` compares whole networks
    for subset in _subsets(len(slots) + 1, generator):  # the last index stands for nothing, so that all may go
        keep = torch.ones(len(structure.roots), dtype=torch.bool)
        keep[slots[[i for i in subset if i < len(slots)]]] = False
        keep = closed(structure, keep, lambda: torch.zeros(len(structure.roots)))
        shrunk = Shrunk(structure, keep)
        if not keep[slots].all() and all(0 not in shrunk.shape(v) for v in values):  # in a network something stays
            _compare_cut(call, shrunk, spans, rules, generator)


def _zeroed(call: Call, rules: Registry) -> Iterator[tuple[Value, int]]:
    """Yield what may only be cut where it is zero, or has been folded: (value, dimension)."""
    c = rules.contraction(call.node)
    if c is not None:
        yield c.input, c.input_dim
    for span in rules.rule(call.node.op).only_zeros(call.node):
        yield span.input, span.dim


def _compare_cut(
    call: Call, shrunk: Shrunk, spans: Sequence[tuple[Value, int]], rules: Registry, generator: torch.Generator
) -> None:
    node, full = call.node, call.random(generator)
    for value, dim in spans:
        stays = shrunk.indices(value, dim)
        if stays is not None:
            shape = [-1 if d == dim else 1 for d in range(value.ndim)]
            full[value.index] = full[value.index] * stays.view(shape)
    numbers = _numbers(node, shrunk, rules)
    if any(d.expr is not None and evaluate(d.expr, shrunk.shape, _no_attribute) != d.wanted for d in numbers):
        return  # the code around the call is edited then: whole networks show whether it is right
    try:
        parts = {v.index: _part(shrunk, v, full[v.index]) for v in call.inputs}
        wanted = [_part(shrunk, v, t) for v, t in zip(node.outputs, run(node, full), strict=True)]
        found = run(node, parts, [d for d in numbers if d.expr is None])
    except (RuntimeError, PlanError, IndexError, ValueError) as error:
        raise _wrong(call, "labels", f"{_told(shrunk, call)} it cannot run: {error}") from error
    if len(found) != len(wanted):
        raise _wrong(call, "labels", f"{_told(shrunk, call)} it has {len(found)} outputs, not {len(wanted)}")
    for value, a, b in zip(node.outputs, wanted, found, strict=True):
        if a.shape != b.shape or not _close(a, b):
            what = f"output {value.index - len(call.inputs)} is {_difference(a, b)}"
            raise _wrong(call, "labels", f"{_told(shrunk, call)} {what}")


def _no_attribute(expr: AttributeOf) -> int:
    raise RuleError(f"An op takes a number from the attribute {expr.name!r} by itself.")


def _part(shrunk: Shrunk, value: Value, tensor: Tensor) -> Tensor:
    mask = shrunk.mask(value)
    return tensor if mask is None else slice_from_mask(value.shape, mask, repr(value)).apply(tensor)


def _numbers(node: Node, shrunk: Shrunk, rules: Registry) -> list[Demand]:
    """The numbers among the arguments, as the rule wants them: demands, and what follows an attribute."""
    rule = rules.rule(node.op)
    wanted = list(rule.demands(node, shrunk.indices, shrunk.shape))
    before, after = rule.attributes(node, lambda value: value.shape), rule.attributes(node, shrunk.shape)
    names = [name for name, old in before.items() if node.args.get(name) == old]
    return wanted + [Demand((name, 0), before[name], after[name]) for name in names]


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a.double(), b.double(), rtol=1e-9, atol=1e-9, equal_nan=True)


def _difference(a: Tensor, b: Tensor) -> str:
    if a.shape != b.shape:
        return f"of shape {tuple(b.shape)} instead of {tuple(a.shape)}"
    return f"off by {float((a.double() - b.double()).abs().nan_to_num(math.inf).max()):.1e}"


def _told(shrunk: Shrunk, call: Call) -> str:
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
    """Take some entries of each input for constants, and some rows of what is stored for zero.

    Returns:
        What the rule makes of it, and what each input is, NaN where an activation varies.
    """
    given = dict(call.tensors)
    for value in call.inputs:
        if value.stored and value.dtype.is_floating_point:
            zeroed = given[value.index] * (_row(value, range(value.ndim), generator) > 0.3)
            given[value.index] = given[value.index] if (given[value.index] > 0).all() else zeroed  # not a variance
    stored = {v.name: given[v.index] for v in call.inputs if v.name is not None}
    outside = Constants(replace(call.graph, nodes=()), rules, stored)
    for value in call.activations:
        array = torch.full([1] * value.ndim, math.nan, dtype=torch.float64)
        if pattern.get(value):
            array = _some_constant(_row(value, pattern[value], generator), value.dtype.is_floating_point)
            array = array.to(value.dtype).double()
        outside.assume(value, array)
        given[value.index] = array.expand(value.shape)
    return Constants(call.graph, rules, stored, known=outside), given


def _row(value: Value, dims: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return random numbers in [0, 1) along one of the dimensions."""
    dim = dims[int(torch.randint(len(dims), (), generator=generator))] if len(dims) else -1
    return torch.rand([n if d == dim else 1 for d, n in enumerate(value.shape)], generator=generator).double()


def _some_constant(draw: Tensor, number: bool) -> Tensor:
    """A third varies, a third is zero, a third is something else."""
    other = (draw - 0.8) * 5 if number else torch.ones_like(draw)
    return torch.where(draw < 1 / 3, math.nan, torch.where(draw < 2 / 3, 0.0, other))


def _drawn(call: Call, given: Mapping[int, Tensor], generator: torch.Generator) -> dict[int, Tensor]:
    """Fill in random numbers where inputs vary."""
    found = dict(given)
    for value in call.activations:
        known = given[value.index]
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        noise = noise if value.dtype.is_floating_point else (noise > 0).double()
        found[value.index] = torch.where(known.isnan(), noise, known).to(value.dtype)
    return found


def _check_constants(call: Call, pattern: Pattern, rules: Registry, generator: torch.Generator) -> None:
    constants, given = _assumed(call, pattern, rules, generator)
    for _ in range(_DRAWS):
        for value, made in zip(call.node.outputs, run(call.node, _drawn(call, given, generator)), strict=True):
            known = constants[value]
            if any(n not in (1, have) for n, have in zip(known.shape, made.shape, strict=True)):
                raise _wrong(call, "constants", f"of shape {tuple(known.shape)} for {tuple(made.shape)}")
            known = known.expand(made.shape)
            sure = known == 0 if constants.has_profile(value) else ~known.isnan()
            if not _close(known[sure], made[sure]):
                raise _wrong(call, "constants", f"a known entry is {_difference(known[sure], made[sure])}")


def _check_use(call: Call, pattern: Pattern, rules: Registry, generator: torch.Generator) -> None:
    node, structure = call.node, _structure(call, pattern, rules)
    constants, given = _assumed(call, pattern, rules, generator)
    use = Use(structure, constants)
    for value in node.outputs:
        use.add(value, torch.rand(use.shape(value), generator=generator) < 0.5)
    rules.rule(node.op).use(node, use)
    before = _drawn(call, given, generator)
    other = _drawn(call, given, generator)
    after = dict(before)
    for value in call.activations:
        after[value.index] = torch.where(use[value].expand(value.shape), before[value.index], other[value.index])
    for value, a, b in zip(node.outputs, run(node, before), run(node, after), strict=True):
        used = use[value].expand(a.shape)
        if not _close(a[used], b[used]):
            raise _wrong(call, "use", f"a used output notices what is called unused ({_difference(a[used], b[used])})")


def check_call(call: Call, rules: Registry, generator: torch.Generator) -> None:
    """Compare what a rule says of one call with what the op does.

    Raises:
        RuleError: where labels, constants or use are wrong; it names the arguments and the difference.
    """
    for pattern in _patterns(call):
        _check_labels(call, pattern, rules, generator)
        _check_constants(call, pattern, rules, generator)
        _check_use(call, pattern, rules, generator)


# ---------------------------------------------------------------- frozen, although it could go


def freed(call: Call, rules: Registry, generator: torch.Generator) -> Iterator[Freed]:
    """Yield the axes of one call's inputs that the op lets go and its rule does not.

    Cut are the same indices of one dimension of one or more inputs, parameters included. The op allows it where what
    it then puts out is a part of what it puts out in full: for any numbers, or for zeros at the indices. An axis can go
    where the smallest allowed cuts are disjoint, cover it, and may be combined at will: these would be its slots.
    """
    if call.node.target is None or rules.rule(call.node.op).unchecked:
        return
    values = [v for v in call.inputs if v in call.activations or v.stored and v.dtype.is_floating_point]
    known: list[Pattern] = []
    for combination in _combinations(call, values):
        if any(smaller.items() <= combination.items() for smaller in known):
            continue
        sets = list(_subsets(next(v.shape[d] for v, (d,) in combination.items()), generator, blocks=True))
        for zero in (False, True):
            full = call.random(generator)
            blocks = _blocks(call, combination, sets, zero, full)
            if blocks and zero:  # zeros are the smallest of some numbers, and the largest of others
                full.update((v.index, -full[v.index].abs()) for v in call.activations if v.dtype.is_floating_point)
                blocks = _blocks(call, combination, blocks, zero, full)
            if blocks:
                known.append(combination)
                structure = _structure(call, {v: d for v, d in combination.items() if v in call.activations}, rules)
                reason = next((r for gone in blocks if (r := _refusal(structure, combination, gone)) is not None), None)
                if reason is not None:
                    told = reason.replace(repr(call.node), call.node.op)
                    yield Freed(call.node.op, _axes(call, combination), zero, told)
                break


def _axes(call: Call, combination: Pattern) -> str:
    return " + ".join(f"{call.name(v)} {d - v.ndim}" for v, (d,) in combination.items())


def _blocks(call: Call, combination: Pattern, sets: Sequence[list[int]], zero: bool, full: Tensors) -> list[list[int]]:
    """Return what could be the slots of an axis; nothing where it cannot go."""
    size = max(i for gone in sets for i in gone) + 1
    blocks: list[list[int]] = []
    wanted = run(call.node, full)
    for gone in sets:
        parts = [b for b in blocks if set(b) <= set(gone)]
        if not blocks and len(gone) > size // 2:
            return []  # at least two blocks make an axis
        given, made = _zero(call, combination, gone, full) if zero else (full, wanted)
        allowed = _op_allows(call, combination, gone, given, made)
        if parts and set(gone) == {i for b in parts for i in b}:
            if not allowed:
                return []
        elif allowed and not parts:
            if any(set(b) & set(gone) for b in blocks):
                return []
            blocks.append(gone)
    return blocks if sum(map(len, blocks)) == size else []


def _zero(
    call: Call, combination: Pattern, gone: Sequence[int], full: Tensors
) -> tuple[dict[int, Tensor], list[Tensor]]:
    """Return the inputs with zeros at some indices, and what the op makes of them."""
    found = dict(full)
    for value, (dim,) in combination.items():
        found[value.index] = full[value.index].index_fill(dim, torch.tensor(gone), 0)
    return found, run(call.node, found)


def _op_allows(call: Call, combination: Pattern, gone: Sequence[int], full: Tensors, wanted: Sequence[Tensor]) -> bool:
    """Whether the op, given less, puts out a part of what it puts out in full."""
    parts = dict(full)
    for value, (dim,) in combination.items():
        stays = torch.tensor([i for i in range(value.shape[dim]) if i not in gone])
        parts[value.index] = _fenced(full[value.index].index_select(dim, stays), value)
    for demands in _retold(call, combination, gone):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of sizes that nobody asked for
                found = run(call.node, parts, demands)
        except (RuntimeError, IndexError, ValueError):
            continue
        if len(wanted) == len(found) and all(map(_is_part, wanted, found)):
            return True
    return False


def _fenced(part: Tensor, value: Value) -> Tensor:
    """Put NaN into the memory behind a tensor: some ops do not look at sizes, and read on."""
    fill = math.nan if part.is_floating_point() else 0
    memory = torch.full((math.prod(value.shape) + part.numel(),), fill, dtype=part.dtype)
    memory[: part.numel()] = part.reshape(-1)
    return memory[: part.numel()].view(part.shape)


def _retold(call: Call, combination: Pattern, gone: Sequence[int]) -> Iterator[list[Demand]]:
    """Yield the arguments as they are, and with one number scaled like the size that is cut."""
    yield []
    size = next(v.shape[d] for v, (d,) in combination.items())
    for name, argument in call.node.args.items():
        numbers = argument if isinstance(argument, (list, tuple)) else [argument]
        for position, number in enumerate(numbers):
            if isinstance(number, int) and not isinstance(number, bool) and number > 1:
                if number * (size - len(gone)) % size == 0:
                    yield [Demand((name, position), number, number * (size - len(gone)) // size)]


def _is_part(full: Tensor, part: Tensor) -> bool:
    """Whether a tensor is another one, or has some of its slices along one dimension, in order."""
    if full.ndim != part.ndim:
        return False
    shorter = [d for d in range(full.ndim) if part.shape[d] != full.shape[d]]
    if not shorter:
        return _close(full, part)
    if len(shorter) > 1 or part.shape[shorter[0]] > full.shape[shorter[0]]:
        return False
    rows, position = full.movedim(shorter[0], 0), 0
    for row in part.movedim(shorter[0], 0):
        while position < len(rows) and not _close(rows[position], row):
            position += 1
        position += 1
    return position <= len(rows)


def _refusal(structure: Structure, combination: Pattern, gone: Sequence[int]) -> str | None:
    """Return why a rule does not cut what a combination cuts, and nothing else; None where it does."""
    made = {v: d for v, d in combination.items() if not v.stored} or combination  # parameters follow
    rows = {v: structure.along(v, d) for v, (d,) in made.items()}
    known = {v: row for v, row in rows.items() if row is not None}
    slots = torch.cat([row[list(gone)] for row in known.values()]) if known else torch.zeros(0, dtype=torch.long)
    if len(known) < len(rows) or structure.frozen[slots].any():
        return structure.slots.why(slots) or "it has no slots"
    keep = torch.ones(len(structure.roots), dtype=torch.bool)
    keep[slots] = False
    keep = closed(structure, keep, lambda: torch.zeros(len(structure.roots)))
    shrunk = Shrunk(structure, keep)
    for value, (dim,) in made.items():
        stays = shrunk.indices(value, dim)
        cut = [d for d in range(value.ndim) if shrunk.shape(value)[d] < value.shape[d]]
        if stays is None or (~stays).nonzero()[:, 0].tolist() != list(gone) or cut != [dim]:
            return "it only goes together with other entries"
    return None
