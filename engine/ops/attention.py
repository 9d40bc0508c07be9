"""Attention: products of activations, softmax, scaled dot product attention.

Heads are removed as a whole: queries, keys and values. A dimension contracted between two activations is frozen,
because no weight says which of its entries matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from engine.analysis.constants import Constants
from engine.analysis.labels import Labels
from engine.analysis.use import Use
from engine.ops.equations import Equation, Factor, attended, einsum, product, product_rule
from engine.ops.products import einsum_layer, or_layer
from engine.program.arrays import align
from engine.program.graph import Node
from engine.rule import Rule, Sample, Shapes

__all__ = ["ATTENTION", "EINSUM", "PRODUCT", "RULES"]


# ---------------------------------------------------------------- sums and products


def _added(node: Node) -> Equation:
    """Describe ``beta * c + alpha * a @ b``, where c combines with the product as one more factor would."""
    equation, added = product(node), node.inputs[0]
    term = Factor(added, equation.result[len(equation.result) - added.ndim :], linear=False)
    return replace(equation, factors=(*equation.factors, term))


def _added_constants(node: Node, constants: Constants) -> Sequence[Tensor] | None:
    """Zero where both the product and the addend are zero."""
    results = PRODUCT.constants(node, constants)
    zero = align(constants.plain(node.inputs[0]) == 0, node.output.ndim)
    return None if results is None else [torch.where(zero, results[0], math.nan)]


# ---------------------------------------------------------------- softmax


def _softmax_labels(node: Node, labels: Labels) -> None:
    """Freeze the dimension that is summed over."""
    source = node.inputs[0]
    dim = node.args["dim"] % source.ndim
    for layer in labels.without(source, [dim], f"{node!r} sums over it"):
        labels.add(node.output, layer)


def _softmax_used(node: Node, use: Use) -> None:
    dim = node.args["dim"] % node.output.ndim
    use.add(node.inputs[0], use[node.output].any(dim, keepdim=True))


# ---------------------------------------------------------------- scaled dot product attention


def _attention_macs(node: Node, shapes: Shapes) -> int:
    """``q kᵀ`` and ``a v``."""
    query, key, value = (shapes(node.args[name]) for name in ("query", "key", "value"))
    return math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


# ---------------------------------------------------------------- samples


class Attention(nn.Module):
    """Self-attention with one fused projection.

    Args:
        width: number of features of the tokens.
        heads: number of heads.
        fused: whether to call `scaled_dot_product_attention`.
        biased: whether to add a bias per head to the scores.
        across: whether the channels of a head attend to each other instead of the tokens.
    """

    def __init__(self, width: int, heads: int, fused: bool, biased: bool = False, across: bool = False) -> None:
        super().__init__()
        self.heads, self.fused, self.across = heads, fused, across
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.randn(heads, 1, 1)) if biased else None

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens, (batch, tokens, width)."""
        n, t, c = x.shape
        q, k, v = self.qkv(x).reshape(n, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        if self.across:
            y = ((q.transpose(-2, -1) @ k / t).softmax(-1) @ v.transpose(-2, -1)).transpose(-2, -1)
        elif self.fused:
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.bias)
        else:
            scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
            y = (scores if self.bias is None else scores + self.bias).softmax(-1) @ v
        tokens: Tensor = self.out(y.transpose(1, 2).reshape(n, t, c))
        return tokens


def _samples() -> Iterable[Sample]:
    def tokens(name: str, fused: bool = False, biased: bool = False, across: bool = False) -> Sample:
        def make() -> nn.Module:
            body = Attention(8, 4, fused, biased, across)
            return nn.Sequential(nn.Linear(5, 8), body, nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 3))

        return Sample(make, (2, 4, 5), name)

    yield tokens("attention by hand")
    yield tokens("attention by hand with a bias per head", biased=True)
    yield tokens("fused attention", fused=True)
    yield tokens("attention between channels", across=True)


class Biased(nn.Module):
    """Self-attention whose scores are products added to a bias, per head or shared by all heads."""

    def __init__(self, width: int, heads: int, bias: Tensor) -> None:
        super().__init__()
        self.heads, self.bias = heads, nn.Parameter(bias)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens, (1, tokens, width)."""
        q, k, v = self.qkv(x[0]).unflatten(1, (3, self.heads, -1)).permute(1, 2, 0, 3).unbind(0)
        scores = torch.baddbmm(self.bias, q, k.transpose(1, 2), beta=0.5, alpha=2.0).softmax(-1)
        tokens: Tensor = self.out(torch.bmm(scores, v).transpose(0, 1).flatten(1))[None]
        return tokens


def _sum_samples() -> Iterable[Sample]:
    for name, bias in (("heads", torch.randn(4, 1, 3)), ("a bias for all", torch.randn(1, 3))):
        yield Sample(
            lambda bias=bias: nn.Sequential(nn.Linear(5, 8), Biased(8, 4, bias), nn.Linear(8, 3)),  # type: ignore[misc]
            (1, 3, 5),
            f"sum and product of {name}",
        )


PRODUCT = product_rule(("bmm", "matmul", "mm"), product, samples=_samples)
EINSUM = product_rule(("einsum",), einsum)
ATTENTION = product_rule(("scaled_dot_product_attention",), attended, macs=_attention_macs)
_SUM: dict[str, Any] = {"constants": _added_constants, "macs": PRODUCT.macs, "elementwise": 1, "samples": _sum_samples}

RULES = [
    or_layer(PRODUCT),
    or_layer(product_rule(("addmm", "baddbmm"), _added, **_SUM)),
    or_layer(EINSUM, einsum_layer),
    Rule(("softmax", "_softmax", "log_softmax"), _softmax_labels, use=_softmax_used, elementwise=1),
    ATTENTION,
]
