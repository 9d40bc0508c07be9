"""A `nn.MultiheadAttention` whose sizes follow from its weights, so that heads and token features can be removed.

The module asserts its own shape in code that cannot be edited. During recording, and permanently once it loses
channels, its class is exchanged for a subclass that computes the same from the same parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import TypeIs

from engine.errors import PlanError
from engine.program.graph import Node
from engine.program.stored import distinct_modules
from engine.rule import Shapes
from engine.surgery.encoders import PaddedEncoder, RecordedEncoder
from engine.surgery.exchange import Change, Decision, Exchange, Undo

__all__ = ["Headwise", "HeadwiseAttention", "head_sizes", "headwise", "shape_free"]


class HeadwiseAttention(nn.MultiheadAttention):
    """Multi-head attention with any number of heads; parameters and state-dict keys are those of its base class.

    Restricted to what TorchScript supports.

    Attributes:
        scale: factor of the scores, from the original head size.
    """

    if TYPE_CHECKING:  # older versions of TorchScript cannot parse a string annotation
        scale: float

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return tokens and, if requested, attention weights, like `nn.MultiheadAttention`."""
        batched = query.ndim == 3
        q, k, v = self._projected(query, key, value)
        q, k, v = self._heads(q, batched), self._heads(k, batched), self._heads(v, batched)
        keys = k.shape[2]
        k, v = self._extended(k, self.bias_k), self._extended(v, self.bias_v)
        # Like torch: where possible, pass a flag to the kernel and omit the mask.
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = _merged(None if causal else attn_mask, key_padding_mask, q, k.shape[2] - keys)
        drop = self.dropout if self.training else 0.0
        weights: Tensor | None = None
        if need_weights:
            scores = (q * self.scale) @ k.transpose(-2, -1)
            weights = (scores if mask is None else scores + mask).softmax(-1)
            y = F.dropout(weights, drop, drop > 0) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask, drop, causal, scale=self.scale)
        y = self.out_proj(y.transpose(1, 2).flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return y.squeeze(0), None if weights is None else weights.squeeze(0)
        return y if self.batch_first else y.transpose(0, 1), weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.in_proj_weight is None:  # keys or values of another width
            w_q, w_k, w_v = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        elif query is key and key is value:
            q, k, v = F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
            return q, k, v
        else:
            w_q, w_k, w_v = self.in_proj_weight.chunk(3)
        if self.in_proj_bias is None:
            return F.linear(query, w_q), F.linear(key, w_k), F.linear(value, w_v)
        b_q, b_k, b_v = self.in_proj_bias.chunk(3)
        return F.linear(query, w_q, b_q), F.linear(key, w_k, b_k), F.linear(value, w_v, b_v)

    def _heads(self, x: Tensor, batched: bool) -> Tensor:
        """(tokens, batch, width), or batch first, -> (batch, heads, tokens, head dimension)."""
        if not batched:
            x = x.unsqueeze(0)
        elif not self.batch_first:
            x = x.transpose(0, 1)
        return x.unflatten(-1, [-1, self.head_dim]).transpose(1, 2)

    def _extended(self, x: Tensor, learned: Tensor | None) -> Tensor:
        """Append the learned keys or values of the module to those of the tokens."""
        if learned is not None:
            x = torch.cat([x, self._heads(learned, True).expand(len(x), -1, -1, -1)], 2)
        return F.pad(x, [0, 0, 0, 1]) if self.add_zero_attn else x


def _merged(attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, extra: int) -> Tensor | None:
    """Return the sum of the masks, broadcastable to (batch, heads, queries, keys); minus infinity masks an entry.

    The last ``extra`` keys are added by the module and never masked.
    """
    mask = None if attn_mask is None else F.pad(_additive(attn_mask, q), [0, extra])
    if mask is not None and mask.ndim == 3:  # one per batch entry and head
        heads = len(mask) // len(q) if len(q) else q.shape[1]  # an empty batch leaves the size open
        mask = mask.unflatten(0, [len(q), heads])
    if padding is not None:
        closed = F.pad(_additive(padding, q), [0, extra]).view(len(q), 1, 1, padding.shape[-1] + extra)
        mask = closed if mask is None else mask + closed
    return mask


def _additive(mask: Tensor, q: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(q.dtype)
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, float("-inf"))


def shape_free(module: nn.Module) -> TypeIs[nn.MultiheadAttention]:
    """Whether a module can be exchanged: multi-head attention with torch's own code."""
    return type(module) is nn.MultiheadAttention


def _scale(module: nn.MultiheadAttention) -> float:
    return float(module.head_dim**-0.5)


def head_sizes(node: Node, shapes: Shapes) -> Mapping[str, int]:
    """Return the attributes of an exchanged module, if the node splits its heads.

    Args:
        node: a call of `Tensor.unflatten`.
        shapes: returns the shape that a value will have.
    """
    if node.site is None or node.site.code is not HeadwiseAttention._heads.__code__:
        return {}
    return dict(zip(("num_heads", "head_dim"), shapes(node.output)[-2:], strict=True))


@dataclass(frozen=True, eq=False)
class Headwise(Exchange):
    """A multi-head attention whose sizes follow from its weights once these are narrowed."""

    kind = "attention"
    title = "Attention"

    @classmethod
    def planned(cls, decision: Decision) -> Iterator[Headwise]:
        """Yield the attention modules that lose channels."""
        for name in sorted(decision.graph.headwise):
            if any(stored.startswith(f"{name}." if name else "") for stored in decision.narrowed):
                yield cls(name)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Headwise:
        """Load a state written by `state_dict`."""
        return cls(str(state["module"]))

    def __str__(self) -> str:
        return f"{self.module} takes its sizes from its weights"

    def prepare(self, change: Change) -> None:
        """Exchange the class, and set the sizes once the parameters are narrowed.

        Raises:
            PlanError: if the module is not torch's own multi-head attention.
        """
        module = change.module(self.module)
        if not shape_free(module):
            kind = type(module).__name__
            raise PlanError(f"The plan belongs to another model: {self.module!r} ({kind}) is not multi-head attention.")
        # An encoder layer's fused path would use its own sizes where keys and values are of the queries' width.
        change.become(module, HeadwiseAttention, {"scale": _scale(module), "_qkv_same_embed_dim": False})
        change.add(functools.partial(_resize, module))


def _resize(module: nn.MultiheadAttention) -> Undo:
    """Set the sizes of an attention from its weights."""
    before = {key: getattr(module, key) for key in ("num_heads", "embed_dim", "kdim", "vdim")}
    width, inner = module.out_proj.weight.shape
    module.num_heads, module.embed_dim = inner // module.head_dim, width
    joint = module.in_proj_weight
    module.kdim = (module.k_proj_weight if joint is None else joint).shape[1]
    module.vdim = (module.v_proj_weight if joint is None else joint).shape[1]
    return functools.partial(vars(module).update, before)


@contextmanager
def headwise(model: nn.Module) -> Iterator[frozenset[str]]:
    """Exchange the class of all such modules inside the context; yields their names."""
    modules = distinct_modules(model)
    attentions = {name: m for name, m in modules.items() if shape_free(m)}
    encoders = [(m, type(m)) for m in modules.values() if type(m) in (nn.TransformerEncoder, PaddedEncoder)]
    for module in attentions.values():
        module.__class__ = HeadwiseAttention
        vars(module)["scale"] = _scale(module)
    for encoder, _ in encoders:
        encoder.__class__ = RecordedEncoder
    try:
        yield frozenset(attentions)
    finally:
        for encoder, kind in encoders:
            encoder.__class__ = kind
        for module in attentions.values():
            module.__class__ = nn.MultiheadAttention
            del vars(module)["scale"]
