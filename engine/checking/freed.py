"""Find dimensions that a rule freezes although the op would allow cuts: cut inputs, run the op, compare."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.analysis.constraints import closed
from engine.checking.isolated import Call, Tensors, run
from engine.checking.validation import Pattern, close, combinations, structure_of_call, subsets
from engine.program.graph import Value
from engine.removal.propagate import Structure
from engine.removal.shrink import Shrunk
from engine.rule import Demand, Registry

__all__ = ["Freed", "freed"]


@dataclass(frozen=True)
class Freed:
    """Entries that could be removed, but that a rule freezes.

    Attributes:
        op: the op.
        axes: dimensions of the inputs that are cut together, counted from the end (``"input -1 + weight -1"``).
        zero: whether they can be removed only where they are zero.
        reason: the rule's reason for freezing them.
    """

    op: str
    axes: str
    zero: bool
    reason: str

    def __str__(self) -> str:
        return f"{self.op}: {self.axes}{' where it is zero' if self.zero else ''} ({self.reason})"


def freed(call: Call, rules: Registry, generator: torch.Generator) -> Iterator[Freed]:
    """Yield dimensions of a call's inputs that the op allows to be cut and its rule freezes.

    Cuts remove the same indices of one dimension of one or more inputs, including parameters. The op allows a cut if
    its output is then a part of its full output: for any numbers, or for zeros at these indices. A dimension can be cut
    if the smallest allowed cuts are disjoint, cover it, and can be combined freely: these would be its slots.
    """
    if call.node.target is None or rules.of(call.node).rare.unchecked:
        return
    values = [v for v in call.inputs if v in call.activations or v.stored and v.dtype.is_floating_point]
    patterns: list[Pattern] = []
    for combination in combinations(call, values):
        if any(smaller.items() <= combination.items() for smaller in patterns):
            continue
        sets = list(subsets(next(v.shape[d] for v, (d,) in combination.items()), generator, blocks=True))
        for zero in (False, True):
            full = call.random(generator)
            blocks = _blocks(call, combination, sets, zero, full)
            if blocks and zero:  # zeros are a minimum among some numbers, and a maximum among others
                full.update((v.index, -full[v.index].abs()) for v in call.activations if v.dtype.is_floating_point)
                blocks = _blocks(call, combination, blocks, zero, full)
            if blocks:
                patterns.append(combination)
                structure = structure_of_call(
                    call, {v: d for v, d in combination.items() if v in call.activations}, rules
                )
                reason = next(
                    (r for removed in blocks if (r := _refusal(structure, combination, removed)) is not None), None
                )
                if reason is not None:
                    reason_text = reason.replace(repr(call.node), call.node.op)
                    yield Freed(call.node.op, _axes(call, combination), zero, reason_text)
                break


def _axes(call: Call, combination: Pattern) -> str:
    return " + ".join(f"{call.name(v)} {d - v.ndim}" for v, (d,) in combination.items())


def _blocks(call: Call, combination: Pattern, sets: Sequence[list[int]], zero: bool, full: Tensors) -> list[list[int]]:
    """Return the index blocks that would be the slots of a dimension; none if it cannot be cut."""
    size = max(i for removed in sets for i in removed) + 1
    blocks: list[list[int]] = []
    wanted = run(call.node, full)
    for removed in sets:
        parts = [b for b in blocks if set(b) <= set(removed)]
        if not blocks and len(removed) > size // 2:
            return []  # a dimension has at least two blocks
        inputs, outputs = _zero(call, combination, removed, full) if zero else (full, wanted)
        allowed = _op_allows(call, combination, removed, inputs, outputs)
        if parts and set(removed) == {i for b in parts for i in b}:
            if not allowed:
                return []
        elif allowed and not parts:
            if any(set(b) & set(removed) for b in blocks):
                return []
            blocks.append(removed)
    return blocks if sum(map(len, blocks)) == size else []


def _zero(
    call: Call, combination: Pattern, removed: Sequence[int], full: Tensors
) -> tuple[dict[int, Tensor], list[Tensor]]:
    """Return the inputs with zeros at some indices, and the op's outputs for them."""
    inputs = dict(full)
    for value, (dim,) in combination.items():
        inputs[value.index] = full[value.index].index_fill(dim, torch.tensor(removed), 0)
    return inputs, run(call.node, inputs)


def _op_allows(
    call: Call, combination: Pattern, removed: Sequence[int], full: Tensors, wanted: Sequence[Tensor]
) -> bool:
    """Whether the op's output for cut inputs is a part of its full output."""
    parts = dict(full)
    for value, (dim,) in combination.items():
        remaining = torch.tensor([i for i in range(value.shape[dim]) if i not in removed])
        parts[value.index] = _fenced(full[value.index].index_select(dim, remaining), value)
    for demands in _demand_variants(call, combination, removed):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about unexpected sizes
                outputs = run(call.node, parts, demands)
        except (RuntimeError, IndexError, ValueError):
            continue
        if len(wanted) == len(outputs) and all(map(_is_part, wanted, outputs)):
            return True
    return False


def _fenced(part: Tensor, value: Value) -> Tensor:
    """Fill the memory behind a tensor with NaN, because some ops read out of bounds without checking sizes."""
    fill = math.nan if part.is_floating_point() else 0
    memory = torch.full((math.prod(value.shape) + part.numel(),), fill, dtype=part.dtype)
    memory[: part.numel()] = part.reshape(-1)
    return memory[: part.numel()].view(part.shape)


def _demand_variants(call: Call, combination: Pattern, removed: Sequence[int]) -> Iterator[list[Demand]]:
    """Yield no demands, then single demands that scale one number as the cut scales the size."""
    yield []
    size = next(v.shape[d] for v, (d,) in combination.items())
    for name, argument in call.node.args.items():
        numbers = argument if isinstance(argument, (list, tuple)) else [argument]
        for position, number in enumerate(numbers):
            if isinstance(number, int) and not isinstance(number, bool) and number > 1:
                if number * (size - len(removed)) % size == 0:
                    yield [Demand((name, position), number, number * (size - len(removed)) // size)]


def _is_part(full: Tensor, part: Tensor) -> bool:
    """Whether a tensor equals another one, or consists of some of its slices along one dimension, in order."""
    if full.ndim != part.ndim:
        return False
    shorter = [d for d in range(full.ndim) if part.shape[d] != full.shape[d]]
    if not shorter:
        return close(full, part)
    if len(shorter) > 1 or part.shape[shorter[0]] > full.shape[shorter[0]]:
        return False
    rows, position = full.movedim(shorter[0], 0), 0
    for row in part.movedim(shorter[0], 0):
        while position < len(rows) and not close(rows[position], row):
            position += 1
        position += 1
    return position <= len(rows)


def _refusal(structure: Structure, combination: Pattern, removed: Sequence[int]) -> str | None:
    """Return why a rule does not cut exactly what a combination cuts; None if it does."""
    axes = {v: d for v, d in combination.items() if not v.stored} or combination  # parameters follow
    rows = {v: structure.along(v, d) for v, (d,) in axes.items()}
    slot_rows = {v: row for v, row in rows.items() if row is not None}
    slots = (
        torch.cat([row[list(removed)] for row in slot_rows.values()]) if slot_rows else torch.zeros(0, dtype=torch.long)
    )
    if len(slot_rows) < len(rows) or structure.frozen[slots].any():
        return structure.slots.why(slots) or "it has no slots"
    keep = torch.ones(len(structure.roots), dtype=torch.bool)
    keep[slots] = False
    keep = closed(structure.constraints, keep, lambda: torch.zeros(len(structure.roots)))
    shrunk = Shrunk(structure, keep)
    for value, (dim,) in axes.items():
        is_kept = shrunk.indices(value, dim)
        cut = [d for d in range(value.ndim) if shrunk.shape(value)[d] < value.shape[d]]
        if is_kept is None or (~is_kept).nonzero()[:, 0].tolist() != list(removed) or cut != [dim]:
            return "it only goes together with other entries"
    return None
