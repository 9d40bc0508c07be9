"""What a call gives is compared, in whatever object it lies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import weight_norm

import engine
from engine.verification.certify import Observation
from engine.verification.comparison import compare
from engine.verification.results import attributes, results_of
from engine.verification.witness import Witness
from tests.engine.exactness import masked, randomised


class Keeps(nn.Module):
    """Leaves an attribute, and returns a namespace."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(2, 2), 0.5

    def forward(self, x: Tensor) -> Any:
        """Leave a tensor and a parameter, return another tensor."""
        self.last, self.again = {"h": self.layer(x)}, self.layer.weight
        return SimpleNamespace(y=x + 1)


def test_returned_and_kept() -> None:
    """In this order; a parameter under another name is not a result."""
    net, x = Keeps(), torch.ones(1, 2)
    before = attributes(net)
    found = results_of(net(x), net, before)
    assert [t.tolist() for t in found] == [(x + 1).tolist(), net.layer(x).tolist()]


def test_another_number_of_results_is_another_path() -> None:
    """Masked and compacted model have to leave the same."""
    one, other = (Observation.of((), reference=True) for _ in range(2))
    one.outputs, other.outputs = [torch.ones(2)], [torch.ones(2), torch.ones(2)]
    with pytest.raises(Exception, match="another path"):
        compare(one, other, Witness((), (), (), ()), 1e-9)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
def test_a_weight_that_a_hook_computes_at_each_call_is_no_result() -> None:
    """`weight_norm` of old sets the plain attribute ``weight`` before each forward; it narrows with the layer."""
    model = nn.Sequential(nn.Conv1d(2, 8, 3), nn.ReLU(), weight_norm(nn.Conv1d(8, 6, 3)), nn.ReLU(), nn.Conv1d(6, 2, 1))
    model = randomised(model)
    mask = (torch.arange(8) % 2).double()
    masks = {"0": {"weight": mask[:, None, None].expand(8, 2, 3), "bias": mask}}
    speedup = engine.ModelSpeedup(model, torch.randn(2, 2, 16).double(), masks)
    assert speedup.speedup_model()[2].in_channels == 4 and speedup.certificate.verified


def test_truth_values_in_an_object_are_compared() -> None:
    """As DETR hands its padding masks around beside the features."""

    class Nested:
        def __init__(self, tensors: Tensor, mask: Tensor) -> None:
            self.tensors, self.mask = tensors, mask

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(3, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Nested:
            return Nested(self.head(self.body(x).relu()), x[..., 0] > 0)

    mask = (torch.arange(6) % 2).double()
    masks = {"body": {"weight": mask[:, None].expand(6, 3), "bias": mask}}
    speedup = engine.ModelSpeedup(randomised(Net()), torch.randn(2, 3).double(), masks)
    assert speedup.speedup_model().body.out_features == 3 and speedup.certificate.verified


class _Fused(nn.Module):
    """Two branches that are added up once, as reparametrised networks do for inference."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head, self.fused = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 2), None

    def forward(self, x: Tensor) -> Tensor:
        if self.fused is None:
            self.fused = self.one.weight + self.two.weight, {"bias": self.one.bias + self.two.bias}
        return self.head(nn.functional.linear(x, self.fused[0], self.fused[1]["bias"]).relu())


def test_weights_that_an_attribute_holds_in_a_container_are_no_results() -> None:
    """They are narrow after the compaction, like a weight that stands in the attribute itself."""
    model, x = randomised(_Fused()), torch.randn(3, 4).double()
    mask = (torch.arange(8) % 2).double()
    masks = {name: {"weight": mask[:, None].expand(8, 4), "bias": mask} for name in ("one", "two")}
    reference = masked(model, masks)
    speedup = engine.ModelSpeedup(model, x, masks)
    assert len(speedup.speedup_model().one.weight) == 4 and speedup.certificate.verified
    for _ in range(2):
        assert torch.allclose(model(x), reference(x), rtol=1e-9, atol=0)
    assert model.fused[0].shape == (4, 4)
