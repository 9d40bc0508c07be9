"""Detectors given several images of different sizes: the boxes at the end agree, not only the heads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import engine
from tests.engine.exactness import channel_masks, masked, randomised

pytest.importorskip("torchvision")
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.ops import MultiScaleRoIAlign


def detector() -> nn.Module:
    """Faster R-CNN of torchvision on a backbone of two convolutions."""
    backbone = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1))
    backbone.out_channels = 8
    return FasterRCNN(
        backbone,
        rpn_anchor_generator=AnchorGenerator(((8, 16),), ((0.5, 1.0),)),
        box_roi_pool=MultiScaleRoIAlign(["0"], 3, 2),
        box_head=TwoMLPHead(8 * 9, 12),
        box_predictor=FastRCNNPredictor(12, 3),
        min_size=32,
        max_size=48,
        rpn_post_nms_top_n_test=10,
        box_score_thresh=0.0,
        box_detections_per_img=6,
    )


def images(*sizes: tuple[int, int]) -> tuple[list[Tensor]]:
    """Return a list of random images."""
    generator = torch.Generator().manual_seed(len(sizes))
    return ([torch.rand(3, *size, generator=generator, dtype=torch.float64) for size in sizes],)


def test_final_boxes() -> None:
    """In float64, where no two scores are alike within rounding, each box of each image is the same."""
    torch.manual_seed(0)
    model = randomised(detector())
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
