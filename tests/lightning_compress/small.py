"""ResNet-18 and ViT-B/16 in small form: the same classes, structure and kinds of groups, a few thousand parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import ResNet, VisionTransformer
from torchvision.models.resnet import BasicBlock

SIDE = 16


class NarrowResNet(ResNet):
    """torchvision's ResNet-18, an eighth as wide behind the stem."""

    def _make_layer(self, block: Any, planes: int, *args: Any, **options: Any) -> nn.Sequential:
        return super()._make_layer(block, planes // 8, *args, **options)


def resnet18() -> nn.Module:
    """Basic blocks in four stages, the first of them with two."""
    net = NarrowResNet(BasicBlock, [2, 1, 1, 1], num_classes=3)
    net.fc = nn.Linear(64, 3)
    return net


def vit_b_16() -> nn.Module:
    """Two encoder blocks with four heads each."""
    net = VisionTransformer(SIDE, 4, 2, 4, 16, 32, num_classes=3)
    nn.init.normal_(net.heads.head.weight, std=0.1)  # torchvision starts it at zero: the loss would not reach the rest
    return net


MODELS = {"resnet18": resnet18, "vit_b_16": vit_b_16}


class Classifier(LightningModule):
    """Trains one of them on random images."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = MODELS[name]()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Cross entropy."""
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), 1e-3)

    def train_dataloader(self) -> DataLoader:
        """Two batches."""
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(8, 3, SIDE, SIDE, generator=generator)
        return DataLoader(TensorDataset(images, torch.arange(8) % 3), batch_size=4)
