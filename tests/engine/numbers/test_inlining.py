"""What torch's functions in Python assert of sizes, and the sizes that they pass on, count as the user's code does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.errors import VerificationError
from engine.running import provenance
from tests.engine.exactness import channel_masks, check_exact, randomised


class Pool(nn.Module):
    """Attention by a function with separate projections, as CLIP's ResNets pool."""

    def __init__(self, width: int, heads: int, outputs: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.c_proj, self.num_heads = nn.Linear(width, outputs), heads

    def forward(self, x: Tensor) -> Tensor:
        """Return one vector per picture."""
        x = x.flatten(2).permute(2, 0, 1)
        x = torch.cat([x.mean(0, keepdim=True), x])
        pooled, _ = F.multi_head_attention_forward(
            query=x[:1],
            key=x,
            value=x,
            embed_dim_to_check=x.shape[-1],
            num_heads=self.num_heads,
            q_proj_weight=self.q_proj.weight,
            k_proj_weight=self.k_proj.weight,
            v_proj_weight=self.v_proj.weight,
            in_proj_weight=None,  # type: ignore[arg-type]
            in_proj_bias=torch.cat([self.q_proj.bias, self.k_proj.bias, self.v_proj.bias]),
            bias_k=None,
            bias_v=None,
            add_zero_attn=False,
            dropout_p=0.0,
            out_proj_weight=self.c_proj.weight,
            out_proj_bias=self.c_proj.bias,
            use_separate_proj_weight=True,
            training=self.training,
            need_weights=False,
        )
        return pooled[0]


def _net() -> nn.Module:
    layers = [nn.Conv2d(3, 12, 3), nn.ReLU(), nn.Conv2d(12, 8, 1), Pool(8, 2, 6), nn.ReLU(), nn.Linear(6, 2)]
    return randomised(nn.Sequential(*layers))


@pytest.mark.parametrize("seed", [0, 1])
def test_attention_by_a_function(seed: int) -> None:
    """It keeps the width that it asserts; layers before and behind it lose channels."""
    model = _net()
    shapes = (1, 3, 6, 6), (2, 3, 6, 6)
    plan = check_exact(model, channel_masks(model, seed), *(torch.randn(s, dtype=torch.float64) for s in shapes))
    assert "0.weight" in plan.slices and "3.c_proj.weight" in plan.slices


def test_without_its_assertions_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The assertion fails once a channel of the query is gone."""
    monkeypatch.setattr(provenance, "inlined", lambda function: None)
    with pytest.raises(VerificationError, match="does not run"):
        test_attention_by_a_function(0)


def test_a_norm_over_neighbours() -> None:
    """It lays channels out as another dimension, by sizes."""
    model = randomised(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 1), nn.LocalResponseNorm(3), nn.Conv2d(6, 2, 1))
    )
    x = torch.randn(1, 3, 6, 6, dtype=torch.float64)
    plan = check_exact(model, channel_masks(model, 0), x, torch.cat([x, x]))
    assert "0.weight" in plan.slices
