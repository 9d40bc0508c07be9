"""A detector that is small enough for tests."""

from __future__ import annotations

from torch import nn
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.ops import MultiScaleRoIAlign

__all__ = ["detector"]


def detector(max_size: int = 32) -> nn.Module:
    """Faster R-CNN of torchvision on a backbone of two convolutions, for images of 32 pixels and more."""
    backbone = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1),
    )
    backbone.out_channels = 8
    return FasterRCNN(
        backbone,
        rpn_anchor_generator=AnchorGenerator(((8, 16),), ((0.5, 1.0),)),
        box_roi_pool=MultiScaleRoIAlign(["0"], 3, 2),
        box_head=TwoMLPHead(8 * 9, 12),
        box_predictor=FastRCNNPredictor(12, 3),
        min_size=32,
        max_size=max_size,
        rpn_post_nms_top_n_test=10,
        rpn_post_nms_top_n_train=10,
        box_score_thresh=0.0,
        box_detections_per_img=6,
    )
