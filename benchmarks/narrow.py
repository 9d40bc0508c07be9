"""The ideal that a compacted network is held against: the same network, built narrow by hand."""

from __future__ import annotations

import copy

import torch.nn.functional as F
from torch import Tensor, nn

import engine
from engine.groups import Group
from engine.sensitivity.importance import cut, l1, unit_rows


class NarrowAttention(nn.Module):
    """Self-attention of any number of heads, as one would write it: two linear layers and the fused product.

    Args:
        like: an attention module whose weights, and number of heads, it takes over.
    """

    def __init__(self, like: nn.MultiheadAttention) -> None:
        super().__init__()
        inner, width = like.in_proj_weight.shape
        self.head_dim = like.head_dim
        self.qkv, self.out = nn.Linear(width, inner), nn.Linear(inner // 3, like.out_proj.weight.shape[0])
        for own, theirs in ((self.qkv.weight, like.in_proj_weight), (self.qkv.bias, like.in_proj_bias)):
            own.data.copy_(theirs.data)
        self.out.load_state_dict(like.out_proj.state_dict())

    def forward(self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool = False) -> tuple[Tensor, None]:
        """Return tokens, (batch, tokens, width)."""
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in self.qkv(query).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)), None


def _fresh(layer: nn.Module) -> nn.Module | None:
    """Return a layer of the same sizes, constructed anew; None for what has none.

    A layer norm that has lost channels becomes an ordinary one, which computes something else.
    """
    if isinstance(layer, nn.LayerNorm):
        return nn.LayerNorm(len(layer.weight), layer.eps)
    if isinstance(layer, nn.Conv2d):
        outputs, inputs, *kernel = layer.weight.shape
        return nn.Conv2d(
            inputs * layer.groups, outputs, kernel, layer.stride, layer.padding, layer.dilation, layer.groups,
            layer.bias is not None, layer.padding_mode,
        )  # fmt: skip
    if isinstance(layer, nn.BatchNorm2d):
        return nn.BatchNorm2d(len(layer.running_mean), layer.eps, layer.momentum)
    if isinstance(layer, nn.Linear):
        return nn.Linear(layer.weight.shape[1], layer.weight.shape[0], layer.bias is not None)
    return None


def built_narrow(small: nn.Module) -> nn.Module:
    """Return the network with every layer constructed anew at the sizes of a compacted one, with its weights."""
    model = copy.deepcopy(small)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.MultiheadAttention):
            model.set_submodule(name, NarrowAttention(module))
    for name, module in list(model.named_modules()):
        layer = _fresh(module)
        if layer is not None:
            layer.load_state_dict(module.state_dict())
            model.set_submodule(name, layer)
    return model.eval()


def group_wise(model: nn.Module, x: Tensor, stream: bool = False) -> dict[str, dict[str, Tensor]]:
    """Mask half of the units of each dependency group.

    Args:
        model: the network.
        x: its input.
        stream: of a vision transformer, mask the residual stream too, not only heads and neurons.
    """
    groups = engine.dependency_groups(model, x)
    whole = not stream and any(isinstance(m, nn.MultiheadAttention) for m in model.modules())
    chosen = [g for g in groups if g.reason is None and not (whole and any(m.role == "norm" for m in g.members))]
    return engine.group_masks(groups, {g.name: _kept(g, model) for g in chosen})


def _kept(group: Group, model: nn.Module) -> Tensor:
    return cut(l1(unit_rows(group, model.get_parameter)), 0.5, group.rows)
