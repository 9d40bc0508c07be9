"""Methods that an exporter binds as forward follow the new sizes, where they compute the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.recording import variants
from tests.engine.exactness import channel_masks, masked, randomised, relative_error


class Split(nn.Module):
    """Forward takes equal parts; another method takes parts of a size, as YOLO's do for export."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.c = outputs // 2
        self.cv1 = nn.Conv2d(inputs, 2 * self.c, 1)
        self.inner = nn.Conv2d(self.c, self.c, 3, padding=1)
        self.cv2 = nn.Conv2d(3 * self.c, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return features, by equal parts."""
        y = list(self.cv1(x).relu().chunk(2, 1))
        return self.cv2(torch.cat([*y, self.inner(y[-1])], 1))  # type: ignore[no-any-return]

    def forward_split(self, x: Tensor) -> Tensor:
        """Return the same, by parts of a size."""
        y = list(self.cv1(x).relu().split((self.c, self.c), 1))
        return self.cv2(torch.cat([*y, self.inner(y[-1])], 1))  # type: ignore[no-any-return]

    def features(self, x: Tensor) -> Tensor:
        """Return less than forward does, so that it is not a substitute."""
        return self.cv1(x)[:, : self.c]  # type: ignore[no-any-return]


class Rows(Split):
    """The other method is given a size that is computed."""

    def forward_split(self, x: Tensor) -> Tensor:
        """Return the same, through a view."""
        y = self.cv1(x).relu()
        y = list(y.view(x.shape[0], 2, self.c, *x.shape[2:]).unbind(1))
        return self.cv2(torch.cat([*y, self.inner(y[-1])], 1))  # type: ignore[no-any-return]


def _net(kind: type[Split]) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), kind(8, 12), nn.ReLU(), kind(12, 12), nn.Conv2d(12, 2, 1))


def _compacted(kind: type[Split]) -> tuple[nn.Module, nn.Module, engine.ModelSpeedup]:
    model = randomised(_net(kind))
    x = torch.zeros(1, 3, 9, 9, dtype=torch.float64)
    masks = dict(engine.fix_mask_conflict(channel_masks(model, 0), model, x))
    reference = masked(model, masks)
    speedup = engine.ModelSpeedup(model, x, masks, confidence=1)
    return reference, speedup.speedup_model(), speedup


def _bound(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, Split):
            module.forward = module.forward_split  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize("kind", [Split, Rows])
def test_a_method_in_place_of_forward_follows(kind: type[Split]) -> None:
    """It computes what it computes in the masked network, in a network that is narrower."""
    reference, compacted, _ = _compacted(kind)
    assert sum(p.numel() for p in compacted.parameters()) < sum(p.numel() for p in reference.parameters())
    x = torch.randn(2, 3, 11, 8, dtype=torch.float64)
    with torch.no_grad():
        assert relative_error([_bound(reference)(x)], [_bound(compacted)(x)]) < 1e-12


def test_without_the_record_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number that only the other method reads would stay, and the plan names it."""
    monkeypatch.setattr(variants, "alternative_forwards", lambda model, nodes: [])
    _, compacted, speedup = _compacted(Split)
    assert any("Split.forward_split" in note and "`c`" in note for note in speedup.plan.notes)
    with pytest.raises(RuntimeError, match="split"):
        _bound(compacted)(torch.randn(1, 3, 9, 9, dtype=torch.float64))


def test_another_function_over_the_same_layers_is_named() -> None:
    """It is not recorded, which would keep what it returns, and its number is named."""
    _, _, speedup = _compacted(Split)
    assert any("Split.features" in note and "`c`" in note for note in speedup.plan.notes)


def test_a_trace_is_as_before() -> None:
    """No module has a forward of its own afterwards, and where it had one, that is the one that runs."""
    model = _net(Split)
    engine.trace(model, torch.zeros(1, 3, 9, 9))
    assert all("forward" not in vars(module) for module in model.modules())
    graph = engine.trace(_bound(model), torch.zeros(1, 3, 9, 9))
    assert any(node.op == "split_with_sizes" for node in graph.nodes if node.path == "eval")


def test_a_forward_that_code_wrote() -> None:
    """A function that was executed from text belongs to no Python module."""
    space: dict[str, object] = {}
    exec("def forward(self, x):\n    return self.layer(x)", space)
    net = type("Written", (nn.Module,), {"forward": space["forward"]})()
    net.layer = nn.Linear(3, 3)
    assert space["forward"].__module__ is None
    assert [node.op for node in engine.trace(net, torch.zeros(2, 3)).nodes] == ["linear"]
