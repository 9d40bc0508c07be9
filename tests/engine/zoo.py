"""Every model of torchvision with random weights, and inputs as small as it takes them.

What hides errors is drawn at random: statistics, affine parameters, biases, layer scales, tables that start at zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models import get_model_builder, get_model_weights, list_models
from torchvision.models.optical_flow import raft
from torchvision.models.optical_flow._utils import make_coords_grid
from torchvision.models.regnet import BlockParams
from torchvision.models.video import MViT, mvit

from engine.program.trees import tensors_in
from tests.engine.exactness import randomised

TASKS = ("classification", "segmentation", "video", "optical_flow", "detection")


def names(task: str) -> list[str]:
    """Return the names of a task's models."""
    models: Any = torchvision.models
    return list_models(module=models if task == "classification" else getattr(models, task))


def task_of(name: str) -> str:
    """Return the task of a model."""
    package = get_model_builder(name).__module__.split(".")[2]
    return package if package in TASKS else "classification"


def family_of(name: str) -> str:
    """Return the architecture that a model is an instance of: the file that defines it."""
    return get_model_builder(name).__module__.removeprefix("torchvision.models.")


def published_size(name: str) -> int:
    """Return the number of parameters of a model as it is published, without building it."""
    size: int = get_model_weights(name).DEFAULT.meta["num_params"]
    return size


# One of each architecture, the smallest; two where the blocks of a file differ.
FAMILIES = """
    alexnet squeezenet1_1 mobilenet_v2 mobilenet_v3_small mnasnet0_5 shufflenet_v2_x0_5 resnet18 resnet50
    resnext50_32x4d regnet_x_400mf regnet_y_400mf efficientnet_b0 efficientnet_v2_s densenet121 googlenet inception_v3
    vgg11 vgg11_bn convnext_tiny vit_b_32 swin_t swin_v2_t maxvit_t
    lraspp_mobilenet_v3_large deeplabv3_mobilenet_v3_large fcn_resnet50
    r2plus1d_18 mc3_18 r3d_18 s3d mvit_v1_b mvit_v2_s swin3d_t
    raft_small raft_large
    ssdlite320_mobilenet_v3_large fasterrcnn_mobilenet_v3_large_320_fpn ssd300_vgg16 retinanet_resnet50_fpn
    retinanet_resnet50_fpn_v2 fcos_resnet50_fpn keypointrcnn_resnet50_fpn maskrcnn_resnet50_fpn
    maskrcnn_resnet50_fpn_v2
""".split()


@dataclass(frozen=True)
class Recipe:
    """How to build a model small and feed it.

    Attributes:
        options: arguments of its builder, besides ``weights=None``.
        size: height and width in pixels.
        larger: a second resolution, or None where the model takes one only.
        frames: number of frames, for video.
        batches: two batch sizes.
    """

    options: dict[str, Any] = field(default_factory=dict)
    size: int = 64
    larger: int | None = 96
    frames: int = 4
    batches: tuple[int, int] = (2, 3)


_SMALL = {"min_size": 96, "max_size": 128}
_PROPOSALS = _SMALL | {"rpn_post_nms_top_n_test": 24, "box_score_thresh": 0.0, "box_detections_per_img": 8}

# By the beginning of the name, the longest first.
RECIPES = {
    "": Recipe(),
    "convnext": Recipe(larger=96),
    "deeplabv3": Recipe({"aux_loss": True, "weights_backbone": None}),
    "fasterrcnn": Recipe(_PROPOSALS | {"weights_backbone": None}, 96, 128),
    "fcn": Recipe({"aux_loss": True, "weights_backbone": None}),
    "fcos": Recipe(_SMALL | {"weights_backbone": None}, 96, 128),
    "googlenet": Recipe({"init_weights": False}),
    "inception": Recipe({"init_weights": False}, 299, 331, batches=(1, 2)),  # the auxiliary head takes no smaller one
    "keypointrcnn": Recipe(_PROPOSALS | {"weights_backbone": None}, 96, 128),
    "lraspp": Recipe({"weights_backbone": None}),
    "maskrcnn": Recipe(_PROPOSALS | {"weights_backbone": None}, 96, 128),
    "maxvit": Recipe({}, 224, None, batches=(1, 2)),  # windows of 7 by 7 at each of four scales
    "mvit": Recipe({"spatial_size": (64, 64), "temporal_size": 4}, 64, None),
    "r2plus1d": Recipe(frames=8),
    "raft": Recipe({}, 128, 136, batches=(1, 2)),
    "retinanet": Recipe(_SMALL | {"weights_backbone": None}, 96, 128),
    "s3d": Recipe({}, 224, None, frames=16, batches=(1, 2)),  # its last pooling is over 7 by 7
    "ssd300": Recipe({"weights_backbone": None}, 96, 128, batches=(1, 2)),
    "ssdlite": Recipe({"weights_backbone": None}, 96, 128),
    "swin": Recipe(larger=128, size=96),
    "swin3d": Recipe(larger=96),
    "vit": Recipe({"image_size": 64}, 64, None),
    "vit_h": Recipe({"image_size": 56}, 56, None),
}


def recipe(name: str) -> Recipe:
    """Return how to build and feed a model."""
    return RECIPES[max((prefix for prefix in RECIPES if name.startswith(prefix)), key=len)]


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return a model with everything random, in eval mode; the same at each call."""
    torch.manual_seed(0)
    return unhidden(randomised(make(name), dtype=dtype))


def make(name: str) -> nn.Module:
    """Return a model as its builder makes it, with options for a small input."""
    builder, options = get_model_builder(name), recipe(name).options
    if name.startswith("raft"):
        raft.make_coords_grid = _coordinates
    if not name.startswith("mvit"):
        return builder(weights=None, **options)
    with mock.patch.object(mvit, "MViT", lambda **given: MViT(**given | options)):  # its builders fix the size
        return builder(weights=None)


def on_meta(name: str) -> nn.Module:
    """Return a model without data."""
    widths = BlockParams.from_init_params  # regnet computes its widths by tensors

    def on_cpu(**options: Any) -> BlockParams:
        with torch.device("cpu"):
            return widths(**options)

    with torch.device("meta"), mock.patch.object(BlockParams, "from_init_params", on_cpu):
        return make(name)


def _coordinates(*sizes: int, device: Any = "cpu") -> Tensor:
    """RAFT's own are in float32, whatever the model is in."""
    return make_coords_grid(*sizes, device=device).to(torch.get_default_dtype())


def unhidden(model: nn.Module) -> nn.Module:
    """Draw at random what starts constant and so may hide: layer scales, tokens, tables, the norms' weights."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() > 1 and bool((parameter == parameter.reshape(-1)[0]).all()):
                _draw(parameter, generator)
    return model


def _draw(parameter: Tensor, generator: torch.Generator) -> None:
    if parameter.reshape(-1)[0] == 0:  # a bias, a token, a table, a matrix that starts at zero
        scale = 0.3 if parameter.ndim < 2 else 1 / math.sqrt(parameter[0].numel())
        parameter.normal_(0, scale, generator=generator)
    else:
        parameter.uniform_(0.5, 1.5, generator=generator)


def example(name: str, batch: int, size: int, dtype: torch.dtype = torch.float64) -> Any:
    """Return random inputs of a batch size and a resolution, as `engine.trace` takes them."""
    task, generator = task_of(name), torch.Generator().manual_seed(batch)

    def images(*shape: int) -> Tensor:
        return torch.rand(*shape, size, size, generator=generator, dtype=dtype)

    if task == "detection":
        return ([images(3) for _ in range(batch)],)
    if task == "video":
        return images(batch, 3, recipe(name).frames) * 2 - 1
    if task == "optical_flow":
        pair = {"image1": images(batch, 3) * 2 - 1, "image2": images(batch, 3) * 2 - 1}
        return pair | {"num_flow_updates": 2}
    return images(batch, 3) * 2 - 1


def call(model: nn.Module, inputs: Any) -> Any:
    """Call a model on what `example` made."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def heads(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a detector whose outputs come before any threshold, sorting or suppression."""
    for name, module in model.named_modules():
        if name in ("head", "rpn.head") or name.startswith("roi_heads.") and name.endswith("_predictor"):
            yield module


def outputs(model: nn.Module, inputs: Any) -> list[Tensor]:
    """Return what a model puts out in eval mode; of a detector what its heads put out."""
    seen: list[Tensor] = []
    hooks = [m.register_forward_hook(lambda m, a, out: seen.extend(tensors_in(out))) for m in heads(model)]
    model.eval()
    with torch.no_grad():
        out = list(tensors_in(call(model, inputs)))
    for hook in hooks:
        hook.remove()
    return [t.clone() for t in seen] if hooks else out


def targets(batch: int, size: int, dtype: torch.dtype = torch.float64) -> list[dict[str, Tensor]]:
    """Return what a detector is trained on: one box per image."""
    box = torch.tensor([[size / 8, size / 8, size / 2, size / 2]], dtype=dtype)
    target = {
        "boxes": box,
        "labels": torch.ones(1, dtype=torch.int64),
        "masks": torch.ones(1, size, size, dtype=torch.uint8),
        "keypoints": torch.full((1, 17, 3), size / 4),
    }
    return [target] * batch
