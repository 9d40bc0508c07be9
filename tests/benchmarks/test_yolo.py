"""What Ultralytics does with a compacted model: it validates, trains, saves, loads and exports it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from benchmarks.breadth import half_of_each_group
from benchmarks.networks import yolo
from tests.engine.exactness import parameters

SIZE = 64
BOX = "0.5 0.5 0.4 0.3"
CORNERS = "0.3 0.35 0.7 0.35 0.7 0.65 0.3 0.65"
LABELS = {"detect": BOX, "segment": CORNERS, "obb": CORNERS, "pose": BOX + " 0.5 0.5 2" * 17}
KINDS = ["yolo11n", "yolo26n-seg", "yolov8n-pose", "yolo11n-obb", "yolo26n-cls"]


def write_data(folder: Path, task: str) -> str:
    """Write images of noise with a label each, and return what Ultralytics calls the data."""
    image = pytest.importorskip("PIL.Image")
    for split in ("train", "val"):
        places = [folder / "images" / split / name for name in "ab"] if task == "classify" else []
        for place in places or [folder / "images" / split]:
            place.mkdir(parents=True)
            for number in range(4):
                pixels = torch.randint(0, 255, (SIZE, SIZE, 3), dtype=torch.uint8).numpy()
                image.fromarray(pixels).save(place / f"{number}.png")
                if task != "classify":
                    labels = folder / "labels" / split
                    labels.mkdir(parents=True, exist_ok=True)
                    (labels / f"{number}.txt").write_text(f"0 {LABELS[task]}\n")
    if task == "classify":
        return str(folder / "images")
    names = {0: "person"} if task == "pose" else dict(enumerate(map(str, range(80))))
    shape = "kpt_shape: [17, 3]\n" if task == "pose" else ""
    (folder / "data.yaml").write_text(
        f"path: {folder}\ntrain: images/train\nval: images/val\n{shape}names: {names}\n".replace("'", "")
    )
    return str(folder / "data.yaml")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KINDS)
def test_ultralytics_goes_on(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its validator, trainer, checkpoint and exporter take a compacted model for one of theirs."""
    for key in ("YOLO_OFFLINE", "YOLO_VERBOSE", "YOLO_AUTOINSTALL"):
        monkeypatch.setenv(key, str(key == "YOLO_OFFLINE"))
    monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    ultralytics = pytest.importorskip("ultralytics")
    wrapper = ultralytics.YOLO(f"{name}.yaml", verbose=False)
    net, x = wrapper.model.float().eval(), torch.rand(1, 3, SIZE, SIZE)
    before, masks = parameters(net), half_of_each_group(net, engine.dependency_groups(net, x))
    wrapper.model = engine.ModelSpeedup(net, x, masks).speedup_model()
    after = parameters(wrapper.model)
    assert after < 0.6 * before
    options: dict[str, Any] = {"imgsz": SIZE, "verbose": False, "plots": False, "device": "cpu", "workers": 0}
    options["data"] = write_data(tmp_path, wrapper.task)
    wrapper.val(batch=2, **options)
    settings = {"model": f"{name}.yaml", "task": wrapper.task, "epochs": 1, "batch": 2, "amp": False}
    trainer = wrapper._smart_load("trainer")(overrides=options | settings | {"project": str(tmp_path / "runs")})
    trainer.model = wrapper.model.train().requires_grad_()
    trainer.train()
    assert parameters(trainer.model) <= after  # a classifier gets a head for the classes of the data
    again = ultralytics.YOLO(str(trainer.last))
    again.val(batch=2, **options)
    again.export(format="onnx", imgsz=SIZE, verbose=False, simplify=False)
    assert parameters(again.model) <= after


def test_what_is_nearest() -> None:
    """An output of ONNX is compared with the model's of its shape; one of a shape that none has is far off."""
    expected: list[Tensor] = [torch.tensor([1.0, 2.0]), torch.tensor([4.0, 4.0]), torch.ones(3)]
    assert yolo.difference(torch.tensor([4.0, 3.0]), expected) == 0.25
    assert yolo.difference(torch.zeros(4), expected) == float("inf")
    classes = torch.tensor([4, 1], dtype=torch.uint8)
    assert yolo.difference(torch.tensor([4, 2], dtype=torch.uint8), [classes]) == 0.25


class Head(nn.Module):
    """Resizes what it returns to an exporter."""

    export, format = False, None

    def forward(self, x: Tensor) -> Tensor:
        """Return a map, as large as the image while exporting to ONNX."""
        return x.repeat_interleave(2, -1) if self.export and self.format == "onnx" else x


def test_heads_with_a_switch_for_the_export() -> None:
    """Their outputs count with the switch on, which is off again afterwards."""
    net = nn.Sequential(Head())
    [result] = yolo._outputs_as_exported(net, torch.ones(1, 3))
    assert result.shape == (1, 6) and not net[0].export and yolo._outputs(net, torch.ones(1, 3))[0].shape == (1, 3)


def test_the_class_of_a_file() -> None:
    """RT-DETR has one of its own, also on another backbone."""
    assert yolo.kind_of("yolov8-rtdetr.yaml") == yolo.kind_of("rtdetr-l.yaml") == "RTDETR"
    assert yolo.kind_of("yolov8-world.yaml") == "YOLO"


def test_a_size_that_the_exporter_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it refuses one, the next is tried."""

    def error(net: nn.Module, name: str, size: int) -> float:
        if size == yolo.SIZE:
            raise torch.onnx.errors.OnnxExporterError("no such pool")
        return float(size)

    monkeypatch.setattr(yolo, "_exported_error", error)
    assert yolo.exported_error(nn.Identity(), "yolov8-world.yaml") == 96


def test_detections_that_tie_may_swap() -> None:
    """Two whose scores differ by rounding only; others may not, nor may one stand for two."""
    expected = torch.tensor([[[1.0, 0.9], [4.0, 0.5], [2.0, 0.5 - 1e-8], [3.0, 0.1]]], dtype=torch.float64)
    assert yolo.difference(expected[:, [0, 2, 1, 3]], [expected]) < 1e-6
    assert yolo.difference(expected[:, [1, 0, 2, 3]], [expected]) > 0.5
    assert yolo.difference(expected[:, [0, 1, 1, 3]], [expected]) == 0.5
