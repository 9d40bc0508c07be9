"""Networks that are written out as plain PyTorch source."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import ConvNeXt, MobileNetV3, ResNet, SwinTransformer, VisionTransformer
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.mobilenetv3 import InvertedResidualConfig
from torchvision.models.resnet import BasicBlock

import engine
from engine.errors import InputError, VerificationError
from lightning_compress import save_stock
from lightning_compress.checkpoints.export import export_onnx
from lightning_compress.stock.source import imported

pytest.importorskip("safetensors")

from benchmarks.sources import RUN

pytestmark = pytest.mark.filterwarnings("ignore")


def mobilenet() -> nn.Module:
    """Two blocks, one with squeeze and excitation."""
    blocks = [
        InvertedResidualConfig(8, 3, 16, 8, True, "RE", 1, 1, 1.0),
        InvertedResidualConfig(8, 5, 24, 16, False, "HS", 2, 1, 1.0),
    ]
    return MobileNetV3(blocks, 32, num_classes=5)


NETWORKS: dict[str, Any] = {
    "resnet": lambda: ResNet(BasicBlock, [1, 1, 1, 1], num_classes=5, width_per_group=64),
    "mobilenet_v3": mobilenet,
    "vit": lambda: VisionTransformer(32, 16, 2, 4, 32, 48, num_classes=5),
    "convnext": lambda: ConvNeXt([CNBlockConfig(16, 32, 1), CNBlockConfig(32, None, 1)], num_classes=5),
    "swin": lambda: SwinTransformer([4, 4], 16, [2, 2], [2, 4], [2, 2], num_classes=5),
}


def images(batch: int) -> Tensor:
    """Random images."""
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(batch))


def compacted(name: str) -> nn.Module:
    """A network that lost half of each group."""
    torch.manual_seed(0)
    model = NETWORKS[name]().eval()
    groups = [group for group in engine.dependency_groups(model, images(2)) if group.reason is None]
    masks = engine.group_masks(groups, {g.name: torch.arange(g.size) < (g.size + 1) // 2 for g in groups})
    return engine.ModelSpeedup(model, images(2), masks, confidence=0).speedup_model()


def test_sources_run_where_this_project_is_not(tmp_path: Path) -> None:
    """They load the weights strictly, and give the same bits at another batch size; ruff finds nothing."""
    for name in NETWORKS:
        model = compacted(name)
        path = save_stock(model, tmp_path / name, example_input=images(1))
        assert path == tmp_path / name / "network.py"
        with torch.no_grad():
            torch.save((images(5), model(images(5))), tmp_path / name / "check.pt")
    folders = [str(tmp_path / name) for name in NETWORKS]
    script = tmp_path / "run.py"
    script.write_text(RUN)
    run = subprocess.run([sys.executable, str(script), *folders], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0 and run.stdout.split() == ["True"] * len(NETWORKS), run.stdout + run.stderr
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", *folders]
    result = subprocess.run(ruff, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_the_source_exports_to_onnx(tmp_path: Path) -> None:
    """As any module of torch does."""
    pytest.importorskip("onnxruntime")
    load_file = pytest.importorskip("safetensors.torch").load_file
    path = save_stock(compacted("resnet"), tmp_path / "small", example_input=images(2))
    network = imported(path).Network()
    network.load_state_dict(load_file(path.with_name("network.safetensors")))
    assert export_onnx(network.eval(), tmp_path / "small.onnx", images(2)) <= 1e-5


class Branches(nn.Module):
    """A network that returns a mapping, keeps a constant, and makes a range."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)
        self.scale = torch.tensor([2.0])

    def forward(self, x: Tensor, shift: Tensor) -> dict[str, Any]:
        """Return several tensors."""
        y = self.layer(x) * self.scale + shift
        return {"y": y, "more": (y.relu_().sum(1), torch.arange(x.shape[0]) + 1)}


def test_structures_and_constants(tmp_path: Path) -> None:
    """What it takes and returns has the same form; a tensor that is not a parameter is saved as a buffer."""
    example = (torch.randn(3, 4), torch.randn(3, 1))
    path = save_stock(Branches(), tmp_path / "small", example_input=example)
    network = imported(path).Network()
    assert [name for name, _ in network.named_parameters()] == ["layer.weight", "layer.bias"]
    assert len(list(network.buffers())) == 1 and network(*example).keys() == {"y", "more"}


def test_an_example_is_taken_from_the_model(tmp_path: Path) -> None:
    """Where timm or Lightning notes one; otherwise the message asks for it."""
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten())
    with pytest.raises(InputError, match="example_input="):
        save_stock(model, tmp_path / "small")
    model.pretrained_cfg = {"input_size": (3, 8, 8)}  # type: ignore[assignment]
    assert save_stock(model, tmp_path / "small").exists()


def test_the_random_state_stays_as_it_is(tmp_path: Path) -> None:
    """A random example and random layers draw from a state of their own."""
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Dropout(), nn.Flatten())
    model.pretrained_cfg = {"input_size": (3, 8, 8)}  # type: ignore[assignment]
    state = torch.get_rng_state()
    save_stock(model, tmp_path / "small")
    assert torch.equal(torch.get_rng_state(), state)


class Draws(nn.Linear):
    """A network that computes something else each time."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return a product with the number of the call."""
        Draws.calls += 1
        return super().forward(x) * Draws.calls


def test_another_function_is_refused(tmp_path: Path) -> None:
    """The file is compared bit by bit, and nothing is written where it differs."""
    with pytest.raises(VerificationError, match="computes a different function"):
        save_stock(Draws(2, 2), tmp_path / "small", example_input=torch.randn(2, 2))
    assert not list(tmp_path.iterdir())


def test_the_model_stays_as_it_is(tmp_path: Path) -> None:
    """Its mode, too."""
    model = compacted("resnet").train()
    save_stock(model, tmp_path / "small", example_input=images(2))
    assert model.training


CALLED = """
import sys, torch
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("engine", "lightning_compress"):
            raise ImportError(f"{name} is not there")
sys.meta_path.insert(0, Blocked())
torch.set_num_threads(1)
from safetensors.torch import load_file
sys.path.insert(0, ".")
import network
model = network.Network()
model.load_state_dict(load_file("network.safetensors"), strict=True)
inputs, outputs = torch.load("check.pt")
with torch.no_grad():
    print(float((model.eval()(inputs) - outputs).abs().max() / outputs.abs().max()))
"""


def halved(model: nn.Module, x: torch.Tensor, only: Any = None, **ways: Any) -> nn.Module:
    """A network without half of each group, or of the groups that a function chooses."""
    graph = engine.trace(model.eval(), x)
    free = [group for group in engine.dependency_groups(model, x, graph=graph) if group.reason is None]
    free = [group for group in free if only is None or only(group)]
    masks = engine.group_masks(free, {group.name: torch.arange(group.size) < group.size // 2 for group in free})
    return engine.ModelSpeedup(model, x, masks, confidence=0, graph=graph, **ways).speedup_model()


def called(model: nn.Module, x: torch.Tensor, folder: Path) -> str:
    """The source of a network, which computes the same in a process that has its package alone."""
    text = save_stock(model, folder, example_input=x).read_text()
    with torch.no_grad():
        torch.save((x, model(x)), folder / "check.pt")
    (folder / "run.py").write_text(CALLED)
    command = [sys.executable, "-I", "run.py"]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) <= 1e-6
    return text


@pytest.mark.slow
def test_constructor_arguments_are_written_where_they_exist(tmp_path: Path) -> None:
    """The inner widths of a residual network of torchvision, whose stream no argument narrows."""
    torchvision = pytest.importorskip("torchvision")
    x = torch.randn(2, 3, 32, 32)
    model = halved(torchvision.models.resnet50(), x, lambda g: len(g.layers) == 1 and g.name.count(".") == 2)
    text = called(model, x, tmp_path / "small")
    assert "torchvision.models.resnet.ResNet(" in text and "width_per_group=32," in text


@pytest.mark.slow
def test_constructor_arguments_of_timm(tmp_path: Path) -> None:
    """The neurons of a transformer are a ratio of its width."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model, x = timm.create_model("test_vit"), torch.randn(2, 3, 160, 160)
    text = called(halved(model, x, lambda group: "mlp" in group.name), x, tmp_path / "small")
    assert "timm.models.vision_transformer.VisionTransformer(" in text and "mlp_ratio=1.5," in text


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    """An error that names the place."""
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file is a file, not a directory"):
        save_stock(nn.Linear(2, 2), tmp_path / "file", example_input=torch.ones(2, 2))
    with pytest.raises(InputError, match="small could not be written: .* is a file"):
        save_stock(nn.Linear(2, 2), tmp_path / "file" / "small", example_input=torch.ones(2, 2))
