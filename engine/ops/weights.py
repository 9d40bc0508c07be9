"""Weights computed at each call: weight norm, ``w = g v / |v|``; and ops that span a whole weight.

The norm of weight norm is taken over all dimensions but one. An output is removed with its entry of ``g`` and its slice
of ``v``. Removing an input, a column of ``v``, changes the norm, which is corrected in ``g``.

A layer may limit the norms of its rows (``self.weight.data = torch.renorm(…)``, as networks for EEG do): its rows can
be removed, the entries within a row are frozen.

A layer may also convert itself at each call, like a router that computes in its own dtype: this check reads the dtype
of its weight, but no entry.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from engine.analysis.constants import Constants
from engine.analysis.labels import Labels
from engine.analysis.use import Use
from engine.ops.samples import chain
from engine.program.arrays import any_over
from engine.program.graph import Node, Value
from engine.rule import Rare, Rule, Sample

__all__ = ["RULES"]


def _parts(node: Node) -> tuple[Value, Value]:
    return node.args["g"], node.args["v"]


def _own(node: Node) -> int | None:
    """The dimension whose indices have separate norms; None if there is a single norm."""
    dim: int = node.args["dim"]
    return None if dim == -1 else dim % node.output.ndim


def _labels(node: Node, labels: Labels) -> None:
    g, v = _parts(node)
    own = _own(node)
    along_others = own is not None and any(size > 1 for d, size in enumerate(g.shape) if d != own)
    if along_others or not (g.stored and v.stored):
        reason = "scales along other dimensions than its norms" if along_others else "normalises is computed"
        for value in (g, v, node.output):
            labels.freeze(value, f"what {node!r} {reason}")
        return
    labels.alias(node.output, v)
    if own is not None:
        slots = labels.alone(v, own)
        rows = labels.slots.new(v.shape[own]) if slots is None else slots
        for value in (v, g):
            labels.add(value, rows.view([-1 if d == own else 1 for d in range(v.ndim)]))


def _norm(node: Node, v: Tensor) -> Tensor:
    dims = [d for d in range(v.ndim) if d != _own(node)]
    return torch.linalg.vector_norm(v, dim=dims, keepdim=True) if dims else v.abs()


def _constants(node: Node, constants: Constants) -> Sequence[Tensor]:
    """``g v / |v|``, NaN for a zero norm; an entry that is zero by chance rather than masked may change later."""
    g, v = _parts(node)
    direction = constants[v].expand(v.shape)
    length = _norm(node, direction)
    weight = constants[g] * (direction / length)
    dead = (constants.zero(v) | constants.zero(g)) & (length != 0)
    return [torch.where(dead, 0.0, torch.where(weight == 0, math.nan, weight))]


def _corrections(
    node: Node, tensor: Callable[[Value], Tensor], kept_of: Callable[[Value], Tensor | None]
) -> Iterable[tuple[Value, Tensor]]:
    """``g' = g |v'| / |v|``, where ``v'`` is the rest of ``v``."""
    g, v = _parts(node)
    mask = kept_of(v)
    if mask is not None:
        direction = tensor(v).expand(v.shape)
        share = _norm(node, direction * mask) / _norm(node, direction)
        share = torch.where(share == 0, math.nan, share)  # nothing would remain of a direction
        yield g, (tensor(g) * (share.view(g.shape) - 1)).to(torch.float64)


def _magnitude(node: Node) -> tuple[Value, Value, int] | None:
    """Masks zero ``g``: a direction must not have length zero."""
    (g, v), own = _parts(node), _own(node)
    return (g, v, own) if own is not None and g.stored and v.stored else None


def _spans_labels(node: Node, labels: Labels) -> None:
    for value in (*node.inputs, *node.outputs):
        labels.freeze(value, f"{node!r} spans all of it, as spectral norm does")


def _limited_labels(node: Node, labels: Labels) -> None:
    source, own = node.args["self"], node.args["dim"] % node.output.ndim
    labels.claim(source)
    others = [d for d in range(source.ndim) if d != own]
    for layer in labels.without(source, others, f"{node!r} limits the norm over it"):
        labels.add(node.output, layer)
    for dim in others:
        labels.fix(node.output, dim)


def _limited_constants(node: Node, constants: Constants) -> Sequence[Tensor]:
    """A zero row stays zero."""
    return [torch.where(constants.plain(node.args["self"]) == 0, 0.0, math.nan)]


def _limited_use(node: Node, use: Use) -> None:
    used = use[node.output]
    use.add(node.args["self"], any_over(used, [d for d in range(used.ndim) if d != node.args["dim"] % used.ndim]))


class _Limited(nn.Conv2d):
    """A convolution that limits the norms of its rows at each call, as the layers of EEGNet do."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution."""
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.5)
        return super().forward(x)


def _limited_samples() -> Iterable[Sample]:
    yield Sample(
        lambda: chain(_Limited(3, 8, 3), nn.ReLU(), _Limited(8, 8, 3, groups=8), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)),
        (2, 3, 7, 7),
        "layers with a limit",
    )


def _asks_labels(node: Node, labels: Labels) -> None:
    """Return no labels: the op checks types, reads no entry and has no output."""


def _asks_use(node: Node, use: Use) -> None:
    """Mark nothing: no entry has an influence."""


class _Converting(nn.Linear):
    """A linear layer that converts itself when called, as the routers of Switch Transformers do."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the linear map."""
        return super(_Converting, self.to(x.dtype)).forward(x)


def _converted_samples() -> Iterable[Sample]:
    yield Sample(
        lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), _Converting(8, 6, bias=False), nn.Tanh(), nn.Linear(6, 3)),
        (2, 5),
        "a layer that converts itself",
    )


def _samples() -> Iterable[Sample]:
    norm = parametrizations.weight_norm
    alone = functools.partial(norm, dim=None)  # type: ignore[arg-type]
    yield Sample(
        lambda: chain(norm(nn.Conv2d(3, 6, 3)), nn.ReLU(), norm(nn.Conv2d(6, 5, 3)), nn.Conv2d(5, 4, 1)),
        (2, 3, 7, 7),
        "weight norm",
    )
    yield Sample(
        lambda: nn.Sequential(alone(nn.Linear(5, 8)), nn.ReLU(), alone(nn.Linear(8, 6)), nn.ReLU(), nn.Linear(6, 3)),
        (2, 5),
        "weight norm with one norm for all",
    )
    yield Sample(
        lambda: chain(nn.Conv2d(3, 6, 1), nn.ReLU(), norm(nn.ConvTranspose2d(6, 4, 2), dim=1), nn.Conv2d(4, 4, 1)),
        (2, 3, 4, 4),
        "weight norm, transposed",
    )


def _spectral_samples() -> Iterable[Sample]:
    norm = parametrizations.spectral_norm
    yield Sample(
        lambda: chain(nn.Conv2d(3, 6, 1), nn.ReLU(), norm(nn.Conv2d(6, 5, 3)), nn.Conv2d(5, 4, 1)),
        (2, 3, 5, 5),
        "spectral norm",
    )


RULES = [
    Rule(
        ("_weight_norm",),
        _labels,
        _constants,
        rare=Rare(magnitude=_magnitude, corrections=_corrections, unchecked=True),
        samples=_samples,
    ),
    Rule(("renorm",), _limited_labels, _limited_constants, _limited_use, samples=_limited_samples),
    Rule(("dot", "mv", "vdot"), _spans_labels, samples=_spectral_samples),
    Rule(("_has_compatible_shallow_copy_type",), _asks_labels, use=_asks_use, samples=_converted_samples),
]
