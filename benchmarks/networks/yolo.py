"""Every YAML of Ultralytics that builds, at its smallest scale, and what its exporter makes of the compacted model."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.networks.network import Network, noise
from engine.program.trees import tensors_in

__all__ = ["NETWORKS", "difference", "exported_error", "kind_of"]

SIZE = 64
_TIED = 1e-6  # of the largest score: in float32, which of two detections comes first is up to rounding


def _files() -> list[Path]:
    """Return the YAML files of the models; none where Ultralytics is not installed."""
    spec = importlib.util.find_spec("ultralytics")
    places = [] if spec is None else spec.submodule_search_locations or []
    return sorted(file for place in places for file in (Path(place) / "cfg" / "models").rglob("*.yaml"))


def _quiet() -> None:
    os.environ |= {"YOLO_OFFLINE": "True", "YOLO_AUTOINSTALL": "False", "YOLO_VERBOSE": "False"}


def _smallest(name: str) -> str:
    """Return the name with the letter of the smallest scale, where the file has scales and the name none."""
    return re.sub(r"(?<=yolo)(v\d+|\d+)(?=[-.])", r"\1n", name, count=1) if _has_scales(name) else name


def _has_scales(name: str) -> bool:
    path = next(file for file in _files() if file.name == name)
    return "\nscales:" in path.read_text() and re.match(r"yoloe?v?-?\d+[-.]", name) is not None


def kind_of(name: str) -> str:
    """Return the name of Ultralytics' class for a YAML: those of RT-DETR have one of their own."""
    return "RTDETR" if "rtdetr" in name else "YOLO"


def _wrapper(name: str) -> Any:
    """Return Ultralytics' object around the model of a file, without the trained weights that some files ask for."""
    _quiet()
    ultralytics = importlib.import_module("ultralytics")
    kind = getattr(ultralytics, kind_of(name))
    options = {"verbose": False} if kind is ultralytics.YOLO else {}  # RTDETR takes no such argument
    text = next(file for file in _files() if file.name == name).read_text()
    if "DEFAULT" not in text:
        return kind(_smallest(name), **options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / _smallest(name)
        path.write_text(text.replace("DEFAULT", "null"))
        return kind(path, **options)


def _build(name: str) -> nn.Module:
    net: nn.Module = _wrapper(name).model
    return net.float()


def exported_error(net: nn.Module, name: str) -> float:
    """Export a compacted model to ONNX by Ultralytics' own exporter, and return the largest relative difference.

    The exporter leaves out what only losses need, so each output of the ONNX graph is compared with the model's output
    of that shape that lies nearest, of those with the heads' switch for the export on or off; one of a shape that no
    output has is infinitely far off.

    Args:
        net: the model, in float32 and eval mode.
        name: of its YAML.
    """
    try:
        return _exported_error(net, name, SIZE)
    except torch.onnx.errors.OnnxExporterError:  # a pool to three by three is exported at multiples of three only
        return _exported_error(net, name, 3 * SIZE // 2)


def _exported_error(net: nn.Module, name: str, size: int) -> float:
    runtime = importlib.import_module("onnxruntime")
    x = noise(3, size, size)(1).float().sigmoid()
    expected = [*_outputs(net, x), *_outputs_as_exported(net, x)]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        wrapper = _wrapper(name)
        wrapper.model = net
        path = wrapper.export(format="onnx", imgsz=size, verbose=False, simplify=False)
        session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        results = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    return max(difference(torch.from_numpy(result), expected) for result in results)


def _outputs(net: nn.Module, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return [tensor.clone() for tensor in tensors_in(net(x))]


def _outputs_as_exported(net: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the outputs with the switches set by which some heads resize or decode what they return to an exporter."""
    switches: dict[str, Any] = {"export": True, "format": "onnx"}
    heads = [module for module in net.modules() if getattr(module, "export", None) is False]
    before = [{name: getattr(head, name, None) for name in switches} for head in heads]
    try:
        for head in heads:
            vars(head).update(switches)
        return _outputs(net, x)
    finally:
        for head, values in zip(heads, before, strict=True):
            vars(head).update(values)


def difference(result: Tensor, expected: Sequence[Tensor]) -> float:
    """Return how far a tensor is from the nearest one of the same shape, relative to the largest entry of that.

    Detections that a column sorts may come in either order where they tie in it.

    Args:
        result: an output of the exported graph.
        expected: the outputs of the model; infinity where none has the shape.
    """
    candidates = [tensor.double() for tensor in expected if tensor.shape == result.shape]
    result = result.double()  # the difference of two unsigned integers would wrap around
    return min((float(_distance(result, t) / t.abs().max()) for t in candidates), default=math.inf)


def _distance(result: Tensor, expected: Tensor) -> Tensor:
    """Return the largest difference of two tensors, in the better order of rows that tie."""
    plain = (result - expected).abs().max()
    if expected.ndim != 3 or len(expected) != 1:
        return plain
    sorted_by = (expected[0].diff(dim=0) <= 0).all(0).nonzero().flatten().tolist()
    return min([plain, *(_matched(result[0], expected[0], column) for column in sorted_by)])


def _matched(result: Tensor, expected: Tensor, column: int) -> Tensor:
    """Return the largest difference of two lists of rows, each with the nearest free one that ties."""
    keys = expected[:, column]
    tied = (keys[:, None] - keys).abs() <= _TIED * keys.abs().max()
    differences = (result[:, None] - expected).abs().amax(-1).masked_fill(~tied, math.inf)
    largest = differences.new_zeros(())
    for row in differences:
        place = row.argmin()
        largest = torch.maximum(largest, row[place])
        differences[:, place] = math.inf
    return largest


NETWORKS = [
    Network(
        "ultralytics",
        path.name,
        lambda name=path.name: _build(name),
        noise(3, SIZE, SIZE),
        constants=("embed",),
    )
    for path in _files()
]
