"""Attention: products of activations, softmax, scaled dot product attention.

Heads are removed as a whole: queries, keys and values. A dimension contracted between two activations is frozen,
because no weight says which of its entries matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from engine.analysis.constants import Constants
from engine.analysis.labels import Labels
from engine.analysis.use import Use
from engine.ops.products import einsum_layer, or_layer
from engine.program.arrays import align, support
from engine.program.graph import Node, Value
from engine.rule import Rule, Sample, Shapes

__all__ = ["EINSUM", "PRODUCT", "RULES", "letters_of"]


def _pass_batch(labels: Labels, value: Value, target: Value, inner: int, reason: str) -> None:
    """Propagate an operand's labels, aligned from the right; ``inner`` is summed over, so slots along it are frozen."""
    for layer in labels.without(value, [inner], reason):
        labels.add(target, align(layer, target.ndim))


def _fix_unknown(labels: Labels, node: Node, values: Iterable[Value], dims: Iterable[int]) -> None:
    """Freeze the dimensions along which an operand has no slots of its own."""
    target = node.output
    for value in values:
        offset = target.ndim - value.ndim
        slotted_dims = {d + offset for layer in labels.layers(value) for d in support(layer)}
        fixed = {d for d in dims if d >= offset and value.shape[d - offset] > 1} - slotted_dims
        labels.hold(target, fixed, f"{node!r} combines it with what has a fixed size")


# ---------------------------------------------------------------- products


def _factors(node: Node) -> tuple[Value, Value]:
    a, b = node.inputs[-2:]
    return a, b


def _product_labels(node: Node, labels: Labels) -> None:
    """``(…, m, k) @ (…, k, n)``: tie batch dimensions, propagate m and n, freeze k."""
    a, b = _factors(node)
    if a.ndim < 2 or b.ndim < 2:
        for value in node.inputs:
            labels.freeze(value, f"{node!r} contracts it")
        return
    for value in (a, b):
        labels.claim(value)
    _pass_batch(labels, a, node.output, a.ndim - 1, f"{node!r} contracts it")
    _pass_batch(labels, b, node.output, b.ndim - 2, f"{node!r} contracts it")
    _fix_unknown(labels, node, (a, b), range(node.output.ndim - 2))


def _product_constants(node: Node, constants: Constants) -> Sequence[Tensor] | None:
    """Zero where either factor is zero along the whole contracted dimension."""
    a, b = _factors(node)
    if a.ndim < 2 or b.ndim < 2:
        return None
    left = (constants.plain(a) == 0).all(-1, keepdim=True)
    right = (constants.plain(b) == 0).all(-2, keepdim=True)
    zero = align(left, node.output.ndim) | align(right, node.output.ndim)
    return [torch.where(zero, 0.0, math.nan)]


def _product_used(node: Node, use: Use) -> None:
    a, b = _factors(node)
    used = use[node.output]
    if a.ndim < 2 or b.ndim < 2:
        use.add_all(a)
        use.add_all(b)
        return
    use.add(a, used.any(-1, keepdim=True))
    use.add(b, used.any(-2, keepdim=True))


def _product_macs(node: Node, shapes: Shapes) -> int:
    return math.prod(shapes(node.output)) * shapes(_factors(node)[0])[-1]


def _sum_labels(node: Node, labels: Labels) -> None:
    """``beta * c + alpha * a @ b``: c combines with the product as in a sum."""
    _product_labels(node, labels)
    added, target = node.inputs[0], node.output
    labels.claim(added)
    for layer in labels.layers(added):
        labels.add(target, align(layer, target.ndim))
    _fix_unknown(labels, node, [added], range(target.ndim))
    _fix_unknown(labels, node, _factors(node), range(target.ndim - 2))
    _fix_unknown(labels, node, _factors(node)[:1], [target.ndim - 2])
    _fix_unknown(labels, node, _factors(node)[1:], [target.ndim - 1])


def _sum_constants(node: Node, constants: Constants) -> Sequence[Tensor] | None:
    """Zero where both the product and the addend are zero."""
    product = _product_constants(node, constants)
    if product is None:
        return None
    zero = align(constants.plain(node.inputs[0]) == 0, node.output.ndim)
    return [torch.where(zero, product[0], math.nan)]


def _sum_used(node: Node, use: Use) -> None:
    _product_used(node, use)
    use.add(node.inputs[0], use[node.output])


# ---------------------------------------------------------------- einsum


def letters_of(node: Node) -> tuple[list[str], str] | None:
    """Return the letters of each operand and of the result; None for an ellipsis or a repeated letter."""
    inputs, _, output = node.args["equation"].replace(" ", "").partition("->")
    terms = inputs.split(",")
    if "->" not in node.args["equation"]:
        letters = "".join(terms)
        output = "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    plain = all(len(set(term)) == len(term) and "." not in term for term in (*terms, output))
    return (terms, output) if plain else None


def _einsum_labels(node: Node, labels: Labels) -> None:
    """Tie letters of the result between operands; freeze all others, which are contracted."""
    parsed = letters_of(node)
    if parsed is None:
        for value in (*node.inputs, *node.outputs):
            labels.freeze(value, f"{node!r} is too intricate")
        return
    terms, output = parsed
    for value, term in zip(node.args["tensors"], terms, strict=True):
        labels.claim(value)
        inner = [d for d, letter in enumerate(term) if letter not in output]
        for layer in labels.without(value, inner, f"{node!r} contracts it"):
            labels.add(node.output, _into_result(layer, term, output))
    for value, term in zip(node.args["tensors"], terms, strict=True):
        slotted_letters = {term[d] for layer in labels.layers(value) for d in support(layer)}
        spanned = {letter for d, letter in enumerate(term) if value.shape[d] > 1 and letter not in slotted_letters}
        fixed = {d for d, letter in enumerate(output) if letter in spanned}
        labels.hold(node.output, fixed, f"{node!r} combines it with what has a fixed size")


def _into_result(array: Tensor, term: str, output: str) -> Tensor:
    """Permute an operand's array, of size 1 along contracted letters, to the order of the result."""
    sizes = dict(zip(term, array.shape, strict=True))
    inner = [d for d, letter in enumerate(term) if letter not in output]
    order = [term.index(letter) for letter in output if letter in term] + inner
    return array.permute(order).reshape([sizes.get(letter, 1) for letter in output])


def _einsum_constants(node: Node, constants: Constants) -> Sequence[Tensor] | None:
    """Zero where an operand is zero along all its contracted letters."""
    parsed = letters_of(node)
    if parsed is None:
        return None
    result = torch.full([1] * node.output.ndim, math.nan, dtype=torch.float64)
    for value, term in zip(node.args["tensors"], parsed[0], strict=True):
        zero = constants.plain(value) == 0
        for dim, letter in enumerate(term):
            zero = zero if letter in parsed[1] else zero.all(dim, keepdim=True)
        result = torch.where(_into_result(zero, term, parsed[1]), 0.0, result)
    return [result]


def _einsum_macs(node: Node, shapes: Shapes) -> int:
    """The product of all sizes, once per additional operand."""
    terms = node.args["equation"].replace(" ", "").partition("->")[0].split(",")
    if len(terms) < 2 or letters_of(node) is None:
        return 0
    sizes = {
        c: n for term, v in zip(terms, node.args["tensors"], strict=True) for c, n in zip(term, shapes(v), strict=True)
    }
    return math.prod(sizes.values()) * (len(terms) - 1)


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


def _heads(node: Node) -> tuple[Value, Value, Value]:
    return node.args["query"], node.args["key"], node.args["value"]


def _shared(query: Value, other: Value) -> int | None:
    """How many query heads share one head of the keys or values; None if the numbers of heads do not match."""
    if query.ndim < 4 or query.shape[:-3] != other.shape[:-3]:
        return 1 if query.shape[:-2] == other.shape[:-2] else None
    return query.shape[-3] // max(other.shape[-3], 1)


def _repeated(array: Tensor, times: int) -> Tensor:
    """Repeat the entries of shared key or value heads for every query head."""
    return array if times == 1 or array.size(-3) == 1 else array.repeat_interleave(times, -3)


def _pooled(used: Tensor, times: int) -> Tensor:
    """Reduce over query heads: a key or value head is marked if any of the heads that share it is."""
    return used if times == 1 or used.size(-3) == 1 else used.unflatten(-3, (-1, times)).any(-3)


def _attention_labels(node: Node, labels: Labels) -> None:
    """Tie heads between query, key, value and mask; the values' dimension propagates, the queries' is frozen.

    Heads that share keys and values are removed together.
    """
    query, key, value = _heads(node)
    target, mask = node.output, node.args["attn_mask"]
    reason = f"{node!r} contracts it"
    shared = [_shared(query, operand) for operand in (key, value)]
    if None in shared:
        for operand in node.inputs:
            labels.freeze(operand, f"{node!r} combines heads of different numbers")
        return
    tokens, last = target.ndim - 2, target.ndim - 1
    for operand, times, dims in (
        (query, 1, [tokens, last]),
        (key, shared[0], [tokens, last]),
        (value, shared[1], [tokens]),
    ):
        for layer in labels.without(operand, dims, reason):
            labels.add(target, _repeated(layer, times or 1))
    if mask is not None:
        labels.claim(mask)
        for layer in labels.without(mask, [mask.ndim - 2, mask.ndim - 1], reason):
            labels.add(target, align(layer, target.ndim))
    _fix_unknown(labels, node, [query, key, value, *([] if mask is None else [mask])], range(tokens))


def _attention_constants(node: Node, constants: Constants) -> Sequence[Tensor] | None:
    """Zero where the values are zero at all positions."""
    query, _, value = _heads(node)
    shared = _shared(query, value)
    if shared is None:
        return None
    zero = (constants.plain(value) == 0).all(-2, keepdim=True)
    return [torch.where(_repeated(zero, shared), 0.0, math.nan)]


def _attention_used(node: Node, use: Use) -> None:
    query, key, value = _heads(node)
    used = use[node.output].any(-2, keepdim=True)
    use.add(value, _pooled(used, _shared(query, value) or 1))
    use.add(query, used.any(-1, keepdim=True))
    use.add(key, _pooled(used.any(-1, keepdim=True), _shared(query, key) or 1))
    if node.args["attn_mask"] is not None:
        use.add_all(node.args["attn_mask"])


def _attention_macs(node: Node, shapes: Shapes) -> int:
    """``q kᵀ`` and ``a v``."""
    query, key, value = (shapes(v) for v in _heads(node))
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


PRODUCT = Rule(
    ("bmm", "matmul", "mm"), _product_labels, _product_constants, _product_used, _product_macs, samples=_samples
)

EINSUM = Rule(("einsum",), _einsum_labels, _einsum_constants, macs=_einsum_macs)

RULES = [
    or_layer(PRODUCT),
    or_layer(
        Rule(
            ("addmm", "baddbmm"),
            _sum_labels,
            _sum_constants,
            _sum_used,
            _product_macs,
            elementwise=1,
            samples=_sum_samples,
        )
    ),
    or_layer(EINSUM, einsum_layer),
    Rule(("softmax", "_softmax", "log_softmax"), _softmax_labels, use=_softmax_used, elementwise=1),
    Rule(("scaled_dot_product_attention",), _attention_labels, _attention_constants, _attention_used, _attention_macs),
]
