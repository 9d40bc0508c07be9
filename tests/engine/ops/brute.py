"""Check a rule by brute force: change entries, run the op, and see what the rule said about it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import engine
from engine.analysis.constants import Constants
from engine.analysis.labels import Labels
from engine.analysis.use import Use
from engine.compaction.build import canonical_tensors
from engine.masks import canonical_masks
from engine.program.graph import Node
from engine.program.trees import tensors_in
from engine.removal.propagate import resolve
from engine.removal.shrink import Shrunk
from engine.removal.structure import structure_of
from engine.rule import Demand
from tests.engine.exactness import masked, run
from tests.engine.nets import Net, dead

Function = Callable[..., Any]
SHAPE = (2, 3, 4, 4)


def stems(f: Function, count: int = 1, channels: int = 8, **parts: nn.Module) -> nn.Module:
    """Put ``count`` 1x1 convolutions of the input through ``f``, which gets the net first where it has parts."""

    def features(m: Net, x: Tensor) -> list[Tensor]:
        return [getattr(m, f"stem{k}")(x) for k in range(count)]

    def forward(m: Net, x: Tensor) -> Any:
        first, *others = features(m, x)
        return f(first, *others) if others else f(first)

    def forward_of_parts(m: Net, x: Tensor) -> Any:
        return f(m, *features(m, x))

    convolutions = {f"stem{k}": nn.Conv2d(3, channels, 1) for k in range(count)}
    return Net(forward_of_parts if parts else forward, **convolutions, **parts).double().eval()


def labels_of(model: nn.Module, shape: Sequence[int] = SHAPE) -> Labels:
    """Run the label rules, without freezing the outputs."""
    labels = Labels(engine.trace(model, torch.randn(*shape, dtype=torch.float64)))
    for node in labels.graph.nodes:
        engine.RULES.rule(node.op).labels(node, labels)
    return labels


def stem_slots(labels: Labels) -> list[Tensor]:
    """The slots of each stem's output channels."""
    found = []
    for node in labels.graph.nodes:
        if node.module.startswith("stem"):
            row = labels.along(node.output, 1)
            assert row is not None
            found.append(row)
    return found


def check_labels(
    f: Function,
    classes: int,
    count: int = 1,
    channels: int = 8,
    shape: Sequence[int] = SHAPE,
    positions: bool = True,
) -> Labels:
    """Every entry that a free class of channels has an influence on carries the class, and no other entry does.

    Args:
        f: the op, a function of the stems' outputs.
        classes: expected number of classes of the stems' channels that are not frozen.
        count, channels: of the stems.
        shape: of the input.
        positions: False compares whole channels, where an op adds positions that nothing has an influence on.
    """
    labels = labels_of(stems(f, count, channels), shape)
    influence: dict[int, list[Tensor]] = {}
    for which, row in enumerate(stem_slots(labels)):
        for channel, slot in enumerate(row):
            if not labels.slots.frozen(slot[None]).any():
                seen = _influence(f, count, which, channel, (shape[0], channels, *shape[2:]))
                root = int(labels.slots.find(slot[None]))
                influence[root] = [a | b for a, b in zip(influence.get(root, seen), seen, strict=True)]
    assert len(influence) == classes, influence.keys()
    for root, changed in influence.items():
        for value, seen in zip(labels.graph.outputs, changed, strict=True):
            marked = torch.zeros(value.shape, dtype=torch.bool)
            for layer in labels.layers(value):
                marked |= labels.slots.find(layer) == root
            if not positions:
                marked, seen = (t.flatten(2).any(2) for t in (marked, seen))
            assert torch.equal(marked, seen), (value, root)
    return labels


def _influence(f: Function, count: int, which: int, channel: int, shape: Sequence[int]) -> list[Tensor]:
    seen: list[Tensor] = []
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(count)]
        base = [t.clone() for t in tensors_in(f(*(t.clone() for t in inputs)))]
        inputs[which][:, channel] += 3 * torch.randn(shape, generator=generator, dtype=torch.float64)[:, channel]
        changed = [a != b for a, b in zip(base, tensors_in(f(*inputs)), strict=True)]
        seen = [a | b for a, b in zip(seen, changed, strict=True)] if seen else changed
    return seen


def check_constants(
    f: Function, constant: Sequence[int], count: int = 1, channels: int = 8, closed: Any = None, **parts: nn.Module
) -> Tensor:
    """Where a constant is predicted, really running the op with dead channels gives it, at two resolutions.

    Args:
        f: the op, a function of the stems' outputs.
        constant: the channels of the output that are expected to be predicted.
        count, channels: of the stems.
        closed: per stem, its dead channels; by default the first half.
        parts: modules that ``f`` uses.

    Returns:
        What is predicted for each channel.
    """
    model = stems(f, count, channels, **parts)
    closed = closed or [range(channels // 2)] * count
    masks = dead(model, {f"stem{k}": rows for k, rows in enumerate(closed)})
    graph = engine.trace(model, torch.randn(*SHAPE, dtype=torch.float64))
    constants = Constants(graph, engine.RULES, canonical_tensors(model, graph), canonical_masks(masks, model))
    value = graph.outputs[0]
    predicted = constants[value]
    small = masked(model, masks)
    for size in ((3, 3, 4, 4), (2, 3, 6, 6)):
        result = run(small, torch.randn(*size, dtype=torch.float64))[0]
        if any(n not in (1, have) for n, have in zip(predicted.shape, result.shape, strict=True)):
            continue  # it differs from place to place, so it is for the example's resolution
        expected = predicted.expand_as(result)
        where = ~expected.isnan()
        if constants.has_profile(value):
            shares = torch.where(where & (expected != 0), result / expected, torch.nan)
            most, least = shares.nan_to_num(-1e9).amax(1), shares.nan_to_num(1e9).amin(1)
            assert ((most - least).abs() < 1e-9).all()
            where = where & (expected == 0)
        torch.testing.assert_close(result[where], expected[where], rtol=1e-9, atol=1e-12)
    row = constants.along(value, 1)
    assert (~row.isnan()).nonzero()[:, 0].tolist() == list(constant)
    return row


def check_use(
    f: Function, columns: Sequence[int], unused: Sequence[int], channels: int = 8, **parts: nn.Module
) -> None:
    """Channels that are said to be unused can be anything; all others have an influence.

    Args:
        f: the op between a stem and a 1x1 convolution.
        columns: what the convolution behind does not look at.
        unused: the stem's channels that are expected to be unused.
        channels: of the stem.
        parts: modules that ``f`` uses.
    """
    model = stems(f, 1, channels, **parts)
    width = run(model, torch.randn(*SHAPE, dtype=torch.float64))[0].shape[1]
    model = Net(lambda m, x: m.head(m.body(x)), body=model, head=nn.Conv2d(width, 2, 1, dtype=torch.float64)).eval()
    mask = torch.ones(2, width, 1, 1)
    mask[:, list(columns)] = 0
    masks = {"head": {"weight": mask}}
    graph = engine.trace(model, torch.randn(*SHAPE, dtype=torch.float64))
    structure = structure_of(graph, engine.RULES)
    constants = Constants(graph, engine.RULES, canonical_tensors(model, graph), canonical_masks(masks, model))
    use = Use(structure, constants)
    stem = next(node for node in graph.nodes if node.module == "body.stem0")
    predicted = (~use.along(stem.output, 1)).nonzero()[:, 0].tolist()
    small = masked(model, masks)
    really = [c for c in range(channels) if not _changes(small, c)]
    assert set(predicted) <= set(really), (predicted, really)
    assert predicted == list(unused)


def _changes(model: nn.Module, channel: int) -> bool:
    x = torch.randn(*SHAPE, dtype=torch.float64)
    before = run(model, x)[0]

    def disturb(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        out = out.clone()
        out[:, channel] += 5 * torch.randn_like(out[:, channel])
        return out

    changed = copy.deepcopy(model)
    changed.get_submodule("body.stem0").register_forward_hook(disturb)
    return not torch.allclose(before, run(changed, x)[0], rtol=0, atol=1e-12)


def counter_knows_attention() -> bool:
    """Whether this version's counter sees fused attention on the CPU."""
    q = torch.randn(1, 1, 2, 2, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    return counter.get_total_flops() > 0


def check_macs(model: nn.Module, *inputs: Tensor) -> int:
    """The count is half of what torch's own counter finds."""
    with FlopCounterMode(display=False) as counter:
        model(*inputs)
    flops = engine.count_flops_params(model, tuple(inputs), verbose=False, batch_dim=None)[0]
    assert flops == counter.get_total_flops() / 2
    return flops


def demands_of(f: Function, keep: Sequence[int], op: str, channels: int = 8) -> list[Demand]:
    """What the arguments of ``op`` in ``f`` have to become when only the channels ``keep`` of the stem stay."""
    labels = labels_of(stems(f, 1, channels))
    from_stem = stem_slots(labels)[0]
    structure = resolve(labels, engine.RULES)
    stays = torch.ones(len(structure.roots), dtype=torch.bool)
    gone = [c for c in range(channels) if c not in keep]
    stays[structure.roots[from_stem[gone]]] = False
    shrunk = Shrunk(structure, stays)
    node = node_of(labels, op)
    return list(engine.RULES.rule(op).demands(node, shrunk.indices, shrunk.shape))


def node_of(labels: Labels, op: str) -> Node:
    """The last call of an op: an older torch slices the batch first, whole."""
    return next(node for node in reversed(labels.graph.nodes) if node.op == op)
