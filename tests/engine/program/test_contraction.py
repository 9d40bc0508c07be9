"""One view of all contractions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import engine
from engine.program.contraction import Contraction
from tests.engine.exactness import check_exact, randomised
from tests.engine.nets import Mean, dead, image

LAYERS = {
    "conv": nn.Conv2d(4, 6, 3),
    "grouped": nn.Conv2d(4, 6, 3, groups=2),
    "depthwise": nn.Conv2d(4, 4, 3, groups=4),
    "multiplier": nn.Conv2d(4, 8, 3, groups=4),
    "transposed": nn.ConvTranspose2d(4, 6, 3),
    "transposed grouped": nn.ConvTranspose2d(4, 6, 3, groups=2),
    "transposed depthwise": nn.ConvTranspose2d(4, 4, 3, groups=4),
    "linear": nn.Linear(4, 6),
}


def contraction(layer: nn.Module) -> Contraction:
    """Return the contraction of a layer."""
    x = torch.randn(2, 4) if isinstance(layer, nn.Linear) else torch.randn(2, 4, 5, 5)
    return engine.RULES.contraction(engine.trace(layer, x).nodes[-1])


@pytest.mark.parametrize("name", LAYERS)
def test_the_canonical_weight_computes_the_layer(name: str) -> None:
    """``y[k, o] = b + Σ W[k, o, i] x[k, i]`` on an input that is the same everywhere, without borders."""
    layer = LAYERS[name].double()
    c = contraction(layer.float())
    layer = layer.double()
    x = torch.randn(c.groups * c.inputs, dtype=torch.float64)
    weight = c.canonical(layer.weight.detach())
    assert weight.shape[:3] == (c.groups, c.outputs, c.inputs)
    found = (weight.sum(-1) @ x.view(c.groups, c.inputs, 1)).reshape(-1) + layer.bias.detach()
    full = x.view(1, -1) if name == "linear" else x.view(1, -1, 1, 1).expand(1, -1, 5, 5)
    with torch.no_grad():
        out = layer(full)
    middle = out[0] if name == "linear" else out[0, :, out.shape[2] // 2, out.shape[3] // 2]
    torch.testing.assert_close(middle, found)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("which", ["outputs", "inputs", "both"])
def test_layout_is_the_inverse_of_canonical(name: str, which: str) -> None:
    """An array over groups, outputs and inputs in the weight's layout reads back as itself."""
    c = contraction(LAYERS[name].float())
    shape = (c.groups, 1 if which == "inputs" else c.outputs, 1 if which == "outputs" else c.inputs)
    array = torch.arange(torch.Size(shape).numel()).view(shape)
    laid = c.layout(array)
    assert laid.ndim == c.weight.ndim
    back = c.canonical(laid.expand(c.weight.shape))
    assert torch.equal(back, array[..., None].expand(back.shape))


def test_a_1x1_convolution_to_one_channel_is_not_depthwise() -> None:
    """One group with one input and one output per group is a plain contraction, not a depthwise one."""
    for layer, depthwise in (
        (nn.Conv2d(4, 1, 1), False),
        (nn.Conv2d(1, 1, 1), False),
        (nn.Conv2d(1, 4, 1), False),
        (nn.Conv2d(4, 4, 1, groups=4), True),
        (nn.Conv2d(4, 8, 1, groups=4), False),
    ):
        x = torch.randn(2, layer.in_channels, 4, 4)
        assert engine.RULES.contraction(engine.trace(layer, x).nodes[-1]).depthwise == depthwise


def test_a_convolution_to_one_channel_compacts_exactly() -> None:
    """A bottleneck of one channel between others: its input channels can go, itself it stays."""
    model = randomised(
        nn.Sequential(
            nn.Conv2d(3, 6, 1), nn.Conv2d(6, 1, 1), nn.ReLU(), nn.Conv2d(1, 4, 3, padding=1), Mean(), nn.Linear(4, 2)
        )
    )
    plan = check_exact(model, dead(model, {"0": [0, 1, 2]}, bias=True), image(), image(9))
    assert plan.slices["1.weight"].shape == (1, 3, 1, 1)
    check_exact(model, dead(model, {"1": [0]}), image(), image(9))


def test_borders() -> None:
    """Zero padding and transposed kernels disturb constants at the border; the rest does not."""
    bordered = {
        "zeros": nn.Conv2d(4, 4, 3, padding=1),
        "zeros 1x1": nn.Conv2d(4, 4, 1, padding=1),
        "same": nn.Conv2d(4, 4, 3, padding="same"),
        "transposed": nn.ConvTranspose2d(4, 4, 3),
        "transposed stride": nn.ConvTranspose2d(4, 4, 1, stride=2),
    }
    clean = {
        "valid": nn.Conv2d(4, 4, 3),
        "same 1x1": nn.Conv2d(4, 4, 1, padding="same"),
        "reflect": nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
        "transposed 1x1": nn.ConvTranspose2d(4, 4, 1),
        "linear": nn.Linear(4, 4),
    }
    assert all(contraction(layer).bordered for layer in bordered.values())
    assert not any(contraction(layer).bordered for layer in clean.values())
