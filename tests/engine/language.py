"""Blocks of a language model as the Llama family writes them: grouped queries, rotary positions, gated neurons."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rotate_half(x: Tensor) -> Tensor:
    """Rotate the two halves of the entries of a head."""
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-b, a), dim=-1)


def repeat_heads(x: Tensor, times: int) -> Tensor:
    """Give every head ``times`` times."""
    n, heads, t, d = x.shape
    return x[:, :, None].expand(n, heads, times, t, d).reshape(n, heads * times, t, d)


class RootMeanSquare(nn.Module):
    """RMS norm by hand, in float32 at least."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), 1e-5

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens of mean square 1, scaled."""
        y = x.to(torch.promote_types(x.dtype, torch.float32))
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


class Rotary(nn.Module):
    """The angles of rotary positions, from a buffer that all layers share."""

    def __init__(self, entries: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 0.1 ** (torch.arange(0, entries, 2) / entries), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine, (1, tokens, entries)."""
        angles = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)[None, :, None] * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


class SelfAttention(nn.Module):
    """Grouped queries with rotary positions.

    Args:
        width: of the tokens.
        heads, shared: number of heads, and how many of them share keys and values.
        fused: let the fused op share keys and values, or repeat them.
        positions: whether to rotate.
    """

    def __init__(self, width: int, heads: int, shared: int, fused: bool, positions: bool = True) -> None:
        super().__init__()
        self.entries, self.shared, self.fused, self.positions = width // heads, shared, fused, positions
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width // shared, bias=False)
        self.v_proj = nn.Linear(width, width // shared, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return tokens."""
        shape = (*x.shape[:-1], -1, self.entries)
        q, k, v = (f(x).view(shape).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        if self.positions:
            q, k = (t * cos[:, None] + rotate_half(t) * sin[:, None] for t in (q, k))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            k, v = repeat_heads(k, self.shared), repeat_heads(v, self.shared)
            y = (q @ k.transpose(-2, -1) * self.entries**-0.5).softmax(-1) @ v
        return self.o_proj(y.transpose(1, 2).reshape(*x.shape[:-1], -1))


class Block(nn.Module):
    """Attention and gated neurons, each behind a norm and beside a residual."""

    def __init__(self, width: int, neurons: int, heads: int, shared: int, fused: bool) -> None:
        super().__init__()
        self.norm, self.post_norm = RootMeanSquare(width), RootMeanSquare(width)
        self.attention = SelfAttention(width, heads, shared, fused)
        self.gate, self.up = nn.Linear(width, neurons, bias=False), nn.Linear(width, neurons, bias=False)
        self.down = nn.Linear(neurons, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return tokens."""
        x = x + self.attention(self.norm(x), cos, sin)
        y = self.post_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Language(nn.Module):
    """Words in, scores of the next words out."""

    def __init__(
        self,
        words: int = 11,
        width: int = 16,
        neurons: int = 12,
        heads: int = 4,
        shared: int = 2,
        depth: int = 2,
        fused: bool = True,
    ) -> None:
        super().__init__()
        self.embed, self.rotary = nn.Embedding(words, width), Rotary(width // heads)
        self.blocks = nn.ModuleList(Block(width, neurons, heads, shared, fused) for _ in range(depth))
        self.norm, self.head = RootMeanSquare(width), nn.Linear(width, words, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        """Return scores, (batch, tokens, words)."""
        x = self.embed(words)
        cos, sin = self.rotary(x)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def sentence(batch: int = 2, count: int = 5, words: int = 11, seed: int = 0) -> Tensor:
    """Random words, (batch, count)."""
    return torch.randint(words, (batch, count), generator=torch.Generator().manual_seed(seed))
