"""NNI's tables."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torchvision
from torch import Tensor, nn

import engine
from tests.engine.nets import Net, image, plain, residual_net

RESNET18 = """Dependency Set,Convolutional Layers
Set 1,conv1,layer1.0.conv2,layer1.1.conv2
Set 2,layer1.0.conv1
Set 3,layer1.1.conv1
Set 4,layer2.0.conv1
Set 5,layer2.0.conv2,layer2.0.downsample.0,layer2.1.conv2
Set 6,layer2.1.conv1
Set 7,layer3.0.conv1
Set 8,layer3.0.conv2,layer3.0.downsample.0,layer3.1.conv2
Set 9,layer3.1.conv1
Set 10,layer4.0.conv1
Set 11,layer4.0.conv2,layer4.0.downsample.0,layer4.1.conv2
Set 12,layer4.1.conv1
"""


def test_the_twelve_sets_of_resnet18(tmp_path: Path) -> None:
    """As NNI documents them, in that CSV form, byte for byte the same every time."""
    with torch.device("meta"):
        model, x = torchvision.models.resnet18(weights=None), torch.ones(1, 3, 224, 224)
    for name in ("one.csv", "two.csv"):
        dependency = engine.ChannelDependency(model, x)
        dependency.export(tmp_path / name)
        assert (tmp_path / name).read_bytes().decode() == RESNET18
    assert len(dependency.dependency_sets) == 12
    assert dependency.dependency["layer2.0.downsample.0"] == {
        "layer2.0.conv2",
        "layer2.0.downsample.0",
        "layer2.1.conv2",
    }
    assert "fc" not in dependency.dependency


def test_what_is_concatenated_is_not_coupled() -> None:
    """Side by side is not a dependency; a gate or an addition is."""

    def forward(m: Net, x: Tensor) -> Tensor:
        a = m.one(x)
        return m.head(torch.cat([a * m.gate(x), m.two(x)], 1).mean((2, 3)))

    model = Net(forward, one=nn.Conv2d(3, 4, 1), gate=nn.Conv2d(3, 4, 1), two=nn.Conv2d(3, 4, 1), head=nn.Linear(8, 2))
    assert engine.ChannelDependency(model.double(), image()).dependency_sets == [{"one", "gate"}, {"two"}]


def test_an_output_layer_is_listed_only_with_others() -> None:
    """On its own it has no set; coupled with another it has."""
    assert {"7"} not in engine.ChannelDependency(plain(), image()).dependency_sets
    both = Net(lambda m, x: m.one(x) + m.two(x), one=nn.Conv2d(3, 4, 1), two=nn.Conv2d(3, 4, 1)).double()
    assert engine.ChannelDependency(both, image()).dependency_sets == [{"one", "two"}]


def test_sets_are_transitive() -> None:
    """A shared trunk joins all its branches."""
    assert engine.ChannelDependency(residual_net(), image()).dependency_sets == [{"stem", "branch"}]


class Viewed(nn.Module):
    """A network whose head flattens by a view."""

    def __init__(self, view: str) -> None:
        super().__init__()
        self.conv, self.fc, self.view = nn.Conv2d(3, 64, 1), nn.Linear(1024, 2), view

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        x = torch.relu(self.conv(x))
        if self.view == "literal":
            x = x.view(-1, 1024)
        elif self.view == "flatten":
            x = torch.flatten(x, 1)
        else:
            x = x.view(x.shape[0], -1)
        return self.fc(x)


@pytest.mark.parametrize("view", ["literal", "flatten", "minus one"])
def test_a_view_to_1024_is_found(view: str) -> None:
    """``view(-1, 1024)`` is not safe, and the reason has file and line; ``flatten`` and ``view(b, -1)`` are safe."""
    net, x = Viewed(view), torch.zeros(2, 3, 4, 4)
    found = engine.not_safe_to_prune(net, x, graph=engine.trace(net, x, constants=["view"]))
    assert list(found) == (["conv"] if view == "literal" else [])
    assert set(found.reasons) == set(found)
    if view == "literal":
        source = Path(__file__).read_text().splitlines()
        line = 1 + next(n for n, text in enumerate(source) if "x = x.view(-1, 1024)" in text)
        assert f"test_dependency.py:{line}" in found.reasons["conv"] and "1024" in found.reasons["conv"]


def test_every_layer_of_a_set_has_its_channels() -> None:
    """An embedding that feeds a residual sum is coupled with linear layers, and has a number of channels as they do."""

    def forward(m: Net, x: Tensor) -> Tensor:
        h = m.table(x)
        return m.head(h + m.back(m.inner(h).relu()))

    layers = {"table": nn.Embedding(5, 8), "inner": nn.Linear(8, 6), "back": nn.Linear(6, 8), "head": nn.Linear(8, 2)}
    dependency = engine.ChannelDependency(Net(forward, **layers), torch.zeros(1, 3, dtype=torch.long))
    assert {"table", "back"} in dependency.dependency_sets
    assert dependency.channels == {"table": 8, "inner": 6, "back": 8, "head": 2}


def test_a_rejected_input() -> None:
    """The error of the trace, whichever table is asked for."""
    for call in (engine.ChannelDependency, engine.not_safe_to_prune, engine.dependency_groups):
        with pytest.raises(engine.errors.TraceError, match="Sequential rejected the example input"):
            call(plain(), torch.zeros(2, 5, 4, 4))


@pytest.mark.parametrize("kind", [engine.ChannelDependency, engine.InputChannelDependency, engine.GroupDependency])
def test_a_file_that_is_no_path(kind: type) -> None:
    """A number is refused; Python would take it for an open file, write to it, and close it."""
    dependency = kind(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1, groups=2)), torch.zeros(1, 3, 8, 8))
    for place in (None, 3):
        with pytest.raises(engine.errors.InputError, match=f"`filepath` must be a string or a path, got {place}"):
            dependency.export(place)
    assert "0" in repr(dependency)
