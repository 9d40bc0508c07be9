"""Which slots are kept: slots that are alive, slots that constraints require, and carriers of constants.

A slot is alive if a contraction uses it and it varies there. A removed slot that is a constant ``c`` at a consumer is
folded: into the consumer's bias or the running mean behind it, or, if borders make its contribution differ between
positions, into the weight column of another constant channel of the same consumer, its *carrier*.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine.analysis.constants import Constants
from engine.analysis.constraints import closed
from engine.analysis.use import Use
from engine.errors import RuleError
from engine.program.contraction import Contraction
from engine.program.graph import Node, Value
from engine.removal.demands import settle
from engine.removal.homes import Homes
from engine.removal.propagate import Structure
from engine.removal.shrink import Shrunk
from engine.removal.structure import readers_of_zeros
from engine.surgery.edits import Pin
from engine.surgery.exchange import Span

__all__ = ["Consumer", "Kept", "alive", "consumers", "corrections", "decide", "only_zeros", "refilled"]

# A carrier's constant must not be tiny compared to those it carries: the ratio amplifies rounding errors.
_NOT_TINY = 1e-3


@dataclass(frozen=True, eq=False)
class Consumer:
    """A contraction as a consumer of its input channels.

    Attributes:
        node, contraction: the call.
        slots: slot of each input position, shape (groups * inputs,).
        constants: constant at each position, NaN where it varies.
        shared: those that all calls of the weight see, NaN elsewhere: a carrier's is one of them.
        used: whether a used output reads the position.
        bordered: whether constants differ between positions, so that only a carrier can absorb them.
        foldable: whether constants can be folded into the weight: it is stored and nothing else reads it.
        settled: at which positions all weights have numbers, without which no share of a constant can be computed.
        sink: the value that absorbs constants that need no carrier, or None.
    """

    node: Node
    contraction: Contraction
    slots: Tensor
    constants: Tensor
    shared: Tensor
    used: Tensor
    bordered: bool
    foldable: bool
    settled: Tensor
    sink: Value | None

    @property
    def carried(self) -> bool:
        """Whether only a carrier can absorb constants."""
        return self.bordered or self.sink is None

    @property
    def key(self) -> tuple[int, int, bool]:
        """The weight and the way it is read; calls with the same key are folded once, for all of them."""
        return self.contraction.weight.index, self.contraction.groups, self.contraction.transposed

    def removed(self, keep: Tensor) -> Tensor:
        """Return which positions are removed and leave a constant behind."""
        return self.used & ~keep[self.slots] & (self.constants != 0)

    def needs(self, keep: Tensor) -> Iterator[Tensor]:
        """Yield, for each group of channels without a carrier, the slots that could be one."""
        removed = self.removed(keep)
        if not self.carried or not removed.any():
            return
        size = self.contraction.inputs
        for group in removed.view(-1, size).any(1).nonzero()[:, 0].tolist():
            rows = slice(group * size, (group + 1) * size)
            strength = self.shared[rows].nan_to_num(0.0).abs()
            able = strength > _NOT_TINY * self.constants[rows].nan_to_num(0.0)[removed[rows]].abs().max()
            if not (able & keep[self.slots[rows]]).any():
                yield self.slots[rows][able]


@dataclass(frozen=True, eq=False)
class Kept:
    """The decision which slots are kept, and the analyses that justify it.

    Attributes:
        shrunk: the kept slots, and the resulting shapes of values.
        carriers: slots that are kept only to carry constants.
        consumers: all contractions with slots at their input.
        constants, use: the analyses behind the decision.
        norms: norms over removable channels.
        pins: arguments in the code that have to be pinned.
        reasons: why slots are kept because of a size written in the code.
    """

    shrunk: Shrunk
    carriers: Tensor
    consumers: tuple[Consumer, ...]
    constants: Constants
    use: Use
    norms: tuple[Span, ...] = ()
    pins: tuple[Pin, ...] = ()
    reasons: tuple[str, ...] = ()


def consumers(structure: Structure, constants: Constants, use: Use) -> tuple[Consumer, ...]:
    """Return all contractions whose input channels are slots, except depthwise ones, which only pass them on."""
    homes = Homes(structure)
    readers = []
    for node, c in structure.contractions():
        slots = structure.along(c.input, c.input_dim)
        if slots is None or c.depthwise or c.hidden:
            continue
        wanted = use.along(c.output, c.output_dim).reshape(c.groups, c.outputs)
        used = torch.from_numpy(constants.links(c).feeding(wanted.numpy()).reshape(-1))
        if used.any():
            row = constants.along(c.input, c.input_dim)
            bordered = constants.bordered(node, c)
            settled = homes.settled(c, constants)
            foldable, sink = homes.foldable(c), homes.sink(c)
            readers.append(Consumer(node, c, slots, row, row, used, bordered, foldable, settled, sink))
    return tuple(_merged(readers))


def _merged(readers: list[Consumer]) -> Iterator[Consumer]:
    """Merge calls of one weight, which is changed for all of them.

    It is used if any call uses it, and needs carriers if any call does, or if calls have other biases.
    """
    calls: dict[tuple[int, int, bool], list[Consumer]] = {}
    for consumer in readers:
        calls.setdefault(consumer.key, []).append(consumer)
    same = {key: _shared_by(alike) for key, alike in calls.items() if len(alike) > 1}
    for consumer in readers:
        yield replace(consumer, **same[consumer.key]) if consumer.key in same else consumer


def _shared_by(calls: Sequence[Consumer]) -> dict[str, Any]:
    """Return the attributes that calls of one weight have in common."""
    first = calls[0]
    constants = torch.stack([call.constants for call in calls])
    return {
        "shared": torch.where((constants == first.constants).all(0), first.constants, torch.nan),
        "used": torch.stack([call.used for call in calls]).any(0),
        "bordered": any(call.bordered for call in calls),
        "sink": first.sink if all(call.sink is first.sink for call in calls) else None,
    }


def alive(structure: Structure, readers: tuple[Consumer, ...], use: Use) -> Tensor:
    """Return a bool per slot: frozen, not an output of a contraction, or used by a contraction where it varies."""
    keep = ~structure.free()
    keep &= structure.roots == torch.arange(len(structure.roots))
    for node in structure.graph.nodes:
        for value, dim, needed in structure.rules.of(node).rare.needs(node, use):
            slots = structure.along(value, dim)
            if slots is not None:
                keep[slots[needed]] = True
    calls: dict[tuple[int, int, bool], list[Consumer]] = {}
    for consumer in readers:
        needed = consumer.used & (consumer.constants.isnan() | ~consumer.settled & (consumer.constants != 0))
        keep[consumer.slots[needed]] = True
        if consumer.carried and not consumer.foldable:
            keep[consumer.slots[consumer.used & (consumer.constants != 0)]] = True
        calls.setdefault(consumer.key, []).append(consumer)
    for same in calls.values():
        differ = _disagreement(same)
        for consumer in same if differ.any() else ():
            keep[consumer.slots[differ]] = True
    return keep


def _disagreement(calls: list[Consumer]) -> Tensor:
    """Return the input positions at which calls of one weight see different constants: it can be folded only once."""
    differ = torch.zeros_like(calls[0].used)
    for one, other in zip(calls[1:], calls[:-1], strict=True):
        equal = (one.constants == other.constants) & ((one.constants == 0) | (one.bordered == other.bordered))
        differ |= (one.used | other.used) & ~equal
    return differ


def _norms(structure: Structure, constants: Constants, use: Use) -> list[Span]:
    """Return the norms over removable channels; all calls of one module must see the same constants.

    Calls over frozen channels may have other sizes (``F.layer_norm(x, x.shape[-1:])`` in one module).
    """
    norms_by_module: dict[str, Span] = {}
    for node in structure.graph.nodes:
        statistic = structure.rules.of(node).statistic
        span = None if statistic is None else statistic(node)
        slots = None if span is None else structure.along(span.input, span.dim)
        if span is None or slots is None or structure.frozen[slots].all():
            continue
        row = constants.along(span.input, span.dim)
        if constants.has_profile(span.input):
            row = torch.where(row == 0, row, torch.nan)
        if not use[node.output].any():  # its result does not matter, but it has to run
            row = torch.zeros_like(row)
        before = norms_by_module.get(node.module)
        if before is not None:
            row = torch.where(row == before.constants, row, torch.nan)
        norms_by_module[node.module] = Span(node.module, slots, row, span.groups)
    return list(norms_by_module.values())


def only_zeros(structure: Structure, constants: Constants, use: Use) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield slots that can be removed only if zero at a reader, with their constants, NaN where they vary.

    Unused entries, which only meet zeros, count as zero.
    """
    for _, span, slots in readers_of_zeros(structure):
        row = constants.along(span.input, span.dim)
        yield slots, torch.where(use.along(span.input, span.dim), row, 0.0)


def _interchangeable(structure: Structure, constants: Constants) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the slots of values that may stand in the place of others, with their constants, NaN where they vary.

    Where such values have other slots than one another, as two layers compute them, NaN stands for all. The same goes
    for values that other code may resize, or combine with others, along the dimensions that this affects.
    """
    for group in structure.graph.interchangeable:
        values = [structure.graph.values[index] for index in group]
        for dim in range(max(value.ndim for value in values)):
            slots = [structure.along(value, dim) if dim < value.ndim else None for value in values]
            alike = _are_same(slots)
            for value, own in zip(values, slots, strict=True):
                if own is not None:
                    row = constants.along(value, dim)
                    yield own, row if alike else torch.full_like(row, torch.nan)
    for index, dims in structure.graph.whole_along.items():
        value = structure.graph.values[index]
        for dim in range(value.ndim):
            own = structure.along(value, dim)
            if own is not None:
                row = constants.along(value, dim)
                yield own, torch.full_like(row, torch.nan) if dim in dims else row


def _are_same(slots: Sequence[Tensor | None]) -> bool:
    first = slots[0]
    return first is not None and all(own is not None and torch.equal(own, first) for own in slots)


def refilled(structure: Structure, constants: Constants, use: Use) -> Iterator[tuple[Node, Tensor, Tensor]]:
    """Yield nodes that fill in constants for channels, with the slots and their constants, NaN where they vary.

    Unused entries count as zero.
    """
    for node in structure.graph.nodes:
        for span in structure.rules.of(node).rare.refills(node):
            slots = structure.along(span.input, span.dim)
            if slots is not None:
                row = constants.along(span.input, span.dim)
                yield node, slots, torch.where(use.along(span.input, span.dim), row, 0.0)


def _cover(needs: list[Tensor]) -> list[int]:
    """Greedy cover: a small set of slots that contains one of each need."""
    waiting: dict[int, list[int]] = {}
    for position, need in enumerate(needs):
        for slot in need.tolist():
            waiting.setdefault(slot, []).append(position)
    queue = [(-len(positions), slot) for slot, positions in waiting.items()]
    heapq.heapify(queue)
    served: set[int] = set()
    chosen = []
    while len(served) < len(needs):
        count, slot = heapq.heappop(queue)
        open_positions = [p for p in waiting[slot] if p not in served]
        if len(open_positions) != -count:
            if open_positions:
                heapq.heappush(queue, (-len(open_positions), slot))
            continue
        chosen.append(slot)
        served.update(open_positions)
    return chosen


def corrections(structure: Structure, constants: Constants, shrunk: Shrunk) -> dict[str, tuple[Node, Tensor]]:
    """Return corrections to add to stored values of nodes that lose a part of others, with the node, by name."""
    deltas: dict[str, tuple[Node, Tensor]] = {}
    for node in structure.graph.nodes:
        for value, delta in structure.rules.of(node).rare.corrections(node, constants.__getitem__, shrunk.mask):
            assert value.name is not None
            deltas[value.name] = node, delta
    return deltas


def _uncorrectable(structure: Structure, constants: Constants, shrunk: Shrunk) -> Tensor:
    """Return removed slots for which no correction exists."""
    slots = [torch.zeros(0, dtype=torch.long)]
    for name, (node, delta) in corrections(structure, constants, shrunk).items():
        mask = shrunk.mask(structure.graph.stored[name])
        left = delta if mask is None else delta[mask.expand(delta.shape)]
        if not left.isfinite().all():
            gone = [layer[~shrunk.keep[layer]] for value in node.inputs for layer in structure.of(value)]
            own = [layer.reshape(-1) for layer in structure.of(structure.graph.stored[name])]
            slots += [some if not own else some[~torch.isin(some, torch.cat(own))] for some in gone]
    return torch.cat(slots)


def decide(structure: Structure, constants: Constants, use: Use) -> Kept:
    """Decide which slots are kept.

    Args:
        structure: the slots and their constraints.
        constants, use: the analyses of the values.

    Returns:
        A lossless choice: everything removed is unused, or a constant that is folded.
    """
    readers = consumers(structure, constants, use)
    keep = alive(structure, readers, use)
    norms = _norms(structure, constants, use)
    for norm in norms:
        keep[norm.slots[norm.constants.isnan()]] = True
    for slots, row in (*only_zeros(structure, constants, use), *_interchangeable(structure, constants)):
        keep[slots[row != 0]] = True
    for _, slots, row in refilled(structure, constants, use):
        keep[slots[row.isnan()]] = True
    score = functools.partial(torch.zeros, len(keep))
    carriers: list[int] = []
    reasons: list[str] = []
    while True:
        keep = closed(structure.constraints, keep, score)
        chosen = _cover([need for consumer in readers for need in consumer.needs(keep)])
        carriers += chosen
        keep[chosen] = True
        if chosen:
            continue
        stuck = _uncorrectable(structure, constants, Shrunk(structure, keep))
        keep[stuck] = True
        if len(stuck):
            continue
        shrunk, pins, unmet = settle(Shrunk(structure, keep))
        if not unmet:
            carried = torch.tensor(sorted(carriers), dtype=torch.long)
            return Kept(shrunk, carried, readers, constants, use, tuple(norms), pins, tuple(reasons))
        before = int(keep.sum())
        for _, reason, slots in unmet:
            keep[slots] = True
            reasons.append(reason)
        if int(keep.sum()) == before:
            raise RuleError(f"A size cannot be met although all of its channels stay: {unmet[0].reason}.")
