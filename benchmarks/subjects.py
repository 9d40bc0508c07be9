"""What is measured: networks, masks for them, and the three contestants: floor, this project, Torch-Pruning."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import engine

MODELS = """
    resnet18 resnet50 mobilenet_v2 efficientnet_b0 densenet121 densenet201 inception_v3 convnext_tiny vit_b_16
""".split()

Masks = dict[str, dict[str, Tensor]]
clock = time.process_time


def build(name: str) -> nn.Module:
    """Return a torchvision model with random weights in eval mode."""
    torch.manual_seed(0)
    options = {"init_weights": False} if name == "inception_v3" else {}
    model: nn.Module = getattr(torchvision.models, name)(weights=None, **options).eval()
    return model


def example(name: str, batch: int = 1) -> Tensor:
    """Return an input in the model's usual size."""
    size = 299 if name == "inception_v3" else 224
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0))


def masks_of(model: nn.Module) -> Masks:
    """Mask half of the outputs of each layer but the last, independently, so that repair has something to do."""
    generator = torch.Generator().manual_seed(0)
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    masks: Masks = {}
    for name, layer in layers[:-1]:
        kept = (torch.rand(layer.weight.shape[0], generator=generator) >= 0.5).float()
        masks[name] = {"weight": kept.view(-1, *[1] * (layer.weight.ndim - 1)).expand_as(layer.weight)}
        if layer.bias is not None:
            masks[name]["bias"] = kept
    return masks


def ours(model: nn.Module, x: Tensor, masks: Masks, confidence: int = 0) -> dict[str, float]:
    """Trace, repair, plan and swap; CPU seconds of each."""
    start = clock()
    graph = engine.trace(model, x)
    traced = clock()
    repaired = engine.fix_mask_conflict(masks, model, x, graph=graph)
    fixed = clock()
    speedup = engine.ModelSpeedup(model, x, repaired, confidence=confidence, graph=graph)
    speedup.speedup_model()
    return {"trace": traced - start, "repair": fixed - traced, "plan and swap": clock() - fixed}


def peer(model: nn.Module, x: Tensor) -> dict[str, float]:
    """Torch-Pruning: dependency graph, and 50 % of the channels removed by L1 norm; CPU seconds of each."""
    import torch_pruning as tp

    last = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
    importance = tp.importance.MagnitudeImportance(p=1)
    start = clock()
    pruner = tp.pruner.MagnitudePruner(model, x, importance=importance, pruning_ratio=0.5, ignored_layers=[last])
    traced = clock()
    pruner.step()
    return {"graph": traced - start, "prune": clock() - traced}


class _Recorder(TorchDispatchMode):
    """Notes every op, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op and note it."""
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs, out))
        return out


def recording(model: nn.Module, x: Tensor) -> float:
    """One bare recording of the forward on tensors without data; CPU seconds."""
    start = clock()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.inference_mode(), _Recorder(), mode:
        model(mode.from_tensor(x))
    return clock() - start


def writing(small: nn.Module) -> float:
    """Write the weights of the compacted model once, into fresh memory; CPU seconds."""
    start = clock()
    kept = [t.detach().clone() for t in (*small.parameters(), *small.buffers())]
    spent = clock() - start
    del kept
    return spent


class Residual(nn.Module):
    """A residual network of many blocks."""

    def __init__(self, blocks: int, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = self.stem(x)
        for block in self.blocks:
            x = torch.relu(x + block(x))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class Transformer(nn.Module):
    """A pre-norm transformer of many layers."""

    def __init__(self, layers: int, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 2 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x.mean(1))
        return logits


SCALED: dict[str, tuple[Callable[[int], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "residual blocks": (Residual, (10, 30, 100, 300, 1000), (2, 3, 8, 8)),
    "transformer layers": (Transformer, (2, 6, 20, 60, 200), (2, 5, 8)),
}
