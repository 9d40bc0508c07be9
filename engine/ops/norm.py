"""Batch norm, 1d–3d: normalises each channel separately, so that removing one leaves the others unchanged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from engine.analysis.constants import Constants
from engine.analysis.labels import Labels
from engine.analysis.use import Use
from engine.ops.samples import chain
from engine.program.graph import Node, Value
from engine.rule import Rare, Rule, Sample, Shapes

__all__ = ["PER_CHANNEL", "RULES"]

PER_CHANNEL = ("weight", "bias", "running_mean", "running_var")
"""Arguments of batch and instance norms with a number per channel."""


def _per_channel(node: Node) -> list[Value]:
    return [node.args[name] for name in PER_CHANNEL if node.args[name] is not None]


def _labels(node: Node, labels: Labels) -> None:
    x = node.args["input"]
    channels = labels.along(x, 1)
    for layer in labels.without(x, [d for d in range(x.ndim) if d != 1], f"{node!r} averages over it"):
        labels.add(node.output, layer)
    for value in _per_channel(node):
        labels.per_channel(value, channels)


def _constants(node: Node, constants: Constants) -> Sequence[Tensor]:
    """``β`` where ``γ = 0`` or where batch statistics see a constant; otherwise the affine map of a constant."""
    a = node.args
    batch = a["training"] or a["running_mean"] is None
    nowhere = None if batch else _nowhere(node, constants)
    if nowhere is not None and constants.training:  # asked only where the mode matters
        nowhere = None
    easy = _of_zeros(node, constants) if nowhere is None and constants.only_zeros(a["input"]) else None
    if easy is not None:
        return [easy]
    batch = batch or constants.training
    variance = torch.ones(1, dtype=torch.float64) if batch else constants[a["running_var"]] + a["eps"]
    x = constants.along(a["input"], 1)
    if constants.has_profile(a["input"]):
        x = torch.where(x == 0, x, torch.nan)

    def stored(name: str, default: float) -> Tensor:
        return torch.tensor([default], dtype=torch.float64) if a[name] is None else constants[a[name]]

    if batch:
        normed = torch.where(x.isnan(), x, 0.0)
    else:
        normed = (x - stored("running_mean", 0.0)) / variance.sqrt()
    gamma = stored("weight", 1.0)
    dead = torch.zeros(1, dtype=torch.bool) if a["weight"] is None else constants.zero(a["weight"])
    result = torch.where(dead, 0.0, normed * gamma) + stored("bias", 0.0)
    if constants.repaired:  # repair masks γ and β of a channel that arrives as zero, and β of one without γ
        result = torch.where(dead | (x == 0), 0.0, result)
    result = result if nowhere is None else torch.where(nowhere, torch.nan, result)
    return [result.view([1, -1] + [1] * (node.output.ndim - 2))]


def _nowhere(node: Node, constants: Constants) -> Tensor | None:
    """Where the square root of the stored variance would divide zero by zero; None if it does so nowhere."""
    negative = constants.at_present(node.args["running_var"]).numpy() + node.args["eps"] <= 0
    return torch.from_numpy(negative) if negative.any() else None


def _of_zeros(node: Node, constants: Constants) -> Tensor | None:
    """``β`` where ``γ = 0``, for an input that varies wherever it is not zero; None if a zero meets a nonzero ``γ``.

    Repair masks γ and β of a channel that arrives as zero, and β of one without γ.
    """
    x, gamma, beta = constants[node.args["input"]], node.args["weight"], node.args["bias"]
    if x.numel() not in (1, x.size(1)):
        return None
    shape = [1, -1] + [1] * (node.output.ndim - 2)
    dead = None if gamma is None else constants.zero(gamma).view(shape)
    if constants.repaired:
        return x if dead is None or not dead.any() else torch.where(dead, 0.0, x)
    if dead is None or ((x == 0) & ~dead).any():
        return None
    return torch.where(dead, 0.0 if beta is None else constants[beta].view(shape), math.nan)


def _use(node: Node, use: Use) -> None:
    wanted = use[node.output]
    gamma = node.args["weight"]
    dead = None if gamma is None else use.constants.zero(gamma)
    if dead is not None and dead.any():
        wanted = wanted & ~dead.view([1, -1] + [1] * (node.output.ndim - 2))
    use.add(node.args["input"], wanted)
    use.add_beside(_per_channel(node), use.along(node.output, 1))


def _attributes(node: Node, shapes: Shapes) -> Mapping[str, int]:
    return {"num_features": shapes(node.output)[1]}


def _absorbs(node: Node) -> Value | None:
    """``(x + d - (μ + d))``: in eval mode, a constant can be folded into the running mean."""
    mean: Value | None = node.args["running_mean"]
    return None if node.args["training"] or mean is None or not mean.stored else mean


def _samples() -> Iterable[Sample]:
    yield Sample(
        lambda: chain(nn.Conv1d(3, 6, 3), nn.BatchNorm1d(6), nn.ReLU(), nn.Conv1d(6, 4, 3, padding=1)), (2, 3, 9), "1d"
    )
    yield Sample(
        lambda: chain(
            nn.Conv2d(3, 6, 3, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 4, 1, bias=False),
            nn.BatchNorm2d(4),
        ),
        (2, 3, 6, 6),
        "2d",
    )
    yield Sample(lambda: chain(nn.Conv3d(2, 6, 2), nn.BatchNorm3d(6), nn.Conv3d(6, 3, 2)), (2, 2, 4, 4, 4), "3d")
    yield Sample(
        lambda: chain(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, affine=False), nn.Conv2d(6, 4, 1)),
        (2, 3, 6, 6),
        "no affine",
    )
    yield Sample(
        lambda: chain(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, track_running_stats=False), nn.Conv2d(6, 4, 1)),
        (4, 3, 6, 6),
        "batch statistics",
    )


RULES = [
    Rule(
        ops=("batch_norm",),
        labels=_labels,
        constants=_constants,
        use=_use,
        elementwise=2,
        attributes=_attributes,
        rare=Rare(absorbs=_absorbs),
        normalises=True,
        samples=_samples,
    ),
]
