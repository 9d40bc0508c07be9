"""Detectors given several images of different sizes: the boxes at the end agree, not only the heads."""

from __future__ import annotations

import torch
from torch import Tensor

import engine
from tests.engine.detectors import detector
from tests.engine.exactness import channel_masks, masked, randomised


def images(*sizes: tuple[int, int]) -> tuple[list[Tensor]]:
    """Return a list of random images."""
    generator = torch.Generator().manual_seed(len(sizes))
    return ([torch.rand(3, *size, generator=generator, dtype=torch.float64) for size in sizes],)


def test_final_boxes() -> None:
    """In float64, where no two scores are alike within rounding, each box of each image is the same."""
    torch.manual_seed(0)
    model = randomised(detector(max_size=48))
    example = images((32, 32), (32, 40))
    masks = {
        k: m for k, m in channel_masks(model, 0).items() if not k.endswith(("cls_score", "bbox_pred", "cls_logits"))
    }
    reference = masked(model, masks)
    small = engine.ModelSpeedup(model, example, masks, confidence=1).speedup_model()
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in reference.parameters())
    with torch.no_grad():
        for inputs in (example, images((32, 48), (32, 32), (36, 32)), images((40, 32))):
            for old, new in zip(reference(*inputs), small(*inputs), strict=True):
                assert len(old["boxes"]) and torch.equal(old["labels"], new["labels"])
                assert torch.allclose(old["boxes"], new["boxes"], atol=1e-9)
                assert torch.allclose(old["scores"], new["scores"], atol=1e-12)
