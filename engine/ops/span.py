"""Layer norm, RMS norm and group norm, whose statistics span channels; instance norm, whose span positions only.

A channel of a layer norm, RMS norm or group norm can be removed if it is constant at the input of the norm;
`engine.surgery.kinds.norms` preserves the statistics. All groups of a group norm keep equally many channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from engine.analysis.constants import Constants
from engine.analysis.constraints import Equal
from engine.analysis.labels import Labels
from engine.analysis.use import Use
from engine.ops.norm import PER_CHANNEL
from engine.ops.samples import Apply, residual
from engine.program.arrays import align, any_over
from engine.program.graph import Node, Value
from engine.rule import Rule, Sample, Shapes, Statistic
from engine.surgery.kinds.norms import can_narrow

__all__ = ["RULES"]


def _correctable(node: Node, labels: Labels) -> bool:
    """Whether the norm spans only the last dimension and its module's class can be exchanged."""
    over_last = len(node.args["normalized_shape"]) == 1
    return over_last and can_narrow(labels.graph.types[node.module]) and all(v.stored for v in _affine(node))


def _affine(node: Node) -> list[Value]:
    return [v for name in ("weight", "bias") if (v := node.args.get(name)) is not None]


def _layer_labels(node: Node, labels: Labels) -> None:
    source = node.args["input"]
    dims = list(range(source.ndim - len(node.args["normalized_shape"]), source.ndim))
    channels = labels.along(source, source.ndim - 1)
    if not _correctable(node, labels):
        for layer in labels.without(source, dims, f"{node!r} averages over it"):
            labels.add(node.output, layer)
        channels = None
    else:
        labels.pass_on(source, node.output)
    for value in _affine(node):
        if channels is None:
            labels.fix(value, value.ndim - 1)
        else:
            labels.add(value, channels)


def _shift_alone(node: Node, constants: Constants) -> Tensor:
    """``β`` where ``γ = 0``, in the shape of the parameters."""
    weight, bias = node.args.get("weight"), node.args.get("bias")
    dead = torch.zeros(1, dtype=torch.bool) if weight is None else constants.zero(weight)
    shift = torch.zeros(1, dtype=torch.float64) if bias is None else constants[bias]
    return torch.where(dead, 0.0, math.nan) + shift


def _repaired(node: Node, constants: Constants, dim: int, result: Tensor) -> Sequence[Tensor]:
    """Repair masks γ and β of a channel that arrives as zero."""
    if not constants.repaired:
        return [result]
    zero = constants.along(node.args["input"], dim) == 0
    return [torch.where(zero.view([-1 if d == dim else 1 for d in range(node.output.ndim)]), 0.0, result)]


def _layer_constants(node: Node, constants: Constants) -> Sequence[Tensor]:
    result = align(_shift_alone(node, constants), node.output.ndim)
    return _repaired(node, constants, node.output.ndim - 1, result)


def _layer_used(node: Node, use: Use) -> None:
    """Every entry contributes to the statistics."""
    used = use[node.output]
    use.add(node.args["input"], any_over(used, range(used.ndim - len(node.args["normalized_shape"]), used.ndim)))
    use.add_beside(_affine(node), used)


def _statistic(node: Node) -> Statistic | None:
    source = node.args["input"]
    return Statistic(source, source.ndim - 1) if len(node.args["normalized_shape"]) == 1 else None


def _group_labels(node: Node, labels: Labels) -> None:
    source, groups = node.args["input"], _groups(node)
    correctable = can_narrow(labels.graph.types[node.module]) and all(v.stored for v in _affine(node))
    dims = [d for d in range(1, source.ndim) if d > 1 or not correctable]
    for layer in labels.without(source, dims, f"{node!r} averages over it"):
        labels.add(node.output, layer)
    channels = labels.along(source, 1) if correctable else None
    if channels is not None and groups > 1:
        labels.constraints.append(Equal(channels.view(groups, -1)))
    for value in _affine(node):
        if channels is None:
            labels.fix(value, 0)
        else:
            labels.add(value, channels)


def _groups(node: Node) -> int:
    return int(node.args["num_groups"])


def _group_constants(node: Node, constants: Constants) -> Sequence[Tensor]:
    result = _shift_alone(node, constants).view(1, -1, *[1] * (node.output.ndim - 2))
    return _repaired(node, constants, 1, result)


def _group_used(node: Node, use: Use) -> None:
    """Every entry contributes to the statistics of its group."""
    used = any_over(use[node.output], range(2, node.output.ndim))
    if used.size(1) > 1:
        used = used.unflatten(1, (_groups(node), -1)).any(2, keepdim=True)
        used = used.expand(-1, -1, node.output.shape[1] // _groups(node), *used.shape[3:]).flatten(1, 2)
    use.add(node.args["input"], used)
    use.add_beside(_affine(node), use.along(node.output, 1))


def _group_statistic(node: Node) -> Statistic:
    return Statistic(node.args["input"], 1, _groups(node))


def _group_attributes(node: Node, shapes: Shapes) -> Mapping[str, int]:
    return {"num_channels": shapes(node.output)[1]}


# ---------------------------------------------------------------- instance norm


def _instance_labels(node: Node, labels: Labels) -> None:
    source = node.args["input"]
    channels = labels.along(source, 1)
    for layer in labels.without(source, [d for d in range(source.ndim) if d != 1], f"{node!r} averages over it"):
        labels.add(node.output, layer)
    for name in PER_CHANNEL:
        value = node.args[name]
        if value is not None and channels is None:
            labels.fix(value, 0)
        elif value is not None and channels is not None:
            labels.add(value, channels)


def _instance_constants(node: Node, constants: Constants) -> Sequence[Tensor]:
    """``β`` where the channel is constant over positions, with statistics of the input, or where ``γ = 0``."""
    weight, bias = node.args["weight"], node.args["bias"]
    x = constants.along(node.args["input"], 1)
    still = x.isfinite() & (not constants.has_profile(node.args["input"])) & bool(node.args["use_input_stats"])
    dead = still if weight is None else still | constants.zero(weight)
    shift = torch.zeros(1, dtype=torch.float64) if bias is None else constants[bias]
    result = torch.where(dead, 0.0, math.nan) + shift
    if constants.repaired:
        result = torch.where(x == 0, 0.0, result)
    return [result.view([1, -1] + [1] * (node.output.ndim - 2))]


def _instance_attributes(node: Node, shapes: Shapes) -> Mapping[str, int]:
    return {"num_features": shapes(node.output)[1]}


def _instance_used(node: Node, use: Use) -> None:
    used = use[node.output]
    use.add(node.args["input"], any_over(used, range(2, used.ndim)))
    use.add_beside((node.args[name] for name in PER_CHANNEL), use.along(node.output, 1))


# ---------------------------------------------------------------- samples


def _layer_samples() -> Iterable[Sample]:
    def tokens(name: str, norm: Callable[[], nn.Module]) -> Sample:
        def make() -> nn.Module:
            inner = nn.Sequential(nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 8))
            block = Apply(residual, nn.Identity(), inner)
            return nn.Sequential(nn.Linear(5, 8), norm(), block, norm(), nn.Linear(8, 3))

        return Sample(make, (2, 4, 5), name)

    yield tokens("layer norm", lambda: nn.LayerNorm(8))
    yield tokens("layer norm without bias", lambda: nn.LayerNorm(8, bias=False))
    yield tokens("layer norm without affine", lambda: nn.LayerNorm(8, elementwise_affine=False, eps=0.1))
    yield tokens("rms norm", lambda: nn.RMSNorm(8))
    yield tokens("rms norm with eps", lambda: nn.RMSNorm(8, eps=0.1))


def _group_samples() -> Iterable[Sample]:
    yield Sample(
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.ReLU(), nn.Conv2d(8, 6, 1), nn.Flatten(), nn.LazyLinear(3)
        ),
        (2, 3, 6, 6),
        "group norm",
    )
    yield Sample(
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.InstanceNorm2d(8, affine=True),
            nn.ReLU(),
            nn.Conv2d(8, 6, 1),
            nn.Flatten(),
            nn.LazyLinear(3),
        ),
        (2, 3, 6, 6),
        "instance norm",
    )


RULES = [
    Rule(
        ("layer_norm", "rms_norm"),
        _layer_labels,
        _layer_constants,
        _layer_used,
        elementwise=5,
        statistic=_statistic,
        normalises=True,
        samples=_layer_samples,
    ),
    Rule(
        ("group_norm",),
        _group_labels,
        _group_constants,
        _group_used,
        elementwise=5,
        attributes=_group_attributes,
        statistic=_group_statistic,
        normalises=True,
        samples=_group_samples,
    ),
    Rule(
        ("instance_norm",),
        _instance_labels,
        _instance_constants,
        _instance_used,
        elementwise=5,
        attributes=_instance_attributes,
        normalises=True,
    ),
]
