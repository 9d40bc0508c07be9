"""Ops over positions, channel by channel: pooling, adaptive pooling, interpolation, padding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.analysis.constants import Constants
from engine.analysis.labels import Labels
from engine.analysis.slots import FROZEN
from engine.analysis.use import Use
from engine.ops.samples import Apply, chain
from engine.ops.shape import through
from engine.program.arrays import any_over, support, uniform
from engine.program.graph import Node
from engine.rule import Rule, Sample

__all__ = ["RULES"]

# Each output is a maximum, or a weighted mean with weights that sum to 1: a constant channel keeps its constant.
KEEPING = """
    _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_lanczos2d_aa
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
    adaptive_max_pool3d max_pool1d max_pool2d max_pool2d_with_indices max_pool3d max_pool3d_with_indices
    upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d
    upsample_trilinear3d
""".split()

# Each output is a sum with weights that add up to less at borders: a constant channel becomes the constant times a map.
AVERAGE = "avg_pool1d avg_pool2d avg_pool3d".split()


def _positions(node: Node) -> list[int]:
    """The dimensions that a pool or an interpolation runs over, as many as the digit in its name."""
    source = node.inputs[0]
    count = next(int(c) for c in node.op if c.isdigit())
    return list(range(source.ndim - count, source.ndim))


def _over_positions(node: Node, labels: Labels) -> None:
    for layer in labels.without(node.inputs[0], _positions(node), f"{node!r} runs over it"):
        for value in node.outputs:
            labels.add(value, layer)


def _kept(node: Node, constants: Constants) -> Sequence[Tensor]:
    array = uniform(constants.plain(node.inputs[0]), _positions(node))
    places = torch.full([1] * node.output.ndim, math.nan)  # the index of a maximum is not its value
    return [array if value.dtype.is_floating_point else places for value in node.outputs]


def _averaged(node: Node, constants: Constants) -> Sequence[Tensor]:
    a = node.args
    if any(a["padding"]) and a["count_include_pad"] or a.get("divisor_override") is not None:
        constants.mark_profile(node.output)
    return _kept(node, constants)


def _used(node: Node, use: Use) -> None:
    for value in node.outputs:
        use.add(node.inputs[0], any_over(use[value], _positions(node)))


# ---------------------------------------------------------------- padding


def _pads(node: Node) -> list[tuple[int, int, int]]:
    """(dimension, before, after) for each padded or cropped dimension."""
    pads, ndim = node.args["pad"], node.output.ndim
    margins = [(ndim - 1 - i // 2, pads[i], pads[i + 1]) for i in range(0, len(pads), 2)]
    return [p for p in margins if p[1] or p[2]]


def _mode(node: Node) -> str:
    mode: str = node.args.get("mode", "constant") if node.op == "pad" else "constant"
    return mode


def _padded(array: Tensor, dim: int, before: int, after: int, value: float) -> Tensor:
    """Pad, or crop where negative, along one dimension."""
    return F.pad(array, [0, 0] * (array.ndim - 1 - dim) + [before, after], value=value)


def _pad_labels(node: Node, labels: Labels) -> None:
    """Freeze added channels, whose number is written in the code; those in between can be removed."""
    source = node.inputs[0]
    labels.claim(source)
    follows = {node.output.ndim - 1 - place // 2 for name, place in labels.amounts(node) if name == "pad"}
    for layer in labels.layers(source):
        if follows & set(support(layer)):
            labels.slots.freeze(layer, f"{node!r} pads it by what follows the size of the input")
            continue
        along = [p for p in _pads(node) if layer.size(p[0]) > 1]
        adds = all(before >= 0 and after >= 0 for _, before, after in along)
        if along and not (_mode(node) == "constant" and adds and len(support(layer)) == 1):
            labels.slots.freeze(layer, f"{node!r} pads it")
            continue
        for dim, before, after in along:
            layer = _padded(layer, dim, before, after, FROZEN)
        labels.add(node.output, layer)


def _pad_constants(node: Node, constants: Constants) -> Sequence[Tensor]:
    """Padding with the constant itself preserves it; padding with zeros makes it the constant times a map."""
    source = node.inputs[0]
    if _mode(node) != "constant":
        return [uniform(constants.plain(source), [p[0] for p in _pads(node)])]
    array, value = constants[source], float(node.args["value"] or 0.0)
    profile = constants.has_profile(source)
    for dim, before, after in _pads(node):
        if array.size(dim) > 1:
            array = _padded(array, dim, before, after, value)
        elif value == 0:
            profile = True
        else:
            array = torch.where(array == value, array, math.nan)
    if profile:
        constants.mark_profile(node.output)
    return [array]


def _pad_used(node: Node, use: Use) -> None:
    used = use[node.output]
    for dim, before, after in _pads(node):
        if used.size(dim) > 1 and _mode(node) == "constant":
            used = _padded(used, dim, -before, -after, False)
        else:
            used = used.any(dim, keepdim=True)
    use.add(node.inputs[0], used)


def _pool_samples() -> Iterable[Sample]:
    pools = {
        "max": nn.MaxPool2d(3, 2, 1),
        "adaptive average": nn.AdaptiveAvgPool2d(3),
        "adaptive maximum": nn.AdaptiveMaxPool2d(3),
        "nearest": nn.Upsample(scale_factor=2),
        "bilinear": nn.Upsample(scale_factor=2, mode="bilinear"),
    }
    for name, pool in pools.items():
        yield through(name, pool)
    yield through("nearest and cubic", lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"))
    yield through("with a filter", _filtered)
    yield through("nearest by centres", lambda x: F.interpolate(x, scale_factor=2, mode="nearest-exact"))
    yield through("places of maxima", _places)
    yield Sample(lambda: chain(nn.Conv1d(3, 8, 3), Apply(_pools_1d), nn.Conv1d(8, 4, 1)), (2, 3, 10), "1d")
    yield Sample(lambda: chain(nn.Conv3d(3, 8, 3), Apply(_pools_3d), nn.Conv3d(8, 4, 1)), (2, 3, 6, 6, 6), "3d")


def _places(x: Tensor) -> Tensor:
    values, places = F.max_pool2d(x, 2, return_indices=True)
    return values + places.to(x) / 16 + F.adaptive_max_pool2d(x, 1, return_indices=True)[1].to(x) / 16


def _filtered(x: Tensor) -> Tensor:
    small = F.interpolate(x, size=3, mode="bilinear", antialias=True)
    return F.interpolate(small, size=5, mode="bicubic", antialias=True)


def _pools_1d(x: Tensor) -> Tensor:
    pooled = F.max_pool1d(x, 2) + F.adaptive_avg_pool1d(x, 4) + F.adaptive_max_pool1d(x, 4)
    exact = F.interpolate(pooled, scale_factor=2, mode="nearest-exact")
    return exact + F.interpolate(pooled, scale_factor=2) + F.interpolate(pooled, scale_factor=2, mode="linear")


def _pools_3d(x: Tensor) -> Tensor:
    values, places = F.max_pool3d(x, 2, return_indices=True)
    pooled = values + places.to(x) / 64 + F.max_pool3d(x, 2) + F.adaptive_avg_pool3d(x, 2) + F.adaptive_max_pool3d(x, 2)
    exact = F.interpolate(pooled, scale_factor=2, mode="nearest-exact")
    return exact + F.interpolate(pooled, scale_factor=2) + F.interpolate(pooled, scale_factor=2, mode="trilinear")


def _average_samples() -> Iterable[Sample]:
    yield through("average", nn.AvgPool2d(2))
    yield through("average that counts its padding", nn.AvgPool2d(3, 1, 1))
    yield through("average that does not", nn.AvgPool2d(3, 1, 1, count_include_pad=False))
    yield through("divisor", nn.AvgPool2d(2, divisor_override=3))
    yield Sample(lambda: chain(nn.Conv1d(3, 8, 3), nn.AvgPool1d(2), nn.Conv1d(8, 4, 1)), (2, 3, 8), "average 1d")
    yield Sample(lambda: chain(nn.Conv3d(3, 8, 3), nn.AvgPool3d(2), nn.Conv3d(8, 4, 1)), (2, 3, 6, 6, 6), "average 3d")
    yield Sample(
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sigmoid(), nn.AvgPool2d(3, 1, 1), nn.Flatten(), nn.Linear(128, 3)),
        (2, 3, 6, 6),
        "average that counts its padding, flattened",
    )


def _pad_samples() -> Iterable[Sample]:
    yield through("zero", lambda x: F.pad(x, (1, 2, 0, 1)))
    yield through("zero, by its own name", lambda x: torch.constant_pad_nd(x, (1, 2, 0, 1)))
    yield through("value", lambda x: F.pad(x, (1, 1, 1, 1), value=0.5))
    yield through("reflect", lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"))
    yield through("channels", lambda x: F.pad(x, (0, 0, 0, 0, 2, 2)), after=12)
    shortcut = lambda x, y: F.pad(x, (0, 0, 0, 0, 2, 2)) + y  # noqa: E731
    yield Sample(
        lambda: chain(
            nn.Conv2d(3, 4, 1), Apply(shortcut, nn.Identity(), nn.Conv2d(4, 8, 3, padding=1)), nn.Conv2d(8, 4, 3)
        ),
        (2, 3, 6, 6),
        "zero-padded channel shortcut",
    )


_PAD = "pad constant_pad_nd".split()

RULES = [
    Rule(tuple(KEEPING), _over_positions, _kept, _used, elementwise=1, samples=_pool_samples),
    Rule(tuple(AVERAGE), _over_positions, _averaged, _used, elementwise=1, samples=_average_samples),
    Rule(tuple(_PAD), _pad_labels, _pad_constants, _pad_used, samples=_pad_samples),
]
