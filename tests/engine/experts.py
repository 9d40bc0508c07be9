"""Mixtures of experts as transformers writes them: stored stacks of matrices, and three ways to go through them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.engine.language import RootMeanSquare


class Experts(nn.Module):
    """Gated experts: ``gate_up_proj`` (experts, 2 * neurons, width) and ``down_proj`` (experts, width, neurons).

    Args:
        width, neurons, experts: sizes.
        how: ``"loop"`` over the experts that some token has, ``"batched"`` with a matrix for each token, or
            ``"grouped"``, one product of all tokens, sorted by expert.
    """

    def __init__(self, width: int, neurons: int, experts: int, how: str) -> None:
        super().__init__()
        self.experts, self.how = experts, how
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * neurons, width) / 3)
        self.down_proj = nn.Parameter(torch.randn(experts, width, neurons) / 3)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of what the experts of each token put out, (tokens, width)."""
        return {"loop": self._loop, "batched": self._batched, "grouped": self._grouped}[self.how](x, index, weights)

    def _loop(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        found = torch.zeros_like(x)
        chosen = F.one_hot(index, self.experts).permute(2, 1, 0)
        for hit in torch.greater(chosen.sum((-1, -2)), 0).nonzero():
            place, token = torch.where(chosen[hit[0]])
            gate, up = F.linear(x[token], self.gate_up_proj[hit[0]]).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, self.down_proj[hit[0]]) * weights[token, place, None]
            found.index_add_(0, token, y.to(found.dtype))
        return found

    def _batched(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        many, expert = index.size(-1), index.reshape(-1)
        tokens = x.repeat_interleave(many, dim=0)
        both = torch.bmm(self.gate_up_proj[expert], tokens.unsqueeze(-1)).squeeze(-1)
        gate, up = both.chunk(2, dim=-1)
        y = torch.bmm(self.down_proj[expert], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        return (y * weights.reshape(-1).unsqueeze(-1)).view(x.size(0), many, x.size(-1)).sum(dim=1)

    def _grouped(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        many, device = index.size(-1), x.device
        expert, order = torch.sort(index.reshape(-1))
        offsets = torch.cumsum(torch.histc(expert.float(), self.experts, 0, self.experts - 1), 0, dtype=torch.int32)
        both = F.grouped_mm(x[order // many], self.gate_up_proj.transpose(-2, -1), offs=offsets)
        gate, up = both.chunk(2, dim=-1)
        y = F.grouped_mm(F.silu(gate) * up, self.down_proj.transpose(-2, -1), offs=offsets)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.size(0), device=device)
        return (y * weights.reshape(-1)[order].unsqueeze(-1))[back].view(x.size(0), many, x.size(-1)).sum(dim=1)


class Mixture(nn.Module):
    """A router, its experts, and for Qwen an expert that all tokens share, behind a gate of its own.

    Args:
        width, neurons: sizes.
        how: as for `Experts`.
        shared: neurons of the shared expert, or 0.
    """

    def __init__(self, width: int, neurons: int, how: str, shared: int = 0) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(width, 4, bias=False), Experts(width, neurons, 4, how)
        self.shared = nn.Sequential(nn.Linear(width, shared), nn.SiLU(), nn.Linear(shared, width)) if shared else None
        self.shared_gate = nn.Linear(width, 1, bias=False) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens, (batch, tokens, width)."""
        batch, length, width = x.shape
        x = x.view(-1, width)
        weights, index = torch.topk(F.softmax(self.gate(x).to(torch.promote_types(x.dtype, torch.float32)), -1), 2)
        y = self.experts(x, index, (weights / weights.sum(-1, keepdim=True)).to(x.dtype))
        if self.shared is not None and self.shared_gate is not None:
            y = y + torch.sigmoid(self.shared_gate(x)) * self.shared(x)
        return y.reshape(batch, length, width)


class Sparse(nn.Module):
    """Words in, scores out; each block is a mixture behind a norm, beside a residual."""

    def __init__(self, how: str, width: int = 16, neurons: int = 8, shared: int = 0, depth: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, width), nn.Linear(width, 11, bias=False)
        self.norms = nn.ModuleList(RootMeanSquare(width) for _ in range(depth + 1))
        self.blocks = nn.ModuleList(Mixture(width, neurons, how, shared) for _ in range(depth))

    def forward(self, words: Tensor) -> Tensor:
        """Return scores, (batch, tokens, words)."""
        x = self.embed(words)
        for norm, block in zip(self.norms, self.blocks, strict=False):
            x = x + block(norm(x))
        return self.head(self.norms[-1](x))
