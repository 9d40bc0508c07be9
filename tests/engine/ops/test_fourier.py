"""Networks that transform positions and filter in frequencies."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engine
from tests.engine.exactness import check_exact, randomised
from tests.engine.nets import dead, image
from tests.engine.ops.brute import check_constants, check_labels


class GlobalFilter(nn.Module):
    """GFNet: a learned complex weight for each frequency and channel, in two real numbers each."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Conv2d(3, 8, 1), nn.LayerNorm(8), nn.Linear(8, 2)
        self.complex_weight = nn.Parameter(torch.randn(6, 4, 8, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        x = self.stem(x).permute(0, 2, 3, 1)
        _, height, width, _ = x.shape
        spectrum = torch.fft.rfft2(self.norm(x), dim=(1, 2), norm="ortho")
        filtered = spectrum * torch.view_as_complex(self.complex_weight)
        return self.head(x + torch.fft.irfft2(filtered, s=(height, width), dim=(1, 2), norm="ortho"))


class FourierUnit(nn.Module):
    """LaMa: a convolution over the real and imaginary parts of all channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv, self.norm = nn.Conv2d(3, 8, 1), nn.Conv2d(16, 16, 1, bias=False), nn.BatchNorm2d(16)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return a map of scores."""
        x = self.stem(x)
        spectrum = torch.fft.rfftn(x, dim=(-2, -1), norm="ortho")
        parts = torch.stack((spectrum.real, spectrum.imag), dim=-1).permute(0, 1, 4, 2, 3).contiguous()
        parts = parts.view((len(x), -1, *parts.size()[3:]))
        parts = F.relu(self.norm(self.conv(parts)))
        parts = parts.view((len(x), -1, 2, *parts.size()[2:])).permute(0, 1, 3, 4, 2).contiguous()
        spectrum = torch.complex(parts[..., 0], parts[..., 1])
        return self.head(x + torch.fft.irfftn(spectrum, s=x.shape[-2:], dim=(-2, -1), norm="ortho"))


class PowerSpectrum(nn.Module):
    """Logarithms of the power in each frequency."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return a map of scores."""
        return self.head(torch.fft.rfft(self.stem(x), dim=2).abs().log1p())


@pytest.mark.parametrize("net", [GlobalFilter, FourierUnit, PowerSpectrum])
def test_channels_go_from_filters_in_frequencies(net: type[nn.Module]) -> None:
    """Half of each group, compared at another batch size, and another resolution where the filter takes one."""
    model = randomised(net())
    group, *_ = groups = [g for g in engine.dependency_groups(model, image()) if g.reason is None]
    masks = engine.group_masks(groups, {g.name: torch.arange(g.size) % 2 == 0 for g in groups})
    other = image(6 if net is GlobalFilter else 9, batch=3)
    plan = check_exact(model, masks, image(), other)
    assert plan.slices["stem.weight"].shape[0] == 4 and group.size >= 4


def test_a_constant_channel_has_a_peak_in_one_frequency() -> None:
    """Only one that is zero is the same in all of them."""
    check_constants(lambda x: torch.fft.fft2(x).real, constant=[])
    model = randomised(PowerSpectrum())
    plan = check_exact(model, dead(model, {"stem": [1, 2]}), image(), image(9))
    assert "stem.weight" not in plan.slices  # their biases are left


def test_transformed_channels_are_frozen() -> None:
    """FNet mixes them, too."""
    check_labels(lambda x: torch.fft.fft(x, dim=1).real, classes=0)
