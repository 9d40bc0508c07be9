"""Classifiers, segmentation, detection and features of images."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from benchmarks.networks.network import Network, noise

__all__ = ["NETWORKS"]

_VIT = {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 32, "heads": 4, "mlp_dim": 48, "dim_head": 8}
_DEEP = _VIT | {"depth": 2}
_MASKS = {"encoder_name": "resnet18", "encoder_weights": None, "classes": 2}
_FLAT = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
_SMALL, _LARGE, _GRAY = (3, 32, 32), (3, 64, 64), (1, 32, 32)


def _stages(*sizes: dict[str, int]) -> dict[str, int]:
    return {f"s{n}_{name}": size for n, stage in enumerate(sizes, 1) for name, size in stage.items()}


def _twins() -> dict[str, int]:
    sizes = [(16, 4, 4), (24, 2, 4), (32, 2, 4), (32, 2, 2)]
    return _stages(
        *(
            {"emb_dim": dim, "patch_size": patch, "local_patch_size": local, "global_k": local, "depth": 1}
            for dim, patch, local in sizes
        )
    )


def _cross() -> dict[str, int]:
    return {
        f"{size}_{name}": value
        for size, dim, patch in (("sm", 16, 8), ("lg", 32, 16))
        for name, value in {
            "dim": dim,
            "patch_size": patch,
            "enc_depth": 1,
            "enc_heads": 2,
            "enc_mlp_dim": 24,
            "enc_dim_head": 8,
        }.items()
    }


_CROSSED = {"image_size": 32, "num_classes": 5, "depth": 1, "cross_attn_depth": 1, "cross_attn_heads": 2}
_CCT = {
    "img_size": (32, 32),
    "embedding_dim": 32,
    "n_conv_layers": 2,
    "kernel_size": 3,
    "stride": 2,
    "padding": 1,
    "num_layers": 2,
    "num_heads": 4,
    "mlp_ratio": 2.0,
    "num_classes": 5,
}
_MOBILE = {
    "image_size": (64, 64),
    "dims": [24, 32, 40],
    "channels": [8, 8, 16, 16, 24, 24, 32, 32, 40, 40, 48],
    "num_classes": 5,
}
_LEVIT = {"image_size": 64, "num_classes": 5, "stages": 2, "dim": (32, 48), "depth": 1, "heads": (2, 4)}
_MAXVIT = {"num_classes": 5, "dim_conv_stem": 16, "dim": 16, "dim_head": 8, "depth": (1, 1), "window_size": 4}
_CVT = _stages(*({"emb_dim": dim, "heads": n, "depth": 1} for n, dim in enumerate((16, 24, 32), 1)))
_UNETR = {"img_size": (32, 32), "feature_size": 8, "hidden_size": 32, "mlp_dim": 48, "num_heads": 4}

_Recipe = tuple[str, str, str, dict[str, Any], tuple[int, ...]]

_VIT_PYTORCH: list[_Recipe] = [
    ("ViT", "vit_pytorch", "ViT", _DEEP, _SMALL),
    ("SimpleViT", "vit_pytorch", "SimpleViT", _DEEP, _SMALL),
    ("DeepViT", "vit_pytorch.deepvit", "DeepViT", _DEEP, _SMALL),
    ("CaiT", "vit_pytorch.cait", "CaiT", _DEEP | {"cls_depth": 1}, _SMALL),
    ("PiT", "vit_pytorch.pit", "PiT", _VIT | {"depth": (1, 1)}, _SMALL),
    ("XCiT", "vit_pytorch.xcit", "XCiT", _VIT | {"depth": 1, "cls_depth": 1}, _SMALL),
    ("CCT", "vit_pytorch.cct", "CCT", _CCT, _SMALL),
    ("CrossViT", "vit_pytorch.cross_vit", "CrossViT", _cross() | _CROSSED, _SMALL),
    ("LeViT", "vit_pytorch.levit", "LeViT", _LEVIT | {"mlp_mult": 2, "dim_key": 8, "dim_value": 16}, _LARGE),
    ("CvT", "vit_pytorch.cvt", "CvT", _CVT | {"num_classes": 5}, _LARGE),
    ("Twins-SVT", "vit_pytorch.twins_svt", "TwinsSVT", _twins() | {"num_classes": 5}, _LARGE),
    ("MaxViT", "vit_pytorch.max_vit", "MaxViT", _MAXVIT, _LARGE),
    ("MobileViT", "vit_pytorch.mobile_vit", "MobileViT", _MOBILE, _LARGE),
    ("parallel ViT", "vit_pytorch.parallel_vit", "ViT", _DEEP, _SMALL),
    ("ViT with q/k norm", "vit_pytorch.simple_vit_with_qk_norm", "SimpleViT", _DEEP, _SMALL),
    ("ViT with register tokens", "vit_pytorch.simple_vit_with_register_tokens", "SimpleViT", _DEEP, _SMALL),
    ("ViT for small datasets", "vit_pytorch.vit_for_small_dataset", "ViT", _DEEP, _SMALL),
]

_SEGMENTATION: list[_Recipe] = [
    (label, "segmentation_models_pytorch", label, _MASKS | options, _LARGE)
    for label, options in {
        "Unet": {"decoder_attention_type": "scse"},
        "UnetPlusPlus": {},
        "MAnet": {},
        "Linknet": {},
        "FPN": {},
        "PSPNet": {},
        "DeepLabV3Plus": {},
        "UPerNet": {},
        "Segformer": {"encoder_name": "mit_b0"},
    }.items()
]

_MEDICAL: list[_Recipe] = [
    (name, "monai.networks.nets", name, _FLAT | options, shape)
    for name, options, shape in [
        ("BasicUNet", {"features": (8, 8, 16, 16, 24, 8)}, _GRAY),
        ("UNet", {"channels": (8, 16, 24), "strides": (2, 2), "num_res_units": 2}, _GRAY),
        ("AttentionUnet", {"channels": (8, 16, 24), "strides": (2, 2)}, _GRAY),
        ("SegResNet", {"init_filters": 8}, _GRAY),
        ("VNet", {}, _GRAY),
        ("HighResNet", {"out_channels": 8}, _GRAY),  # ends in ReLU, which shuts all of two channels
        ("UNETR", _UNETR, _GRAY),
        ("SwinUNETR", {"feature_size": 12, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 2, 2)}, (1, 64, 64)),
    ]
]


def _pytorchcv(name: str) -> nn.Module:
    net: nn.Module = importlib.import_module("pytorchcv.model_provider").get_model(name, pretrained=False)
    return net


def _efficientdet() -> nn.Module:
    config = importlib.import_module("effdet").get_efficientdet_config("tf_efficientdet_lite0")
    config.num_classes, config.image_size = 5, (128, 128)
    net: nn.Module = importlib.import_module("effdet").EfficientDet(config, pretrained_backbone=False)
    return net


def _segment_anything() -> nn.Module:
    encoder = importlib.import_module("segment_anything.modeling.image_encoder").ImageEncoderViT
    options = {"img_size": 64, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "out_chans": 16}
    net: nn.Module = encoder(**options, qkv_bias=True, use_rel_pos=True, window_size=4, global_attn_indexes=(1,))
    return net


def _open_clip_resnet() -> nn.Module:
    modified = importlib.import_module("open_clip.modified_resnet").ModifiedResNet
    net: nn.Module = modified(layers=(1, 1, 1, 1), output_dim=16, heads=8, image_size=64, width=16)
    return net


def _open_clip_vit() -> nn.Module:
    vit = importlib.import_module("open_clip.transformer").VisionTransformer
    options = {"image_size": 32, "patch_size": 8, "width": 32, "layers": 2, "heads": 4, "mlp_ratio": 2.0}
    net: nn.Module = vit(**options, output_dim=16)
    return net


def _call(module: str, name: str, *args: Any, **options: Any) -> nn.Module:
    net: nn.Module = getattr(importlib.import_module(module), name)(*args, **options)
    return net


def _efficientnet() -> nn.Module:
    kind = importlib.import_module("efficientnet_pytorch").EfficientNet
    net: nn.Module = kind.from_name("efficientnet-b0", num_classes=5, image_size=64)
    return net


def _recipes(package: str, recipes: list[_Recipe]) -> Iterator[Network]:
    for label, module, name, options, shape in recipes:
        yield Network(package, label, lambda m=module, n=name, o=options: _call(m, n, **o), noise(*shape))


NETWORKS = [
    *_recipes("vit-pytorch", _VIT_PYTORCH),
    *_recipes("segmentation-models-pytorch", _SEGMENTATION),
    *_recipes("monai", _MEDICAL),
    *(
        Network("pytorchcv", name, lambda name=name: _pytorchcv(name), noise(3, 224, 224))
        for name in ("resnet10", "seresnet10", "mobilenet_wd4", "shufflenetv2_wd2", "ghostnet")
    ),
    Network("efficientnet-pytorch", "efficientnet-b0", _efficientnet, noise(3, 64, 64)),
    Network(
        "facenet-pytorch", "InceptionResnetV1", lambda: _call("facenet_pytorch", "InceptionResnetV1"), noise(3, 96, 96)
    ),
    Network("effdet", "tf_efficientdet_lite0", _efficientdet, noise(3, 128, 128)),
    Network("segment-anything", "ImageEncoderViT", _segment_anything, noise(3, 64, 64)),
    Network("open-clip-torch", "ModifiedResNet", _open_clip_resnet, noise(3, 64, 64)),
    Network("open-clip-torch", "VisionTransformer", _open_clip_vit, noise(3, 32, 32)),
    Network(
        "lightly",
        "ResNetGenerator",
        lambda: _call("lightly.models", "ResNetGenerator", "resnet-9", 0.5),
        noise(3, 32, 32),
    ),
    Network(
        "kornia", "HardNet", lambda: _call("kornia.feature", "HardNet", pretrained=False), noise(1, 32, 32), (2, 3)
    ),
    Network(
        "kornia",
        "TinyViT",
        lambda: _call(
            "kornia.models.tiny_vit",
            "TinyViT",
            img_size=64,
            num_classes=5,
            embed_dims=(16, 32, 48, 64),
            depths=(1, 1, 2, 1),
            num_heads=(1, 2, 3, 4),
            window_sizes=(4, 4, 4, 2),
        ),
        noise(3, 64, 64),
    ),
    Network("torchgeo", "FCN", lambda: _call("torchgeo.models", "FCN", 4, 3, 16), noise(4, 32, 32)),
    Network(
        "torchgeo",
        "FCSiamDiff",
        lambda: _call("torchgeo.models", "FCSiamDiff", "resnet18", 5, None, in_channels=3, classes=2),
        noise(2, 3, 64, 64),
    ),
    Network("torchgeo", "FarSeg", lambda: _call("torchgeo.models", "FarSeg", "resnet18", 3, False), noise(3, 64, 64)),
    Network(
        "torchgeo",
        "LTAE",
        lambda: _call("torchgeo.models", "LTAE", 8, 4, 4, (16, 8), d_model=16, len_max_seq=6),
        noise(6, 8),
    ),
]
