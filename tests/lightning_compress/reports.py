"""Reports of tiny networks for the tests of the forms of output."""

from __future__ import annotations

import copy
import functools

import torch
from torch import Tensor, nn

import engine
from lightning_compress.report.content import Report
from lightning_compress.report.latency import compare
from lightning_compress.report.stages import Point, stages
from lightning_compress.report.survey import survey


class Sized(nn.Module):
    """A residual sum, and a size in code that keeps the last convolution whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.back = nn.Conv2d(1, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.last, self.fc = nn.Conv2d(8, 4, 1), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 1, 2, 2) -> (N, 2)."""
        x = self.first(x).relu()
        x = x + self.back(self.inner(x).relu())
        return self.fc(self.last(x).view(-1, 16))


@functools.cache
def compacted() -> Report:
    """Half of the channels of the residual sum removed."""
    torch.manual_seed(0)
    net, x = Sized(), torch.rand(1, 1, 2, 2)
    before = survey(net, x)
    masks = {name: {"weight": torch.ones(net.get_submodule(name).weight.shape)} for name in ("first", "back")}
    for own in masks.values():
        own["weight"][::2] = 0
    masks = engine.fix_mask_conflict(masks, net, x)
    masked_net = copy.deepcopy(net)
    speedup = engine.ModelSpeedup(net, x, masks, confidence=1)
    speedup.speedup_model()
    history = [
        {"step": step, "complexity/macs": macs, "complexity/macs_compacted": 200, "sparsity/channels": step / 100}
        for step, macs in ((0, 400), (10, 400), (11, 200))
    ]
    logged = [Point(5, 0, False, {"val_acc": 0.96875}), Point(10, 8, False, {"val_acc": 0.9375})]
    return Report(
        "Sized",
        before,
        survey(net, x),
        speedup.plan,
        speedup.certificate,
        history=history,
        metrics={"val_acc": 0.9375},
        stages=stages(logged, (384, 190), (200, 98)),
        settings={"ChannelPruning": {"criterion": "l1", "amount": 0.5}},
        latency=compare(masked_net, net, x, runs=3),
    )


@functools.cache
def masked() -> Report:
    """The same, but left as it was."""
    torch.manual_seed(0)
    net, x = Sized(), torch.rand(1, 1, 2, 2)
    groups = engine.dependency_groups(net, x)
    masks = engine.group_masks(groups, {"first": torch.arange(8) < 2})
    small = engine.count_flops_params(net, x, verbose=False, masks=masks)
    before, after = survey(net, x), survey(net, x, masks)
    return Report("Sized", before, after, predicted=(small[0], small[1]), note="It differs at <node>.")
