"""Every code sample of NNI's pages, written anew with only the import changed, and what it documents as output."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

import engine
from engine import (
    ChannelDependency,
    GroupDependency,
    InputChannelDependency,
    ModelSpeedup,
    SensitivityAnalysis,
    count_flops_params,
    fix_mask_conflict,
    not_safe_to_prune,
)
from engine.errors import EngineError, InputError, MaskError

RESNET18_SETS = """layer1.1.conv2,layer1.0.conv2,conv1
layer1.0.conv1
layer1.1.conv1
layer2.0.conv1
layer2.1.conv2,layer2.0.conv2,layer2.0.downsample.0
layer2.1.conv1
layer3.0.conv1
layer3.0.downsample.0,layer3.1.conv2,layer3.0.conv2
layer3.1.conv1
layer4.0.conv1
layer4.0.downsample.0,layer4.1.conv2,layer4.0.conv2
layer4.1.conv1"""


@pytest.fixture(scope="module")
def resnet18() -> nn.Module:
    """With random weights."""
    return torchvision.models.resnet18(weights=None)


class TorchModel(nn.Module):
    """The network of NNI's speedup tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(256, 120), nn.Linear(120, 84), nn.Linear(84, 10)
        self.relu1, self.relu2, self.relu3, self.relu4 = (nn.ReLU() for _ in range(4))
        self.pool1, self.pool2 = nn.MaxPool2d((2, 2), (2, 2)), nn.MaxPool2d((2, 2), (2, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Return log-probabilities of the digits."""
        x = self.pool1(self.relu1(self.conv1(x)))
        x = self.pool2(self.relu2(self.conv2(x)))
        x = torch.flatten(x, 1)
        x = self.fc3(self.relu4(self.fc2(self.relu3(self.fc1(x)))))
        return nn.functional.log_softmax(x, dim=1)


SMALL = """TorchModel(
  (conv1): Conv2d(1, 3, kernel_size=(5, 5), stride=(1, 1))
  (conv2): Conv2d(3, 16, kernel_size=(5, 5), stride=(1, 1))
  (fc1): Linear(in_features=256, out_features=120, bias=True)
  (fc2): Linear(in_features=120, out_features=84, bias=True)
  (fc3): Linear(in_features=84, out_features=10, bias=True)
  (relu1): ReLU()
  (relu2): ReLU()
  (relu3): ReLU()
  (relu4): ReLU()
  (pool1): MaxPool2d(kernel_size=(2, 2), stride=(2, 2), padding=0, dilation=1, ceil_mode=False)
  (pool2): MaxPool2d(kernel_size=(2, 2), stride=(2, 2), padding=0, dilation=1, ceil_mode=False)
)"""


# ---------------------------------------------------------------- topology


def test_channel_dependency(resnet18: nn.Module, tmp_path: Path) -> None:
    """The documented table of resnet18: the sets, in the documented order, under the documented header."""
    net, path = resnet18, tmp_path / "dependency.csv"
    data = torch.ones(1, 3, 224, 224)
    channel_depen = ChannelDependency(net, data)
    channel_depen.export(path)
    header, *rows = csv.reader(path.read_text().splitlines())
    assert header == ["Dependency Set", "Convolutional Layers"]
    assert [row[0] for row in rows] == [f"Set {k}" for k in range(1, 13)]
    # as sets: NNI's table lists the 64-wide trunk first, as ours does, and the members in no order
    assert [set(row[1:]) for row in rows] == [set(line.split(",")) for line in RESNET18_SETS.splitlines()]


def test_mask_conflict(resnet18: nn.Module, tmp_path: Path) -> None:
    """Masks in a file that disagree in one set come back agreeing, the union of what they kept, and with the cost."""
    net, data = resnet18, torch.ones(1, 3, 64, 64)
    masks = {name: {"weight": torch.ones_like(net.get_submodule(name).weight)} for name in ("conv1", "layer1.0.conv2")}
    masks["conv1"]["weight"][:32] = 0
    masks["layer1.0.conv2"]["weight"][16:48] = 0
    other = torch.ones_like(net.layer1[1].conv2.weight)
    other[:48] = 0
    masks["layer1.1.conv2"] = {"weight": other}
    torch.save(masks, tmp_path / "resnet18_mask")
    fixed_mask = fix_mask_conflict(str(tmp_path / "resnet18_mask"), net, data)
    kept = {name: fixed_mask[name]["weight"].flatten(1).any(1) for name in masks}
    expected = torch.cat([torch.ones(16), torch.zeros(16), torch.ones(32)]).bool()
    assert all(torch.equal(mask, expected) for mask in kept.values())
    report = fixed_mask.report
    assert report.rows == (("conv1", 64, {"conv1": 32, "layer1.0.conv2": 32, "layer1.1.conv2": 16}, 48),)
    assert report.channels["conv1"] == (80, 144)
    each = {"conv1": 3 * 49 * 32 * 32, "layer1.0.conv2": 64 * 9 * 16 * 16, "layer1.1.conv2": 64 * 9 * 16 * 16}
    before = 32 * each["conv1"] + 32 * each["layer1.0.conv2"] + 16 * each["layer1.1.conv2"]
    assert report.macs["conv1"] == (before, 48 * sum(each.values()))
    assert f"channels +64, MACs {report.macs['conv1'][1] - before:+,}" in str(report)


class Viewed(nn.Module):
    """NNI's example of what is not safe to prune."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 1024, 1), nn.Linear(1024, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of every position."""
        x = self.conv(x)
        x = x.view(-1, 1024)
        return self.fc(x)


def test_not_safe_to_prune(resnet18: nn.Module) -> None:
    """The convolution before ``view(-1, 1024)`` is found; in resnet18 all is safe."""
    model, dummy_input = Viewed(), torch.zeros(2, 3, 3, 3)
    not_safe = not_safe_to_prune(model, dummy_input)
    assert not_safe == ["conv"]
    assert "test_nni_samples.py" in not_safe.reasons["conv"]
    assert not_safe_to_prune(resnet18, torch.zeros(1, 3, 64, 64)) == []


def test_input_channel_dependency() -> None:
    """Layers that read one tensor are coupled, through norms and depthwise convolutions; so are those of the image."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.norm = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)
            self.c, self.deep, self.d = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 4, 1)
            self.e = nn.Conv2d(12, 2, 1)

        def forward(self, x: Tensor) -> Any:
            a = self.norm(self.a(x))
            c, d = self.c(a), self.d(self.deep(torch.relu(a)))
            return self.e(torch.cat([c, self.b(x)], 1)), d

    dependency = InputChannelDependency(Branches(), torch.zeros(1, 3, 8, 8))
    assert dependency.dependency_sets == [{"a", "b"}, {"c", "deep", "d"}, {"e"}]


def test_group_dependency(tmp_path: Path) -> None:
    """NNI's example: 2 groups that feed 4 have to stay divisible by 4. Depthwise ones ask for nothing themselves."""

    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(4, 8, 1, groups=2), nn.Conv2d(8, 8, 1, groups=4)
            self.deep, self.left, self.right = nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 6, 1), nn.Conv2d(8, 6, 1)
            self.join = nn.Conv2d(12, 4, 1, groups=2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.deep(self.conv2(self.conv1(x)))
            return self.join(torch.cat([self.left(x), self.right(x)], 1))

    dependency = GroupDependency(Grouped(), torch.zeros(1, 4, 8, 8))
    groups = {"conv1": 4, "conv2": 4, "deep": 4, "left": 1, "right": 1, "join": 2}
    assert dependency.dependency == groups == dependency.dependency_sets
    dependency.export(tmp_path / "groups.csv")
    lines = (tmp_path / "groups.csv").read_text().splitlines()
    assert lines == ["Conv Layer Name,Group", *(f"{name},{number}" for name, number in groups.items())]


def test_tree_of_a_group(resnet18: nn.Module) -> None:
    """Modules, parameters, and which dimension of each goes; an unknown layer is an error."""
    dependency = ChannelDependency(resnet18, torch.zeros(1, 3, 64, 64))
    lines = dependency.tree("layer2.1.conv2").splitlines()
    assert lines[0] == "layer2.0.conv2: 128 channels that are removed together"
    assert "├── layer2.0.downsample.1 (BatchNorm2d)" in lines
    assert lines[lines.index("└── layer3.0.downsample.0 (Conv2d)") + 1].endswith("weight [256, 128, 1, 1], dim 1: in")
    assert "frozen (is an output of the model)" in dependency.tree("fc")
    with pytest.raises(InputError, match="no layer 'layer9'"):
        dependency.tree("layer9")


# ---------------------------------------------------------------- counting


class TwoConvs(nn.Module):
    """The network of NNI's counter example."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.conv2 = nn.Conv2d(3, 5, 1), nn.Conv2d(5, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the second convolution's output."""
        return self.conv2(self.conv(x))


def test_count_flops_params() -> None:
    """The documented results, as a dict of lists by layer."""
    flops, params, results = count_flops_params(TwoConvs(), (1, 3, 2, 2), verbose=False)
    assert (flops, params) == (160, 50)
    assert results == {
        "conv": {
            "flops": [60],
            "params": [20],
            "weight_size": [(5, 3, 1, 1)],
            "input_size": [(1, 3, 2, 2)],
            "output_size": [(1, 5, 2, 2)],
            "module_type": ["Conv2d"],
        },
        "conv2": {
            "flops": [100],
            "params": [30],
            "weight_size": [(5, 5, 1, 1)],
            "input_size": [(1, 5, 2, 2)],
            "output_size": [(1, 5, 2, 2)],
            "module_type": ["Conv2d"],
        },
    }


def test_count_flops_params_by_shape_and_by_tensor(capsys: pytest.CaptureFixture[str]) -> None:
    """A shape, and ``full`` mode with a tuple of one tensor; a table is printed with the total."""
    model = TorchModel()
    flops, params, results = count_flops_params(model, (1, 1, 28, 28))
    assert f"FLOPs total: {flops:,}" in capsys.readouterr().out
    x = torch.randn(1, 1, 28, 28)
    full, params_again, all_results = count_flops_params(model, (x,), mode="full")
    assert flops == 6 * 25 * 24 * 24 + 16 * 6 * 25 * 8 * 8 + 256 * 120 + 120 * 84 + 84 * 10
    assert params == params_again == sum(p.numel() for p in model.parameters())
    activations = {
        "relu1": 6 * 24 * 24,
        "pool1": 6 * 12 * 12,
        "relu2": 16 * 64,
        "pool2": 256,
        "relu3": 120,
        "relu4": 84,
    }
    assert {name: row["flops"] for name, row in all_results.items() if name in activations} == {
        name: [number] for name, number in activations.items()
    }
    assert full >= flops + sum(activations.values()) and set(results) < set(all_results)


def test_custom_ops_count_their_module_with_all_in_it() -> None:
    """An integer or a dict; of the type or a subclass; what happens inside is not counted again."""

    class Block(nn.Sequential):
        pass

    class Special(Block):
        pass

    model = nn.Sequential(nn.Conv2d(1, 4, 1), Block(nn.Conv2d(4, 4, 1), nn.ReLU()), Special(nn.Conv2d(4, 2, 1)))
    seen: list[Any] = []

    def count(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Any:
        seen.append((type(module), [tuple(t.shape) for t in inputs], tuple(output.shape)))
        return 7 if type(module) is Block else {"flops": 5, "params": 3}

    flops, params, results = count_flops_params(model, (2, 1, 3, 3), {Block: count}, verbose=False)
    assert seen == [(Block, [(2, 4, 3, 3)], (2, 4, 3, 3)), (Special, [(2, 4, 3, 3)], (2, 2, 3, 3))]
    assert list(results) == ["0", "1", "2"] and flops == 4 * 9 + 7 + 5 and params == 8 + 20 + 3
    assert results["2"]["params"] == [3] and results["1"]["output_size"] == [(2, 4, 3, 3)]
    assert not any(m._forward_hooks for m in model.modules())


def test_custom_ops_see_the_compacted_model_under_masks() -> None:
    """Their module and input are as they will be, so that predicted is measured."""
    model = nn.Sequential(nn.Conv2d(1, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    mask = torch.ones(4, 1, 1, 1)
    mask[:3] = 0
    ops: dict[type[nn.Module], Any] = {nn.ReLU: lambda module, inputs, output: inputs[0][0].numel()}
    predicted = count_flops_params(model, (1, 1, 3, 3), ops, False, masks={"0": {"weight": mask}})
    before = count_flops_params(model, (1, 1, 3, 3), ops, False)
    ModelSpeedup(model, torch.rand(2, 1, 3, 3), {"0": {"weight": mask}}).speedup_model()
    assert predicted[:2] == count_flops_params(model, (1, 1, 3, 3), ops, False)[:2] != before[:2]
    assert predicted[2]["1"]["flops"] == [9]


def test_models_under_torchs_pruning_count_what_remains() -> None:
    """As NNI counts a model in its wrappers, but with the inputs that go as well; NNI's own number is beside it."""
    model = nn.Sequential(nn.Conv2d(1, 4, 1), nn.Conv2d(4, 2, 1))
    prune.ln_structured(model[0], "weight", 0.5, 1, 0)
    flops, params, results = count_flops_params(model, (1, 1, 3, 3), verbose=False)
    assert flops == 2 * 9 + 2 * 2 * 9 and params == 2 + 2 + 4 + 2
    assert results["0"]["params"] == [4] and results["1"]["masked_flops"] == [4 * 2 * 9]


@pytest.mark.parametrize(
    ("make", "shape", "batch_dim", "expected"),
    [
        pytest.param(
            lambda: torchvision.models.vit_b_16(weights=None), (1, 3, 224, 224), 0, 17_563_828_224, id="vit_b_16"
        ),
        pytest.param(lambda: torchvision.models.swin_t(weights=None), (1, 3, 224, 224), 0, 4_490_566_656, id="swin_t"),
        pytest.param(lambda: nn.LSTM(128, 256, 2), (50, 1, 128), 1, 45_875_200, id="lstm"),
        pytest.param(lambda: nn.ConvTranspose2d(64, 32, 4, 2), (1, 64, 56, 56), 0, 102_760_448, id="transposed"),
    ],
)
def test_counts(make: Callable[[], nn.Module], shape: tuple[int, ...], batch_dim: int, expected: int) -> None:
    """Where other counters are wrong: attention, recurrent layers, transposed convolutions."""
    model = make()
    assert count_flops_params(model, shape, verbose=False, batch_dim=batch_dim)[0] == expected


CLASSIFIERS = torchvision.models.list_models(module=torchvision.models)
QUICK = ("alexnet", "mobilenet_v3_small", "resnet18", "shufflenet_v2_x0_5", "squeezenet1_1", "vit_b_32")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CLASSIFIERS])
def test_torchs_own_counter_agrees(name: str) -> None:
    """FlopCounterMode with gradients enabled, halved."""
    unused = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    with torch.device("cpu" if name.startswith("regnet") else "meta"):  # regnet computes its widths with tensors
        model = torchvision.models.get_model(name, weights=None, **unused).eval().to("meta")
    size = 299 if name == "inception_v3" else 224
    x = torch.rand(1, 3, size, size, device="meta")
    with FlopCounterMode(display=False) as counter:
        model(x)
    assert 2 * count_flops_params(model, x, verbose=False)[0] == counter.get_total_flops()


# ---------------------------------------------------------------- speedup


def test_the_page_for_nnis_users_imports_what_there_is() -> None:
    """Each import that docs/from-nni.md recommends works."""
    page = (Path(__file__).parents[2] / "docs" / "from-nni.md").read_text()
    imports = [line for line in page.splitlines() if line.startswith("from engine import ")]
    assert len(imports) >= 5
    for line in imports:
        assert all(hasattr(engine, name.strip()) for name in line.removeprefix("from engine import ").split(","))


def test_speedup_tutorial() -> None:
    """``conv1`` goes from 6 to 3 channels, ``conv2`` to 3 inputs, nothing else changes, and the output is the same."""
    model = TorchModel()
    # masks = {layer_name: {'weight': weight_mask, 'bias': bias_mask}}
    conv1_mask = torch.ones_like(model.conv1.weight.data)
    # mask the first three output channels in conv1
    conv1_mask[0:3] = 0
    masks = {"conv1": {"weight": conv1_mask}}
    x = torch.rand(128, 1, 28, 28)
    with torch.no_grad():
        masked = TorchModel()
        masked.load_state_dict(model.state_dict())
        masked.conv1.weight.mul_(conv1_mask)
        expected = masked(x)
    ModelSpeedup(model, torch.rand(10, 1, 28, 28), masks).speedup_model()
    assert str(model) == SMALL
    with torch.no_grad():
        assert torch.allclose(model(x), expected, atol=1e-5)


def test_speedup_reads_a_mask_file(tmp_path: Path) -> None:
    """The documented ``masks_file`` and ``map_location``."""
    model = TorchModel()
    mask = torch.ones_like(model.conv1.weight)
    mask[:3] = 0
    torch.save({"conv1": {"weight": mask}}, tmp_path / "mask.pth")
    ModelSpeedup(model, torch.rand(2, 1, 28, 28), str(tmp_path / "mask.pth"), "cpu", 0, 2).speedup_model()
    assert str(model) == SMALL


# ---------------------------------------------------------------- sensitivity


class Digits(nn.Module):
    """A small network with a layer of the name that NNI's sample analyses."""

    def __init__(self) -> None:
        super().__init__()
        self.Conv1, self.Conv2, self.fc = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        return self.fc(torch.relu(self.Conv2(torch.relu(self.Conv1(x)))).mean((2, 3)))


@pytest.fixture
def validation() -> Callable[[nn.Module], float]:
    """The documented validation function, over random images."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(32, 1, 8, 8, generator=generator)
    val_loader = DataLoader(TensorDataset(images, torch.randint(3, (32,), generator=generator)), batch_size=8)

    def val(model: nn.Module) -> float:
        model.eval()
        total = 0
        correct = 0
        with torch.no_grad():
            for _batchid, (data, label) in enumerate(val_loader):
                out = model(data)
                _, predicted = out.max(1)
                total += data.size(0)
                correct += predicted.eq(label).sum().item()
        return correct / total

    return val


def test_sensitivity_analysis(validation: Callable[[nn.Module], float], tmp_path: Path) -> None:
    """A table by layer and sparsity, and a CSV with the documented header; the model is as it was."""
    net, outdir, filename = Digits(), tmp_path / "out", "sensitivity.csv"
    before = {name: value.clone() for name, value in net.state_dict().items()}
    s_analyzer = SensitivityAnalysis(model=net, val_func=validation)
    sensitivity = s_analyzer.analysis(val_args=[net])
    os.mkdir(outdir)
    s_analyzer.export(os.path.join(outdir, filename))
    header, *rows = csv.reader((outdir / filename).read_text().splitlines())
    assert header == ["layername", *(f"0.{n}" for n in range(1, 10))]
    assert rows == [[name, *map(str, row.values())] for name, row in sensitivity.items()]
    assert [row[0] for row in rows] == ["Conv1", "Conv2", "fc"]
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_sensitivity_with_sparsities_stop_and_layers(validation: Callable[[nn.Module], float]) -> None:
    """The documented options: given sparsities, early stop by a drop, and some layers only."""
    net = Digits()
    s_analyzer = SensitivityAnalysis(model=net, val_func=validation, sparsities=[0.25, 0.5, 0.75])
    assert all(list(row) == [0.25, 0.5, 0.75] for row in s_analyzer.analysis(val_args=[net]).values())
    s_analyzer = SensitivityAnalysis(
        model=net,
        val_func=validation,
        sparsities=[0.25, 0.5, 0.75],
        early_stop_mode="dropped",
        early_stop_value=0.1,
    )
    sensitivity = s_analyzer.analysis(val_args=[net], specified_layers=["Conv1"])
    assert list(sensitivity) == ["Conv1"]
    baseline = s_analyzer.ori_metric
    assert all(value >= baseline - 0.1 for value in list(sensitivity["Conv1"].values())[:-1])


# ---------------------------------------------------------------- bad input


class Hostile:
    """Runs a command when it is unpickled, where unpickling is not restricted."""

    def __reduce__(self) -> Any:
        return (os.mkdir, (os.environ["HOSTILE"],))


X = torch.zeros(1, 1, 28, 28)
WEIGHT = torch.ones(6, 1, 5, 5)

BAD: dict[str, tuple[Callable[[nn.Module, Path], Any], type[Exception], str]] = {
    "count: mode": (lambda m, p: count_flops_params(m, X, mode="all"), InputError, "`mode`"),
    "count: no input": (lambda m, p: count_flops_params(m, None), InputError, "no tensor"),
    "count: shape": (lambda m, p: count_flops_params(m, (1, 3, 28, 28)), EngineError, "rejected the example input"),
    "count: negative": (lambda m, p: count_flops_params(m, (-1, 1, 28, 28)), InputError, "sizes from 0 on"),
    "count: ops": (lambda m, p: count_flops_params(m, X, {"Conv2d": len}), InputError, "`custom_ops`"),
    "count: op": (lambda m, p: count_flops_params(m, X, {nn.ReLU: 3}), InputError, "`custom_ops`"),
    "count: no count": (lambda m, p: count_flops_params(m, X, {nn.ReLU: lambda *a: None}), InputError, "'relu1'"),
    "count: dict": (lambda m, p: count_flops_params(m, X, {nn.ReLU: lambda *a: {}}), InputError, "'flops'"),
    "masks: layer": (lambda m, p: ModelSpeedup(m, X, {"conv9": {"weight": WEIGHT}}), MaskError, "'conv9'"),
    "masks: parameter": (lambda m, p: ModelSpeedup(m, X, {"conv1": {"wieght": WEIGHT}}), MaskError, "'wieght'"),
    "masks: shape": (lambda m, p: ModelSpeedup(m, X, {"conv1": {"weight": WEIGHT[:3]}}), MaskError, r"\(3, 1, 5, 5\)"),
    "masks: values": (lambda m, p: ModelSpeedup(m, X, {"conv1": {"weight": WEIGHT / 2}}), MaskError, "0 and 1"),
    "masks: NaN": (
        lambda m, p: fix_mask_conflict({"conv1": {"weight": WEIGHT * torch.nan}}, m, X),
        MaskError,
        "0 and 1",
    ),
    "masks: list": (lambda m, p: fix_mask_conflict([WEIGHT], m, X), MaskError, "got list"),
    "masks: flat": (lambda m, p: fix_mask_conflict({"conv1": WEIGHT}, m, X), MaskError, "Masks are a mapping"),
    "masks: no tensor": (lambda m, p: fix_mask_conflict({"conv1": {"weight": 1}}, m, X), MaskError, "not a tensor"),
    "file: none": (lambda m, p: ModelSpeedup(m, X, str(p / "nowhere.pth")), MaskError, "cannot be read"),
    "file: folder": (lambda m, p: ModelSpeedup(m, X, str(p)), MaskError, "cannot be read"),
    "file: text": (lambda m, p: ModelSpeedup(m, X, str(p / "text.pth")), MaskError, "cannot be read"),
    "file: empty": (lambda m, p: fix_mask_conflict(str(p / "empty.pth"), m, X), MaskError, "cannot be read"),
    "file: cut": (lambda m, p: fix_mask_conflict(p / "cut.pth", m, X), MaskError, "cannot be read"),
    "file: hostile": (lambda m, p: ModelSpeedup(m, X, str(p / "hostile.pth")), MaskError, "cannot be read"),
    "file: other": (lambda m, p: ModelSpeedup(m, X, str(p / "other.pth")), MaskError, "got Tensor"),
    "repair: policy": (lambda m, p: fix_mask_conflict({}, m, X, policy="both"), InputError, "union, intersection"),
    "repair: input": (lambda m, p: fix_mask_conflict({}, m, torch.zeros(1, 2, 28, 28)), EngineError, "rejected"),
    "dependency: input": (lambda m, p: ChannelDependency(m, torch.zeros(3)), EngineError, "rejected"),
    "dependency: nothing": (lambda m, p: GroupDependency(m, ()), InputError, "no tensor"),
    "dependency: layer": (lambda m, p: ChannelDependency(m, X).tree("relu1"), InputError, "'relu1'"),
    "safe: input": (lambda m, p: not_safe_to_prune(m, torch.zeros(1, 1, 7, 7)), EngineError, "rejected"),
    "speedup: confidence": (lambda m, p: ModelSpeedup(m, X, {}, confidence=-1), InputError, "`confidence`"),
    "speedup: input": (lambda m, p: ModelSpeedup(m, {"y": X}, {}), EngineError, "rejected"),
    "sensitivity: layer": (
        lambda m, p: SensitivityAnalysis(m, lambda: 1.0).analysis(specified_layers=["Conv1"]),
        InputError,
        "'Conv1'",
    ),
    "sensitivity: NaN": (lambda m, p: SensitivityAnalysis(m, lambda: torch.nan).analysis(), InputError, "NaN"),
    "sensitivity: raises": (lambda m, p: SensitivityAnalysis(m, lambda: 1 / 0).analysis(), ZeroDivisionError, "zero"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_a_clear_error(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The culprit is named, nothing of a hostile file runs, and the model is bit for bit as it was."""
    monkeypatch.setenv("HOSTILE", str(tmp_path / "ran"))
    torch.save({"conv1": {"weight": WEIGHT}}, tmp_path / "good.pth")
    (tmp_path / "text.pth").write_text("conv1: weight")
    (tmp_path / "empty.pth").touch()
    (tmp_path / "cut.pth").write_bytes((tmp_path / "good.pth").read_bytes()[:-200])
    torch.save({"conv1": {"weight": Hostile()}}, tmp_path / "hostile.pth")
    torch.save(WEIGHT, tmp_path / "other.pth")
    model = TorchModel()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    call, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        call(model, tmp_path)
    assert not (tmp_path / "ran").exists()
    assert model.training and all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert engine.count_flops_params(model, X, verbose=False)[1] == sum(p.numel() for p in model.parameters())
