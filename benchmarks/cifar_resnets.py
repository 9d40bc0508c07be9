"""The residual networks of He et al. (2015, section 4.2) for CIFAR-10, under the names of published weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Block(nn.Module):
    """Two convolutions; where the width doubles, the shortcut is subsampled and padded with zeros."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.padding = (width - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        """Maps of the block."""
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.padding:
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.padding, self.padding))
        return F.relu(out + x)


class CifarResNet(nn.Module):
    """Three stages of equally many blocks.

    Args:
        blocks: of a stage: 3 makes ResNet-20, 9 ResNet-56.
        width: of the first stage.
    """

    def __init__(self, blocks: int = 3, width: int = 16) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        inputs = width
        for stage in (1, 2, 3):
            width_now = width << (stage - 1)
            layers = []
            for number in range(blocks):
                layers.append(Block(inputs, width_now, 2 if stage > 1 and number == 0 else 1))
                inputs = width_now
            self.add_module(f"layer{stage}", nn.Sequential(*layers))
        self.linear = nn.Linear(inputs, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images."""
        x = F.relu(self.bn1(self.conv1(x)))
        for stage in (1, 2, 3):
            x = self.get_submodule(f"layer{stage}")(x)
        return self.linear(x.mean((2, 3)))


def pretrained(name: str, folder: Path) -> nn.Module:
    """Return ``"resnet20"`` or ``"resnet56"`` with the weights ``FOLDER/NAME-*.th``, in eval mode."""
    [path] = sorted(folder.glob(f"{name}-*.th"))
    state = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    net = CifarResNet((int(name.removeprefix("resnet")) - 2) // 6)
    net.load_state_dict({key.removeprefix("module."): value for key, value in state.items()}, strict=False)
    return net.eval()


def normalised(images: np.ndarray | Tensor) -> Tensor:
    """Return (N, 32, 32, 3) bytes as the networks take them."""
    pixels = torch.as_tensor(images).permute(0, 3, 1, 2).float() / 255
    channels = (
        (channel - mean) / deviation for channel, mean, deviation in zip(pixels.unbind(1), MEAN, DEVIATION, strict=True)
    )
    return torch.stack(list(channels), 1)
